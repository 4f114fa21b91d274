"""Stage 1 of chunk_kda: everything of a chunk that does not need the state (Kimi Linear, arXiv 2510.26692).

One program of two warps per (chunk, head). It reads q, k, v, the cumulative gate G and beta from memory, forms the
decayed scores (scores.py), inverts I + L with L = beta_i <k_i D_ij, k_j>, and writes what the scan multiplies with the
state:

    q_decayed = q 2^G      k_decayed = k 2^(G_last - G)      w = A (beta k 2^G)      u = A (beta v)      a_qk

in the inputs' type, at padded widths, token-major like the inputs: any number of tiny sequences needs no more memory
than one long one. At K = V = 128 in bf16: 1,284 bytes read and 1,152 written for each token and head. On their way w's
place holds k 2^G and u's the scores of k, which the program itself reads back from the cache: what waits there holds no
registers.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .._device import held
from .._operator import LOG2_E
from .scores import score_blocks, score_corner, score_levels
from .tiles import (
    CHUNK,
    block_width,
    chunk_slots,
    finite,
    held_beta,
    invert_unit_lower,
    load_clamped,
    locate_chunk,
    matmul,
    merge_inverses,
    operand_dtype,
    store_rows,
)


class Prepared(NamedTuple):
    q_decayed: Tensor  # [B, T, H, BK]
    k_decayed: Tensor  # [B, T, H, BK]
    w: Tensor  # [B, T, H, BK]
    u: Tensor  # [B, T, H, BV]
    a_qk: Tensor  # [B, T, H, 64], not scaled
    a_inv: Tensor | None  # [B, T, H, 64]
    q_scale: Tensor | None  # 1 / sqrt(K (|q|^2 + 1e-6)), FP32: [H, B * T] flat, so that a chunk's lie side by side


@triton.jit
def load_scores(lower, rows, stride, ROW: tl.constexpr, COLUMN: tl.constexpr, beta, H):
    """A quarter [32, 32] of L: the strictly lower part of what was stored, times the row's beta."""
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    mask = (ROW + i < rows) & (ROW + i > COLUMN + j)
    tile = tl.load(lower + (ROW + i) * stride + COLUMN + j, mask=mask, other=0.0).to(tl.float32)
    return tile * held_beta(tl.load(beta + (ROW + i) * H, mask=ROW + i < rows, other=0.0))


@triton.jit
def apply_inverse(
    upper, corner, lower, source, target, rows, width, stride_source, stride_target, column,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, IN_PLACE: tl.constexpr,
):  # fmt: skip
    """[[upper, 0], [corner, lower]] times 64 rows of ``source``."""
    row = tl.arange(0, 32)[:, None]
    first = load_clamped(source, row, rows, column, width, stride_source, MASKED)
    second = load_clamped(source, 32 + row, rows, column, width, stride_source, MASKED)
    if not IN_PLACE:
        first = held(first)
        second = held(second)
    first = first.to(upper.dtype)
    second = second.to(upper.dtype)
    out_first = matmul(upper, first, PRECISION)
    out_second = tl.dot(lower, second, matmul(corner, first, PRECISION), input_precision=PRECISION)
    if IN_PLACE:
        tl.debug_barrier()  # every thread has read its rows
    store_rows(target, finite(out_first, upper.dtype), row, rows, stride_target, column)
    store_rows(target, finite(out_second, upper.dtype), 32 + row, rows, stride_target, column)


