"""chunk_output and chunk_fwd_o_vk: the last stage of the chunked forward, alone.

    o = scale ((q 2^G) h + tril(a_qk) v_new)

per chunk, where h is the state at the chunk's start and G the cumulative log2 decay: none, one scalar per head (g), or
one per key channel (gk). Source: Kimi Linear, arXiv 2510.26692. No chunk waits for another.

With a scalar gate the intra-chunk weights are q k^T times the pair gate 2^(g_i - g_j), formed under the causal mask,
where it is at most 1. In 2^(g_i - g_last) 2^(g_last - g_j) the second factor would overflow once a chunk decays
by more than 88 nats.
"""

from typing import Any

import torch
from torch import Tensor

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
from .reference import naive_chunk_output

CHUNK_SIZES = (16, 32, 64, 128)
VALUE_BLOCKS = (32, 64, 128)

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
        impl: None, "triton" or "reference"; None picks Triton for CUDA tensors, once that path is written.

    Returns:
        o [B, T, H, V] in q's type.

    Raises:
        ValueError: a wrong shape, rank, head count, device, chunk_size or block_v; g with gk; gk without a_qk; neither
            a_qk nor k.
        TypeError: a wrong dtype.
        RuntimeError: grad mode is on and an input requires grad, unless impl="reference" in eager mode, which
            differentiates.
        NotImplementedError: impl="triton", until that path is written.
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
    eager_reference = resolve_impl(op, impl, q) == "reference" and runs_eagerly()
    if wants_grad(q, v_new, h, a_qk, k, g, gk) and not (impl == "reference" and eager_reference):
        raise RuntimeError(f"{op} has no backward: chunk_kda trains, or impl='reference' in eager mode differentiates")
    if eager_reference:
        return _reference(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, q.dtype)
    impl = resolve_impl(op, impl, q)
    return _CHUNK_OUTPUT_OP(q, v_new, h, a_qk, k, g, gk, scale, cu_seqlens, chunk_size, l2norm_q, block_v, impl)


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
        NotImplementedError: num_decodes or num_decode_tokens other than 0; impl="triton", until that path is written.
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
    scale = _scale(op, scale, q.shape[3])
    if wants_grad(q, v, h, *optional.values()):
        raise RuntimeError(f"{op} has no backward: chunk_kda trains, and chunk_output(impl='reference') differentiates")
    impl = resolve_impl(op, impl, q)
    _CHUNK_FWD_O_VK_OP(q, k, v, o, h, g, gk, a_qk, scale, cu_seqlens, chunk_size, use_exp2, block_v, impl)
    return o
