"""Full attention without positions: multi-head latent attention (MLA) and grouped-query attention (GQA).

Kimi Linear puts one such layer after three KDA layers. Nothing is rotated: the KDA layers tell where a token stands.

    MLA:  q = W_q x                                  per head [nope | rope]
          [c | r] = W_kva x;  c = rmsnorm(c)         c: the latent, kv_lora_rank wide; r: one key part for all heads
          [k | v] = W_kvb c                          per head
          o = attention(q, [k | r], v);  y = W_o o
    GQA:  q, k, v = W_q x, W_k x, W_v x;  o = attention(q, k, v);  y = W_o o       groups of query heads share k and v

Attention is causal and stays inside a sequence. Packed sequences run in flash attention's variable-length form
(``torch.nn.attention.varlen``, 16-bit, CUDA), which takes one head width: a narrower v is filled up with zeros. Rows
that are sequences of their own run in PyTorch's scaled dot-product attention, cuDNN's first. FP32 and the CPU take one
product a sequence (``document_attention``).

Decode keeps, of a token, MLA's [c | r] alone, 576 numbers at the released width against 10,240 for keys and values, and
never expands it: W_kvb's key half goes to the query, its value half to the output (the absorbed form), so that a step
reads the cache and no more. Sources: Kimi Linear, arXiv 2510.26692; DeepSeek-V2, arXiv 2405.04434.
"""

from __future__ import annotations

import inspect
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

from .cache import TokenCache
from .initialize import Initializer

LATENT_NORM_EPS = 1e-6
"""Of the latent's RMSNorm: the released model's own, whatever the epsilon of the others."""

_FLASH_MAX_WIDTH = 256
# Fastest first; each is taken where it can run. The last two serve FP32.
_SDPA = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# Later releases of torch want to be told that heads are grouped; earlier ones just take them.
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


# ---- attention over packed sequences ----


def _spans(cu_q: Tensor, cu_k: Tensor) -> list[tuple[slice, slice]]:
    """The rows of each sequence that has a query, in q and in k."""
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    pairs = zip(ends_q, ends_q[1:], ends_k, ends_k[1:])
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a]


