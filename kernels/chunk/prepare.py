"""Stage 1 of chunk_kda: everything of a chunk that does not need the state (Kimi Linear, arXiv 2510.26692).

One program per (chunk, head). It reads q, k, v, the cumulative gate G and beta once from memory (what it reads again
comes from the cache), forms the decayed scores by levels (tiles.py), inverts I + L, and writes what the scan multiplies
with the state:

    q_decayed = q 2^G      k_decayed = k 2^(G_last - G)      w = A (beta k 2^G)      u = A (beta v)      a_qk

in the inputs' type, at padded widths, token-major like the inputs: any number of tiny sequences needs no more memory
than one long one. At K = V = 128 in bf16: 1,284 bytes read and 1,152 written for each token and head.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .._operator import LOG2_E
from .tiles import (
    CHUNK,
    block_width,
    chunk_slots,
    invert_unit_lower,
    keep_levels,
    level_factors,
    load_rows,
    locate_chunk,
    matmul,
    operand_dtype,
)


class Prepared(NamedTuple):
    q_decayed: Tensor  # [B, T, H, BK]
    k_decayed: Tensor  # [B, T, H, BK]
    w: Tensor  # [B, T, H, BK]
    u: Tensor  # [B, T, H, BV]
    a_qk: Tensor  # [B, T, H, 64], not scaled
    a_inv: Tensor | None  # [B, T, H, 64]
    q_scale: Tensor | None  # [B, T, H], FP32


@triton.jit
def add_level(
    q_scores, k_scores, q, k, gate, rows, K, stride, steps, log_level,
    BK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Adds one level's pairs to <q_i D_ij, k_j> and <k_i D_ij, k_j>."""
    row = tl.arange(0, 64)[:, None]
    level = 1 << log_level
    anchor = (row & -(2 * level)) + level
    for step in range(0, steps):
        column = step * BK + tl.arange(0, BK)[None, :]
        q_tile = load_rows(q, row, rows, column, K, stride, MASKED)
        k_tile = load_rows(k, row, rows, column, K, stride, MASKED)
        gate_tile = load_rows(gate, row, rows, column, K, stride, MASKED)
        gate_anchor = load_rows(gate, anchor, rows, column, K, stride, MASKED)
        above, below = level_factors(gate_tile, gate_anchor, row, level)
        q_row = (q_tile.to(tl.float32) * above).to(OPERAND)
        k_row = (k_tile.to(tl.float32) * above).to(OPERAND)
        k_column = tl.trans((k_tile.to(tl.float32) * below).to(OPERAND))
        q_scores = tl.dot(q_row, k_column, q_scores, input_precision=PRECISION)
        k_scores = tl.dot(k_row, k_column, k_scores, input_precision=PRECISION)
    return keep_levels(q_scores, log_level + 1), keep_levels(k_scores, log_level + 1)


