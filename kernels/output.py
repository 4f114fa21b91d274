"""chunk_output and chunk_fwd_o_vk: the last stage of the chunked forward, alone.

    o = scale ((q 2^G) h + tril(a_qk) v_new)

per chunk, where h is the state at the chunk's start and G the cumulative log2 decay: none, one scalar per head (g), or
one per key channel (gk). Source: Kimi Linear, arXiv 2510.26692. No chunk waits for another.

With a scalar gate the intra-chunk weights are q k^T times the pair gate 2^(g_i - g_j), formed under the causal mask,
where it is at most 1. In 2^(g_i - g_last) 2^(g_last - g_j) the second factor would overflow once a chunk decays
by more than 88 nats.

The Triton kernel has one program per (chunk, head, block of values); its tile is chunk_kda's own (output_tile in
chunk/scan.py). At K = V = 128 in bf16 the gk form reads 1,664 bytes for each token and head (512 of them are the state,
512 the gate) and writes 256; the scalar form reads 1,284. With one block of 128 values everything is read once; with
two, the second finds q, the gate and the weights in the L2 cache. In a pack, a one-program kernel first sums the
sequences' chunks, so that no offset goes to the host.

A block of 32 values is computed on a tile of 64: tiles 32 wide are among those that Triton has miscompiled on sm_90,
and what lies past the block is neither read nor written, so that it costs arithmetic alone.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import configs
from ._device import cdiv, multiprocessors, on_device
from ._operator import (
    CHUNK_SIZE,
    FLOAT_DTYPES,
    LOG2_E,
    MAX_KEY_WIDTH,
    check_cu_seqlens,
    check_device,
    check_dtype,
    check_rank,
    check_shape,
    register,
    resolve_impl,
    runs_eagerly,
    wants_grad,
)
from .chunk.scan import output_tile
from .chunk.tiles import block_width, load_rows, matmul, operand_dtype
from .reference import naive_chunk_output

CHUNK_SIZES = (16, 32, 64, 128)
VALUE_BLOCKS = (32, 64, 128)

# ---- the Triton path ----


@triton.jit(do_not_specialize=["T", "N", "chunks"])
def _chunk_starts_kernel(cu_seqlens, chunk_starts, T, N, chunks, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """chunk_starts[n]: how many chunks lie before sequence n, for n from 0 to N."""
    total = 0
    tl.store(chunk_starts, 0)
    for first in range(0, N, BLOCK):
        n = first + tl.arange(0, BLOCK)
        begin = tl.load(cu_seqlens + n, mask=n < N, other=0)
        end = tl.load(cu_seqlens + n + 1, mask=n < N, other=0)
        tl.device_assert((begin >= 0) & (begin <= end) & (end <= T), "cu_seqlens must rise from 0 to at most T")
        begin = tl.minimum(tl.maximum(begin, 0), T)
        end = tl.minimum(tl.maximum(end, begin), T)
        counts = tl.cdiv(end - begin, CHUNK)
        tl.store(chunk_starts + n + 1, total + tl.cumsum(counts, 0), mask=n < N)
        total += tl.sum(counts, 0)
    tl.device_assert(total <= chunks, "h must hold every chunk of the sequences")


@triton.jit
def _locate(cu_seqlens, chunk_starts, chunk, T, N, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Batch entry, first token and number of tokens of a chunk; none for a state that no sequence owns."""
    if PACKED:
        n = 0
        last = N - 1
        while n < last:  # ends at the last n with chunk_starts[n] <= chunk
            middle = (n + last + 1) // 2
            below = tl.load(chunk_starts + middle) <= chunk
            n = tl.where(below, middle, n)
            last = tl.where(below, last, middle - 1)
        begin = tl.minimum(tl.maximum(tl.load(cu_seqlens + n), 0), T)
        start = begin + (chunk - tl.load(chunk_starts + n)) * CHUNK
        end = tl.minimum(tl.maximum(tl.load(cu_seqlens + n + 1), begin), T)
        batch = 0
    else:
        chunks = tl.cdiv(T, CHUNK)
        batch = chunk // chunks
        start = (chunk % chunks) * CHUNK
        end = T
    return batch, start, tl.where(start < 0, 0, tl.minimum(end - start, CHUNK))


