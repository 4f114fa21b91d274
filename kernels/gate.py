"""bounded_gate_cumsum and softplus_gate_cumsum: from a layer's gate logits to the chunk-local cumulative log2 decay.

Source: Kimi Linear, arXiv 2510.26692. With x = raw_gate + dt_bias and a = exp(A_log), a token's log2 decay is

    bounded:   log2(e) lower_bound sigmoid(a x)          softplus:   -log2(e) a softplus(x)

floored at -256, and summed over the tokens of its chunk so far. A program owns a span of tokens (whole chunks of one
sequence) and BLOCK of the H K channels; it walks the span row by row with the running sum in registers, each thread
on channels of its own, ROWS rows loaded ahead of their use. Bytes per element: raw_gate read and FP32 written, 6 with
bf16 logits. The backward walks its spans from the end: the reverse sum of the gradient and the gate's derivative in one
pass (FP32 gradient and raw_gate read, raw_gate's gradient written, 8 bytes), and per program two FP32 sums a channel,
which a second, small kernel adds up in a fixed order.
"""

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import (
    Launch,
    cdiv,
    load_rows,
    locate_span,
    logistic,
    mask_if,
    on_device,
    power_of_2,
    reciprocal,
    span_slots,
)
from ._operator import (
    CHUNK_SIZE,
    FLOAT_DTYPES,
    LOG2_E,
    MIN_LOG2_DECAY,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_key_width,
    check_lower_bound,
    check_rank,
    check_shape,
    grad_or_none,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    sequence_count,
    without_autocast,
)
from .reference import naive_bounded_gate_cumsum, naive_softplus_gate_cumsum

MAX_CHUNK_SIZE = 128

# ---- Triton kernels ----

_LOG2_E = tl.constexpr(LOG2_E)
_FLOOR = tl.constexpr(MIN_LOG2_DECAY)
_MAX_A_LOG = tl.constexpr(88.72)  # the largest whose exp is finite in FP32, nearly
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_GRAD_LIMIT = tl.constexpr(2.0**100)  # a token's gradient is held below it: sums of such stay finite, inf - inf is NaN


@triton.jit
def gate_slope(A_log):
    """log2(e) exp(A_log), held to the finite range, so that 0 times it is 0."""
    return tl.minimum(tl.exp2(A_log * _LOG2_E) * _LOG2_E, _FLOAT_MAX)


@triton.jit
def _softplus(x, e):
    """log(1 + exp(x)) given e = exp(-|x|); log1p(e) / e as a polynomial on [0, 1], relative error 3e-7."""
    p = e * -0.008574675768613815 + 0.044214192777872086
    p = p * e - 0.10785368084907532
    p = p * e + 0.17757023870944977
    p = p * e - 0.2449961155653
    p = p * e + 0.3327617645263672
    p = p * e - 0.49997448921203613
    p = p * e + 0.9999998211860657
    return tl.maximum(x, 0.0) + e * p


@triton.jit
def gate_log2_decay(x, slope, lower_bound, BOUNDED: tl.constexpr):
    """A token's log2 decay from x = raw_gate + dt_bias and ``gate_slope``, all FP32."""
    if BOUNDED:
        decay = logistic(x * slope) * (lower_bound * _LOG2_E)
    else:
        decay = -slope * _softplus(x, tl.exp2(tl.abs(x) * -_LOG2_E))
    return tl.maximum(decay, _FLOOR)


@triton.jit
def _gate_log2_decay_grads(grad, x, slope, lower_bound, BOUNDED: tl.constexpr, FLOORED: tl.constexpr):
    """From the gradient of a token's log2 decay: those of x and of A_log. Zero where the decay is floored, which the
    bounded gate's can be only if its lower bound is (``FLOORED``)."""
    if BOUNDED:
        # Written with 2^-|z|, which cannot overflow: sigmoid' = e / (1 + e)^2 without cancellation.
        z = x * slope
        e = tl.exp2(tl.abs(z) * -1.0)
        s = reciprocal(1.0 + e)
        dx = (grad * lower_bound) * (e * s * s) * slope
        if FLOORED:
            dx = tl.where(tl.where(z > 0, s, e * s) * (lower_bound * _LOG2_E) > _FLOOR, dx, 0.0)
        dx = tl.minimum(tl.maximum(dx, -_GRAD_LIMIT), _GRAD_LIMIT)
        return dx, dx * x
    else:
        e = tl.exp2(tl.abs(x) * -_LOG2_E)
        s = reciprocal(1.0 + e)
        decay = -slope * _softplus(x, e)
        grad = tl.where(decay > _FLOOR, grad, 0.0)
        decay = tl.maximum(decay, _FLOOR)  # finite
        return grad * tl.maximum(-slope * tl.where(x > 0, s, e * s), _FLOOR), grad * decay


