"""The decayed scores of a chunk, <q_i D_ij, k_j> and <k_i D_ij, k_j> with D_ij = 2^(G_i - G_j): the first half of
prepare.py, in two forms. The same passes over q, k and G also write q 2^G, k 2^(G_last - G) and k 2^G.

No product may hold a factor that overflows, and no anchor may lie after a row it serves. With a row r between i and j,

    2^(G_i - G_j) = 2^(G_i - G_r) 2^(G_r - G_j)        both exponents <= 0 for every legal gate,

so a set of pairs around one r is a plain matrix product. A factor that flushes to zero belongs to a pair that is zero.

``score_levels``, for any gate: a pair belongs to the level s of 16, 8, 4, 2, 1 that is the highest bit in which i and j
differ, and r is the first row of the upper half of their block of 2s rows. Both halves of a block are scaled by the
same 2^-|G - G_r|, so one tile is rows and columns. What a product holds beside its level's pairs is finite and cut off.
Level 32 is ``score_corner``.

``score_blocks``, under a promised bound: inside a block of 16 rows G falls by at most 15 steps of it, so all its pairs
are one product around the block's first row r, shifted by half that range: exponents within +-54 at -5 nats. A later
block meets an earlier one through the first row after the earlier one, whose columns 2^(G_end - G_j) are formed once
and carried from block to block by 2^(G_r - G_r') of the rows between.

Tiles are 16 or 32 rows high and belong to programs of two warps: so small a program waits for nobody but its twin, and
eight of them to a multiprocessor hide the memory's latency better than fewer and wider ones (docs/performance).
Rows past the end of a short chunk repeat its last row; no pair of theirs is stored.
"""

import triton
import triton.language as tl

from .._device import held
from .tiles import finite_scores, load_clamped, opaque, stack, store_rows


