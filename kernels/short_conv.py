"""causal_conv1d: the depthwise causal convolution before q, k and v. Its decode step is short_conv_step.py.

Source: Kimi Linear, arXiv 2510.26692. Per channel, y[t] = act(sum_w weight[w] x[t - (W - 1) + w]), act being SiLU or
nothing, with the rows before a sequence's first taken from its initial state or zero. A program owns a span of tokens
of one sequence and BLOCK channels, each thread channels of its own. C is a constant of the kernels: in a row-major
tensor a group of rows is then one address and constant offsets.

The forward's spans are short: all rows and the W - 1 before them are asked for at once, and the many programs of an SM
hide each other's waiting. x is read once (W - 1 rows of 16 twice, the second time from the cache) and the output
written once, 4 bytes an element in bf16.

The backward walks long pieces by whole groups of ROWS rows, which need no masks, on their way through shared memory
two groups ahead of their use. At row t it recomputes y's preactivation, turns the output's gradient into the
preactivation's, dy[t], and with the last W of those finishes the row u = t - (W - 1): dx[u] = sum_j weight[W - 1 - j]
dy[u + j]. So a piece needs W - 1 rows past its end too, asked for before its first; x, the gradient and dx are 6 bytes
an element. Pieces share out all tokens equally, wherever sequences begin and end in them, and are as many as the GPU
runs at once, or whole turns of so many. A program may walk its piece as several streams side by side. It sums the
weight's gradient over all of it; a second, small kernel adds the programs' sums in a fixed order.
"""

# ruff: noqa: RUF005 (Triton has no starred tuples)

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ._device import (
    Launch,
    at_most,
    cdiv,
    dependent_launch,
    load_rows,
    locate_span,
    logistic,
    mask_if,
    on_device,
    span_slots,
    wait_for_earlier_launches,
    widened,
    within,
)
from ._operator import (
    FLOAT_DTYPES,
    LOG2_E,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    empty_like_optional,
    grad_or_none,
    reference_vjp,
    register,
    resolve_impl,
    runs_eagerly,
    second_order_raises,
    sequence_count,
    without_autocast,
)
from .reference import naive_causal_conv1d

ACTIVATIONS = ("silu", None)
MAX_TAPS = 8  # the loops over taps are unrolled: twice as many take minutes to compile

# ---- Triton kernels ----

_LOG2_E = tl.constexpr(LOG2_E)
_LN_2 = tl.constexpr(1 / LOG2_E)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_STAGES = tl.constexpr(3)  # of the backward's pipeline; four, with more on their way, are slower


@triton.jit
def load_taps_by_channel(weight_ptr, channels, in_channels, W: tl.constexpr, WORDS: tl.constexpr):
    """The weight as W blocks of channels in FP32. Each thread reads just its own channels': no exchange, no barrier for
    the rows' loads to wait behind, and no other layout for what meets the taps. WORDS: four taps of 16 bits, at a
    multiple of 8 bytes, are one word."""
    if WORDS:
        words = tl.load(weight_ptr.to(tl.pointer_type(tl.int64)) + channels, mask=in_channels, other=0)
        taps = ()
        for w in tl.static_range(W):
            tap = (words >> (16 * w)).to(tl.int16).to(weight_ptr.dtype.element_ty, bitcast=True)
            taps = taps + (tap.to(tl.float32),)
        return taps
    else:
        taps = ()
        for w in tl.static_range(W):
            taps = taps + (tl.load(weight_ptr + channels * W + w, mask=in_channels, other=0.0).to(tl.float32),)
        return taps


@triton.jit
def _scaled(taps, factor, W: tl.constexpr):
    """Times the factor, and finite where they were."""
    scaled = ()
    for w in tl.static_range(W):
        scaled = scaled + (within(taps[w] * factor, _FLOAT_MAX),)
    return scaled


@triton.jit
def _load_group(ptrs, stride, in_channels, ROWS: tl.constexpr, EVEN: tl.constexpr):
    """ROWS rows, all of them there. EVEN: so are all channels."""
    loaded = ()
    for r in tl.static_range(ROWS):
        if EVEN:
            loaded = loaded + (tl.load(ptrs + r * stride),)
        else:
            loaded = loaded + (tl.load(ptrs + r * stride, mask=in_channels, other=0.0),)
    return loaded


@triton.jit
def _store_row(ptrs, row, in_channels, EVEN: tl.constexpr):
    if EVEN:
        tl.store(ptrs, row)
    else:
        tl.store(ptrs, row, mask=in_channels)