@triton.jit(do_not_specialize=["T", "N"])
def _gate_cumsum_kernel(
    raw_gate_ptr,  # [B, T, H, K]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H, K]
    output_ptr,  # [B, T, H, K]
    cu_seqlens_ptr,  # [N + 1]
    raw_stride_b,
    raw_stride_t,
    raw_stride_h,
    raw_stride_k,
    T,
    N,
    H,
    lower_bound,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(H * K, BLOCK)
    _, batch, begin, length, position = locate_span(pid // blocks, cu_seqlens_ptr, T, N, SPAN, PACKED)
    channels = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_channels = channels < H * K
    head = (channels // K).to(tl.int64)
    bias = tl.load(dt_bias_ptr + channels, mask=in_channels, other=0.0)
    slope = gate_slope(tl.load(A_log_ptr + head, mask=in_channels, other=0.0))
    raw_ptrs = raw_gate_ptr + batch * raw_stride_b + head * raw_stride_h + (channels % K).to(tl.int64) * raw_stride_k
    output_ptrs = output_ptr + batch * T * (H * K) + channels

    start = begin + position
    rows = tl.minimum(length - position, SPAN)
    total = tl.zeros([BLOCK], tl.float32)
    ahead = load_rows(raw_ptrs, raw_stride_t, start, 0, rows, in_channels, ROWS)
    for base in range(0, rows, ROWS):
        loaded = ahead
        ahead = load_rows(raw_ptrs, raw_stride_t, start, base + ROWS, rows, in_channels, ROWS)
        if CHUNK > ROWS:
            total = tl.where(base % CHUNK == 0, 0.0, total)
        for r in tl.static_range(ROWS):
            if r % CHUNK == 0 and CHUNK <= ROWS:
                total = tl.zeros([BLOCK], tl.float32)
            total += gate_log2_decay(loaded[r].to(tl.float32) + bias, slope, lower_bound, BOUNDED)
            mask = mask_if(in_channels, base + r < rows)
            tl.store(output_ptrs + (start + base + r) * (H * K), total, mask=mask)


@triton.jit(do_not_specialize=["T", "N", "slots", "workers"])
def _gate_cumsum_backward_kernel(
    grad_ptr,  # [B, T, H, K]
    raw_gate_ptr,  # [B, T, H, K]
    A_log_ptr,  # [H]
    dt_bias_ptr,  # [H, K]
    draw_ptr,  # [B, T, H, K]
    sums_ptr,  # [2, workers, H, K]: of the gradients of dt_bias, and of A_log
    cu_seqlens_ptr,  # [N + 1]
    grad_stride_b,
    grad_stride_t,
    grad_stride_h,
    grad_stride_k,
    raw_stride_b,
    raw_stride_t,
    raw_stride_h,
    raw_stride_k,
    T,
    N,
    H,
    slots,
    workers,
    lower_bound,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BOUNDED: tl.constexpr,
    FLOORED: tl.constexpr,
    PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    blocks = tl.cdiv(H * K, BLOCK)
    worker = pid // blocks
    channels = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_channels = channels < H * K
    head = (channels // K).to(tl.int64)
    channel_in_head = (channels % K).to(tl.int64)
    bias = tl.load(dt_bias_ptr + channels, mask=in_channels, other=0.0)
    slope = gate_slope(tl.load(A_log_ptr + head, mask=in_channels, other=0.0))
    bias_sum = tl.zeros([BLOCK], tl.float32)
    A_sum = tl.zeros([BLOCK], tl.float32)
    for slot in range(worker, slots, workers):
        _, batch, begin, length, position = locate_span(slot, cu_seqlens_ptr, T, N, SPAN, PACKED)
        rows = tl.maximum(tl.minimum(length - position, SPAN), 0)
        last_base = (tl.cdiv(rows, ROWS) - 1) * ROWS
        start = begin + position
        grad_ptrs = grad_ptr + batch * grad_stride_b + head * grad_stride_h + channel_in_head * grad_stride_k
        raw_ptrs = raw_gate_ptr + batch * raw_stride_b + head * raw_stride_h + channel_in_head * raw_stride_k
        draw_ptrs = draw_ptr + batch * T * (H * K) + channels
        total = tl.zeros([BLOCK], tl.float32)
        before = tl.maximum(last_base, 0)
        grad_ahead = load_rows(grad_ptrs, grad_stride_t, start, before, rows, in_channels, ROWS)
        raw_ahead = load_rows(raw_ptrs, raw_stride_t, start, before, rows, in_channels, ROWS)
        for done in range(0, rows, ROWS):
            base = last_base - done
            grads = grad_ahead
            raws = raw_ahead
            before = tl.where(base > 0, base - ROWS, rows)  # none before the first
            grad_ahead = load_rows(grad_ptrs, grad_stride_t, start, before, rows, in_channels, ROWS)
            raw_ahead = load_rows(raw_ptrs, raw_stride_t, start, before, rows, in_channels, ROWS)
            if CHUNK > ROWS:
                total = tl.where((base + ROWS) % CHUNK == 0, 0.0, total)
            for i in tl.static_range(ROWS):
                if i % CHUNK == 0 and CHUNK <= ROWS:
                    total = tl.zeros([BLOCK], tl.float32)
                total += grads[ROWS - 1 - i].to(tl.float32)
                x = raws[ROWS - 1 - i].to(tl.float32) + bias
                dx, dA = _gate_log2_decay_grads(total, x, slope, lower_bound, BOUNDED, FLOORED)
                bias_sum += dx
                A_sum += dA
                mask = mask_if(in_channels, base + (ROWS - 1 - i) < rows)
                dx = dx.to(draw_ptr.dtype.element_ty)
                tl.store(draw_ptrs + (start + base + (ROWS - 1 - i)) * (H * K), dx, mask=mask)
    sums_ptrs = sums_ptr + worker.to(tl.int64) * (H * K) + channels
    tl.store(sums_ptrs, bias_sum, mask=in_channels)
    tl.store(sums_ptrs + workers.to(tl.int64) * (H * K), A_sum, mask=in_channels)


@triton.jit(do_not_specialize=["workers"])
def _gate_parameter_grads_kernel(
    sums_ptr,  # [2, workers, H, K]
    A_log_ptr,  # [H]
    dA_log_ptr,  # [H]
    ddt_bias_ptr,  # [H, K]
    workers,
    H,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    head = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    channels = tl.arange(0, BLOCK_K)
    in_channels = channels < K
    bias_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    A_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    ptrs = sums_ptr + rows.to(tl.int64)[:, None] * (H * K) + (head * K + channels)[None, :]
    for base in range(0, workers, ROWS):
        mask = (base + rows < workers)[:, None] & in_channels[None, :]
        bias_sum += tl.load(ptrs, mask=mask, other=0.0)
        A_sum += tl.load(ptrs + workers.to(tl.int64) * (H * K), mask=mask, other=0.0)
        ptrs += ROWS * (H * K)
    tl.store(ddt_bias_ptr + head * K + channels, tl.sum(bias_sum, axis=0), mask=in_channels)
    dA = tl.sum(tl.sum(A_sum, axis=0), axis=0)
    dA = tl.where(tl.load(A_log_ptr + head) < _MAX_A_LOG, dA, 0.0)  # past it exp(A_log) is held, a constant
    tl.store(dA_log_ptr + head, dA)


# ---- launchers ----

# Four channels a thread: 16-byte accesses of FP32, 8-byte ones of 16-bit logits. Spans hold whole chunks. What counts
# most is how the programs fill the GPU: at T 8192, H 32, K 128 they are all resident at once, or in two full turns.
_FORWARD = Launch(rows=16, warps=2, per_thread=4, span=64)
_STEP = Launch(rows=4, warps=4, per_thread=4, span=64)  # small decode steps
_BACKWARD = Launch(rows=4, warps=2, per_thread=4, span=128, registers=96)
_MAX_WORKERS = 1024  # bounds the partial sums; a fixed number, so that sums have one order


def _forward_triton(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, launch=_FORWARD):
    batch, tokens, heads, key_width = raw_gate.shape
    output = torch.empty(raw_gate.shape, dtype=torch.float32, device=raw_gate.device)
    packed = cu_seqlens is not None
    sequences = sequence_count(batch, cu_seqlens)
    if raw_gate.numel() == 0 or sequences == 0:
        return output
    strides = raw_gate.stride()
    least = max(chunk_size, 16)
    if tokens == 1 and chunk_size == 1 and not packed:  # a decode step: the batch is as good as a sequence
        tokens, sequences, strides = batch, 1, (0, strides[0], *strides[2:])
        if batch <= 512:  # too few for long spans
            least = min(power_of_2(cdiv(batch, 32)), 4)
            launch = dataclasses.replace(_STEP, rows=least)
    block, blocks, warps = launch.over(heads * key_width)
    span = launch.span_over(sequences * tokens, blocks, least)
    slots = span_slots(tokens, sequences, span, packed)
    with on_device(raw_gate):
        _gate_cumsum_kernel[(slots * blocks,)](
            raw_gate,
            A_log.contiguous(),
            dt_bias.contiguous(),
            output,
            cu_seqlens,
            *strides,
            tokens,
            sequences,
            heads,
            0.0 if lower_bound is None else lower_bound,
            K=key_width,
            CHUNK=chunk_size,
            SPAN=span,
            ROWS=launch.rows,
            BLOCK=block,
            BOUNDED=lower_bound is not None,
            PACKED=packed,
            num_warps=warps,
            maxnreg=launch.registers,
        )
    return output


def _backward_triton(grad, raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, launch=_BACKWARD):
    batch, tokens, heads, key_width = raw_gate.shape
    draw = raw_gate.new_empty(raw_gate.shape)
    dA_log = A_log.new_empty(A_log.shape)
    ddt_bias = dt_bias.new_empty(dt_bias.shape)
    packed = cu_seqlens is not None
    sequences = sequence_count(batch, cu_seqlens)
    if raw_gate.numel() == 0 or sequences == 0:
        return draw, dA_log.zero_(), ddt_bias.zero_()
    A_log, dt_bias = A_log.contiguous(), dt_bias.contiguous()
    block, blocks, warps = launch.over(heads * key_width)
    span = launch.span_over(batch * tokens, blocks, max(chunk_size, 16))
    slots = span_slots(tokens, sequences, span, packed)
    workers = min(slots, _MAX_WORKERS)
    sums = torch.empty(2, workers, heads, key_width, dtype=torch.float32, device=raw_gate.device)
    with on_device(raw_gate):
        _gate_cumsum_backward_kernel[(workers * blocks,)](
            grad,
            raw_gate,
            A_log,
            dt_bias,
            draw,
            sums,
            cu_seqlens,
            *grad.stride(),
            *raw_gate.stride(),
            tokens,
            sequences,
            heads,
            slots,
            workers,
            0.0 if lower_bound is None else lower_bound,
            K=key_width,
            CHUNK=chunk_size,
            SPAN=span,
            ROWS=launch.rows,
            BLOCK=block,
            BOUNDED=lower_bound is not None,
            FLOORED=lower_bound is not None and lower_bound * LOG2_E <= MIN_LOG2_DECAY,
            PACKED=packed,
            num_warps=warps,
            maxnreg=launch.registers,
        )
        _gate_parameter_grads_kernel[(heads,)](
            sums,
            A_log,
            dA_log,
            ddt_bias,
            workers,
            heads,
            K=key_width,
            ROWS=min(64, 8192 // power_of_2(key_width)),
            BLOCK_K=power_of_2(key_width),
            num_warps=8,
        )
    return draw, dA_log, ddt_bias


# ---- registration ----


def _reference(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens):
    """Either gate in plain PyTorch; a lower_bound of None means softplus, here and below."""
    if lower_bound is None:
        return naive_softplus_gate_cumsum(raw_gate, A_log, dt_bias, chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    return naive_bounded_gate_cumsum(
        raw_gate, A_log, dt_bias, chunk_size=chunk_size, lower_bound=lower_bound, cu_seqlens=cu_seqlens
    )


def _forward(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, impl):
    if impl == "triton":
        return _forward_triton(raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens)
    with without_autocast(raw_gate):
        return _reference(raw_gate.float(), A_log, dt_bias, chunk_size, lower_bound, cu_seqlens).contiguous()


def _backward(grad, raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens, impl):
    if impl == "triton":
        return _backward_triton(grad, raw_gate, A_log, dt_bias, chunk_size, lower_bound, cu_seqlens)
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
    check_key_width(op, key_width)
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
    impl = resolve_impl(op, impl, raw_gate)
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
    impl = resolve_impl(op, impl, raw_gate)
    if impl == "reference" and runs_eagerly():
        with without_autocast(raw_gate):
            return _reference(raw_gate.float(), A_log, dt_bias, chunk_size, None, cu_seqlens)
    return _SOFTPLUS_OP(raw_gate, A_log, dt_bias, chunk_size, cu_seqlens, impl)
