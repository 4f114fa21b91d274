"""Backward stage 2 of chunk_kda: the gradients of q, k, v, the cumulative gate and beta (Kimi Linear, arXiv
2510.26692).

One program per (chunk, head), with the state S at the chunk's start, the gradient dS' of the state at its end, v_new
and dv_new from the scans. With v_new = A beta (v - (k 2^G) S), the inverse never needs a gradient of its own:

    dX = A^T dv_new          dv = beta dX        dL = -tril(dX v_new^T)       da_qk = scale tril(dO v_new^T)

What meets the state is a product with S or dS'; what stays inside the chunk runs over the levels of tiles.py, where row
i collects its pairs with earlier tokens and row j those with later ones:

    dq_i += da_qk_ij k_j D_ij      dk_i += beta_i dL_ij k_j D_ij      dk_j += (da_qk_ij q_i + beta_i dL_ij k_i) D_ij

The gate's gradient is the sum of each row's terms times q or k, less the columns'. Pairs whose decay is 2^0, the
diagonal and the last row's own write into the state, are no part of it: they never enter the sums. All sums are FP32.

At K = V = 128 in bf16 it reads 3,204 bytes for each token and head and writes 1,284 (256 of them dX, in dv_new's
place).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .prepare import anchored_half_range
from .tiles import chunk_slots, load_rows, locate_chunk, matmul


@triton.jit
def pair_factors(
    gate, row, rows, channel, K, stride, log_level, half_range, MASKED: tl.constexpr, ANCHORED: tl.constexpr
):
    """above_i and below_j with 2^(G_i - G_j) = above_i below_j for the pairs of one level; where ANCHORED, log_level 3
    stands for all levels below 16 (prepare.py)."""
    tile = load_rows(gate, row, rows, channel, K, stride, MASKED)
    anchor = (row & -(2 << log_level)) + (1 << log_level)
    if ANCHORED:
        anchor = tl.where(log_level == 3, row & -16, anchor)
    delta = tile - load_rows(gate, anchor, rows, channel, K, stride, MASKED)
    if ANCHORED:
        shift = tl.where(log_level == 3, half_range, 0.0)
        delta = tl.where(log_level == 3, tl.minimum(tl.maximum(delta + shift, -shift), shift), -tl.abs(delta))
        above = tl.exp2(delta)
        below = tl.exp2(tl.where(log_level == 3, -delta, delta))
    else:
        above = tl.exp2(-tl.abs(delta))
        below = above
    return above, below


@triton.jit
def served_pairs(tile, row, column, log_level, ANCHORED: tl.constexpr):
    """The pairs of one level in a tile that is zero on and above the diagonal."""
    served = ((row >> log_level) ^ (column >> log_level)) == 1
    if ANCHORED:
        shift = tl.where(log_level == 3, 4, log_level)
        served = ((row >> shift) ^ (column >> shift)) == tl.where(log_level == 3, 0, 1)
    return tl.where(served, tile, 0.0)


@triton.jit
def input_gradients_kernel(
    q, k, v, gate, beta, cu_seqlens, a_qk, a_inv, h, v_new, dh, dv_new, d_output, dq_out, dk_out, dv_out, dg_out,
    dbeta_out, T, N, H, K, V, steps, steps_v, half_range, scale,
    PACKED: tl.constexpr, MASK_K: tl.constexpr, MASK_V: tl.constexpr, ANCHORED: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
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
    v += first * V
    dv_out += first * V
    d_output += first * V
    a_qk += first * 64
    a_inv += first * 64
    v_new += first * WIDTH_V
    dv_new += first * WIDTH_V
    h += (slot.to(tl.int64) * H + head) * WIDTH_K * WIDTH_V
    dh += (slot.to(tl.int64) * H + head) * WIDTH_K * WIDTH_V

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
        written = load_rows(v_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        d_written = load_rows(dv_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        dx = matmul(tl.trans(inverse), d_written, PRECISION)
        tl.store(dv_new + row * (H * WIDTH_V) + value, dx.to(OPERAND), mask=in_rows)
        dv = (dx * beta_row).to(dv_out.dtype.element_ty)
        tl.store(dv_out + row * (H * V) + value, dv, mask=in_rows & (value < V))
        d_beta += tl.sum(dx * load_rows(v, row, rows, value, V, H * V, MASK_V).to(tl.float32), axis=1)
        d_lower = tl.dot(dx.to(OPERAND), tl.trans(written), d_lower, input_precision=PRECISION)
        if HAS_OUTPUT:
            d_out = load_rows(d_output, row, rows, value, V, H * V, MASK_V).to(tl.float32) * scale
            d_diagonal += tl.sum(d_out * written.to(tl.float32), axis=1)
            d_out = d_out.to(OPERAND)
            d_scores = tl.dot(d_out, tl.trans(written), d_scores, input_precision=PRECISION)
    # Through memory, and so out of the registers: a_qk and a_inv are not needed any more.
    tl.store(a_qk + row * (H * 64) + j, tl.where(row > j, d_scores, 0.0).to(OPERAND), mask=in_rows)
    tl.store(a_inv + row * (H * 64) + j, tl.where(row > j, -d_lower, 0.0).to(OPERAND), mask=in_rows)
    tl.debug_barrier()  # what was stored above is loaded below by other threads of this program

    # For each block of channels first what row i collects from earlier tokens and the state, then what row j collects
    # from later ones: both at once would not fit the registers. The gate's gradient waits in its place meanwhile.
    for step in range(0, steps):
        channel = step * BK + tl.arange(0, BK)[None, :]
        target = row * (H * K) + channel
        in_target = in_rows & (channel < K)
        dq = tl.zeros((64, BK), tl.float32)
        row_side = tl.zeros((64, BK), tl.float32)  # of dk, not yet times beta
        for step_v in range(0, steps_v):
            value = step_v * BV + tl.arange(0, BV)[None, :]
            state = tl.trans(tl.load(h + tl.trans(channel) * WIDTH_V + value))
            dx = load_rows(dv_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
            row_side = tl.dot(dx, state, row_side, input_precision=PRECISION)
            if HAS_OUTPUT:
                d_out = load_rows(d_output, row, rows, value, V, H * V, MASK_V).to(tl.float32) * scale
                dq = tl.dot(d_out.to(OPERAND), state, dq, input_precision=PRECISION)
        decay = tl.exp2(load_rows(gate, row, rows, channel, K, H * K, MASK_K))
        dq *= decay
        row_side *= -decay
        for log_level in range(3 if ANCHORED else 0, 6):
            above, below = pair_factors(gate, row, rows, channel, K, H * K, log_level, half_range, MASK_K, ANCHORED)
            k_below = load_rows(k, row, rows, channel, K, H * K, MASK_K).to(tl.float32) * below
            k_below = k_below.to(OPERAND)
            scores = load_rows(a_qk, row, rows, j, 64, H * 64, False)
            scores = served_pairs(scores, row, j, log_level, ANCHORED).to(OPERAND)
            dq += matmul(scores, k_below, PRECISION) * above
            lower = load_rows(a_inv, row, rows, j, 64, H * 64, False)
            lower = served_pairs(lower, row, j, log_level, ANCHORED).to(OPERAND)
            row_side += matmul(lower, k_below, PRECISION) * above
        q_tile = load_rows(q, row, rows, channel, K, H * K, MASK_K).to(tl.float32)
        k_tile = load_rows(k, row, rows, channel, K, H * K, MASK_K).to(tl.float32)
        d_beta += tl.sum(k_tile * row_side, axis=1)
        row_side *= beta_row
        tl.store(dg_out + target, q_tile * dq + k_tile * row_side, mask=in_target)
        dq += d_diagonal[:, None] * k_tile
        tl.store(dq_out + target, dq.to(dq_out.dtype.element_ty), mask=in_target)
        dk = row_side + d_diagonal[:, None] * q_tile
        tl.debug_barrier()

        column_side = tl.zeros((64, BK), tl.float32)
        passed_on = tl.zeros((BK,), tl.float32)
        for step_v in range(0, steps_v):
            value = step_v * BV + tl.arange(0, BV)[None, :]
            state = tl.load(h + tl.trans(channel) * WIDTH_V + value)
            d_state = tl.load(dh + tl.trans(channel) * WIDTH_V + value)
            passed_on += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), axis=1)
            written = load_rows(v_new, row, rows, value, WIDTH_V, H * WIDTH_V, False)
            column_side = tl.dot(written, tl.trans(d_state), column_side, input_precision=PRECISION)
        gate_tile = load_rows(gate, row, rows, channel, K, H * K, MASK_K)
        gate_last = load_rows(gate, rows - 1 + tl.zeros((1, 1), tl.int32), rows, channel, K, H * K, MASK_K)
        column_side *= tl.exp2(-tl.abs(gate_last - gate_tile))
        dk += tl.where(row == rows - 1, column_side, 0.0)  # the last row's own write decays by 2^0: it is not dg's
        column_side = tl.where(row == rows - 1, 0.0, column_side)
        k_tile = load_rows(k, row, rows, channel, K, H * K, MASK_K).to(tl.float32)
        passed_on = passed_on[None, :] * tl.exp2(gate_last) + tl.sum(k_tile * column_side, axis=0)[None, :]
        for log_level in range(3 if ANCHORED else 0, 6):
            above, below = pair_factors(gate, row, rows, channel, K, H * K, log_level, half_range, MASK_K, ANCHORED)
            scores = load_rows(a_qk, row, rows, j, 64, H * 64, False)
            scores = tl.trans(served_pairs(scores, row, j, log_level, ANCHORED).to(OPERAND))
            q_above = load_rows(q, row, rows, channel, K, H * K, MASK_K).to(tl.float32) * above
            pairs = matmul(scores, q_above.to(OPERAND), PRECISION)
            lower = load_rows(a_inv, row, rows, j, 64, H * 64, False)
            lower = tl.trans(served_pairs(lower, row, j, log_level, ANCHORED).to(OPERAND))
            k_above = load_rows(k, row, rows, channel, K, H * K, MASK_K).to(tl.float32) * above * beta_row
            pairs = tl.dot(lower, k_above.to(OPERAND), pairs, input_precision=PRECISION)
            column_side += pairs * below
        tl.store(dk_out + target, (dk + column_side).to(dk_out.dtype.element_ty), mask=in_target)
        k_tile = load_rows(k, row, rows, channel, K, H * K, MASK_K).to(tl.float32)
        dg = tl.load(dg_out + target, mask=in_target, other=0.0) - k_tile * column_side
        dg += tl.where(row == rows - 1, passed_on, 0.0)
        tl.store(dg_out + target, dg * 0.6931471805599453, mask=in_target)  # ln 2: the gate is a log2
    rows_1d = tl.arange(0, 64)
    tl.store(dbeta_out + first + rows_1d * H, d_beta.to(dbeta_out.dtype.element_ty), mask=rows_1d < rows)


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
    grads = tuple(torch.empty_like(x) for x in (q, k, v, cumulative_gate, beta))
    packed = cu_seqlens is not None
    sequences = cu_seqlens.shape[0] - 1 if packed else batch
    full = v_new.dtype == torch.float32
    half_range = anchored_half_range(v_new.dtype, gate_lower_bound)
    config = configs.chunk_config(width_k, full)
    block = config.inputs_block
    input_gradients_kernel[(chunk_slots(tokens, sequences, packed) * heads,)](
        q, k, v, cumulative_gate, beta, cu_seqlens, a_qk, a_inv, h, v_new, dh, dv_new, v if d_output is None else
        d_output, *grads, tokens, sequences, heads, key_width, value_width, width_k // block, width_v // block,
        half_range or 0.0, key_width**-0.5,
        PACKED=packed, MASK_K=width_k != key_width, MASK_V=width_v != value_width, ANCHORED=half_range is not None,
        HAS_OUTPUT=d_output is not None, WIDTH_K=width_k, WIDTH_V=width_v, BK=block, BV=block,
        PRECISION="tf32x3" if full else "tf32",
        num_warps=config.inputs_warps, num_stages=1,
    )  # fmt: skip
    return grads