@triton.jit
def _filtered(taps, run, r: tl.constexpr, W: tl.constexpr):
    """sum_w taps[w] run[r + w]. The fused operations are spelled out: left to the compiler, the first two products may
    be fused in either order, in one unrolled row so and in another not, and a row's bits would depend on its place."""
    y = taps[0] * run[r]
    for w in tl.static_range(1, W):
        y = tl.fma(taps[w], run[r + w], y)
    return y


@triton.jit
def _pulled(taps, run, r: tl.constexpr, W: tl.constexpr):
    """Its transpose, sum_j taps[W - 1 - j] run[r + j]."""
    dx = taps[W - 1] * run[r]
    for j in tl.static_range(1, W):
        dx = tl.fma(taps[W - 1 - j], run[r + j], dx)
    return dx


@triton.jit
def _summed(sums, dy, run, r: tl.constexpr, W: tl.constexpr):
    """The sums of the weight's gradient, with a row's part."""
    added = ()
    for w in tl.static_range(W):
        added = added + (tl.fma(dy, run[r + w], sums[w]),)
    return added


@triton.jit
def _activated(y, SILU: tl.constexpr):
    if SILU:
        y = y * logistic(y * _LOG2_E)
    return y


@triton.jit
def _preactivation_grad(grad, y, SILU: tl.constexpr):
    """Of y, given times UNIT, and divided by it, as the taps are multiplied by it: log2(e) with SiLU, so that no
    product is spent on changing the base. The fused operations are spelled out, as in ``_filtered``."""
    if SILU:
        s = logistic(y)
        slope = s * tl.fma(tl.fma(s * -1.0, y, y), _LN_2 * _LN_2, _LN_2)  # s (1 + y (1 - s)), at most 1.1
        # At an infinite y it is no number, which the minimum drops: a later token that has no part in the loss must not
        # reach earlier ones.
        grad = grad * at_most(slope, 2.0)
    return grad


@triton.jit
def _row(
    x_ptrs, state_ptrs, p, length, x_stride_t, state_stride_w, in_channels, W: tl.constexpr, HAS_STATE: tl.constexpr
):
    """Row p of a sequence, from -(W - 1), where its initial state begins; zero if there is none."""
    x = tl.load(x_ptrs + p.to(tl.int64) * x_stride_t, mask=mask_if(in_channels, (p >= 0) & (p < length)), other=0.0)
    if HAS_STATE:
        mask = mask_if(in_channels, p < 0)
        x = tl.where(p < 0, tl.load(state_ptrs + (p + (W - 1)).to(tl.int64) * state_stride_w, mask=mask, other=0.0), x)
    return x