@triton.jit
def sum_eights(tile):
    """Along the rows by eight columns, what one thread has loaded at once: the threads' sums meet when the last step's
    are in."""
    return tl.sum(tl.reshape(tile, (tile.shape[0], tile.shape[1] // 8, 8)), axis=2)


# ---- any gate ----


@triton.jit
def score_levels(
    q, k, gate, q_decayed, k_decayed, k_gated, a_qk, lower, q_scale, rows, H, K, stride, stride_k, stride_a, stride_l,
    FIRST: tl.constexpr, MASKED: tl.constexpr, Q_NORM: tl.constexpr, WIDTH_K: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The pairs within rows FIRST to FIRST + 31."""
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    row = FIRST + i
    apart = i ^ j
    level_of = (apart >= 2).to(tl.int32) + (apart >= 4) + (apart >= 8) + (apart >= 16)
    q_scores = tl.zeros((32, 32), tl.float32)
    k_scores = tl.zeros((32, 32), tl.float32)
    dot_qk = tl.zeros((32,), tl.float32)
    square = tl.zeros((32, BK // 8), tl.float32)
    for step in range(0, WIDTH_K // BK):
        column = step * BK + tl.arange(0, BK)[None, :]
        q_tile = load_clamped(q, row, rows, column, K, stride, MASKED).to(tl.float32)
        k_tile = load_clamped(k, row, rows, column, K, stride, MASKED).to(tl.float32)
        g = load_clamped(gate, row, rows, column, K, stride, MASKED)
        g_last = load_clamped(gate, rows - 1, rows, column, K, stride, MASKED)
        decay = tl.exp2(g)
        q_decay = q_tile * decay
        if OPERAND == tl.float32:
            q_decay = held(q_decay)  # TF32 rounds the largest numbers to infinity
        store_rows(q_decayed, q_decay, row, rows, stride_k, column)
        store_rows(k_gated, held((k_tile * decay).to(OPERAND)), row, rows, stride_k, column)
        k_decay = k_tile * tl.exp2(-tl.abs(g_last - g))
        if OPERAND == tl.float32:
            k_decay = held(k_decay)
        store_rows(k_decayed, k_decay, row, rows, stride_k, column)
        dot_qk += tl.sum(q_tile * k_tile, axis=1)
        if Q_NORM:
            square += sum_eights(q_tile * q_tile)
        g_anchor = load_clamped(gate, FIRST + (i & -2) + 1, rows, column, K, stride, MASKED)
        for level in range(0, 5):
            factor = tl.exp2(-tl.abs(g - g_anchor))
            up = tl.minimum(level + 1, 4)  # the next level's anchor is on its way while this level computes
            g_anchor = load_clamped(gate, FIRST + (i & -(2 << up)) + (1 << up), rows, column, K, stride, MASKED)
            k_near = opaque((k_tile * factor).to(OPERAND))
            q_near = opaque((q_tile * factor).to(OPERAND))
            served = level_of == level
            q_more = tl.dot(q_near, tl.trans(k_near), q_scores, input_precision=PRECISION)
            k_more = tl.dot(k_near, tl.trans(k_near), k_scores, input_precision=PRECISION)
            q_scores = tl.where(served, q_more, q_scores)
            k_scores = tl.where(served, k_more, k_scores)
    q_scores = tl.where(i > j, q_scores, tl.where(i == j, dot_qk[:, None], 0.0))
    store_rows(a_qk, finite_scores(q_scores, OPERAND), row, rows, stride_a, FIRST + j)
    store_rows(lower, finite_scores(k_scores, lower.dtype.element_ty), row, rows, stride_l, FIRST + j)
    if Q_NORM:
        line = FIRST + tl.arange(0, 32)
        tl.store(q_scale + line, tl.rsqrt((tl.sum(square, axis=1) + 1e-6) * K), mask=line < rows)


@triton.jit
def score_corner(
    q, k, gate, a_qk, lower, rows, K, stride, stride_a, stride_l,
    MASKED: tl.constexpr, WIDTH_K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """Level 32: the pairs of rows 32 to 63 with rows 0 to 31."""
    i = tl.arange(0, 32)[:, None]
    q_scores = tl.zeros((32, 32), tl.float32)
    k_scores = tl.zeros((32, 32), tl.float32)
    for step in range(0, WIDTH_K // BK):
        column = step * BK + tl.arange(0, BK)[None, :]
        anchor = load_clamped(gate, 32, rows, column, K, stride, MASKED)
        below = tl.exp2(-tl.abs(anchor - load_clamped(gate, i, rows, column, K, stride, MASKED)))
        k_left = load_clamped(k, i, rows, column, K, stride, MASKED).to(tl.float32)
        k_left = tl.trans(opaque((k_left * below).to(OPERAND)))
        above = tl.exp2(-tl.abs(load_clamped(gate, 32 + i, rows, column, K, stride, MASKED) - anchor))
        q_row = load_clamped(q, 32 + i, rows, column, K, stride, MASKED).to(tl.float32) * above
        k_row = load_clamped(k, 32 + i, rows, column, K, stride, MASKED).to(tl.float32) * above
        q_scores = tl.dot(opaque(q_row.to(OPERAND)), k_left, q_scores, input_precision=PRECISION)
        k_scores = tl.dot(opaque(k_row.to(OPERAND)), k_left, k_scores, input_precision=PRECISION)
    j = tl.arange(0, 32)[None, :]
    store_rows(a_qk, finite_scores(q_scores, OPERAND), 32 + i, rows, stride_a, j)
    store_rows(lower, finite_scores(k_scores, lower.dtype.element_ty), 32 + i, rows, stride_l, j)


# ---- under a promised bound ----


@triton.jit
def score_block(
    scores, square, q, k, gate, q_decayed, k_decayed, k_gated, rows, K, stride, stride_k, step, half_range,
    FIRST: tl.constexpr, MASKED: tl.constexpr, Q_NORM: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OPERAND: tl.constexpr,
):  # fmt: skip
    """The pairs within rows FIRST to FIRST + 15, q's rows above k's. Returns what the other blocks need of this one:
    its rows, times 2^half_range; its columns up to the next block's first row, times 2^-half_range; its first gate."""
    row = FIRST + tl.arange(0, 16)[:, None]
    column = step * BK + tl.arange(0, BK)[None, :]
    q_tile = held(load_clamped(q, row, rows, column, K, stride, MASKED)).to(tl.float32)  # times 2^half_range
    k_tile = load_clamped(k, row, rows, column, K, stride, MASKED).to(tl.float32)
    g = load_clamped(gate, row, rows, column, K, stride, MASKED)
    g_first = load_clamped(gate, FIRST, rows, column, K, stride, MASKED)
    g_end = load_clamped(gate, FIRST + 16, rows, column, K, stride, MASKED)
    g_last = load_clamped(gate, rows - 1, rows, column, K, stride, MASKED)
    delta = g - g_first + half_range
    above = tl.exp2(delta)
    q_row = q_tile * above
    k_row = k_tile * above
    k_column = k_tile * tl.exp2(-delta)
    left = opaque(stack(q_row.to(OPERAND), k_row.to(OPERAND)))
    scores = tl.dot(left, tl.trans(opaque(k_column.to(OPERAND))), scores, input_precision=PRECISION)
    if Q_NORM:
        square += sum_eights(q_tile * q_tile)
    from_start = tl.exp2(g_first - half_range)
    store_rows(q_decayed, q_row * from_start, row, rows, stride_k, column)
    store_rows(k_gated, k_row * from_start, row, rows, stride_k, column)
    store_rows(k_decayed, k_column * tl.exp2(g_last - g_first + half_range), row, rows, stride_k, column)
    return scores, square, left, k_column * tl.exp2(g_end - g_first), g_first


@triton.jit
def add_pair(scores, left, k_column, PRECISION: tl.constexpr):
    return tl.dot(left, tl.trans(opaque(k_column.to(left.dtype))), scores, input_precision=PRECISION)


@triton.jit
def store_scores(
    a_qk, lower, scores, rows, stride_a, stride_l, ROW: tl.constexpr, COLUMN: tl.constexpr, FULL: tl.constexpr
):
    """A block of 16 columns, q's 16 rows to a_qk and k's to ``lower``: in one store, as a split would go through shared
    memory."""
    i = tl.arange(0, 32)[:, None] & 15
    j = tl.arange(0, 16)[None, :]
    of_q = tl.arange(0, 32)[:, None] < 16
    if ROW == COLUMN:
        scores = tl.where((i > j) | (of_q & (i == j)), scores, 0.0)
    row = ROW + i
    at_q = a_qk + row * stride_a + COLUMN + j
    at_k = lower + row * stride_l + COLUMN + j
    if FULL:
        tl.store(tl.where(of_q, at_q, at_k), finite_scores(scores, tl.float32), mask=row < rows)
    else:
        bits_q = finite_scores(scores, a_qk.dtype.element_ty).to(tl.int16, bitcast=True)
        bits_k = finite_scores(scores, lower.dtype.element_ty).to(tl.int16, bitcast=True)
        at_q = at_q.to(tl.pointer_type(tl.int16))
        at_k = at_k.to(tl.pointer_type(tl.int16))
        tl.store(tl.where(of_q, at_q, at_k), tl.where(of_q, bits_q, bits_k), mask=row < rows)


@triton.jit
def store_scales(q_scale, n0, n1, n2, n3, rows, K):
    """Of the four blocks in one store: each would take barriers of its own."""
    squares = tl.join(tl.join(tl.sum(n0, axis=1), tl.sum(n1, axis=1)), tl.join(tl.sum(n2, axis=1), tl.sum(n3, axis=1)))
    two = tl.arange(0, 2)
    line = tl.arange(0, 16)[:, None, None] + 16 * two[None, :, None] + 32 * two[None, None, :]
    tl.store(q_scale + line, tl.rsqrt((squares + 1e-6) * K), mask=line < rows)


@triton.jit
def score_blocks(
    q, k, gate, q_decayed, k_decayed, k_gated, a_qk, lower, q_scale, rows, H, K, stride, stride_k, stride_a, stride_l,
    half_range,
    MASKED: tl.constexpr, Q_NORM: tl.constexpr, WIDTH_K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    OPERAND: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    zero = tl.zeros((32, 16), tl.float32)  # blocks of rows 0 to 3, of columns 0 to 3
    s00, s10, s11, s20, s21, s22, s30, s31, s32, s33 = zero, zero, zero, zero, zero, zero, zero, zero, zero, zero
    none = tl.zeros((16, BK // 8), tl.float32)
    n0, n1, n2, n3 = none, none, none, none
    for step in tl.range(0, WIDTH_K // BK, num_stages=STAGES):
        s00, n0, left, k0, _ = score_block(
            s00, n0, q, k, gate, q_decayed, k_decayed, k_gated, rows, K, stride, stride_k, step, half_range, 0,
            MASKED, Q_NORM, BK, PRECISION, OPERAND,
        )  # fmt: skip
        s11, n1, left, k1, g1 = score_block(
            s11, n1, q, k, gate, q_decayed, k_decayed, k_gated, rows, K, stride, stride_k, step, half_range, 16,
            MASKED, Q_NORM, BK, PRECISION, OPERAND,
        )  # fmt: skip
        s10 = add_pair(s10, left, k0, PRECISION)
        s22, n2, left, k2, g2 = score_block(
            s22, n2, q, k, gate, q_decayed, k_decayed, k_gated, rows, K, stride, stride_k, step, half_range, 32,
            MASKED, Q_NORM, BK, PRECISION, OPERAND,
        )  # fmt: skip
        k0 *= tl.exp2(g2 - g1)
        s20 = add_pair(s20, left, k0, PRECISION)
        s21 = add_pair(s21, left, k1, PRECISION)
        s33, n3, left, _, g3 = score_block(
            s33, n3, q, k, gate, q_decayed, k_decayed, k_gated, rows, K, stride, stride_k, step, half_range, 48,
            MASKED, Q_NORM, BK, PRECISION, OPERAND,
        )  # fmt: skip
        passed = tl.exp2(g3 - g2)
        k0 *= passed
        k1 *= passed
        s30 = add_pair(s30, left, k0, PRECISION)
        s31 = add_pair(s31, left, k1, PRECISION)
        s32 = add_pair(s32, left, k2, PRECISION)
    store_scores(a_qk, lower, s00, rows, stride_a, stride_l, 0, 0, FULL)
    store_scores(a_qk, lower, s10, rows, stride_a, stride_l, 16, 0, FULL)
    store_scores(a_qk, lower, s11, rows, stride_a, stride_l, 16, 16, FULL)
    store_scores(a_qk, lower, s20, rows, stride_a, stride_l, 32, 0, FULL)
    store_scores(a_qk, lower, s21, rows, stride_a, stride_l, 32, 16, FULL)
    store_scores(a_qk, lower, s22, rows, stride_a, stride_l, 32, 32, FULL)
    store_scores(a_qk, lower, s30, rows, stride_a, stride_l, 48, 0, FULL)
    store_scores(a_qk, lower, s31, rows, stride_a, stride_l, 48, 16, FULL)
    store_scores(a_qk, lower, s32, rows, stride_a, stride_l, 48, 32, FULL)
    store_scores(a_qk, lower, s33, rows, stride_a, stride_l, 48, 48, FULL)
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    above = tl.zeros((16, 16), tl.float32)
    store_rows(a_qk, above, i, rows, stride_a, 16 + j)
    store_rows(a_qk, above, 32 + i, rows, stride_a, 48 + j)
    if Q_NORM:
        store_scales(q_scale, n0, n1, n2, n3, rows, K)
