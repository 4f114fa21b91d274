"""Backward stage 2 of chunk_kda: the gradients of q, k, v, the cumulative gate and beta (Kimi Linear, arXiv
2510.26692).

With the state S at a chunk's start, the gradient dS' of the state at its end, v_new and dv_new from the scans. Since
v_new = A beta (v - (k 2^G) S), the inverse never needs a gradient of its own:

    dX = A^T dv_new          dv = beta dX        dL = -tril(dX v_new^T)       da_qk = scale tril(dO v_new^T)

``score_gradients_kernel`` forms these, one program per (chunk, head). ``input_gradients_kernel``, one program per
(chunk, head, 64 channels), forms the rest: row i collects its pairs with earlier tokens and row j those with later
ones, and each row meets S or dS':

    dq_i += da_qk_ij k_j D_ij      dk_i += beta_i dL_ij k_j D_ij      dk_j += (da_qk_ij q_i + beta_i dL_ij k_i) D_ij

The gate's gradient is the sum of each row's terms times q or k, less the columns'. Pairs whose decay is 2^0, the
diagonal and the last row's own write into the state, are no part of it: they never enter the sums. All sums are FP32;
d(beta), to which every program gives a part, is added up in a fixed order by ``sum_beta_kernel``.

What a row reads from S comes first, in units of the factor that its pairs will share, so that the pairs are added onto
it. The loops over turns and values are software-pipelined: without that the kernel waits most of its time, much of it
for loads (docs/performance). FP32 operands go without, as the pipelines would triple their shared memory.

A tile is [4, 16, 64], four blocks of 16 rows, and the pairs of blocks are batches of small products. D_ij =
2^(G_i - G_j) is split at the first or last row of the block that collects, so it takes one exponential for each row of
the other block and one for the block's own. Inside a block the pairs go by levels (scores.py); under a promise a block
is a partner to itself.

At K = V = 128 in bf16, for each token and head: the scores' gradients read 1,156 bytes and write 776; those of the
inputs read 3,080 and write 1,032, and the two programs of a chunk share 1,032 of what they read through the L2 cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .._device import INTERPRETED, cdiv, held
from .prepare import anchored_half_range
from .tiles import chunk_slots, load_rows, locate_chunk, matmul


@triton.jit(do_not_specialize=["T", "N"])
def score_gradients_kernel(
    v, beta, cu_seqlens, a_qk, a_inv, v_new, dv_new, d_output, dv_out, d_diagonal_out, d_beta_out,
    T, N, H, V, steps_v, scale,
    PACKED: tl.constexpr, MASK_V: tl.constexpr, HAS_OUTPUT: tl.constexpr, WIDTH_V: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dX in dv_new's place, da_qk and dL in a_qk's and a_inv's, strictly lower; da_qk's diagonal apart; dv."""
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _, start, rows = locate_chunk(cu_seqlens, slot, T, N, PACKED)
    if rows <= 0:
        return
    OPERAND: tl.constexpr = v_new.dtype.element_ty
    first = start * H + head  # of a [tokens, H] table
    v += first * V
    dv_out += first * V
    d_output += first * V
    a_qk += first * 64
    a_inv += first * 64
    v_new += first * WIDTH_V
    dv_new += first * WIDTH_V

    row = tl.arange(0, 64)[:, None]
    in_rows = row < rows
    j = tl.arange(0, 64)[None, :]
    beta_row = tl.load(beta + first + row * H, mask=in_rows, other=0.0).to(tl.float32)
    inverse = load_rows(a_inv, row, rows, j, 64, H * 64, False)
    d_scores = tl.zeros((64, 64), tl.float32)
    d_lower = tl.zeros((64, 64), tl.float32)
    d_diagonal = tl.zeros((64,), tl.float32)
    d_beta = tl.zeros((64,), tl.float32)
    for step in range(0, steps_v):
        value = step * BV + tl.arange(0, BV)[None, :]
        d_written = load_rows(dv_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        written = load_rows(v_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        v_tile = load_rows(v, row, rows, value, V, H * V, MASK_V)
        if HAS_OUTPUT:
            d_out = load_rows(d_output, row, rows, value, V, H * V, MASK_V)
            d_scores = tl.dot(d_out.to(OPERAND), tl.trans(written), d_scores, input_precision=PRECISION)
            d_diagonal += tl.sum(d_out.to(tl.float32) * written.to(tl.float32), axis=1)
        dx = matmul(tl.trans(inverse), d_written, PRECISION)
        tl.store(dv_new + row * (H * WIDTH_V) + value, dx.to(OPERAND), mask=in_rows)
        dv = (dx * beta_row).to(dv_out.dtype.element_ty)
        tl.store(dv_out + row * (H * V) + value, dv, mask=in_rows & (value < V))
        d_beta += tl.sum(dx * v_tile.to(tl.float32), axis=1)
        d_lower = tl.dot(dx.to(OPERAND), tl.trans(written), d_lower, input_precision=PRECISION)
    tl.store(a_qk + row * (H * 64) + j, tl.where(row > j, d_scores * scale, 0.0).to(OPERAND), mask=in_rows)
    tl.store(a_inv + row * (H * 64) + j, tl.where(row > j, -d_lower, 0.0).to(OPERAND), mask=in_rows)
    rows_1d = tl.arange(0, 64)
    tl.store(d_diagonal_out + first + rows_1d * H, d_diagonal * scale, mask=rows_1d < rows)
    tl.store(d_beta_out + first + rows_1d * H, d_beta, mask=rows_1d < rows)


@triton.jit
def load_blocks(base, row, channel, K, stride, MASKED: tl.constexpr):
    """The tile of existing rows ``row`` [4, R, 1] and of channels [1, 1, C]; zeros past K if MASKED."""
    if MASKED:
        return tl.load(base + (row * stride + channel), mask=channel < K, other=0.0)
    else:
        return tl.load(base + (row * stride + channel))


@triton.jit
def load_either(is_a, a, b, row, channel, K, stride, MASKED: tl.constexpr):
    """Rows of a where ``is_a`` [4, R, 1], of b elsewhere: one load where their types allow it, FP32 otherwise."""
    if a.dtype == b.dtype:
        return load_blocks(tl.where(is_a, a, b), row, channel, K, stride, MASKED)
    else:
        a_tile = load_blocks(a, row, channel, K, stride, MASKED).to(tl.float32)
        return tl.where(is_a, a_tile, load_blocks(b, row, channel, K, stride, MASKED).to(tl.float32))


@triton.jit
def as_sum(tile, operand, PRECISION: tl.constexpr):
    """The tile itself, through a product with zeros: it then lies in registers as the sums do, and meets them without
    an exchange through shared memory at every use."""
    return tl.dot(tl.zeros((4, 16, 16), operand.dtype), operand, tile, input_precision=PRECISION)


@triton.jit
def scale_rows(tile, factor, OPERAND: tl.constexpr):
    """tile factor as an operand. In bf16 the factor is rounded first and one instruction multiplies two; it is a sum
    with -0, as bare products in bf16 begin with compute capability 9.0."""
    if OPERAND != tl.bfloat16:
        return (tile.to(tl.float32) * factor).to(OPERAND)
    elif INTERPRETED:
        return (tile.to(tl.float32) * factor.to(OPERAND).to(tl.float32)).to(OPERAND)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }", "=r,r,r",
            [tile, factor.to(OPERAND)], tl.bfloat16, is_pure=False, pack=2,
        )  # fmt: skip


