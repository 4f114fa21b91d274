"""l2norm: rows scaled to unit length, x * rsqrt(sum(x^2) + eps) over the last axis."""

from torch import Tensor

from ._operator import (
    FLOAT_DTYPES,
    check_dtype,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    without_autocast,
)
from .reference import naive_l2norm

# ---- registration ----


def _reference(x, eps):
    with without_autocast(x):
        return naive_l2norm(x.float(), eps).to(x.dtype)


def _forward(x, eps, impl):
    return _reference(x, eps).contiguous()


def _backward(grad, x, eps, impl):
    (dx,) = reference_vjp(lambda x: naive_l2norm(x, eps), (x.float(),), grad.float())
    return dx.to(x.dtype).contiguous()


def _setup_context(ctx, inputs, output):
    x, ctx.eps, ctx.impl = inputs
    ctx.save_for_backward(x)


_BACKWARD_OP = register(
    "l2norm_backward(Tensor grad, Tensor x, float eps, str impl) -> Tensor",
    _backward,
    lambda grad, x, eps, impl: x.new_empty(x.shape),
    backward=second_order_raises("l2norm"),
)
_OP = register(
    "l2norm(Tensor x, float eps, str impl) -> Tensor",
    _forward,
    lambda x, eps, impl: x.new_empty(x.shape),
    backward=lambda ctx, grad: (_BACKWARD_OP(grad, *ctx.saved_tensors, ctx.eps, ctx.impl), None, None),
    setup_context=_setup_context,
)

# ---- public function ----


def l2norm(x: Tensor, eps: float = 1e-6, *, impl: str | None = None) -> Tensor:
    """``x * rsqrt(sum(x^2) + eps)`` over the last axis, as KDA's layer does to q and k (Kimi Linear, arXiv 2510.26692).

    Args:
        x: [..., D], any number of axes from one up and any D; bf16, fp16 or fp32. The arithmetic is FP32.
        eps: added to the sum of squares; not negative, finite.
        impl: None, "triton" or "reference".

    Returns:
        A new tensor of x's shape and dtype. Differentiates with respect to x.

    Raises:
        ValueError: an x without axes, a bad eps or impl.
        TypeError: another dtype.
    """
    op = "l2norm"
    check_dtype(op, "x", x, FLOAT_DTYPES)
    if x.dim() < 1:
        raise ValueError(f"{op}: x must be [..., D], got a tensor without axes")
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        raise TypeError(f"{op}: eps must be a float, got {type(eps).__name__}")
    if not 0 <= eps < float("inf"):
        raise ValueError(f"{op}: eps must be finite and not negative, got {eps}")
    impl = resolve_impl(op, impl, x, triton_ready=False)
    if impl == "reference" and runs_eagerly():
        return _reference(x, eps)
    return _OP(x, float(eps), impl)
