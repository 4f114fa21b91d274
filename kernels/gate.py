"""bounded_gate_cumsum and softplus_gate_cumsum: from a layer's gate logits to the chunk-local cumulative log2 decay."""

import torch
from torch import Tensor

from ._operator import (
    CHUNK_SIZE,
    FLOAT_DTYPES,
    MAX_KEY_WIDTH,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_lower_bound,
    check_rank,
    check_shape,
    grad_or_none,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    without_autocast,
)
from .reference import naive_bounded_gate_cumsum, naive_softplus_gate_cumsum

MAX_CHUNK_SIZE = 128

# ---- registration ----


def _reference(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens):
    """Either gate in plain PyTorch; a lower_bound of None means softplus, here and below."""
    if lower_bound is None:
        return naive_softplus_gate_cumsum(raw_gate, A_log, dt_bias, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    return naive_bounded_gate_cumsum(
        raw_gate, A_log, dt_bias, chunk_size=chunk_size, lower_bound=lower_bound, cu_seqlens=cu_seqlens
    )


def _forward(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, impl):
    with without_autocast(raw_gate):
        return _reference(raw_gate.float(), A_log, dt_bias, chunk_size, lower_bound, cu_seqlens).contiguous()


def _backward(grad, raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, impl):
    grads = reference_vjp(
        lambda *inputs: _reference(*inputs, chunk_size, lower_bound, cu_seqlens),
        (raw_gate.float(), A_log, dt_bias),
        grad,
    )
    return grads[0].to(raw_gate.dtype).contiguous(), grads[1].contiguous(), grads[2].contiguous()


def _register(name: str, bound: str):
    """Registers one gate and its backward; ``bound`` is the schema's lower_bound argument, or empty for softplus."""

    def with_bound(kernel, before):  # softplus: insert the None that the shared functions expect
        return kernel if bound else lambda *args: kernel(*args[:before], None, *args[before:])

    backward_op = register(
        f"{name}_backward(Tensor grad, Tensor raw_gate, Tensor A_log, Tensor dt_bias, int chunk_size, {bound}"
        "Tensor? cu_seqlens, str impl) -> (Tensor, Tensor, Tensor)",
        with_bound(_backward, 5),
        lambda grad, raw_gate, A_log, dt_bias, *_: (
            raw_gate.new_empty(raw_gate.shape),
            A_log.new_empty(A_log.shape),
            dt_bias.new_empty(dt_bias.shape),
        ),
        backward=second_order_raises(name),
    )

    def setup_context(ctx, inputs, output):
        raw_gate, A_log, dt_bias, *settings = inputs
        ctx.save_for_backward(raw_gate, A_log, dt_bias, settings[-2])
        ctx.settings, ctx.impl = settings[:-2], settings[-1]

    def backward(ctx, grad):
        raw_gate, A_log, dt_bias, cu_seqlens = ctx.saved_tensors
        grads = backward_op(grad, raw_gate, A_log, dt_bias, *ctx.settings, cu_seqlens, ctx.impl)
        return *grad_or_none(ctx.needs_input_grad, grads), *[None] * (len(ctx.settings) + 2)

    return register(
        f"{name}(Tensor raw_gate, Tensor A_log, Tensor dt_bias, int chunk_size, {bound}"
        "Tensor? cu_seqlens, str impl) -> Tensor",
        with_bound(_forward, 4),
        lambda raw_gate, *_: raw_gate.new_empty(raw_gate.shape, dtype=torch.float32),
        backward=backward,
        setup_context=setup_context,
    )


_BOUNDED_OP = _register("bounded_gate_cumsum", "float lower_bound, ")
_SOFTPLUS_OP = _register("softplus_gate_cumsum", "")

# ---- public functions ----


def _check(op, raw_gate, A_log, dt_bias, chunk_size, cu_seqlens) -> None:
    check_dtype(op, "raw_gate", raw_gate, FLOAT_DTYPES)
    check_dtype(op, "A_log", A_log, (torch.float32,))
    check_dtype(op, "dt_bias", dt_bias, (torch.float32,))
    check_rank(op, "raw_gate", raw_gate, "[B, T, H, K]")
    batch, _, heads, key_width = raw_gate.shape
    if not 1 <= key_width <= MAX_KEY_WIDTH:
        raise ValueError(f"{op}: K must be from 1 to {MAX_KEY_WIDTH}, got {key_width}")
    check_shape(op, "A_log", A_log, "[H]", (heads,))
    check_shape(op, "dt_bias", dt_bias, "[H, K]", (heads, key_width))
    check_device(op, "A_log", A_log, raw_gate.device)
    check_device(op, "dt_bias", dt_bias, raw_gate.device)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"{op}: chunk_size must be an int, got {type(chunk_size).__name__}")
    if not 1 <= chunk_size <= MAX_CHUNK_SIZE or chunk_size & (chunk_size - 1):
        raise ValueError(f"{op}: chunk_size must be a power of two from 1 to {MAX_CHUNK_SIZE}, got {chunk_size}")
    if cu_seqlens is not None:
        check_cu_seqlens(op, cu_seqlens, batch, raw_gate.device)