@triton.jit(do_not_specialize=["T", "N"])
def prepare_kernel(
    q, k, v, gate, beta, cu_seqlens, q_decayed, k_decayed, w, u, a_qk, a_inv, q_scale, T, N, H, K, V, half_range,
    PACKED: tl.constexpr, MASK_K: tl.constexpr, MASK_V: tl.constexpr, ANCHORED: tl.constexpr,
    SAVE_INVERSE: tl.constexpr, Q_NORM: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BK: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
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
    v += first * V
    gate += first * K
    beta += first
    q_decayed += first * WIDTH_K
    k_decayed += first * WIDTH_K
    w += first * WIDTH_K
    u += first * WIDTH_V
    a_qk += first * 64
    stride_k = H * WIDTH_K
    stride_u = H * WIDTH_V
    stride_a = H * 64
    if SAVE_INVERSE:
        a_inv += first * 64
    if Q_NORM:
        q_scale += tl.cast(head, tl.int64) * (T if PACKED else tl.cast(T, tl.int64) * N) + start
    # The scores of k stay in u's place until u is known: in FP16, as the inverse's products take them.
    scores = u
    if not FULL:
        scores = u.to(tl.pointer_type(tl.float16))

    if ANCHORED:
        score_blocks(
            q, k, gate, q_decayed, k_decayed, w, a_qk, scores, q_scale, rows, H, K, H * K, stride_k, stride_a, stride_u,
            half_range, MASK_K, Q_NORM, WIDTH_K, BK, PRECISION, OPERAND, FULL, STAGES,
        )  # fmt: skip
    else:
        score_levels(
            q, k, gate, q_decayed, k_decayed, w, a_qk, scores, q_scale, rows, H, K, H * K, stride_k, stride_a, stride_u,
            0, MASK_K, Q_NORM, WIDTH_K, BK, PRECISION, OPERAND,
        )  # fmt: skip
        score_levels(
            q, k, gate, q_decayed, k_decayed, w, a_qk, scores, q_scale, rows, H, K, H * K, stride_k, stride_a, stride_u,
            32, MASK_K, Q_NORM, WIDTH_K, BK, PRECISION, OPERAND,
        )  # fmt: skip
        score_corner(
            q, k, gate, a_qk, scores, rows, K, H * K, stride_a, stride_u, MASK_K, WIDTH_K, BK, PRECISION, OPERAND
        )  # fmt: skip
    i = tl.arange(0, 32)[:, None]
    j = tl.arange(0, 32)[None, :]
    nothing = tl.zeros((32, 32), tl.float32)
    store_rows(a_qk, nothing, i, rows, stride_a, 32 + j)
    tl.debug_barrier()  # the scores and k 2^G were written by other threads of this program

    upper = invert_unit_lower(load_scores(scores, rows, stride_u, 0, 0, beta, H), FULL)
    lower = invert_unit_lower(load_scores(scores, rows, stride_u, 32, 32, beta, H), FULL)
    corner = merge_inverses(upper, load_scores(scores, rows, stride_u, 32, 0, beta, H), lower, FULL)
    if SAVE_INVERSE:
        store_rows(a_inv, finite(upper, OPERAND), i, rows, stride_a, j)
        store_rows(a_inv, nothing, i, rows, stride_a, 32 + j)
        store_rows(a_inv, finite(corner, OPERAND), 32 + i, rows, stride_a, j)
        store_rows(a_inv, finite(lower, OPERAND), 32 + i, rows, stride_a, 32 + j)
    # A diag(beta), so that k 2^G and v go into the products as they are.
    beta_first = held_beta(tl.load(beta + j * H, mask=j < rows, other=0.0))
    beta_second = held_beta(tl.load(beta + (32 + j) * H, mask=32 + j < rows, other=0.0))
    upper = finite(upper * beta_first, OPERAND, 2.0**56)
    corner = finite(corner * beta_first, OPERAND, 2.0**56)
    lower = finite(lower * beta_second, OPERAND, 2.0**56)
    for step in range(0, WIDTH_K // BLOCK):
        column = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        apply_inverse(
            upper, corner, lower, w, w, rows, WIDTH_K, stride_k, stride_k, column, False, PRECISION, True
        )  # fmt: skip
    for step in range(0, WIDTH_V // BLOCK):
        column = step * BLOCK + tl.arange(0, BLOCK)[None, :]
        apply_inverse(
            upper, corner, lower, v, u, rows, V, H * V, stride_u, column, MASK_V, PRECISION, False
        )  # fmt: skip


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
        # Two chunks longer than it is filled: the scan reads whole chunks, and one ahead.
        q_scale=cumulative_gate.new_empty(heads * batch * tokens + 2 * CHUNK) if fuse_q_l2norm else None,
    )
    packed = cu_seqlens is not None
    sequences = cu_seqlens.shape[0] - 1 if packed else batch
    slots = chunk_slots(tokens, sequences, packed)
    half_range = anchored_half_range(dtype, gate_lower_bound)
    full = dtype == torch.float32
    config = configs.chunk_config(width_k, full)
    prepare_kernel[(slots * heads,)](
        q, k, v, cumulative_gate, beta, cu_seqlens, *out, tokens, sequences, heads, key_width, value_width,
        half_range or 0.0,
        PACKED=packed, MASK_K=width_k != key_width, MASK_V=width_v != value_width, ANCHORED=half_range is not None,
        SAVE_INVERSE=save_inverse, Q_NORM=fuse_q_l2norm, WIDTH_K=width_k, WIDTH_V=width_v, BK=config.prepare_block,
        BLOCK=config.prepare_columns, PRECISION="tf32x3" if full else "tf32", FULL=full, STAGES=config.prepare_stages,
        num_warps=config.prepare_warps,
    )  # fmt: skip
    return out


def anchored_half_range(dtype: torch.dtype, gate_lower_bound: float | None) -> float | None:
    """Half of what G can fall by between the first and the last row of a block of 16, in log2, if the promise admits
    the factored diagonal: a type of FP32's range, and a bound whose half range, 54 at -5, leaves room for rows of any
    size."""
    if dtype == torch.float16 or gate_lower_bound is None or gate_lower_bound < -5.0:
        return None
    return 0.5 * 15 * -gate_lower_bound * LOG2_E
