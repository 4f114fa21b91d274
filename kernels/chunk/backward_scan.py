"""Backward stage 1 of chunk_kda: both scans over chunks, side by side in one launch (Kimi Linear, arXiv 2510.26692).

The forward scan is run again for the state at each chunk's start, h, and for v_new (scan.py). The reverse scan carries
dS, the gradient of the state, from the last chunk to the first; with dS' the one that arrives from the right,

    dv_new = scale a_qk^T dO + k_decayed dS'
    dS     = diag(2^G_last) dS' + scale q_decayed^T dO - w^T dv_new

Neither needs the other, so the two are halves of one grid: a single sequence's chain of chunks is walked once, not
twice. Each program holds an FP32 tile [K, 64], or [K, 128] where that makes fewer turns of the device (configs.py). At
K = V = 128 in bf16 the halves read 1,152 + 1,408 bytes for each token and head and write 768 each: v_new or dv_new, and
a snapshot of the state or its gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import configs
from .._device import multiprocessors
from .prepare import Prepared
from .scan import scan_sequence
from .tiles import chunk_slots, load_rows, matmul, sequence_bounds


@triton.jit
def reverse_scan_sequence(
    program, q_decayed, k_decayed, w, a_qk, gate, cu_seqlens, d_output, d_final_state, d_initial_state, dh, dv_new,
    T, N, H, K, V, scale,
    PACKED: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    blocks = WIDTH_V // BV
    block = program % blocks
    head = (program // blocks) % H
    n = program // (blocks * H)
    begin, end, slot = sequence_bounds(cu_seqlens, n, T, PACKED)
    OPERAND: tl.constexpr = w.dtype.element_ty
    length = (end - begin).to(tl.int32)
    chunks = tl.cdiv(length, 64)

    row = tl.arange(0, 64)[:, None]
    channel = tl.arange(0, WIDTH_K)[None, :]
    token = tl.arange(0, 64)[None, :]
    value = block * BV + tl.arange(0, BV)[None, :]
    in_state = (tl.arange(0, WIDTH_K)[:, None] < K) & (value < V)
    state_offset = (n.to(tl.int64) * H + head) * K * V + tl.arange(0, WIDTH_K)[:, None] * V + value
    first = (begin + tl.maximum(chunks - 1, 0).to(tl.int64) * 64) * H + head  # of a [tokens, H] table
    q_decayed += first * WIDTH_K
    k_decayed += first * WIDTH_K
    w += first * WIDTH_K
    a_qk += first * 64
    gate += first * K
    d_output += first * V
    dv_new += first * WIDTH_V
    last_slot = slot.to(tl.int64) + tl.maximum(chunks - 1, 0)
    dh += (last_slot * H + head) * WIDTH_K * WIDTH_V + tl.arange(0, WIDTH_K)[:, None] * WIDTH_V + value

    d_state = tl.zeros((WIDTH_K, BV), tl.float32)
    if FINAL:
        d_state = tl.load(d_final_state + state_offset, mask=in_state, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES):
        rows = tl.minimum(length - (chunks - 1 - step) * 64, 64)
        rounded = d_state.to(OPERAND)
        tl.store(dh, rounded)
        k_tile = load_rows(k_decayed, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
        dv_tile = matmul(k_tile, rounded, PRECISION)
        gate_last = tl.load(
            gate + (rows - 1) * (H * K) + tl.arange(0, WIDTH_K), mask=tl.arange(0, WIDTH_K) < K, other=0.0
        )  # fmt: skip
        d_state = d_state * tl.exp2(gate_last)[:, None]
        if HAS_OUTPUT:
            d_out = load_rows(d_output, row, rows, value, V, H * V, True).to(tl.float32) * scale
            d_out = d_out.to(OPERAND)
            scores = load_rows(a_qk, row, rows, token, 64, H * 64, False)
            dv_tile = tl.dot(tl.trans(scores), d_out, dv_tile, input_precision=PRECISION, out_dtype=tl.float32)
            q_tile = load_rows(q_decayed, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
            d_state = tl.dot(tl.trans(q_tile), d_out, d_state, input_precision=PRECISION, out_dtype=tl.float32)
        written = dv_tile.to(OPERAND)
        tl.store(dv_new + row * (H * WIDTH_V) + value, written, mask=row < rows)
        w_tile = load_rows(w, row, rows, channel, WIDTH_K, H * WIDTH_K, False)
        d_state = tl.dot(tl.trans(w_tile), -written, d_state, input_precision=PRECISION, out_dtype=tl.float32)
        q_decayed -= 64 * tl.cast(H * WIDTH_K, tl.int64)
        k_decayed -= 64 * tl.cast(H * WIDTH_K, tl.int64)
        w -= 64 * tl.cast(H * WIDTH_K, tl.int64)
        a_qk -= 64 * tl.cast(H * 64, tl.int64)
        gate -= 64 * tl.cast(H * K, tl.int64)
        d_output -= 64 * tl.cast(H * V, tl.int64)
        dv_new -= 64 * tl.cast(H * WIDTH_V, tl.int64)
        dh -= tl.cast(H * WIDTH_K, tl.int64) * WIDTH_V
    if INITIAL:
        tl.store(d_initial_state + state_offset, d_state, mask=in_state)


@triton.jit(do_not_specialize=["T", "N"])
def backward_scan_kernel(
    q_decayed, k_decayed, w, u, a_qk, gate, cu_seqlens, initial_state, d_output, d_final_state, d_initial_state, h,
    v_new, dh, dv_new, T, N, H, K, V, scale,
    PACKED: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, HAS_OUTPUT: tl.constexpr,
    WIDTH_K: tl.constexpr, WIDTH_V: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    half = tl.num_programs(0) // 2
    if tl.program_id(0) < half:
        reverse_scan_sequence(
            tl.program_id(0), q_decayed, k_decayed, w, a_qk, gate, cu_seqlens, d_output, d_final_state, d_initial_state,
            dh, dv_new, T, N, H, K, V, scale, PACKED, FINAL, INITIAL, HAS_OUTPUT, WIDTH_K, WIDTH_V, BV, PRECISION,
            STAGES,
        )  # fmt: skip
    else:
        scan_sequence(
            tl.program_id(0) - half, q_decayed, k_decayed, w, u, a_qk, w, gate, cu_seqlens, initial_state, w, w, h,
            v_new,
            T, N, H, K, V, scale, PACKED, INITIAL, False, False, True, False, WIDTH_K, WIDTH_V, BV, PRECISION, STAGES,
        )  # fmt: skip


def backward_scan(
    prepared: Prepared,
    cumulative_gate: Tensor,
    value_width: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    d_output: Tensor | None,
    d_final_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Launches the stage on contiguous tensors.

    Returns h [slots, H, BK, BV], v_new [B, T, H, BV] (in u's place), dh and dv_new of the same shapes, where dh holds
    the gradient of the state at each chunk's end; and d_initial_state [N, H, K, V] if there is an initial state.
    """
    batch, tokens, heads, key_width = cumulative_gate.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    packed = cu_seqlens is not None
    slots = chunk_slots(tokens, sequences, packed)
    w, v_new = prepared.w, prepared.u
    width_k, width_v = w.shape[3], v_new.shape[3]
    h = torch.empty(slots, heads, width_k, width_v, dtype=w.dtype, device=w.device)
    dh = torch.empty_like(h)
    dv_new = torch.empty_like(v_new)
    d_initial_state = None if initial_state is None else torch.empty_like(initial_state)
    full = w.dtype == torch.float32
    config = configs.chunk_config(width_k, full)
    halves = 2 * sequences * heads
    block_v, warps = configs.backward_scan_tile(config, halves, width_v, multiprocessors(w))
    backward_scan_kernel[(halves * (width_v // block_v),)](
        prepared.q_decayed, prepared.k_decayed, w, prepared.u, prepared.a_qk, cumulative_gate, cu_seqlens,
        initial_state, w if d_output is None else d_output, d_final_state, d_initial_state, h, v_new, dh, dv_new,
        tokens, sequences, heads, key_width, value_width, key_width**-0.5,
        PACKED=packed, INITIAL=initial_state is not None, FINAL=d_final_state is not None,
        HAS_OUTPUT=d_output is not None, WIDTH_K=width_k, WIDTH_V=width_v, BV=block_v,
        PRECISION="tf32x3" if full else "tf32", STAGES=config.backward_scan_stages, num_warps=warps,
    )  # fmt: skip
    return h, v_new, dh, dv_new, d_initial_state
