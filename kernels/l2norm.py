"""l2norm: rows scaled to unit length, y = x rsqrt(sum(x^2) + eps) over the last axis.

Source: Kimi Linear, arXiv 2510.26692, whose layer does this to q and k. A program owns a tile of whole rows, read once
and written once, 4 bytes an element in bf16. With r = rsqrt(sum(x^2) + eps), the backward is dx = r (dy - x r^2
sum(dy x)), and recomputes r from the x that it needs anyway: 6 bytes. A row wider than the tile is read twice.
"""

import triton
import triton.language as tl
from torch import Tensor

from ._device import cdiv, on_device, power_of_2
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

# ---- Triton kernels ----


@triton.jit
def _rows(ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The program's row numbers; in 64 bits if there are that many, which makes the divisions below slower."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    return pid * ROWS + tl.arange(0, ROWS)


@triton.jit
def _row_offsets(rows, size_1, size_2, stride_0, stride_1, stride_2):
    """Where rows begin, over leading axes [size_0, size_1, size_2]."""
    offsets = (rows % size_2).to(tl.int64) * stride_2
    offsets += (rows // size_2 % size_1).to(tl.int64) * stride_1
    return offsets + (rows // size_2 // size_1).to(tl.int64) * stride_0


@triton.jit(do_not_specialize=["row_count", "size_2"])
def _l2norm_kernel(
    x_ptr,
    y_ptr,  # [rows, D]
    row_count,
    size_1,
    size_2,
    x_stride_0,
    x_stride_1,
    x_stride_2,
    x_stride_d,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows = _rows(ROWS, WIDE)
    columns = tl.arange(0, BLOCK_D)
    in_rows = (rows < row_count)[:, None]
    x_ptrs = x_ptr + _row_offsets(rows, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)[:, None]
    x_ptrs += columns.to(tl.int64)[None, :] * x_stride_d
    y_ptrs = y_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    if D <= BLOCK_D:
        mask = in_rows & (columns < D)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        y = x * tl.rsqrt(tl.sum(x * x, axis=1) + eps)[:, None]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            mask = in_rows & (columns + start < D)[None, :]
            x = tl.load(x_ptrs + start * x_stride_d, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        r = tl.rsqrt(tl.sum(squares, axis=1) + eps)[:, None]
        for start in range(0, D, BLOCK_D):
            mask = in_rows & (columns + start < D)[None, :]
            x = tl.load(x_ptrs + start * x_stride_d, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_ptrs + start, (x * r).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["row_count", "size_2"])
def _l2norm_backward_kernel(
    grad_ptr,
    x_ptr,
    dx_ptr,  # [rows, D]
    row_count,
    size_1,
    size_2,
    grad_stride_0,
    grad_stride_1,
    grad_stride_2,
    grad_stride_d,
    x_stride_0,
    x_stride_1,
    x_stride_2,
    x_stride_d,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
):
    rows = _rows(ROWS, WIDE)
    columns = tl.arange(0, BLOCK_D)
    in_rows = (rows < row_count)[:, None]
    wide_columns = columns.to(tl.int64)[None, :]
    x_ptrs = x_ptr + _row_offsets(rows, size_1, size_2, x_stride_0, x_stride_1, x_stride_2)[:, None]
    x_ptrs += wide_columns * x_stride_d
    grad_ptrs = grad_ptr + _row_offsets(rows, size_1, size_2, grad_stride_0, grad_stride_1, grad_stride_2)[:, None]
    grad_ptrs += wide_columns * grad_stride_d
    dx_ptrs = dx_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :]
    if D <= BLOCK_D:
        mask = in_rows & (columns < D)[None, :]
        x = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptrs, mask=mask, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=1) + eps)
        along = tl.sum(grad * x, axis=1) * r * r
        dx = (grad - x * along[:, None]) * r[:, None]
        tl.store(dx_ptrs, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([ROWS, BLOCK_D], tl.float32)
        products = tl.zeros([ROWS, BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            mask = in_rows & (columns + start < D)[None, :]
            x = tl.load(x_ptrs + start * x_stride_d, mask=mask, other=0.0).to(tl.float32)
            squares += x * x
            products += tl.load(grad_ptrs + start * grad_stride_d, mask=mask, other=0.0).to(tl.float32) * x
        r = tl.rsqrt(tl.sum(squares, axis=1) + eps)
        along = tl.sum(products, axis=1) * r * r
        for start in range(0, D, BLOCK_D):
            mask = in_rows & (columns + start < D)[None, :]
            x = tl.load(x_ptrs + start * x_stride_d, mask=mask, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptrs + start * grad_stride_d, mask=mask, other=0.0).to(tl.float32)
            dx = (grad - x * along[:, None]) * r[:, None]
            tl.store(dx_ptrs + start, dx.to(dx_ptr.dtype.element_ty), mask=mask)


# ---- launchers ----

_TILE = 2048
_WIDEST = 4096  # a row of up to so many is held whole
_NARROW = 2**31 - 1 - _TILE


def _leading_axes(*tensors: Tensor) -> tuple[list[Tensor], list[int], list[list[int]]]:
    """The tensors' axes but the last, merged where every one of them allows it, as three sizes and three strides each.

    Tensors that need more than three axes are made contiguous, which needs one.
    """
    if all(t.is_contiguous() for t in tensors):
        width = tensors[0].shape[-1]
        return list(tensors), [1, 1, tensors[0].numel() // width], [[0, 0, width] for _ in tensors]
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis in range(tensors[0].dim() - 1):
        size = tensors[0].shape[axis]
        if size == 1:
            continue
        steps = [t.stride(axis) for t in tensors]
        if sizes and all(own[-1] == step * size for own, step in zip(strides, steps)):
            sizes[-1] *= size
            for own, step in zip(strides, steps):
                own[-1] = step
        else:
            sizes.append(size)
            for own, step in zip(strides, steps):
                own.append(step)
    if len(sizes) > 3:
        return _leading_axes(*[t.contiguous() for t in tensors])
    missing = 3 - len(sizes)
    return list(tensors), [1] * missing + sizes, [[0] * missing + own for own in strides]


def _tile(width: int) -> tuple[int, int]:
    block = min(power_of_2(width), _WIDEST)
    return max(1, _TILE // block), block


def _forward_triton(x, eps):
    y = x.new_empty(x.shape)
    if x.numel() == 0:
        return y
    width = x.shape[-1]
    (x,), sizes, (strides,) = _leading_axes(x)
    rows, block = _tile(width)
    count = x.numel() // width
    with on_device(x):
        _l2norm_kernel[(cdiv(count, rows),)](
            x,
            y,
            count,
            *sizes[1:],
            *strides,
            x.stride(-1),
            eps,
            D=width,
            ROWS=rows,
            BLOCK_D=block,
            WIDE=count > _NARROW,
            num_warps=4,
        )
    return y


def _backward_triton(grad, x, eps):
    dx = x.new_empty(x.shape)
    if x.numel() == 0:
        return dx
    width = x.shape[-1]
    (grad, x), sizes, (grad_strides, x_strides) = _leading_axes(grad, x)
    rows, block = _tile(width)
    count = x.numel() // width
    with on_device(x):
        _l2norm_backward_kernel[(cdiv(count, rows),)](
            grad,
            x,
            dx,
            count,
            *sizes[1:],
            *grad_strides,
            grad.stride(-1),
            *x_strides,
            x.stride(-1),
            eps,
            D=width,
            ROWS=rows,
            BLOCK_D=block,
            WIDE=count > _NARROW,
            num_warps=4,
        )
    return dx


# ---- registration ----


def _reference(x, eps):
    with without_autocast(x):
        return naive_l2norm(x.float(), eps).to(x.dtype)


def _forward(x, eps, impl):
    if impl == "triton":
        return _forward_triton(x, eps)
    return _reference(x, eps).contiguous()


def _backward(grad, x, eps, impl):
    if impl == "triton":
        return _backward_triton(grad, x, eps)
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
    impl = resolve_impl(op, impl, x)
    if impl == "reference" and runs_eagerly():
        return _reference(x, eps)
    return _OP(x, float(eps), impl)