def _one_document(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of one sequence, q [Tq, H, D] being its last Tq tokens, k [Tk, G, D] and v [Tk, G, V]."""
    mask = None
    if len(q) != len(k):
        mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    o = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return o[0].transpose(0, 1)


def _one_document_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """By the formula: autograd does not record inside an operator. P = softmax(scale q k^T) is formed again."""
    groups = k.shape[1]
    # [T, H, D] to [G, H / G, T, D]; keys and values serve each of a group's heads.
    dtype = torch.promote_types(q.dtype, torch.float32)
    q, do = (tensor.to(dtype).unflatten(1, (groups, -1)).permute(1, 2, 0, 3) for tensor in (q, do))
    k, v = (tensor.to(dtype).transpose(0, 1)[:, None] for tensor in (k, v))
    future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(k.shape[2] - q.shape[2] + 1)
    p = torch.softmax((q @ k.mT * scale).masked_fill(future, -float("inf")), -1)
    dp = do @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq = (ds @ k).permute(2, 0, 1, 3).flatten(1, 2)
    dk, dv = ((weights.mT @ rows).sum(1).transpose(0, 1) for weights, rows in ((ds, q), (p, do)))
    return dq, dk, dv


@torch.library.custom_op("titan_kda::document_attention", mutates_args=())
def document_attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> Tensor:
    """Causal attention inside packed sequences, one product a sequence; reads the offsets on the host.

    Args:
        q: [Tq, H, D]; a sequence's queries are its last tokens.
        k, v: [Tk, G, D] and [Tk, G, V], H a multiple of G.
        cu_q, cu_k: [N + 1], where each sequence's rows begin and end.
        scale: of the products q k.

    Returns:
        [Tq, H, V]; zero past the last sequence.
    """
    o = q.new_zeros(*q.shape[:2], v.shape[2])
    for rows, seen in _spans(cu_q, cu_k):
        o[rows] = _one_document(q[rows], k[seen], v[seen], scale)
    return o


@document_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


@torch.library.custom_op("titan_kda::document_attention_backward", mutates_args=())
def _document_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, seen in _spans(cu_q, cu_k):
        dq[rows], dk[seen], dv[seen] = _one_document_backward(do[rows], q[rows], k[seen], v[seen], scale)
    return dq, dk, dv


@_document_attention_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, scale: float):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, do: Tensor):
    return *_document_attention_backward(do, *ctx.saved_tensors, ctx.scale), None, None, None


document_attention.register_autograd(_differentiate, setup_context=_keep)


def flash_runs(q: Tensor) -> bool:
    """Whether packed sequences run in flash attention's variable-length form: 16-bit tensors on a CUDA device."""
    return _is_16_bit_cuda(q.device, q.dtype)


def _is_16_bit_cuda(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, scale: float
) -> Tensor:
    """Causal attention inside packed sequences, [Tq, H, V]; ``document_attention`` says what of what.

    Rows past the last offset are read by nobody, come out as zero and get no gradient. ``max_q`` and ``max_k`` bound
    the sequences' lengths.

    Raises:
        ValueError: heads wider than flash attention takes.
    """
    if not flash_runs(q):
        return document_attention(q, k, v, cu_q, cu_k, scale)
    value_width = v.shape[2]
    width = -(-max(q.shape[2], value_width) // 8) * 8
    if width > _FLASH_MAX_WIDTH:
        raise ValueError(f"attention heads must be at most {_FLASH_MAX_WIDTH} wide on a GPU, got {width}")
    live_q = (torch.arange(q.shape[0], device=q.device) < cu_q[-1])[:, None, None]
    live_k = live_q if cu_k is cu_q else (torch.arange(k.shape[0], device=k.device) < cu_k[-1])[:, None, None]
    q, k, v = (
        F.pad(torch.where(live, tensor, 0), (0, width - tensor.shape[2]))
        for live, tensor in ((live_q, q), (live_k, k), (live_k, v))
    )
    grouped = _GROUPED if q.shape[1] != k.shape[1] else {}
    # The window reaches back without end and not ahead: causal, the last query at the last key.
    o = varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(o, Tensor)
    return torch.where(live_q, o[..., :value_width], 0)


def row_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention inside each row: q [B, T, H, D], k [B, T, G, D], v [B, T, G, V] to [B, T, H, V]."""
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    if not q.is_cuda:
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    else:
        with sdpa_kernel(_SDPA, set_priority=True):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return o.transpose(1, 2)


def token_attention(query: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, scale: float) -> Tensor:
    """One query a sequence against its cache, scores and softmax in FP32.

    Args:
        query: [N, G, H / G, D].
        keys, values: [N, G, C, D] and [N, G, C, V], finite past a sequence's length too.
        lengths: [N], how many of the C tokens are a sequence's own.
        scale: of the products.

    Returns:
        [N, G, H / G, V], in the cache's dtype.
    """
    dead = torch.arange(keys.shape[2], device=keys.device) >= lengths[:, None]
    query = query.to(keys.dtype)
    with torch.autocast(query.device.type, enabled=False):
        if flash_runs(query):  # a product of 16-bit operands that keeps its FP32 sums
            flat = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(1, 2), out_dtype=torch.float32)
            scores = flat.unflatten(0, query.shape[:2])
        else:
            scores = (query @ keys.transpose(2, 3)).float()
        weights = torch.softmax((scores * scale).masked_fill(dead[:, None, None], -float("inf")), -1)
        return weights.to(values.dtype) @ values


# ---- the layers ----


def _local(tensor: Tensor) -> Tensor:
    """A parameter's shard on this rank, under tensor parallelism; the parameter itself elsewhere."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class FullAttention(nn.Module):
    """What the two kinds share: phases, the cache, packing. See ``LatentAttention`` and ``GroupedQueryAttention``."""

    num_heads: int
    scale: float
    wq: nn.Linear
    wo: nn.Linear

    def _query(self, x: Tensor) -> Tensor:
        """x [..., dim] to q [..., H, D], this rank's heads."""
        raise NotImplementedError

    def _kept(self, x: Tensor) -> tuple[Tensor, ...]:
        """What attention keeps of a token, x [..., dim] to tensors [..., width]; side by side they are the cache's."""
        raise NotImplementedError

    def _keys_values(self, *kept: Tensor) -> tuple[Tensor, Tensor]:
        """What was kept to k [..., G, D] and v [..., G, V]."""
        raise NotImplementedError

    def _to_cache(self, *kept: Tensor) -> Tensor:
        """What was kept, [T, width], as the cache holds it, [T, groups, width]."""
        raise NotImplementedError

    def _from_cache(self, rows: Tensor) -> tuple[Tensor, ...]:
        """The inverse of ``_to_cache``."""
        raise NotImplementedError

    def _token(self, q: Tensor, cache: TokenCache) -> Tensor:
        """One query a sequence, q [N, H, D], against the cache: [N, H, V]."""
        raise NotImplementedError

    def init_weights(self, init: Initializer, name: str, output_std: float) -> None:
        """Fills every parameter; ``output_std`` is the depth-scaled deviation of the output projection."""
        for child, module in self.named_children():
            if isinstance(module, nn.Linear):
                std = output_std if child == "wo" else self.wq.in_features**-0.5
                init.trunc_normal(module.weight, f"{name}.{child}.weight", std)
            elif isinstance(module, nn.RMSNorm):
                module.reset_parameters()

    def gather(self) -> tuple[Tensor, ...]:
        """Nothing is gathered apart from the layer's own parameters."""
        return ()

    def new_cache(self) -> TokenCache:
        return TokenCache()

    def ran(self, phase: str, x: Tensor, packed: bool) -> str:
        """The line that the log gets the first time a phase runs on inputs like x."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        if phase == "decode":
            how = "token_attention"
        elif not packed:
            how = "scaled_dot_product_attention"
        else:
            how = "varlen_attn" if _is_16_bit_cuda(x.device, dtype) else "document_attention"
        return f"Full attention {phase} runs {how}"

    def phase(self, cache: TokenCache | None, max_tokens: int) -> Literal["train", "eval", "prefill", "decode"]:
        if torch.is_grad_enabled():
            return "train"
        if cache is None:
            return "eval"
        return "decode" if max_tokens == 1 and cache.rows is not None else "prefill"

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None = None,
        cache: TokenCache | None = None,
        max_tokens: int | None = None,
        decay: tuple[Tensor, ...] = (),
    ) -> Tensor:
        """x [B, T, dim] to [B, T, dim].

        Args:
            x: the input, sequences along B; with ``cu_seqlens`` the B rows are one stream of B * T tokens.
            cu_seqlens: int32 [N + 1], where the stream's sequences begin and end; None: each row is a sequence. Rows
                past the last offset are padding.
            cache: what the N sequences carry; advanced in place. An empty one is filled. Further tokens for a filled
                one, more than one a sequence, read its lengths on the host.
            max_tokens: a bound on the sequences' lengths; T (B * T when packed) if not given. 1 with a filled cache is
                a decode step: one token for each of its sequences, in order, and padding after them.
            decay: what ``gather()`` gave: nothing.

        Raises:
            RuntimeError: gradients are on, and a cache was given.
        """
        rows, tokens, _ = x.shape
        if max_tokens is None:
            max_tokens = tokens if cu_seqlens is None else rows * tokens
        phase = self.phase(cache, max_tokens)
        if phase == "train" and cache is not None:
            raise RuntimeError(f"{type(self).__name__}: a cache is for inference; call it under torch.no_grad()")
        if phase == "decode":
            assert cache is not None
            return self._decode(x, cache)
        q, kept = self._query(x), self._kept(x)
        if cu_seqlens is None and cache is None:
            o = row_attention(q, *self._keys_values(*kept), self.scale)
            return self.wo(o.flatten(2))
        if cu_seqlens is None:
            cu_seqlens = torch.arange(0, rows * tokens + 1, tokens, dtype=torch.int32, device=q.device)
        cu_k, max_k = cu_seqlens, max_tokens
        if cache is None:
            k, v = self._keys_values(*kept)
            k, v = k.flatten(0, 1), v.flatten(0, 1)
        else:
            first = cache.rows is None
            kept = tuple(_local(part).flatten(0, 1) for part in kept)
            cache.extend(self._to_cache(*kept), cu_seqlens, max_tokens)
            if not first:
                packed, cu_k, max_k = cache.packed()
                kept = self._from_cache(packed)
            k, v = self._keys_values(*kept)
        o = packed_attention(q.flatten(0, 1), k, v, cu_seqlens, cu_k, max_tokens, max_k, self.scale)
        return self.wo(o.flatten(1).unflatten(0, (rows, tokens)))

    def _decode(self, x: Tensor, cache: TokenCache) -> Tensor:
        """One token for each of the cache's N sequences: the first N rows of x [B, T, dim]; the rest is padding."""
        assert cache.rows is not None
        live = cache.rows.shape[0]
        token = x.flatten(0, 1)[:live]
        q = self._query(token)
        cache.append(self._to_cache(*(_local(part) for part in self._kept(token))))
        o = self._token(q, cache).to(q.dtype)
        o = F.pad(o.flatten(1), (0, 0, 0, x.shape[0] * x.shape[1] - live))
        return self.wo(o.unflatten(0, tuple(x.shape[:2])))


class LatentAttention(FullAttention):
    """One MLA layer without positions.

    Args:
        dim: width of the residual stream.
        num_heads: H.
        kv_lora_rank: width of the latent that keys and values are made of.
        qk_nope_head_dim: width of a head's own part of queries and keys.
        qk_rope_head_dim: width of the part whose key all heads share; other models rotate it, this one does not.
        v_head_dim: width of a head's values.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        kv_lora_rank: int = 512,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
    ):
        super().__init__()
        self.num_heads = num_heads
        self.kv_lora_rank = kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        self.scale = (qk_nope_head_dim + qk_rope_head_dim) ** -0.5
        self.wq = nn.Linear(dim, num_heads * (qk_nope_head_dim + qk_rope_head_dim), bias=False)
        self.wkv_a = nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(kv_lora_rank, eps=LATENT_NORM_EPS)
        self.wkv_b = nn.Linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim), bias=False)
        self.wo = nn.Linear(num_heads * v_head_dim, dim, bias=False)

    def core_flops_per_token(self, seq_len: int) -> int:
        """Operations of attention's two products; as elsewhere in the field, the causal half is not taken off."""
        return 2 * self.num_heads * (self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim) * seq_len

    def _query(self, x: Tensor) -> Tensor:
        return self.wq(x).unflatten(-1, (-1, self.qk_nope_head_dim + self.qk_rope_head_dim))

    def _kept(self, x: Tensor) -> tuple[Tensor, ...]:
        latent, shared = self.wkv_a(x).split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        return self.kv_norm(latent), shared

    def _keys_values(self, *kept: Tensor) -> tuple[Tensor, Tensor]:
        latent, shared = kept
        per_head = self.wkv_b(latent).unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k, v = per_head.split([self.qk_nope_head_dim, self.v_head_dim], -1)
        if isinstance(shared, DTensor):  # each rank's heads give a part of its gradient
            shared = shared.to_local(grad_placements=[Partial()] * shared.device_mesh.ndim)
        shared = shared.unsqueeze(-2).expand(*k.shape[:-1], -1)
        return torch.cat([k, shared.to(k.dtype)], -1), v

    def _to_cache(self, *kept: Tensor) -> Tensor:
        latent, shared = kept
        return torch.cat([latent.to(shared.dtype), shared], -1)[:, None]

    def _from_cache(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows[:, 0].split([self.kv_lora_rank, self.qk_rope_head_dim], -1)

    def _token(self, q: Tensor, cache: TokenCache) -> Tensor:
        assert cache.rows is not None
        own, shared = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        per_head = _local(self.wkv_b.weight).unflatten(0, (-1, self.qk_nope_head_dim + self.v_head_dim))
        to_k, to_v = per_head.to(q.dtype).split([self.qk_nope_head_dim, self.v_head_dim], 1)  # [H, width, latent]
        query = torch.cat([torch.einsum("nhk,hkr->nhr", own, to_k), shared], -1)
        latents = cache.rows[..., : self.kv_lora_rank]
        o = token_attention(query[:, None], cache.rows, latents, cache.lengths, self.scale)[:, 0]  # [N, H, latent]
        return torch.einsum("nhr,hvr->nhv", o.to(q.dtype), to_v)


class GroupedQueryAttention(FullAttention):
    """One GQA layer without positions.

    Args:
        dim: width of the residual stream.
        num_heads: H, of the queries.
        num_kv_heads: G, of keys and values; divides H.
        head_width: of every head.
    """

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, head_width: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_width = num_heads, num_kv_heads, head_width
        self.scale = head_width**-0.5
        self.wq = nn.Linear(dim, num_heads * head_width, bias=False)
        self.wk = nn.Linear(dim, num_kv_heads * head_width, bias=False)
        self.wv = nn.Linear(dim, num_kv_heads * head_width, bias=False)
        self.wo = nn.Linear(num_heads * head_width, dim, bias=False)

    def core_flops_per_token(self, seq_len: int) -> int:
        """Operations of attention's two products; as elsewhere in the field, the causal half is not taken off."""
        return 2 * self.num_heads * 2 * self.head_width * seq_len

    def _query(self, x: Tensor) -> Tensor:
        return self.wq(x).unflatten(-1, (-1, self.head_width))

    def _kept(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wk(x), self.wv(x)

    def _keys_values(self, *kept: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (part.unflatten(-1, (-1, self.head_width)) for part in kept)
        return k, v

    def _to_cache(self, *kept: Tensor) -> Tensor:
        return torch.cat(self._keys_values(*kept), -1)

    def _from_cache(self, rows: Tensor) -> tuple[Tensor, ...]:
        return rows[..., : self.head_width].flatten(1), rows[..., self.head_width :].flatten(1)

    def _token(self, q: Tensor, cache: TokenCache) -> Tensor:
        assert cache.rows is not None
        keys, values = cache.rows.split(self.head_width, -1)
        grouped = q.unflatten(1, (keys.shape[1], -1))
        return token_attention(grouped, keys, values, cache.lengths, self.scale).flatten(1, 2)