@triton.jit
def add_anchored_diagonal(
    q_scores, k_scores, q, k, gate, rows, K, stride, half_range, steps,
    BK: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Levels 1 to 8 at once, under a promised bound: products around each block's first row, shifted by
    half the block's range so that both factors stay within 2^(+-half_range). The clamp keeps broken promises finite."""
    row = tl.arange(0, 64)[:, None]
    anchor = row // 16 * 16
    for step in range(0, steps):
        column = step * BK + tl.arange(0, BK)[None, :]
        q_tile = load_rows(q, row, rows, column, K, stride, MASKED)
        k_tile = load_rows(k, row, rows, column, K, stride, MASKED)
        gate_tile = load_rows(gate, row, rows, column, K, stride, MASKED)
        delta = gate_tile - load_rows(gate, anchor, rows, column, K, stride, MASKED) + half_range
        delta = tl.minimum(tl.maximum(delta, -half_range), half_range)
        above = tl.exp2(delta)
        q_row = (q_tile.to(tl.float32) * above).to(OPERAND)
        k_row = (k_tile.to(tl.float32) * above).to(OPERAND)
        k_column = tl.trans((k_tile.to(tl.float32) * tl.exp2(-delta)).to(OPERAND))
        q_scores = tl.dot(q_row, k_column, q_scores, input_precision=PRECISION)
        k_scores = tl.dot(k_row, k_column, k_scores, input_precision=PRECISION)
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    q_scores = tl.where((i > j) & (i // 16 == j // 16), q_scores, 0.0)
    k_scores = tl.where((i > j) & (i // 16 == j // 16), k_scores, 0.0)
    return q_scores, k_scores


@triton.jit
def prepare_kernel(
    q, k, v, gate, beta, cu_seqlens, q_decayed, k_decayed, w, u, a_qk, a_inv, q_scale,
    T, N, H, K, V, steps, steps_v, half_range,
    PACKED: tl.constexpr, MASK_K: tl.constexpr, MASK_V: tl.constexpr, ANCHORED: tl.constexpr,
    SAVE_INVERSE: tl.constexpr,
    Q_NORM: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0) // H
    head = tl.program_id(0) % H
    _, start, rows = locate_chunk(cu_seqlens, slot, T, N, PACKED)
    if rows <= 0:
        return
    OPERAND: tl.constexpr = w.dtype.element_ty
    first = start * H + head  # of a [tokens, H] table
    q += first * K
    k += first * K
    gate += first * K
    stride = H * K

    row = tl.arange(0, 64)[:, None]
    in_rows = row < rows
    q_scores = tl.zeros((64, 64), tl.float32)
    k_scores = tl.zeros((64, 64), tl.float32)
    if ANCHORED:
        q_scores, k_scores = add_anchored_diagonal(
            q_scores, k_scores, q, k, gate, rows, K, stride, half_range,
            steps, BK, MASK_K, PRECISION, OPERAND,
        )  # fmt: skip
    for log_level in range(4 if ANCHORED else 0, 6):
        q_scores, k_scores = add_level(
            q_scores, k_scores, q, k, gate, rows, K, stride,
            steps, log_level, BK, MASK_K, PRECISION, OPERAND,
        )  # fmt: skip

    # The rows that meet the state, and what the other outputs need of them.
    beta_row = tl.load(beta + first + row * H, mask=in_rows, other=0.0).to(tl.float32)
    dot_qk = tl.zeros((64,), tl.float32)
    square = tl.zeros((64,), tl.float32)
    for step in range(0, steps):
        column = step * BK + tl.arange(0, BK)[None, :]
        q_tile = load_rows(q, row, rows, column, K, stride, MASK_K).to(tl.float32)
        k_tile = load_rows(k, row, rows, column, K, stride, MASK_K).to(tl.float32)
        dot_qk += tl.sum(q_tile * k_tile, axis=1)
        if Q_NORM:
            square += tl.sum(q_tile * q_tile, axis=1)
    q_scores = tl.where(row == tl.arange(0, 64)[None, :], dot_qk[:, None], q_scores)
    if Q_NORM:
        tl.store(q_scale + first + tl.arange(0, 64) * H, tl.rsqrt(square + 1e-6), mask=tl.arange(0, 64) < rows)
    where = first * 64 + row * (H * 64) + tl.arange(0, 64)[None, :]
    tl.store(a_qk + where, q_scores.to(OPERAND), mask=in_rows)
    inverse = invert_unit_lower(k_scores * beta_row, FULL).to(OPERAND)
    if SAVE_INVERSE:
        tl.store(a_inv + where, inverse, mask=in_rows)

    for step in range(0, steps):
        column = step * BK + tl.arange(0, BK)[None, :]
        q_tile = load_rows(q, row, rows, column, K, stride, MASK_K)
        k_tile = load_rows(k, row, rows, column, K, stride, MASK_K)
        gate_tile = load_rows(gate, row, rows, column, K, stride, MASK_K)
        gate_last = load_rows(gate, rows - 1 + tl.zeros((1, 1), tl.int32), rows, column, K, stride, MASK_K)
        decay = tl.exp2(gate_tile)
        target = first * WIDTH_K + row * (H * WIDTH_K) + column
        tl.store(q_decayed + target, (q_tile.to(tl.float32) * decay).to(OPERAND), mask=in_rows)
        k_last = k_tile.to(tl.float32) * tl.exp2(-tl.abs(gate_last - gate_tile))
        tl.store(k_decayed + target, k_last.to(OPERAND), mask=in_rows)
        w_tile = matmul(inverse, (k_tile.to(tl.float32) * decay * beta_row).to(OPERAND), PRECISION)
        tl.store(w + target, w_tile.to(OPERAND), mask=in_rows)
    for step in range(0, steps_v):
        column = step * BV + tl.arange(0, BV)[None, :]
        v_tile = load_rows(v + first * V, row, rows, column, V, H * V, MASK_V)
        u_tile = matmul(inverse, (v_tile.to(tl.float32) * beta_row).to(OPERAND), PRECISION)
        tl.store(u + first * WIDTH_V + row * (H * WIDTH_V) + column, u_tile.to(OPERAND), mask=in_rows)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_gate: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor | None,
    gate_lower_bound: float | None,
    *,
    fuse_q_l2norm: bool = False,
    save_inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Prepared:
    """Launches the stage on contiguous inputs; shapes and dtypes are the public function's. ``dtype`` is that of the
    operands and of what is returned, the inputs' common type if None."""
    batch, tokens, heads, key_width = q.shape
    value_width = v.shape[3]
    dtype = operand_dtype(q, k, v) if dtype is None else dtype
    width_k, width_v = block_width(key_width), block_width(value_width)

    def table(width: int) -> Tensor:
        return torch.empty(batch, tokens, heads, width, dtype=dtype, device=q.device)

    out = Prepared(
        q_decayed=table(width_k),
        k_decayed=table(width_k),
        w=table(width_k),
        u=table(width_v),
        a_qk=table(CHUNK),
        a_inv=table(CHUNK) if save_inverse else None,
        q_scale=torch.empty(batch, tokens, heads, dtype=torch.float32, device=q.device) if fuse_q_l2norm else None,
    )
    packed = cu_seqlens is not None
    sequences = cu_seqlens.shape[0] - 1 if packed else batch
    slots = chunk_slots(tokens, sequences, packed)
    half_range = anchored_half_range(dtype, gate_lower_bound)
    full = dtype == torch.float32
    config = configs.chunk_config(width_k, full)
    block = config.prepare_block
    prepare_kernel[(slots * heads,)](
        q, k, v, cumulative_gate, beta, cu_seqlens, *out,
        tokens, sequences, heads, key_width, value_width, width_k // block, width_v // block, half_range or 0.0,
        PACKED=packed, MASK_K=width_k != key_width, MASK_V=width_v != value_width, ANCHORED=half_range is not None,
        SAVE_INVERSE=save_inverse, Q_NORM=fuse_q_l2norm, WIDTH_K=width_k, WIDTH_V=width_v, BK=block, BV=block,
        PRECISION="tf32x3" if full else "tf32", FULL=full, num_warps=config.prepare_warps, num_stages=1,
        maxnreg=config.prepare_registers,
    )  # fmt: skip
    return out


def anchored_half_range(dtype: torch.dtype, gate_lower_bound: float | None) -> float | None:
    """Half of what G can fall by between the first and the last row of a block of 16, in log2, if the promise admits
    the factored diagonal: a type of FP32's range, and a bound whose half range, 54 at -5, leaves room for rows of any
    size."""
    if dtype == torch.float16 or gate_lower_bound is None or gate_lower_bound < -5.0:
        return None
    return 0.5 * 15 * -gate_lower_bound * LOG2_E