@triton.jit
def scale_scores(tile, beta, OPERAND: tl.constexpr):
    """d_lower's rows times beta: of a 16 x 16 tile, not of the rows of k that it meets."""
    return (tile.to(tl.float32) * beta).to(OPERAND)


@triton.jit
def add_turn(
    dq, row_side, column_side, q, k, gate, beta, d_scores, d_lower, rows, turn, channel, K, H, half_range,
    MASK_K: tl.constexpr, ANCHORED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Adds the pairs of each block with one other. While there is one ``turn`` blocks back, its rows collect from that
    one; in the turns that are left, those after it collect as columns: each of a block's three partners has a turn of
    its own. Under a promise turns 0 and 4 pair a block with itself."""
    stride = H * K
    block = tl.arange(0, 4)[:, None, None]
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    own_row = block * 16 + r
    earlier = turn <= block
    other = tl.where(earlier, block - turn, block + 4 - turn)
    other_row = other * 16 + r
    partner = tl.minimum(other_row, rows - 1)
    gate_tile = load_blocks(gate, partner, channel, K, stride, MASK_K)
    k_tile = load_blocks(k, partner, channel, K, stride, MASK_K)
    x_tile = load_either(earlier, k, q, partner, channel, K, stride, MASK_K)
    if ANCHORED or OPERAND == tl.float32:
        x_tile = held(x_tile)
    if OPERAND == tl.float32:
        k_tile = held(k_tile)
    beta_other = tl.load(beta + partner * H).to(tl.float32)
    sign = tl.where(earlier, -1.0, 1.0)
    if ANCHORED:
        anchor = load_blocks(gate, tl.minimum(block * 16, rows - 1), channel, K, stride, MASK_K) - half_range
        factor = tl.exp2(gate_tile * sign - anchor * sign)
    else:
        # The row of this block that lies between the two: no exponent is above zero.
        between = tl.minimum(tl.where(earlier, block * 16, block * 16 + 15), rows - 1)
        anchor = load_blocks(gate, between + r * 0, channel, K, stride, MASK_K)
        factor = tl.exp2(-tl.abs(gate_tile * sign - anchor * sign))
    x_tile = scale_rows(x_tile, factor, OPERAND)
    pairs = own_row * (H * 64) + other * 16 + c
    is_row = earlier & (own_row < rows)
    scores = tl.load(d_scores + pairs, mask=is_row, other=0.0)
    dq = tl.dot(scores, x_tile, dq, input_precision=PRECISION)
    lower = tl.load(d_lower + pairs, mask=is_row, other=0.0)
    row_side = tl.dot(lower, x_tile, row_side, input_precision=PRECISION)
    pairs = other_row * (H * 64) + block * 16 + c
    is_column = (turn > block) & (other_row < rows)
    scores = tl.load(d_scores + pairs, mask=is_column, other=0.0)
    lower = scale_scores(tl.load(d_lower + pairs, mask=is_column, other=0.0), beta_other, OPERAND)
    k_tile = scale_rows(k_tile, factor, OPERAND)
    column_side = tl.dot(tl.trans(scores, 0, 2, 1), x_tile, column_side, input_precision=PRECISION)
    column_side = tl.dot(tl.trans(lower, 0, 2, 1), k_tile, column_side, input_precision=PRECISION)
    return dq, row_side, column_side


@triton.jit
def add_level(
    dq, row_side, column_side, q, k, gate, beta_row, d_scores, d_lower, rows, log_level, channel, K, H,
    MASK_K: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Adds one level's pairs inside the blocks."""
    stride = H * K
    block = tl.arange(0, 4)[:, None, None]
    r = tl.arange(0, 16)[None, :, None]
    c = tl.arange(0, 16)[None, None, :]
    own_row = block * 16 + r
    own = tl.minimum(own_row, rows - 1)
    anchor = tl.minimum(block * 16 + (r & -(2 << log_level)) + (1 << log_level), rows - 1)
    delta = load_blocks(gate, anchor, channel, K, stride, MASK_K)
    delta = load_blocks(gate, own, channel, K, stride, MASK_K) - delta
    # A condition that always holds keeps the exponential where the tile was loaded, before any exchange of registers.
    factor = tl.exp2(tl.where(own_row < 64, -tl.abs(delta), 0.0))
    k_tile = load_blocks(k, own, channel, K, stride, MASK_K)
    # What the upper half gives to columns is q and k, what the lower half gives to rows is k.
    x_tile = load_either((r & (1 << log_level)) != 0, q, k, own, channel, K, stride, MASK_K)
    if OPERAND == tl.float32:
        x_tile = held(x_tile)
        k_tile = held(k_tile)
    x_tile = scale_rows(x_tile, factor, OPERAND)
    k_tile = scale_rows(k_tile, factor, OPERAND)
    served = ((r >> log_level) ^ (c >> log_level)) == 1
    pairs = own_row * (H * 64) + block * 16 + c
    scores = tl.load(d_scores + pairs, mask=own_row < rows, other=0.0)
    lower = tl.load(d_lower + pairs, mask=own_row < rows, other=0.0)
    scores = tl.where(served, scores, tl.zeros_like(scores))
    lower = tl.where(served, lower, tl.zeros_like(lower))
    empty = tl.zeros_like(dq)
    factor = as_sum(factor, x_tile, PRECISION)
    dq += factor * tl.dot(scores, x_tile, empty, input_precision=PRECISION)
    row_side += factor * tl.dot(lower, x_tile, empty, input_precision=PRECISION)
    lower = scale_scores(lower, beta_row, OPERAND)
    pairs = tl.dot(tl.trans(scores, 0, 2, 1), x_tile, empty, input_precision=PRECISION)
    column_side += factor * tl.dot(tl.trans(lower, 0, 2, 1), k_tile, pairs, input_precision=PRECISION)
    return dq, row_side, column_side


@triton.jit(do_not_specialize=["T", "N", "table"])
def input_gradients_kernel(
    q, k, gate, beta, cu_seqlens, d_scores, d_lower, d_diagonal, h, v_new, dh, dx, d_output, dq_out, dk_out, dg_out,
    d_beta_out, T, N, H, K, V, steps, steps_v, table, half_range, scale,
    PACKED: tl.constexpr, MASK_K: tl.constexpr, MASK_V: tl.constexpr, ANCHORED: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    step = tl.program_id(0) % steps  # programs of one chunk and head are neighbours: they share rows in the L2 cache
    slot = tl.program_id(0) // steps // H
    head = tl.program_id(0) // steps % H
    _, start, rows = locate_chunk(cu_seqlens, slot, T, N, PACKED)
    if rows <= 0:
        return
    OPERAND: tl.constexpr = v_new.dtype.element_ty
    first = start * H + head  # of a [tokens, H] table
    q += first * K
    k += first * K
    gate += first * K
    dq_out += first * K
    dk_out += first * K
    dg_out += first * K
    d_output += first * V
    d_scores += first * 64
    d_lower += first * 64
    beta += first
    d_diagonal += first
    v_new += first * WIDTH_V
    dx += first * WIDTH_V
    h += (slot.to(tl.int64) * H + head) * WIDTH_K * WIDTH_V
    dh += (slot.to(tl.int64) * H + head) * WIDTH_K * WIDTH_V
    stride = H * K

    row = tl.arange(0, 64)[:, None]
    channel_2d = step * BK + tl.arange(0, BK)[:, None]
    block = tl.arange(0, 4)[:, None, None]
    own_row = block * 16 + tl.arange(0, 16)[None, :, None]
    own = tl.minimum(own_row, rows - 1)  # a short chunk repeats its last row: no pair of the repeats is ever used
    in_rows = own_row < rows
    channel = step * BK + tl.arange(0, BK)[None, None, :]

    # What meets the state: first the rows that read it.
    dq_2d = tl.zeros((64, BK), tl.float32)
    row_2d = tl.zeros((64, BK), tl.float32)
    for step_v in tl.range(0, steps_v, num_stages=STAGES):
        value = step_v * BV + tl.arange(0, BV)[None, :]
        state = tl.trans(tl.load(h + channel_2d * WIDTH_V + value))
        dx_tile = load_rows(dx, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        if HAS_OUTPUT:
            d_out = load_rows(d_output, row, rows, value, V, H * V, MASK_V)
            dq_2d = tl.dot(d_out.to(OPERAND), state, dq_2d, input_precision=PRECISION)
        row_2d = tl.dot(dx_tile, state, row_2d, input_precision=PRECISION)
    # 2^G of the row at which its pairs are split: what is left of each row's decay is the factor of the pairs' sums.
    gate_split = load_blocks(gate, tl.minimum(block * 16, rows - 1), channel, K, stride, MASK_K)
    if ANCHORED:
        gate_split -= half_range
    decay = tl.exp2(gate_split)
    dq = tl.reshape(dq_2d, (4, 16, BK)) * (decay * scale)
    row_side = tl.reshape(row_2d, (4, 16, BK)) * -decay  # of dk, not yet times beta

    # The pairs.
    column_side = tl.zeros((4, 16, BK), tl.float32)
    for turn in tl.range(0 if ANCHORED else 1, 5 if ANCHORED else 4, num_stages=STAGES):
        dq, row_side, column_side = add_turn(
            dq, row_side, column_side, q, k, gate, beta, d_scores, d_lower, rows, turn, channel, K, H, half_range,
            MASK_K, ANCHORED, PRECISION, OPERAND,
        )  # fmt: skip
    beta_row = tl.load(beta + own * H).to(tl.float32)
    operand = tl.zeros((4, 16, BK), OPERAND)
    gate_tile = as_sum(load_blocks(gate, own, channel, K, stride, MASK_K), operand, PRECISION)
    gate_split = load_blocks(gate, tl.minimum(block * 16, rows - 1), channel, K, stride, MASK_K)
    if ANCHORED:
        gate_split -= half_range
        delta = gate_tile - gate_split
        above = tl.exp2(delta)
        below = tl.exp2(-delta)
    else:
        gate_end = load_blocks(gate, tl.minimum(block * 16 + 15, rows - 1), channel, K, stride, MASK_K)
        above = tl.exp2(-tl.abs(gate_tile - gate_split))
        below = tl.exp2(-tl.abs(gate_tile - gate_end))
    dq *= above
    row_side *= above
    column_side *= below
    if not ANCHORED:
        for log_level in range(0, 4):
            dq, row_side, column_side = add_level(
                dq, row_side, column_side, q, k, gate, beta_row, d_scores, d_lower, rows, log_level, channel, K, H,
                MASK_K, PRECISION, OPERAND,
            )  # fmt: skip

    target = own_row * stride + channel
    in_target = in_rows & (channel < K)
    q_tile = as_sum(load_blocks(q, own, channel, K, stride, MASK_K).to(tl.float32), operand, PRECISION)
    k_tile = as_sum(load_blocks(k, own, channel, K, stride, MASK_K).to(tl.float32), operand, PRECISION)
    diagonal = tl.load(d_diagonal + own * H)
    d_beta = tl.sum(k_tile * row_side, axis=2, keep_dims=True)
    part = (1 + step).to(tl.int64) * table + first
    tl.store(d_beta_out + part + own_row * H, d_beta, mask=in_rows)
    row_side *= beta_row
    dg = tl.fma(q_tile, dq, k_tile * (row_side - column_side))  # the compiler could fuse either product
    dq += diagonal * k_tile
    tl.store(dq_out + target, dq.to(dq_out.dtype.element_ty), mask=in_target)
    dk = row_side + column_side + diagonal * q_tile

    # Then what each row wrote into it, and the state that passed through the chunk: sum_v S dS' of each channel, as the
    # diagonal of a product, which costs less than the sum along loaded rows.
    written_2d = tl.zeros((64, BK), tl.float32)
    through = tl.zeros((BK, BK), tl.float32)
    for step_v in tl.range(0, steps_v, num_stages=STAGES):
        value = step_v * BV + tl.arange(0, BV)[None, :]
        state = tl.load(h + channel_2d * WIDTH_V + value)
        d_state = tl.load(dh + channel_2d * WIDTH_V + value)
        written = load_rows(v_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        written_2d = tl.dot(written, tl.trans(d_state), written_2d, input_precision=PRECISION)
        through = tl.dot(state, tl.trans(d_state), through, input_precision=PRECISION)
    through = tl.where(tl.arange(0, BK)[:, None] == tl.arange(0, BK)[None, :], through, 0.0)
    passed_on = tl.reshape(tl.sum(through, axis=1), (1, 1, BK))
    gate_last = load_blocks(gate, rows - 1 + tl.zeros_like(block), channel, K, stride, MASK_K)
    # 2^(G_last - G) from the columns' factor, which is at hand.
    if ANCHORED:
        to_last = tl.exp2(gate_last - gate_split)
    else:
        gate_end = load_blocks(gate, tl.minimum(block * 16 + 15, rows - 1), channel, K, stride, MASK_K)
        to_last = tl.exp2(-tl.abs(gate_last - gate_end))
    own_write = tl.reshape(written_2d, (4, 16, BK)) * (below * to_last)
    dk += own_write
    tl.store(dk_out + target, dk.to(dk_out.dtype.element_ty), mask=in_target)
    own_write = tl.where(own_row < rows - 1, k_tile * own_write, 0.0)  # the last row's decays by 2^0: it is not dg's
    dg -= own_write
    # The rows of each block first: over all 64 at once it takes five times as many shuffles.
    kept = tl.sum(tl.reshape(tl.sum(own_write, axis=1), (1, 4, BK)), axis=1, keep_dims=True)
    passed_on = passed_on * tl.exp2(gate_last) + kept
    dg += tl.where(own_row == rows - 1, passed_on, 0.0)
    tl.store(dg_out + target, dg * 0.6931471805599453, mask=in_target)  # ln 2: the gate is a log2


@triton.jit(do_not_specialize=["size"])
def sum_beta_kernel(parts, out, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * tl.cast(size, tl.int64) + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def input_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
    a_qk: Tensor,
    a_inv: Tensor,
    h: Tensor,
    v_new: Tensor,
    dh: Tensor,
    dv_new: Tensor,
    d_output: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launches the stage on contiguous tensors: dq, dk, dv, d_cumulative_gate, d_beta in their inputs' types. a_qk,
    a_inv and dv_new are used up."""
    batch, tokens, heads, key_width = q.shape
    value_width = v.shape[3]
    width_k, width_v = h.shape[2], h.shape[3]
    dq, dk, dv, d_gate, d_beta = (torch.empty_like(x) for x in (q, k, v, cumulative_gate, beta))
    packed = cu_seqlens is not None
    sequences = cu_seqlens.shape[0] - 1 if packed else batch
    full = v_new.dtype == torch.float32
    precision = "tf32x3" if full else "tf32"
    half_range = anchored_half_range(v_new.dtype, gate_lower_bound)
    config = configs.chunk_config(width_k, full)
    block = config.inputs_block
    steps, steps_v = width_k // block, width_v // block
    programs = chunk_slots(tokens, sequences, packed) * heads
    d_diagonal = torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device)
    d_beta_parts = torch.empty(1 + steps, batch, tokens, heads, dtype=torch.float32, device=q.device)
    grad_output = v if d_output is None else d_output  # a pointer that is not used
    score_gradients_kernel[(programs,)](
        v, beta, cu_seqlens, a_qk, a_inv, v_new, dv_new, grad_output, dv, d_diagonal, d_beta_parts,
        tokens, sequences, heads, value_width, steps_v, key_width**-0.5,
        PACKED=packed, MASK_V=width_v != value_width, HAS_OUTPUT=d_output is not None, WIDTH_V=width_v, BV=block,
        PRECISION=precision, num_warps=config.inputs_warps, num_stages=1,
    )  # fmt: skip
    input_gradients_kernel[(programs * steps,)](
        q, k, cumulative_gate, beta, cu_seqlens, a_qk, a_inv, d_diagonal, h, v_new, dh, dv_new, grad_output,
        dq, dk, d_gate, d_beta_parts, tokens, sequences, heads, key_width, value_width, steps, steps_v, beta.numel(),
        half_range or 0.0, key_width**-0.5,
        PACKED=packed, MASK_K=width_k != key_width, MASK_V=width_v != value_width, ANCHORED=half_range is not None,
        HAS_OUTPUT=d_output is not None, WIDTH_K=width_k, WIDTH_V=width_v, BK=block, BV=block, PRECISION=precision,
        STAGES=config.inputs_stages, num_warps=config.inputs_warps, num_stages=1,
    )  # fmt: skip
    sum_beta_kernel[(cdiv(beta.numel(), 1024),)](
        d_beta_parts, d_beta, beta.numel(), PARTS=1 + steps, BLOCK=1024
    )  # fmt: skip
    return dq, dk, dv, d_gate, d_beta