@triton.jit(do_not_specialize=["T", "N"])
def _causal_conv1d_kernel(
    x_ptr,  # [B, T, C]
    weight_ptr,  # [C, W]
    initial_state_ptr,  # [N, W - 1, C]
    output_ptr,  # [B, T, C]
    final_state_ptr,  # [N, W - 1, C]
    cu_seqlens_ptr,  # [N + 1]
    x_stride_b,
    x_stride_t,
    x_stride_c,
    state_stride_n,
    state_stride_w,
    state_stride_c,
    T,
    N,
    C: tl.constexpr,
    W: tl.constexpr,
    SPAN: tl.constexpr,
    ROWS: tl.constexpr,  # at a sequence's ends
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    WORDS: tl.constexpr,
    X_ROW_MAJOR: tl.constexpr,  # x's rows are C apart
):
    pid = tl.program_id(0)
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = C % BLOCK == 0
    sequence, batch, begin, length, position = locate_span(pid // blocks, cu_seqlens_ptr, T, N, SPAN, PACKED)
    channels = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
    in_channels = tl.full([BLOCK], True, tl.int1) if EVEN else channels < C
    wide_channels = channels.to(tl.int64)
    x_stride = C if X_ROW_MAJOR else tl.cast(x_stride_t, tl.int64)
    sequence_ptrs = x_ptr + batch * x_stride_b + begin * x_stride_t + wide_channels * x_stride_c
    state_ptrs = initial_state_ptr
    if HAS_INITIAL:
        state_ptrs += sequence * state_stride_n + wide_channels * state_stride_c

    rows = tl.maximum(tl.minimum(length - position, SPAN), 0)
    start = position.to(tl.int64)
    x_ptrs = sequence_ptrs + start * x_stride
    output_ptrs = output_ptr + (batch * T + begin + start) * C + channels
    if (rows == SPAN) & (position >= W - 1):  # all rows at once, those before the span among them
        taps = load_taps_by_channel(weight_ptr, channels, in_channels, W, WORDS)
        loaded = _load_group(x_ptrs - (W - 1) * x_stride, x_stride, in_channels, SPAN + (W - 1), EVEN)
        run = ()
        for r in tl.static_range(SPAN + W - 1):
            run = run + (loaded[r].to(tl.float32),)
        for r in tl.static_range(SPAN):
            y = _activated(_filtered(taps, run, r, W), SILU)
            _store_row(output_ptrs + r * C, y.to(output_ptr.dtype.element_ty), in_channels, EVEN)
    else:  # a sequence's ends
        taps = load_taps_by_channel(weight_ptr, channels, in_channels, W, WORDS)
        window = ()
        for w in tl.static_range(W - 1):
            p = position - (W - 1) + w
            row = _row(sequence_ptrs, state_ptrs, p, length, x_stride, state_stride_w, in_channels, W, HAS_INITIAL)
            window = window + (row.to(tl.float32),)
        for base in range(0, rows, ROWS):
            loaded = load_rows(x_ptrs, x_stride, 0 * start, base, rows, in_channels, ROWS)
            run = window
            for r in tl.static_range(ROWS):
                run = run + (loaded[r].to(tl.float32),)
            for r in tl.static_range(ROWS):
                y = _activated(_filtered(taps, run, r, W), SILU)
                mask = mask_if(in_channels, base + r < rows)
                tl.store(output_ptrs + tl.cast(base + r, tl.int64) * C, y.to(output_ptr.dtype.element_ty), mask=mask)
            window = ()
            for w in tl.static_range(W - 1):
                window = window + (run[ROWS + w],)

    if HAS_FINAL:  # written where the sequence ends; an empty one has its first span for that
        if (position + SPAN >= length) & ((position == 0) | (position < length)):
            final_ptrs = final_state_ptr + sequence * ((W - 1) * C) + channels
            for w in tl.static_range(W - 1):
                p = length - (W - 1) + w
                row = _row(sequence_ptrs, state_ptrs, p, length, x_stride, state_stride_w, in_channels, W, HAS_INITIAL)
                tl.store(final_ptrs + w * C, row, mask=in_channels)


@triton.jit
def _sequence_at(token, cu_seqlens_ptr, N):
    """The last sequence that begins at or before a token of the pack: the one with the token in it."""
    low = 0 * token
    high = low + N
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) <= token:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _share(piece, pieces, cu_seqlens_ptr, T, N, GROUP: tl.constexpr, PACKED: tl.constexpr, WIDE: tl.constexpr):
    """A piece's tokens, first and past the last, counted through all sequences, and the first and past the last of
    those. Pieces are alike, in whole groups of GROUP, however the sequences lie. WIDE: 32 bits may not count them."""
    if PACKED:
        total = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + N), 0), T)
    else:
        total = (tl.cast(N, tl.int64) if WIDE else N) * T
    if WIDE:
        total = tl.cast(total, tl.int64)
    share = tl.cdiv(tl.cdiv(total, pieces), GROUP) * GROUP
    first = piece * share
    past = tl.minimum(first + share, total)
    if PACKED:
        sequence = _sequence_at(first, cu_seqlens_ptr, N)
        last_sequence = _sequence_at(past - 1, cu_seqlens_ptr, N)
    else:
        sequence = first // T
        last_sequence = (past - 1) // T
    past_sequence = tl.where(first < past, last_sequence + 1, sequence)
    return first, past, tl.cast(sequence, tl.int32), tl.cast(past_sequence, tl.int32)


@triton.jit
def _bounds(sequence, cu_seqlens_ptr, T, PACKED: tl.constexpr):
    """A sequence's batch row, its first token there, and its length."""
    if PACKED:
        begin = tl.load(cu_seqlens_ptr + sequence)
        end = tl.load(cu_seqlens_ptr + sequence + 1)
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= T), "cu_seqlens must rise from 0 to at most T")
        begin = tl.minimum(tl.maximum(begin, 0), T)
        return tl.cast(0, tl.int64), begin.to(tl.int64), tl.minimum(tl.maximum(end, begin), T) - begin
    else:
        return tl.cast(sequence, tl.int64), tl.cast(0, tl.int64), tl.cast(T, tl.int32)


@triton.jit
def _finish_row(
    dx,
    v,  # the row in the stream; below 0, a row of the initial state, or of the stream before
    rows,
    position,
    length,
    dx_ptrs,  # row 0 of the stream
    dfinal_ptrs,  # row 0 of the final state's gradient
    dinitial_ptrs,  # row 0 of the initial state's gradient
    C: tl.constexpr,
    dfinal_stride_w,
    in_channels,
    W: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
):
    """Writes a row's gradient, plus what it gets as a row of the final state, if the row is this stream's to write. The
    initial state's are whose first row is the sequence's."""
    u = position + v
    own = (v >= 0) & (v < rows)
    initial = (u < 0) & (position == 0) & (length > 0)
    if HAS_FINAL:
        final_row = u - length + (W - 1)
        mask = mask_if(in_channels, (final_row >= 0) & (final_row < W - 1) & (own | initial))
        dx += tl.load(dfinal_ptrs + final_row.to(tl.int64) * dfinal_stride_w, mask=mask, other=0.0).to(tl.float32)
    dx = dx.to(dx_ptrs.dtype.element_ty)
    tl.store(dx_ptrs + tl.cast(v, tl.int64) * C, dx, mask=mask_if(in_channels, own))
    if HAS_INITIAL:
        tl.store(dinitial_ptrs + (u + (W - 1)) * C, dx, mask=mask_if(in_channels, initial))