@triton.jit
def _output_block(
    index, q, k, v, h, a_qk, g, gk, o, cu_seqlens, chunk_starts,
    T, N, H, HG, K, V, scale, to_log2,
    v_batch, v_token, v_head, g_batch, g_token, g_head, h_key, h_value, o_batch, o_token, o_head, o_value,
    PACKED: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_G: tl.constexpr, HAS_GK: tl.constexpr, Q_NORM: tl.constexpr,
    OPERAND: tl.constexpr, CHUNK: tl.constexpr, WIDTH_K: tl.constexpr, STEP_K: tl.constexpr, WIDTH_V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk's output for one head and BV values. The blocks of a chunk's heads follow each other, so that programs
    that run together read whole rows of memory, and what they share from the L2 cache."""
    blocks = tl.cdiv(V, BV)
    block = index % blocks
    head = (index // blocks) % H
    chunk = index // (blocks * H)
    batch, start, rows = _locate(cu_seqlens, chunk_starts, chunk, T, N, CHUNK, PACKED)
    keys = K
    if PACKED:
        keys = tl.where(rows > 0, K, 0)  # nothing is read for a state that no sequence owns
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    channel = tl.arange(0, STEP_K)[None, :]
    value = block * BV + tl.arange(0, WIDTH_V)[None, :]
    end = tl.minimum((block + 1) * BV, V)
    causal = (row >= column) & (row < rows)
    token = batch.to(tl.int64) * T + start  # of a [B T, H] table, as wide as it gets
    q += (token * HG + head // (H // HG)) * K
    h += (chunk.to(tl.int64) * H + head) * K * V + value * h_value
    v += batch.to(tl.int64) * v_batch + start.to(tl.int64) * v_token + head.to(tl.int64) * v_head
    if not HAS_SCORES:
        k += (token * HG + head // (H // HG)) * K
    if HAS_GK:
        gk += (token * H + head) * K
    if HAS_G:
        g += batch.to(tl.int64) * g_batch + start.to(tl.int64) * g_token + head.to(tl.int64) * g_head
        gate_row = tl.load(g + row * g_token, mask=row < rows, other=0.0) * to_log2
        gate_column = tl.load(g + column * g_token, mask=column < rows, other=0.0) * to_log2

    if WIDTH_K > STEP_K:  # all but the last columns of q, in steps: in FP32 they do not fit shared memory together
        squares = tl.zeros((CHUNK, 1), tl.float32)
        products = tl.zeros((CHUNK, CHUNK), tl.float32)
        partial = tl.zeros((CHUNK, WIDTH_V), tl.float32)
        for _ in range(0, WIDTH_K - STEP_K, STEP_K):
            key = tl.trans(channel)
            state = tl.load(h + key * h_key, mask=(key < keys) & (value < end), other=0.0)
            q_tile = load_rows(q, row, rows, channel, keys, HG * K, True).to(tl.float32)
            squares += tl.sum(q_tile * q_tile, axis=1)[:, None]
            if not HAS_SCORES:
                k_tile = load_rows(k, row, rows, channel, keys, HG * K, True)
                products += matmul(q_tile.to(OPERAND), tl.trans(k_tile.to(OPERAND)), PRECISION)
            if HAS_GK:
                q_tile *= tl.exp2(load_rows(gk, row, rows, channel, keys, H * K, True) * to_log2)
            partial += matmul(q_tile.to(OPERAND), state.to(OPERAND), PRECISION)
            channel += STEP_K

    # Every load comes before the first use of one: they are then all on their way at once, and registers are where they
    # land.
    key = tl.trans(channel)
    state = tl.load(h + key * h_key, mask=(key < keys) & (value < end), other=0.0)
    q_tile = load_rows(q, row, rows, channel, keys, HG * K, True)
    if HAS_GK:
        decay = load_rows(gk, row, rows, channel, keys, H * K, True)
    if HAS_SCORES:
        scores = load_rows(a_qk + (token * H + head) * CHUNK, row, rows, column, CHUNK, H * CHUNK, False)
    else:
        k_tile = load_rows(k, row, rows, channel, keys, HG * K, True)
    v_tile = load_rows(v, row, rows, value, end, v_token, True)

    # The weights of the chunk's tokens, then q's decay: k meets q as it was given.
    if not HAS_SCORES:
        scores = matmul(q_tile.to(OPERAND), tl.trans(k_tile.to(OPERAND)), PRECISION)
        if WIDTH_K > STEP_K:
            scores += products
        if HAS_G:
            scores *= tl.exp2(tl.where(causal, gate_row - gate_column, 0.0))
    scores = tl.where(causal, scores.to(tl.float32), 0.0)
    row_scale = scale
    if Q_NORM:
        sums = tl.sum(q_tile.to(tl.float32) * q_tile.to(tl.float32), axis=1)[:, None]
        if WIDTH_K > STEP_K:
            sums += squares
        row_scale = scale * tl.rsqrt(sums + 1e-6)
    if HAS_GK:
        q_tile = q_tile.to(tl.float32) * tl.exp2(decay * to_log2)
    row_decay = None
    if HAS_G:
        row_decay = tl.exp2(gate_row)
    out = output_tile(
        q_tile.to(OPERAND), state.to(OPERAND), scores.to(OPERAND), v_tile.to(OPERAND), row_scale, PRECISION, row_decay
    )  # fmt: skip
    if WIDTH_K > STEP_K:
        if HAS_G:
            partial *= row_decay
        out += partial * row_scale
    o += batch.to(tl.int64) * o_batch + start.to(tl.int64) * o_token + head.to(tl.int64) * o_head
    tl.store(o + row * o_token + value * o_value, out.to(o.dtype.element_ty), mask=(row < rows) & (value < end))


@triton.jit(do_not_specialize=["T", "N", "total"])
def _chunk_output_kernel(
    q, k, v, h, a_qk, g, gk, o, cu_seqlens, chunk_starts,
    T, N, H, HG, K, V, total, scale, to_log2,
    v_batch, v_token, v_head, g_batch, g_token, g_head, h_key, h_value, o_batch, o_token, o_head, o_value,
    PACKED: tl.constexpr, HAS_SCORES: tl.constexpr, HAS_G: tl.constexpr, HAS_GK: tl.constexpr, Q_NORM: tl.constexpr,
    OPERAND: tl.constexpr, CHUNK: tl.constexpr, WIDTH_K: tl.constexpr, STEP_K: tl.constexpr, WIDTH_V: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block to a program; or, with STAGES, the blocks in turns, the next ones' loads under way through shared
    memory while one is worked on."""
    if STAGES is None:
        _output_block(
            tl.program_id(0), q, k, v, h, a_qk, g, gk, o, cu_seqlens, chunk_starts,
            T, N, H, HG, K, V, scale, to_log2,
            v_batch, v_token, v_head, g_batch, g_token, g_head, h_key, h_value, o_batch, o_token, o_head, o_value,
            PACKED, HAS_SCORES, HAS_G, HAS_GK, Q_NORM, OPERAND, CHUNK, WIDTH_K, STEP_K, WIDTH_V, BV, PRECISION,
        )  # fmt: skip
    else:
        for index in tl.range(tl.program_id(0), total, tl.num_programs(0), num_stages=STAGES):
            _output_block(
                index, q, k, v, h, a_qk, g, gk, o, cu_seqlens, chunk_starts,
                T, N, H, HG, K, V, scale, to_log2,
                v_batch, v_token, v_head, g_batch, g_token, g_head, h_key, h_value, o_batch, o_token, o_head, o_value,
                PACKED, HAS_SCORES, HAS_G, HAS_GK, Q_NORM, OPERAND, CHUNK, WIDTH_K, STEP_K, WIDTH_V, BV, PRECISION,
            )  # fmt: skip


def launch_chunk_output(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    h: Tensor,
    a_qk: Tensor | None,
    g: Tensor | None,
    gk: Tensor | None,
    o: Tensor,
    scale: float,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    l2norm_q: bool,
    block_v: int | None,
    *,
    head_major: bool,
    log2: bool,
    config: configs.OutputConfig | None = None,
) -> None:
    """Fills ``o`` [B, T, H, V], of any strides; ``head_major`` says how v, g and h lie (chunk_fwd_o_vk).

    ``config`` is for tuning; None takes the one of configs.py.
    """
    batch, tokens, _, value_width = o.shape
    heads, key_width = o.shape[2], q.shape[3]
    chunks = h.shape[0] if cu_seqlens is not None else batch * h.shape[1]
    sequences = 0 if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if o.numel() == 0 or chunks == 0 or (cu_seqlens is not None and sequences == 0):
        return
    q, v, h = q.contiguous(), v.contiguous(), h.contiguous()
    k, a_qk, g, gk = (None if x is None else x.contiguous() for x in (k, a_qk, g, gk))
    operands = [x for x in (q, v, a_qk, k if a_qk is None else None) if x is not None]
    dtype = operand_dtype(*operands)
    if head_major:
        v_strides, g_strides = (v.stride(0), v.stride(2), v.stride(1)), (heads * tokens, 1, tokens)
        h_strides = (1, key_width)
    else:
        v_strides, g_strides = v.stride()[:3], (heads * tokens, heads, 1)
        h_strides = (value_width, 1)
    width_k = block_width(key_width)
    if config is None:
        full = dtype == torch.float32
        config = configs.output_config(width_k, value_width, chunk_size, full, a_qk is None, block_v)
    total = chunks * heads * cdiv(value_width, config.block_v)
    programs = total
    if config.stages is not None:
        programs = min(total, config.programs * multiprocessors(q))
    with on_device(q):
        chunk_starts = None
        if cu_seqlens is not None:
            chunk_starts = torch.empty(sequences + 1, dtype=torch.int32, device=q.device)
            _chunk_starts_kernel[(1,)](
                cu_seqlens, chunk_starts, tokens, sequences, chunks, CHUNK=chunk_size, BLOCK=1024
            )
        _chunk_output_kernel[(programs,)](
            q, k, v, h, a_qk, g, gk, o, cu_seqlens, chunk_starts,
            tokens, sequences, heads, q.shape[2], key_width, value_width, total, scale, 1.0 if log2 else LOG2_E,
            *v_strides, *g_strides, *h_strides, *o.stride(),
            PACKED=cu_seqlens is not None, HAS_SCORES=a_qk is not None, HAS_G=g is not None, HAS_GK=gk is not None,
            Q_NORM=l2norm_q, OPERAND=_TRITON_TYPES[dtype], CHUNK=chunk_size, WIDTH_K=width_k,
            STEP_K=min(config.step_k, width_k), WIDTH_V=block_width(config.block_v), BV=config.block_v,
            PRECISION="tf32x3" if dtype == torch.float32 else "tf32", STAGES=config.stages,
            num_warps=config.num_warps, num_stages=1,
            maxnreg=config.registers,
        )  # fmt: skip


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# ---- the reference path ----


def _reference(
    q: Tensor,
    v_new: Tensor,
    h: Tensor,
    a_qk: Tensor | None,
    k: Tensor | None,
    g: Tensor | None,
    gk: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    l2norm_q: bool,
    dtype: torch.dtype,
) -> Tensor:
    """naive_chunk_output in FP32, rounded to ``dtype``; differentiable."""
    output = naive_chunk_output(
        q.float(),
        v_new.float(),
        h.float(),
        a_qk=None if a_qk is None else a_qk.float(),
        k=None if k is None else k.float(),
        g=g,
        gk=gk,
        scale=scale,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
        l2norm_q=l2norm_q,
    )
    return output.to(dtype).contiguous()


# ---- registration ----


def _chunk_output(
    q: Tensor,
    v_new: Tensor,
    h: Tensor,
    a_qk: Tensor | None,
    k: Tensor | None,
    g: Tensor | None,
    gk: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    l2norm_q: bool,
    block_v: int | None,
    impl: str,
) -> Tensor:
    if impl == "triton":
        output = torch.empty_like(v_new, dtype=q.dtype, memory_format=torch.contiguous_format)
        launch_chunk_output(
            q, k, v_new, h, a_qk, g, gk, output, scale, cu_seqlens, chunk_size, l2norm_q, block_v,
            head_major=False, log2=True,
        )  # fmt: skip
        return output
    return _reference(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, q.dtype)


def _chunk_output_fake(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, block_v, impl) -> Tensor:
    return q.new_empty(v_new.shape)


_CHUNK_OUTPUT_OP = register(
    "chunk_output(Tensor q, Tensor v_new, Tensor h, Tensor? a_qk, Tensor? k, Tensor? g, Tensor? gk, float scale, "
    "Tensor? cu_seqlens, int chunk_size, bool l2norm_q, int? block_v, str impl) -> Tensor",
    _chunk_output,
    _chunk_output_fake,
)


def _chunk_fwd_o_vk(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    h: Tensor,
    g: Tensor | None,
    gk: Tensor | None,
    a_qk: Tensor | None,
    scale: float,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    use_exp2: bool,
    block_v: int | None,
    impl: str,
) -> None:
    if impl == "triton":
        launch_chunk_output(
            q, k, v, h, a_qk, g, gk, o, scale, cu_seqlens, chunk_size, False, block_v, head_major=True, log2=use_exp2
        )  # fmt: skip
        return
    g = None if g is None else g.transpose(1, 2)
    if not use_exp2:
        g = None if g is None else LOG2_E * g
        gk = None if gk is None else LOG2_E * gk
    o.copy_(_reference(q, v.transpose(1, 2), h.mT, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, False, o.dtype))


def _chunk_fwd_o_vk_fake(q, k, v, o, h, g, gk, a_qk, scale, cu_seqlens, chunk_size, use_exp2, block_v, impl) -> None:
    return None


_CHUNK_FWD_O_VK_OP = register(
    "chunk_fwd_o_vk(Tensor q, Tensor? k, Tensor v, Tensor(a!) o, Tensor h, Tensor? g, Tensor? gk, Tensor? a_qk, "
    "float scale, Tensor? cu_seqlens, int chunk_size, bool use_exp2, int? block_v, str impl) -> ()",
    _chunk_fwd_o_vk,
    _chunk_fwd_o_vk_fake,
)


# ---- public functions ----


def _check(
    op: str,
    forms: dict[str, str],
    q: Tensor,
    values: Tensor,
    h: Tensor,
    optional: dict[str, Tensor | None],
    cu_seqlens: Tensor | None,
    chunk_size: int,
    block_v: int | None,
) -> None:
    """Checks the inputs against ``forms``, each tensor's axes by name; the first entry is that of ``values``."""
    check_dtype(op, "q", q, FLOAT_DTYPES)
    check_rank(op, "q", q, "[B, T, Hg, K]")
    axes: dict[str, int] = dict(zip(("B", "T", "Hg", "K"), q.shape))
    if not 1 <= axes["K"] <= MAX_KEY_WIDTH:
        raise ValueError(f"{op}: K must be from 1 to {MAX_KEY_WIDTH}, got {axes['K']}")
    if chunk_size not in CHUNK_SIZES:
        raise ValueError(f"{op}: chunk_size must be one of {CHUNK_SIZES}, got {chunk_size}")
    if block_v is not None and block_v not in VALUE_BLOCKS:
        raise ValueError(f"{op}: block_v must be None or one of {VALUE_BLOCKS}, got {block_v}")
    axes["chunk_size"] = chunk_size
    if cu_seqlens is None:
        axes["chunks"] = (axes["T"] + chunk_size - 1) // chunk_size
    else:
        check_cu_seqlens(op, cu_seqlens, axes["B"], q.device)

    def check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        names = forms[name].strip("[]").split(", ")
        check_dtype(op, name, tensor, dtypes)
        check_rank(op, name, tensor, forms[name])
        for axis, size in zip(names, tensor.shape):
            axes.setdefault(
                axis, size
            )  # H and V come from the values, and how many chunks a pack has is not known here
        check_shape(op, name, tensor, forms[name], [axes[axis] for axis in names])
        check_device(op, name, tensor, q.device)

    check(next(iter(forms)), values, FLOAT_DTYPES)
    if axes["Hg"] < 1 or axes["H"] % axes["Hg"]:
        raise ValueError(f"{op}: H must be a multiple of q's head count {axes['Hg']}, got {axes['H']}")
    check("h", h, FLOAT_DTYPES)
    for name, tensor in optional.items():
        if tensor is not None:
            check(name, tensor, (torch.float32,) if name in ("g", "gk") else FLOAT_DTYPES)
    if optional["g"] is not None and optional["gk"] is not None:
        raise ValueError(f"{op}: g and gk exclude each other, got both")
    if optional["a_qk"] is None:
        if optional["gk"] is not None:
            raise ValueError(f"{op}: gk needs a_qk, got none")
        if optional["k"] is None:
            raise ValueError(f"{op}: k is needed to form a_qk, got neither")


def _scale(op: str, scale: float | None, key_width: int) -> float:
    if scale is None:
        return key_width**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"{op}: scale must be a float or None, got {type(scale).__name__}")
    return float(scale)