def bounded_gate_cumsum(
    raw_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
    lower_bound: float = -5.0,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The bounded gate, summed over the tokens of each chunk.

    A token's decay is ``lower_bound * sigmoid(exp(A_log) * (raw_gate + dt_bias))``, a natural logarithm in
    (lower_bound, 0), times log2(e), and floored at -256, where its gradient is zero. The sum is inclusive and starts
    afresh at every chunk and every sequence. ``chunk_size=64`` gives chunk_kda's ``cumulative_gate``; ``chunk_size=1``,
    with nothing summed, gives recurrent_kda's ``gate``. Source: Kimi Linear, arXiv 2510.26692.

    Args:
        raw_gate: gate logits, [B, T, H, K], bf16, fp16 or fp32; K at most 256.
        A_log: logarithm of the head's slope, [H], fp32. Its exponential is held to FP32's finite range.
        dt_bias: [H, K], fp32.
        chunk_size: tokens to a chunk, a power of two from 1 to 128.
        lower_bound: the least decay of a token, in nats: negative and finite.
        cu_seqlens: offsets of packed sequences, [N + 1], int32, contiguous; B is then 1, and rows past the last offset
            are neither read nor defined in the result.
        impl: None, "triton" or "reference".

    Returns:
        The cumulative log2 decay, [B, T, H, K], fp32. Differentiates with respect to the first three arguments.

    Raises:
        ValueError: a shape, device, chunk_size, lower_bound or impl that breaks the above.
        TypeError: a dtype that does.
    """
    op = "bounded_gate_cumsum"
    _check(op, raw_gate, A_log, dt_bias, chunk_size, cu_seqlens)
    lower_bound = check_lower_bound(op, "lower_bound", lower_bound)
    impl = resolve_impl(op, impl, raw_gate, triton_ready=False)
    if impl == "reference" and runs_eagerly():
        with without_autocast(raw_gate):
            return _reference(raw_gate.float(), A_log, dt_bias, chunk_size, lower_bound, cu_seqlens)
    return _BOUNDED_OP(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, impl)


def softplus_gate_cumsum(
    raw_gate: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    chunk_size: int = CHUNK_SIZE,
    cu_seqlens: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """The softplus gate, summed over the tokens of each chunk.

    A token's decay is ``-exp(A_log) * softplus(raw_gate + dt_bias)``, a natural logarithm below 0; everything else,
    arguments, result and errors, is as in :func:`bounded_gate_cumsum`. The two are different functions, used by
    different released models: neither is a clamp of the other.
    """
    op = "softplus_gate_cumsum"
    _check(op, raw_gate, A_log, dt_bias, chunk_size, cu_seqlens)
    impl = resolve_impl(op, impl, raw_gate, triton_ready=False)
    if impl == "reference" and runs_eagerly():
        with without_autocast(raw_gate):
            return _reference(raw_gate.float(), A_log, dt_bias, chunk_size, None, cu_seqlens)
    return _SOFTPLUS_OP(raw_gate, A_log, dt_bias, chunk_size, cu_seqlens, impl)