@triton.jit(do_not_specialize=["T", "N", "pieces"])
def _causal_conv1d_backward_kernel(
    grad_ptr,  # [B, T, C]
    dfinal_ptr,  # [N, W - 1, C]
    x_ptr,  # [B, T, C]
    weight_ptr,  # [C, W]
    initial_state_ptr,  # [N, W - 1, C]
    dx_ptr,  # [B, T, C]
    dinitial_ptr,  # [N, W - 1, C]
    sums_ptr,  # [pieces, W, C]: of the weight's gradient
    cu_seqlens_ptr,  # [N + 1]
    grad_stride_b,
    grad_stride_t,
    grad_stride_c,
    dfinal_stride_n,
    dfinal_stride_w,
    dfinal_stride_c,
    x_stride_b,
    x_stride_t,
    x_stride_c,
    state_stride_n,
    state_stride_w,
    state_stride_c,
    T,
    N,
    pieces,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SILU: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    WIDE: tl.constexpr,
    WORDS: tl.constexpr,
    X_ROW_MAJOR: tl.constexpr,  # x's rows are C apart
    GRAD_ROW_MAJOR: tl.constexpr,
    DEPENDENT: tl.constexpr,  # so is the launch of the sum over programs
):
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
    pid = tl.program_id(0)
    blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    EVEN: tl.constexpr = C % BLOCK == 0
    UNIT: tl.constexpr = _LOG2_E if SILU else 1.0
    piece = pid // blocks
    streams = tl.arange(0, STREAMS)[:, None]
    # All blocks are of one shape, and then of one layout: [1, BLOCK] would be laid out in another.
    channels = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :] + 0 * streams
    in_channels = tl.full([STREAMS, BLOCK], True, tl.int1) if EVEN else channels < C
    wide_channels = channels.to(tl.int64)
    x_stride = C if X_ROW_MAJOR else tl.cast(x_stride_t, tl.int64)
    grad_stride = C if GRAD_ROW_MAJOR else tl.cast(grad_stride_t, tl.int64)
    sums = ()
    for _ in tl.static_range(W):
        sums = sums + (tl.zeros([STREAMS, BLOCK], tl.float32),)
    first_token, past_token, first_sequence, past_sequence = _share(
        piece, pieces, cu_seqlens_ptr, T, N, STREAMS * ROWS, PACKED, WIDE
    )
    for sequence in range(first_sequence, past_sequence):
        batch, begin, length = _bounds(sequence, cu_seqlens_ptr, T, PACKED)
        sequence_first = begin if PACKED else batch * T
        part = tl.minimum(tl.maximum(first_token - sequence_first, 0), length).to(tl.int32)  # the piece's first row
        part_rows = tl.maximum(tl.minimum(past_token - sequence_first, length).to(tl.int32) - part, 0)
        # Streams side by side, all of as many rows but the last, which has fewer and walks on for as long.
        walk = tl.cdiv(part_rows, STREAMS * ROWS) * ROWS
        position = part + streams * walk
        rows = tl.minimum(tl.maximum(part_rows - streams * walk, 0), walk)
        whole = tl.minimum(tl.maximum(part_rows - (STREAMS - 1) * walk, 0), walk) // ROWS * ROWS
        left = length - position
        start = position.to(tl.int64)
        sequence_ptrs = x_ptr + batch * x_stride_b + begin * x_stride_t + wide_channels * x_stride_c
        x_ptrs = sequence_ptrs + start * x_stride
        grad_ptrs = grad_ptr + batch * grad_stride_b + (begin + start) * grad_stride + wide_channels * grad_stride_c
        dx_ptrs = dx_ptr + (batch * T + begin + start) * C + channels
        state_ptrs = initial_state_ptr
        dinitial_ptrs = dinitial_ptr
        dfinal_ptrs = dfinal_ptr
        wide_sequence = tl.cast(sequence, tl.int64)
        if HAS_INITIAL:
            state_ptrs += wide_sequence * state_stride_n + wide_channels * state_stride_c
            dinitial_ptrs += wide_sequence * ((W - 1) * C) + channels
        if HAS_FINAL:
            dfinal_ptrs += wide_sequence * dfinal_stride_n + wide_channels * dfinal_stride_c

        window = ()  # x at the W - 1 rows before
        pulls = ()  # the preactivation's gradient there; before the stream it is not needed
        for w in tl.static_range(W - 1):
            p = position - (W - 1) + w
            row = _row(sequence_ptrs, state_ptrs, p, length, x_stride, state_stride_w, in_channels, W, HAS_INITIAL)
            window = window + (widened(row),)
            pulls = pulls + (tl.zeros([STREAMS, BLOCK], tl.float32),)
        # The W - 1 rows after the streams, which finish their last ones: asked for now, as nobody waits for them.
        xs_after = load_rows(x_ptrs, x_stride, 0 * begin, walk, left, in_channels, W - 1)
        grads_after = load_rows(grad_ptrs, grad_stride, 0 * begin, walk, left, in_channels, W - 1)
        if WORDS:
            taps = _scaled(load_taps_by_channel(weight_ptr, channels, in_channels, W, WORDS), UNIT, W)
        else:  # laid out anew, once; a strided block of two axes would be laid out across them
            flat = (pid % blocks) * BLOCK + tl.arange(0, BLOCK)
            flat_taps = _scaled(load_taps_by_channel(weight_ptr, flat, flat < C, W, WORDS), UNIT, W)
            taps = ()
            for w in tl.static_range(W):
                taps = taps + (tl.broadcast_to(flat_taps[w][None, :], [STREAMS, BLOCK]),)

        for base in tl.range(0, whole, ROWS, num_stages=_STAGES):
            group = tl.cast(base, tl.int64)
            xs = _load_group(x_ptrs + group * x_stride, x_stride, in_channels, ROWS, EVEN)
            grads = _load_group(grad_ptrs + group * grad_stride, grad_stride, in_channels, ROWS, EVEN)
            run = window
            pull_run = pulls
            first = group - (W - 1)  # of the rows that this turn finishes
            group_ptrs = dx_ptrs + first * C
            for r in tl.static_range(ROWS):
                run = run + (widened(xs[r]),)
                dy = _preactivation_grad(widened(grads[r]), _filtered(taps, run, r, W), SILU)
                pull_run = pull_run + (dy,)
                sums = _summed(sums, dy, run, r, W)
                dx = _pulled(taps, pull_run, r, W).to(dx_ptr.dtype.element_ty)
                if r < W - 1:  # perhaps a row before the stream: another's, or the initial state's
                    tl.store(group_ptrs + r * C, dx, mask=mask_if(in_channels, first + r >= 0))
                    if HAS_INITIAL:
                        initial = (first + r < 0) & (start == 0)
                        tl.store(dinitial_ptrs + (first + r + (W - 1)) * C, dx, mask=mask_if(in_channels, initial))
                else:
                    _store_row(group_ptrs + r * C, dx, in_channels, EVEN)
            window = ()
            pulls = ()
            for w in tl.static_range(W - 1):
                window = window + (run[ROWS + w],)
                pulls = pulls + (pull_run[ROWS + w],)

        # Groups that lack rows of the last stream; and the rows after, for which the last W - 1 rows of a stream, or of
        # the initial state, wait.
        for base in range(whole, walk, ROWS):
            xs = load_rows(x_ptrs, x_stride, 0 * begin, base, left, in_channels, ROWS)
            grads = load_rows(grad_ptrs, grad_stride, 0 * begin, base, left, in_channels, ROWS)
            run = window
            pull_run = pulls
            for r in tl.static_range(ROWS):
                run = run + (widened(xs[r]),)
                dy = _preactivation_grad(widened(grads[r]), _filtered(taps, run, r, W), SILU)
                pull_run = pull_run + (dy,)
                sums = _summed(sums, tl.where(base + r < rows, dy, 0.0), run, r, W)
                _finish_row(
                    _pulled(taps, pull_run, r, W),
                    base + (r - (W - 1)),
                    rows,
                    position,
                    length,
                    dx_ptrs,
                    dfinal_ptrs,
                    dinitial_ptrs,
                    C,
                    dfinal_stride_w,
                    in_channels,
                    W,
                    HAS_INITIAL,
                    HAS_FINAL,
                )
            window = ()
            pulls = ()
            for w in tl.static_range(W - 1):
                window = window + (run[ROWS + w],)
                pulls = pulls + (pull_run[ROWS + w],)
        run = window
        pull_run = pulls
        for r in tl.static_range(W - 1):
            run = run + (widened(xs_after[r]),)
            dy = _preactivation_grad(widened(grads_after[r]), _filtered(taps, run, r, W), SILU)
            pull_run = pull_run + (dy,)
            _finish_row(
                _pulled(taps, pull_run, r, W),
                walk + (r - (W - 1)),
                rows,
                position,
                length,
                dx_ptrs,
                dfinal_ptrs,
                dinitial_ptrs,
                C,
                dfinal_stride_w,
                in_channels,
                W,
                HAS_INITIAL,
                HAS_FINAL,
            )

    if HAS_INITIAL and PACKED:  # empty sequences, of which no piece has a token
        for sequence in range(piece, N, pieces):
            bounds = _bounds(sequence, cu_seqlens_ptr, T, PACKED)
            if bounds[2] == 0:
                wide_sequence = tl.cast(sequence, tl.int64)
                dinitial_ptrs = dinitial_ptr + wide_sequence * ((W - 1) * C) + channels
                for w in tl.static_range(W - 1):
                    row = tl.zeros([STREAMS, BLOCK], dinitial_ptr.dtype.element_ty)
                    if HAS_FINAL:
                        dfinal_ptrs = dfinal_ptr + wide_sequence * dfinal_stride_n + wide_channels * dfinal_stride_c
                        row = tl.load(dfinal_ptrs + w * tl.cast(dfinal_stride_w, tl.int64), mask=in_channels, other=0.0)
                    tl.store(dinitial_ptrs + w * C, row, mask=in_channels)

    sums_ptrs = sums_ptr + piece.to(tl.int64) * (W * C) + channels
    for w in tl.static_range(W):
        total = tl.broadcast_to(tl.sum(sums[w], axis=0, keep_dims=True) * UNIT, [STREAMS, BLOCK])
        tl.store(sums_ptrs + w * C, total, mask=in_channels & (streams == 0))