def chunk_output(
    q: Tensor,
    v_new: Tensor,
    h: Tensor,
    *,
    a_qk: Tensor | None = None,
    k: Tensor | None = None,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    l2norm_q: bool = False,
    block_v: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """The output of a chunked scan from its states: ``scale ((q 2^G) h + tril(a_qk) v_new)`` per chunk.

    Source: Kimi Linear, arXiv 2510.26692. For inference: see RuntimeError below.

    Args:
        q: [B, T, Hg, K], bf16, fp16 or fp32, K <= 256; each of the Hg query heads serves H / Hg value heads.
        v_new: [B, T, H, V], the corrected values before any decay; bf16, fp16 or fp32.
        h: the states at the chunks' starts, [B, chunks, H, K, V], or packed [chunks, H, K, V], each sequence's chunks
            after its predecessors'; bf16, fp16 or fp32.
        a_qk: [B, T, H, chunk_size], decayed, not yet scaled; what lies above the diagonal is never read. Without it the
            weights are formed from q, k and g.
        k: [B, T, Hg, K]; unused if a_qk is given.
        g: [B, T, H] fp32, a cumulative log2 decay per head that restarts with each chunk; or
        gk: [B, T, H, K] fp32, one per key channel, which needs a_qk. Neither means no decay.
        scale: None for 1 / sqrt(K).
        cu_seqlens: [N + 1] int32, as in ``chunk_kda``.
        chunk_size: 16, 32, 64 or 128.
        l2norm_q: scale each row by 1 / sqrt(sum(q^2) + 1e-6), as if q had been L2-normalised.
        block_v: the Triton kernel's block of values, 32, 64 or 128; None for the tuned one.
        impl: None, "triton" or "reference"; None is "triton" for CUDA tensors and "reference" for others.

    Returns:
        o [B, T, H, V] in q's type.

    Raises:
        ValueError: a wrong shape, rank, head count, device, chunk_size or block_v; g with gk; gk without a_qk; neither
            a_qk nor k.
        TypeError: a wrong dtype.
        RuntimeError: grad mode is on and an input requires grad, unless impl="reference" in eager mode, which
            differentiates.
    """
    op = "chunk_output"
    forms = {
        "v_new": "[B, T, H, V]",
        "h": "[B, chunks, H, K, V]" if cu_seqlens is None else "[chunks, H, K, V]",
        "k": "[B, T, Hg, K]",
        "g": "[B, T, H]",
        "gk": "[B, T, H, K]",
        "a_qk": "[B, T, H, chunk_size]",
    }
    _check(op, forms, q, v_new, h, {"k": k, "g": g, "gk": gk, "a_qk": a_qk}, cu_seqlens, chunk_size, block_v)
    scale = _scale(op, scale, q.shape[3])
    chosen = resolve_impl(op, impl, q)
    eager_reference = chosen == "reference" and runs_eagerly()
    if wants_grad(q, v_new, h, a_qk, k, g, gk) and not (impl == "reference" and eager_reference):
        raise RuntimeError(f"{op} has no backward: chunk_kda trains, or impl='reference' in eager mode differentiates")
    if eager_reference:
        return _reference(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, q.dtype)
    return _CHUNK_OUTPUT_OP(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, block_v, chosen)


def chunk_fwd_o_vk(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    h: Tensor,
    g: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
    use_exp2: bool = True,
    num_decodes: int = 0,
    num_decode_tokens: int = 0,
    prefill_metadata: Any = None,
    *,
    gk: Tensor | None = None,
    a_qk: Tensor | None = None,
    block_v: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """``chunk_output`` with the calling convention of aiter's ``chunk_fwd_o_opt_vk``; ``o`` is written and returned.

    Args:
        q, k: [B, T, Hg, K] token-major; each query head serves H / Hg value heads. k may be None where a_qk is given.
        v: [B, H, T, V] head-major, the corrected values before any decay.
        o: [B, T, H, V], bf16, fp16 or fp32; written in place. Rows past the last offset are unspecified.
        h: [B, chunks, H, V, K], or packed [chunks, H, V, K].
        g: [B, H, T] fp32 head-major, cumulative in its chunk; log2 if use_exp2, else natural.
        scale: None for 1 / sqrt(K).
        cu_seqlens: [N + 1] int32, as in ``chunk_kda``.
        chunk_size: 16, 32, 64 or 128.
        num_decodes, num_decode_tokens: of mixed batches; 0.
        prefill_metadata: ignored; it would save a synchronisation that is not made here.
        gk: [B, T, H, K] fp32 token-major, instead of g; it needs a_qk.
        a_qk: [B, T, H, chunk_size] token-major, decayed, not yet scaled; above the diagonal never read.
        block_v, impl: as in ``chunk_output``.

    Returns:
        o.

    Raises:
        ValueError, TypeError: as ``chunk_output``.
        NotImplementedError: num_decodes or num_decode_tokens other than 0.
        RuntimeError: grad mode is on and an input or o requires grad.
    """
    op = "chunk_fwd_o_vk"
    for name, count in (("num_decodes", num_decodes), ("num_decode_tokens", num_decode_tokens)):
        if count != 0:
            raise NotImplementedError(f"{op}: {name} must be 0 (decode tokens go to recurrent_kda_step), got {count}")
    forms = {
        "v": "[B, H, T, V]",
        "h": "[B, chunks, H, V, K]" if cu_seqlens is None else "[chunks, H, V, K]",
        "o": "[B, T, H, V]",
        "k": "[B, T, Hg, K]",
        "g": "[B, H, T]",
        "gk": "[B, T, H, K]",
        "a_qk": "[B, T, H, chunk_size]",
    }
    optional = {"o": o, "k": k, "g": g, "gk": gk, "a_qk": a_qk}
    _check(op, forms, q, v, h, optional, cu_seqlens, chunk_size, block_v)
    if any(stride == 0 and size > 1 for stride, size in zip(o.stride(), o.shape)):
        raise ValueError(f"{op}: o is written to and must not be an expanded tensor, got stride {o.stride()}")
    scale = _scale(op, scale, q.shape[3])
    if wants_grad(q, v, h, *optional.values()):
        raise RuntimeError(f"{op} has no backward: chunk_kda trains, and chunk_output(impl='reference') differentiates")
    impl = resolve_impl(op, impl, q)
    _CHUNK_FWD_O_VK_OP(q, k, v, o, h, g, gk, a_qk, scale, cu_seqlens, chunk_size, use_exp2, block_v, impl)
    return o
