"""Stage 2 of chunk_kda: the scan over chunks, which carries the state and finishes the output (Kimi Linear,
arXiv 2510.26692).

One program per (sequence, head, block of 64 value columns) holds its FP32 state [K, 64] in registers and walks the
sequence's chunks in order:

    v_new = u - w S        o = scale (q_decayed S + a_qk v_new)        S <- diag(2^G_last) S + k_decayed^T v_new

The state is rounded to the inputs' type only as an operand of a product. At K = V = 128 in bf16 it reads 1,152 bytes
for each token and head (per value block 896 + 128; the second block finds the shared rows in the L2 cache) and writes
256; neither the states between chunks nor v_new leave the chip. The backward runs the same kernel for those two
instead of the output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .prepare import Prepared
from .tiles import finite, load_rows, matmul, sequence_bounds

BLOCK_V = 64


@triton.jit
def output_tile(q_decayed, state, a_qk, v_new, scale, PRECISION: tl.constexpr, decay=None):
    """scale (q_decayed state + a_qk v_new): a chunk's output, FP32, for operands of one type; ``scale`` may be a
    column. Where all channels decay alike, ``decay`` is that column, and q comes without it: no rounding between."""
    out = tl.dot(q_decayed, state, input_precision=PRECISION, out_dtype=tl.float32)
    if decay is not None:
        out *= decay
    out = tl.dot(a_qk, v_new, out, input_precision=PRECISION, out_dtype=tl.float32)
    return out * scale


@triton.jit
def scan_sequence(
    program, q_decayed, k_decayed, w, u, a_qk, q_scale, gate, cu_seqlens, initial_state, output, final_state, h, v_new,
    T, N, H, K, V, scale,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, OUTPUT: tl.constexpr, SNAPSHOTS: tl.constexpr,
    Q_NORM: tl.constexpr, WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    blocks = WIDTH_V // BV
    block = program % blocks
    head = (program // blocks) % H
    n = program // (blocks * H)
    begin, end, slot = sequence_bounds(cu_seqlens, n, T, PACKED)
    OPERAND: tl.constexpr = w.dtype.element_ty
    first = begin * H + head  # of a [tokens, H] table

    row = tl.arange(0, 64)[:, None]
    channel = tl.arange(0, WIDTH_K)[None, :]
    token = tl.arange(0, 64)[None, :]
    value = block * BV + tl.arange(0, BV)[None, :]
    in_state = (tl.arange(0, WIDTH_K)[:, None] < K) & (value < V)
    state_offset = (n.to(tl.int64) * H + head) * K * V + tl.arange(0, WIDTH_K)[:, None] * V + value
    q_decayed += first * WIDTH_K
    k_decayed += first * WIDTH_K
    w += first * WIDTH_K
    u += first * WIDTH_V
    a_qk += first * 64
    gate += first * K
    output += first * V
    v_new += first * WIDTH_V
    if Q_NORM:
        q_scale += head.to(tl.int64) * (T if PACKED else tl.cast(T, tl.int64) * N) + begin
    h += (slot.to(tl.int64) * H + head) * WIDTH_K * WIDTH_V + tl.arange(0, WIDTH_K)[:, None] * WIDTH_V + value

    state = tl.zeros((WIDTH_K, BV), tl.float32)
    if INITIAL:
        state = tl.load(initial_state + state_offset, mask=in_state, other=0.0)
    length = (end - begin).to(tl.int32)
    if Q_NORM:
        scales = tl.load(q_scale + tl.arange(0, 64))
    # num_stages on the loop, not on the launch: only then is the load of G_last, which feeds no product, prefetched
    # too.
    for chunk in tl.range(0, tl.cdiv(length, 64), num_stages=STAGES):
        rows = length - chunk * 64
        rounded = state.to(OPERAND)
        row_scale = scale
        if Q_NORM:
            row_scale = scales[:, None]  # in the place of ``scale``, which they hold
        w_tile = load_rows(w, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
        u_tile = load_rows(u, row, rows, value, WIDTH_V, H * WIDTH_V, False)
        written = finite(u_tile.to(tl.float32) - matmul(w_tile, rounded, PRECISION), OPERAND)
        if Q_NORM:  # the next chunk's, a chunk ahead: in the pipeline with the tiles they cost more
            q_scale += 64
            scales = tl.load(q_scale + tl.arange(0, 64))
        if SNAPSHOTS:
            tl.store(h + chunk * tl.cast(H * WIDTH_K * WIDTH_V, tl.int64), rounded)
            tl.store(v_new + row * (H * WIDTH_V) + value, written, mask=row < rows)
            v_new += 64 * tl.cast(H * WIDTH_V, tl.int64)
        if OUTPUT:
            q_tile = load_rows(q_decayed, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
            scores = load_rows(a_qk, row, rows, token, 64, H * 64, False)
            out = output_tile(q_tile, rounded, scores, written, row_scale, PRECISION)
            tl.store(
                output + row * (H * V) + value, out.to(output.dtype.element_ty), mask=(row < rows) & (value < V)
            )  # fmt: skip
            q_decayed += 64 * tl.cast(H * WIDTH_K, tl.int64)
            a_qk += 64 * tl.cast(H * 64, tl.int64)
            output += 64 * tl.cast(H * V, tl.int64)
        k_tile = load_rows(k_decayed, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
        last = gate + (tl.minimum(rows, 64) - 1) * (H * K) + tl.arange(0, WIDTH_K)
        state = state * tl.exp2(tl.load(last, mask=tl.arange(0, WIDTH_K) < K, other=0.0))[:, None]
        state = tl.dot(tl.trans(k_tile), written, state, input_precision=PRECISION, out_dtype=tl.float32)
        w += 64 * tl.cast(H * WIDTH_K, tl.int64)
        k_decayed += 64 * tl.cast(H * WIDTH_K, tl.int64)
        u += 64 * tl.cast(H * WIDTH_V, tl.int64)
        gate += 64 * tl.cast(H * K, tl.int64)
    if FINAL:
        tl.store(final_state + state_offset, state, mask=in_state)


@triton.jit(do_not_specialize=["T", "N"])
def scan_kernel(
    q_decayed, k_decayed, w, u, a_qk, q_scale, gate, cu_seqlens, initial_state, output, final_state,
    T, N, H, K, V, scale,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, Q_NORM: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    scan_sequence(
        tl.program_id(0), q_decayed, k_decayed, w, u, a_qk, q_scale, gate, cu_seqlens, initial_state, output,
        final_state,
        w, w, T, N, H, K, V, scale, PACKED, INITIAL, FINAL, True, False, Q_NORM, WIDTH_K, WIDTH_V, BV, PRECISION,
        STAGES,
    )  # fmt: skip


def scan(
    prepared: Prepared,
    cumulative_gate: Tensor,
    value_width: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *,
    output_dtype: torch.dtype,
    output_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    """Launches the stage: output [B, T, H, V] and, if asked for, the final state [N, H, K, V]."""
    batch, tokens, heads, key_width = cumulative_gate.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    device = cumulative_gate.device
    output = torch.empty(batch, tokens, heads, value_width, dtype=output_dtype, device=device)
    final_state = None
    if output_final_state:
        final_state = torch.empty(sequences, heads, key_width, value_width, dtype=torch.float32, device=device)
    width_k, width_v = prepared.w.shape[3], prepared.u.shape[3]
    full = prepared.w.dtype == torch.float32
    config = configs.chunk_config(width_k, full)
    scan_kernel[(sequences * heads * (width_v // BLOCK_V),)](
        prepared.q_decayed, prepared.k_decayed, prepared.w, prepared.u, prepared.a_qk,
        prepared.w if prepared.q_scale is None else prepared.q_scale,  # a pointer that is not used
        cumulative_gate, cu_seqlens, initial_state, output, final_state,
        tokens, sequences, heads, key_width, value_width, key_width**-0.5,
        PACKED=cu_seqlens is not None, INITIAL=initial_state is not None, FINAL=output_final_state,
        Q_NORM=prepared.q_scale is not None, WIDTH_K=width_k, WIDTH_V=width_v, BV=BLOCK_V,
        PRECISION="tf32x3" if full else "tf32", STAGES=config.scan_stages, num_warps=config.scan_warps,
    )  # fmt: skip
    return output, final_state