@triton.jit(do_not_specialize=["pieces"])
def _weight_grad_kernel(
    sums_ptr,  # [pieces, W, C]
    dweight_ptr,  # [C, W]
    pieces,
    C: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_for_earlier_launches(DEPENDENT)
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_columns = columns < W * C
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    ptrs = sums_ptr + rows.to(tl.int64)[:, None] * (W * C) + columns[None, :]
    for base in range(0, pieces, ROWS):
        total += tl.load(ptrs, mask=(base + rows < pieces)[:, None] & in_columns[None, :], other=0.0)
        ptrs += ROWS * W * C
    total = tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + (columns % C) * W + columns // C, total, mask=in_columns)


# ---- launchers ----

# The forward takes four channels a thread, 8-byte accesses in bf16; with T 8192 and 4,096 channels its 4,096 programs
# take six turns.
_FORWARD = Launch(rows=4, warps=4, per_thread=4, span=16, registers=80)
# The backward's accesses are 16 bytes. Two streams halve the partial sums, but wait for each other where sequences end.
_BACKWARD = Launch(rows=4, warps=1, per_thread=8, span=256, streams=2)
_BACKWARD_PACKED = Launch(rows=4, warps=2, per_thread=8, span=128)
_BACKWARD_MANY_TAPS = Launch(rows=4, warps=4, per_thread=2, span=128, registers=128)
_CHANNELS_AT_ONCE = 2**18  # in the backward: eight to a thread, on an H200 eight warps to a multiprocessor


def check_taps(op, weight) -> None:
    if weight.shape[1] > MAX_TAPS:
        raise ValueError(f"{op}: the Triton path takes at most {MAX_TAPS} taps, got weight {list(weight.shape)}")


def _small(x, width) -> bool:
    """Whether the rows fit the registers that a launch allows; others would spill."""
    return width <= 4 and x.element_size() == 2


def in_words(weight) -> bool:
    return weight.shape[1] == 4 and weight.element_size() == 2 and weight.data_ptr() % 8 == 0


def _forward_triton(x, weight, activation, cu_seqlens, initial_state, output_final_state, launch=_FORWARD):
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    output = x.new_empty(x.shape)
    packed = cu_seqlens is not None
    sequences = sequence_count(batch, cu_seqlens)
    final_state = empty_like_optional(x, output_final_state, (sequences, width - 1, channels), x.dtype)
    if tokens == 0 and output_final_state:
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    block, blocks, warps = launch.over(channels, width)
    span = launch.span_over(batch * tokens, blocks, 16)
    slots = span_slots(tokens, sequences, span, packed)
    if x.numel() == 0 or slots == 0:
        return output, final_state
    weight = weight.contiguous()
    with on_device(x):
        _causal_conv1d_kernel[(slots * blocks,)](
            x,
            weight,
            initial_state,
            output,
            final_state,
            cu_seqlens,
            *x.stride(),
            *((0, 0, 0) if initial_state is None else initial_state.stride()),
            tokens,
            sequences,
            C=channels,
            W=width,
            SPAN=span,
            ROWS=launch.rows,
            BLOCK=block,
            SILU=activation == "silu",
            HAS_INITIAL=initial_state is not None and width > 1,
            HAS_FINAL=output_final_state and width > 1,
            PACKED=packed,
            WORDS=in_words(weight),
            X_ROW_MAJOR=x.stride(1) == channels,
            num_warps=warps,
            maxnreg=launch.registers if _small(x, width) else None,
        )
    return output, final_state


def _backward_launch(x, width, packed) -> Launch:
    if width > 4:
        return _BACKWARD_MANY_TAPS
    return dataclasses.replace(_BACKWARD_PACKED if packed else _BACKWARD, per_thread=16 // x.element_size())


def _pieces(launch, tokens, blocks) -> int:
    """Pieces of the backward: of ``launch.span`` tokens or fewer, in whole turns of the programs that run at once. Of
    no fewer than 16, as each reads rows before and after its own. The same on every device: sums have one order."""
    programs = _CHANNELS_AT_ONCE // (32 * launch.warps * launch.per_thread)
    turns = cdiv(tokens * blocks, programs * launch.span)
    return max(min(turns * programs // blocks, cdiv(tokens, 16)), 1)


def _backward_triton(
    grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, output_final_state, launch=None
):
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(weight.shape)
    dinitial = x.new_empty([0] if initial_state is None else initial_state.shape)
    packed = cu_seqlens is not None
    sequences = sequence_count(batch, cu_seqlens)
    if tokens == 0 and initial_state is not None:
        dinitial.copy_(grad_final_state) if output_final_state else dinitial.zero_()
    if x.numel() == 0 or sequences == 0:
        return dx, dweight.zero_(), dinitial
    launch = launch or _backward_launch(x, width, packed)
    block, blocks, warps = launch.over(channels, width)
    pieces = _pieces(launch, batch * tokens, blocks)
    sums = torch.empty(pieces, width, channels, dtype=torch.float32, device=x.device)
    weight = weight.contiguous()
    dependent = dependent_launch(x, True)
    with on_device(x):
        _causal_conv1d_backward_kernel[(pieces * blocks,)](
            grad,
            grad_final_state,
            x,
            weight,
            initial_state,
            dx,
            dinitial,
            sums,
            cu_seqlens,
            *grad.stride(),
            *(grad_final_state.stride() if output_final_state else (0, 0, 0)),
            *x.stride(),
            *((0, 0, 0) if initial_state is None else initial_state.stride()),
            tokens,
            sequences,
            pieces,
            C=channels,
            W=width,
            ROWS=launch.rows,
            STREAMS=launch.streams,
            BLOCK=block,
            SILU=activation == "silu",
            HAS_INITIAL=initial_state is not None and width > 1,
            HAS_FINAL=output_final_state and width > 1,
            PACKED=packed,
            WIDE=batch * tokens > 2**30,
            WORDS=in_words(weight),
            X_ROW_MAJOR=x.stride(1) == channels,
            GRAD_ROW_MAJOR=grad.stride(1) == channels,
            DEPENDENT=dependent["DEPENDENT"],
            num_warps=warps,
            maxnreg=launch.registers,
        )
        columns = width * channels
        _weight_grad_kernel[(cdiv(columns, 32),)](
            sums, dweight, pieces, C=channels, W=width, ROWS=32, BLOCK=32, num_warps=1, **dependent
        )
    return dx, dweight, dinitial


# ---- registration ----


def _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state):
    with without_autocast(x):
        output, final_state = naive_causal_conv1d(
            x.float(),
            weight.float(),
            activation=activation,
            cu_seqlens=cu_seqlens,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=output_final_state,
        )
    return output.to(x.dtype), None if final_state is None else final_state.to(x.dtype)


def _state_shape(x, weight, cu_seqlens):
    return sequence_count(x.shape[0], cu_seqlens), weight.shape[1] - 1, x.shape[2]  # [N, W - 1, C]


def _forward(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    if impl == "triton":
        return _forward_triton(x, weight, activation, cu_seqlens, initial_state, output_final_state)
    output, final_state = _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state)
    return output.contiguous(), x.new_empty([0]) if final_state is None else final_state.contiguous()


def _forward_fake(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    return x.new_empty(x.shape), x.new_empty(_state_shape(x, weight, cu_seqlens) if output_final_state else [0])


def _backward(grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, output_final_state, impl):
    if impl == "triton":
        return _backward_triton(
            grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, output_final_state
        )

    def function(x, weight, initial_state=None):
        output, final_state = naive_causal_conv1d(
            x,
            weight,
            activation=activation,
            cu_seqlens=cu_seqlens,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
        return (output, final_state) if output_final_state else (output,)

    inputs = (x, weight) if initial_state is None else (x, weight, initial_state)
    grads = (grad, grad_final_state) if output_final_state else (grad,)
    dx, dweight, *rest = reference_vjp(function, [t.float() for t in inputs], tuple(g.float() for g in grads))
    dinitial = rest[0].to(x.dtype).contiguous() if rest else x.new_empty([0])
    return dx.to(x.dtype).contiguous(), dweight.to(x.dtype).contiguous(), dinitial


def _backward_fake(grad, grad_final_state, x, weight, activation, cu_seqlens, initial_state, *_):
    state_shape = [0] if initial_state is None else initial_state.shape
    return x.new_empty(x.shape), weight.new_empty(weight.shape), x.new_empty(state_shape)


_BACKWARD_OP = register(
    "causal_conv1d_backward(Tensor grad, Tensor grad_final_state, Tensor x, Tensor weight, str? activation, "
    "Tensor? cu_seqlens, Tensor? initial_state, bool output_final_state, str impl) -> (Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
    backward=second_order_raises("causal_conv1d"),
)


def _setup_context(ctx, inputs, output):
    x, weight, ctx.activation, cu_seqlens, initial_state, ctx.output_final_state, ctx.impl = inputs
    ctx.save_for_backward(x, weight, cu_seqlens, initial_state)


def _autograd_backward(ctx, grad, grad_final_state):
    x, weight, cu_seqlens, initial_state = ctx.saved_tensors
    dx, dweight, dinitial = _BACKWARD_OP(
        grad, grad_final_state, x, weight, ctx.activation, cu_seqlens, initial_state, ctx.output_final_state, ctx.impl
    )
    dinitial = dinitial if ctx.needs_input_grad[4] else None
    return *grad_or_none(ctx.needs_input_grad[:2], (dx, dweight)), None, None, dinitial, None, None


_OP = register(
    "causal_conv1d(Tensor x, Tensor weight, str? activation, Tensor? cu_seqlens, Tensor? initial_state, "
    "bool output_final_state, str impl) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
    backward=_autograd_backward,
    setup_context=_setup_context,
)


# ---- public function ----


def check_convolution(op, x, form, weight, activation) -> None:
    check_dtype(op, "x", x, FLOAT_DTYPES)
    check_rank(op, "x", x, form)
    check_dtype(op, "weight", weight, (x.dtype,))
    check_rank(op, "weight", weight, "[C, W]")
    check_shape(op, "weight", weight, "[C, W]", (x.shape[-1], weight.shape[1]))
    check_device(op, "weight", weight, x.device)
    if weight.shape[1] < 1:
        raise ValueError(f"{op}: weight must have at least one tap, got shape {list(weight.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation must be 'silu' or None, got {activation!r}")


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    *,
    activation: str | None = "silu",
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution along T: ``y[t] = act(sum_w weight[:, w] * x[t - (W - 1) + w])``.

    The rows before a sequence's first are its ``initial_state``, or zero; no sequence sees another. Part of KDA's
    layer (Kimi Linear, arXiv 2510.26692).

    Args:
        x: [B, T, C], bf16, fp16 or fp32. The arithmetic is FP32.
        weight: [C, W], x's dtype; the last tap meets the current token.
        activation: "silu" or None.
        cu_seqlens: offsets of packed sequences, [N + 1], int32, contiguous; B is then 1, and rows past the last offset
            are neither read nor defined in the output.
        initial_state: the W - 1 rows before each sequence, oldest first, [N, W - 1, C], x's dtype; N is B, or
            len(cu_seqlens) - 1.
        output_final_state: whether to return the same of each sequence's end.
        impl: None, "triton" or "reference".

    Returns:
        The output, [B, T, C] in x's dtype, and the final state, [N, W - 1, C] (storage of its own), or None.
        Differentiates with respect to x, weight and initial_state.

    Raises:
        ValueError: a shape, device, activation or impl that breaks the above.
        TypeError: a dtype that does.
    """
    op = "causal_conv1d"
    check_convolution(op, x, "[B, T, C]", weight, activation)
    sequences = x.shape[0] if cu_seqlens is None else check_cu_seqlens(op, cu_seqlens, x.shape[0], x.device)
    if initial_state is not None:
        check_dtype(op, "initial_state", initial_state, (x.dtype,))
        check_shape(op, "initial_state", initial_state, "[N, W - 1, C]", (sequences, weight.shape[1] - 1, x.shape[2]))
        check_device(op, "initial_state", initial_state, x.device)
    impl = resolve_impl(op, impl, x)
    if impl == "triton":
        check_taps(op, weight)
    if impl == "reference" and runs_eagerly():
        return _reference(x, weight, activation, cu_seqlens, initial_state, output_final_state)
    output, final_state = _OP(x, weight, activation, cu_seqlens, initial_state, output_final_state, impl)
    return output, final_state if output_final_state else None
