"""A pre-norm decoder whose layers are built from a pattern of mixers.

    h = embed(tokens)
    for each layer:  h = h + mixer(norm(h));  h = h + feed_forward(norm(h))
    logits = head(norm(h))

``MIXERS`` maps a name in ``ModelArgs.layer_pattern`` to what builds the layer's token mixer: "kda", "mla" (multi-head
latent attention) and "gqa" (grouped-query attention). A new mixer is a module with the methods of ``Mixer`` and one
line in that table. The feed-forward is a SwiGLU, or after the first layers a mixture of experts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.tools.logging import logger

from .attention import Backends, KimiDeltaAttention
from .cache import LayerCache, ModelCache
from .documents import OFFSETS, DocumentMasks, document_offsets
from .full_attention import FullAttention, GroupedQueryAttention, LatentAttention
from .initialize import Initializer
from .moe import MixtureOfExperts
from .packing import PackedLinear, pack

if TYPE_CHECKING:
    from torchtitan.components.tokenizer import BaseTokenizer


@dataclass
class ModelArgs(BaseModelArgs):
    """A model's shape and behaviour; every field can be set from a job's ``[architecture]`` or ``[kda]`` section.

    Attributes:
        vocab_size: rows of the embedding; at least the tokenizer's size.
        dim: width of the residual stream.
        n_layers: number of layers.
        layer_pattern: the mixers' names, repeated to ``n_layers``.
        n_heads, key_width, value_width: H, K and V of the KDA layers.
        conv_width: taps of their short convolutions.
        attn_heads: heads of the "mla" and "gqa" layers; 0: ``n_heads``.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: of the "mla" layers, see ``LatentAttention``.
        kv_heads: heads of keys and values in the "gqa" layers; 0: as many as of queries.
        head_width: of a "gqa" head; 0: ``dim`` divided by the heads.
        ffn_width: hidden width of the SwiGLU.
        num_experts: routed experts of a layer; 0: every layer has a SwiGLU of ``ffn_width``.
        num_experts_per_token: how many of them a token goes to.
        num_shared_experts: experts that every token goes to.
        expert_width: hidden width of each expert.
        first_k_dense: so many first layers have the SwiGLU all the same.
        routed_scaling_factor: of the routed experts' weights.
        moe_renormalize: whether a token's weights are divided by their sum.
        load_balance_coeff: how far a step moves the bias by which experts are chosen; 0: it stays as it is.
        num_expert_group, topk_group: 1; choosing groups of experts first is not supported.
        norm_eps: of every RMSNorm but MLA's, which has its own.
        tie_embeddings: the head uses the embedding's weight.
        gate, lower_bound, allow_neg_eigval, output_gate: of the KDA layers, see ``KimiDeltaAttention``.
        attn_type: torchtitan's name for how documents are told apart: "varlen" resets state and convolution at each
            document's end, "sdpa" lets them run through a row.
        train_backend, eval_backend, prefill_backend, recurrent_max_tokens, fuse_q_l2norm, impl: see ``Backends``.
    """

    vocab_size: int = 264
    dim: int = 256
    n_layers: int = 2
    layer_pattern: list[str] = field(default_factory=lambda: ["kda"])
    n_heads: int = 4
    key_width: int = 32
    value_width: int = 32
    conv_width: int = 4
    attn_heads: int = 0
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    kv_heads: int = 0
    head_width: int = 0
    ffn_width: int = 512
    num_experts: int = 0
    num_experts_per_token: int = 8
    num_shared_experts: int = 1
    expert_width: int = 1024
    first_k_dense: int = 1
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True
    load_balance_coeff: float = 1e-3
    num_expert_group: int = 1
    topk_group: int = 1
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    gate: str = "bounded"
    lower_bound: float = -5.0
    allow_neg_eigval: bool = False
    output_gate: str = "low_rank"
    attn_type: str = "varlen"
    train_backend: str = "chunk"
    eval_backend: str = "recurrent"
    prefill_backend: str = "auto"
    recurrent_max_tokens: int = 64
    fuse_q_l2norm: bool = True
    impl: str = "auto"

    def update_from_config(self, job_config: Any, **kwargs: Any) -> None:
        """Takes ``[architecture]`` (where set) and ``[kda]`` over the flavor's values, and checks the whole."""
        from .job_config import check_job, overrides

        check_job(job_config)
        for name, value in overrides(job_config).items():
            setattr(self, name, value)
        self.check()

    def check(self) -> None:
        """Raises ValueError with one line that names the field."""
        for name in _AT_LEAST_ONE:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _AT_LEAST_ZERO:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if self.key_width > 256:
            raise ValueError(f"key_width must be at most 256, got {self.key_width}")
        if not self.layer_pattern:
            raise ValueError("layer_pattern must name at least one mixer")
        for name in self.layer_pattern:
            if name not in MIXERS:
                raise ValueError(f"layer_pattern: no mixer is called {name!r}; there are {', '.join(sorted(MIXERS))}")
        if "gqa" in self.layer_pattern:
            if self.full_heads % self.group_heads:
                raise ValueError(
                    f"kv_heads must divide the number of heads: got {self.group_heads} with {self.full_heads} heads"
                )
            if not self.head_width and self.dim % self.full_heads:
                raise ValueError(f"head_width must be set: {self.full_heads} heads do not divide dim = {self.dim}")
        if self.num_experts:
            if not self.num_experts_per_token <= self.num_experts:
                raise ValueError(
                    f"num_experts_per_token must be at most num_experts = {self.num_experts}, "
                    f"got {self.num_experts_per_token}"
                )
            for name in ("num_expert_group", "topk_group"):
                if getattr(self, name) != 1:
                    raise ValueError(
                        f"{name} must be 1, got {getattr(self, name)}: experts in groups are not supported"
                    )
        if not -float("inf") < self.lower_bound < 0:
            raise ValueError(f"lower_bound must be negative and finite, got {self.lower_bound}")
        if not 0 < self.norm_eps < 1:
            raise ValueError(f"norm_eps must be above 0 and below 1, got {self.norm_eps}")
        for name, known in (
            ("gate", ("bounded", "softplus")),
            ("output_gate", ("low_rank", "full")),
            ("attn_type", ("varlen", "sdpa")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        self.backends()

    def backends(self) -> Backends:
        return Backends(
            train=cast(Any, self.train_backend),
            eval=cast(Any, self.eval_backend),
            prefill=cast(Any, self.prefill_backend),
            recurrent_max_tokens=self.recurrent_max_tokens,
            fuse_q_l2norm=self.fuse_q_l2norm,
            impl=cast(Any, self.impl),
        )

    def mixer_of(self, layer: int) -> str:
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def mixers(self) -> set[str]:
        """The mixers that some layer has."""
        return {self.mixer_of(i) for i in range(self.n_layers)}

    def has_experts(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.first_k_dense

    @property
    def full_heads(self) -> int:
        """Query heads of the full-attention layers."""
        return self.attn_heads or self.n_heads

    @property
    def group_heads(self) -> int:
        """Heads of keys and values of the "gqa" layers."""
        return self.kv_heads or self.full_heads

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and operations a token of a training step (forward and backward).

        6 for each parameter that multiplies (an untied embedding only looks up, and of the routed experts a token meets
        ``num_experts_per_token``), and 3 times the mixers' own forward operations: the backward costs twice the
        forward, what it recomputes not counted.
        """
        decoder = cast(Decoder, model)
        nparams = sum(p.numel() for p in decoder.parameters())
        embedding = decoder.tok_embeddings.weight.numel()
        multiplied = nparams if self.tie_embeddings else nparams - embedding
        blocks = [cast(Block, layer) for layer in decoder.layers.values()]
        routed = sum(p.numel() for block in blocks if block.moe is not None for p in block.moe.experts.parameters())
        if routed:
            multiplied -= routed - routed * self.num_experts_per_token // self.num_experts
        core = sum(block.mixer.core_flops_per_token(seq_len) for block in blocks)
        return nparams, 6 * multiplied + 3 * core


class Mixer(Protocol):
    """What a layer asks of its token mixer, beside being an ``nn.Module``."""

    num_heads: int

    def gather(self) -> tuple[Tensor, ...]:
        """Parameters that FSDP gathers apart from the layer's own, passed back to ``mix``."""
        ...

    def new_cache(self) -> LayerCache: ...

    def core_flops_per_token(self, seq_len: int) -> int:
        """Operations of a forward per token beside the parameters' products."""
        ...

    def init_weights(self, init: Initializer, name: str, output_std: float) -> None: ...

    def __call__(
        self, x: Tensor, cu_seqlens: Tensor | None, cache: Any, max_tokens: int | None, *, decay: Any
    ) -> Tensor: ...


def _build_kda(args: ModelArgs) -> Mixer:
    return KimiDeltaAttention(
        args.dim,
        args.n_heads,
        args.key_width,
        args.value_width,
        conv_width=args.conv_width,
        gate=cast(Any, args.gate),
        lower_bound=args.lower_bound,
        allow_neg_eigval=args.allow_neg_eigval,
        output_gate=cast(Any, args.output_gate),
        norm_eps=args.norm_eps,
        backends=args.backends(),
    )


def _build_mla(args: ModelArgs) -> Mixer:
    return LatentAttention(
        args.dim,
        args.full_heads,
        args.kv_lora_rank,
        args.qk_nope_head_dim,
        args.qk_rope_head_dim,
        args.v_head_dim,
    )


def _build_gqa(args: ModelArgs) -> Mixer:
    return GroupedQueryAttention(
        args.dim, args.full_heads, args.group_heads, args.head_width or args.dim // args.full_heads
    )


MIXERS: dict[str, Callable[[ModelArgs], Mixer]] = {"kda": _build_kda, "mla": _build_mla, "gqa": _build_gqa}

_AT_LEAST_ONE = (
    *("vocab_size", "dim", "n_layers", "n_heads", "key_width", "value_width", "conv_width", "ffn_width"),
    *("kv_lora_rank", "qk_nope_head_dim", "v_head_dim", "num_experts_per_token", "expert_width"),
)
_AT_LEAST_ZERO = (
    *("attn_heads", "qk_rope_head_dim", "kv_heads", "head_width", "num_experts", "num_shared_experts"),
    *("first_k_dense", "routed_scaling_factor", "load_balance_coeff"),
)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.w1 = nn.Linear(dim, width, bias=False)
        self.w2 = nn.Linear(width, dim, bias=False)
        self.w3 = nn.Linear(dim, width, bias=False)
        self._packed: PackedLinear | None = None

    def pack(self) -> None:
        """Until ``unpack()``, w1 and w3 are one product with copies of them where no gradients are on."""
        self._packed = pack([self.w1, self.w3])

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def unpack(self) -> None:
        self._packed = None

    def init_weights(self, init: Initializer, name: str, output_std: float) -> None:
        std = self.w1.in_features**-0.5
        init.trunc_normal(self.w1.weight, f"{name}.w1.weight", std)
        init.trunc_normal(self.w3.weight, f"{name}.w3.weight", std)
        init.trunc_normal(self.w2.weight, f"{name}.w2.weight", output_std)

    def forward(self, x: Tensor) -> Tensor:
        packed = None if torch.is_grad_enabled() else self._packed  # whose copies would take w1's and w3's gradients
        gate, up = (self.w1(x), self.w3(x)) if packed is None else packed(x)
        return self.w2(F.silu(gate) * up)


def _build_moe(args: ModelArgs) -> MixtureOfExperts:
    return MixtureOfExperts(
        args.dim,
        args.expert_width,
        args.num_experts,
        args.num_experts_per_token,
        args.num_shared_experts,
        args.routed_scaling_factor,
        args.moe_renormalize,
        args.load_balance_coeff,
    )


class Block(nn.Module):
    """One layer: a mixer and a feed-forward, each behind its norm and added to the stream.

    The feed-forward is ``feed_forward`` or, where ``moe_enabled`` (torchtitan's name), ``moe``; the other is None.
    """

    feed_forward: SwiGLU | None
    moe: MixtureOfExperts | None

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.mixer = MIXERS[args.mixer_of(layer)](args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.moe_enabled = args.has_experts(layer)
        self.feed_forward = None if self.moe_enabled else SwiGLU(args.dim, args.ffn_width)
        self.moe = _build_moe(args) if self.moe_enabled else None
        # Projections start at 1 / sqrt(dim), 0.022 at a width of 2,048; the stream sums 2 n_layers outputs.
        self.output_std = args.dim**-0.5 / (2 * args.n_layers) ** 0.5

    def init_weights(self, init: Initializer, name: str, buffer_device: torch.device | None = None) -> None:
        self.mixer_norm.reset_parameters()
        self.ffn_norm.reset_parameters()
        self.mixer.init_weights(init, f"{name}.mixer", self.output_std)
        if self.feed_forward is not None:
            self.feed_forward.init_weights(init, f"{name}.feed_forward", self.output_std)
        if self.moe is not None:
            self.moe.init_weights(init, f"{name}.moe", self.output_std, buffer_device)

    def forward(
        self,
        x: Tensor,
        gathered: tuple[Tensor, ...],
        cu_seqlens: Tensor | None = None,
        cache: LayerCache | None = None,
        max_tokens: int | None = None,
    ) -> Tensor:
        """x [B, T, dim]; ``gathered`` is what the mixer's ``gather()`` gave, outside a compiled block."""
        x = x + self.mixer(self.mixer_norm(x), cu_seqlens, cache, max_tokens, decay=gathered)
        feed_forward = self.moe if self.feed_forward is None else self.feed_forward
        assert feed_forward is not None
        return x + feed_forward(self.ffn_norm(x))


def unwrapped(module: Any) -> Any:
    """A module without the wrapper that ``torch.compile`` puts around it."""
    return getattr(module, "_orig_mod", module)


class TiedHead(nn.Module):
    """The output projection by the embedding's own weight; it has no parameter."""

    def __init__(self, embedding: nn.Embedding):
        super().__init__()
        self._embedding = [embedding]  # in a list, so that the module is not registered twice

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self._embedding[0].weight)


class Decoder(ModelProtocol):
    """The model that torchtitan trains: tokens to logits."""

    def __init__(self, model_args: ModelArgs):
        super().__init__(model_args)
        model_args.check()
        self.model_args = model_args
        self.tok_embeddings = nn.Embedding(model_args.vocab_size, model_args.dim)
        self.layers = nn.ModuleDict({str(i): Block(model_args, i) for i in range(model_args.n_layers)})
        self.norm = nn.RMSNorm(model_args.dim, eps=model_args.norm_eps)
        self.output: nn.Module = (
            TiedHead(self.tok_embeddings)
            if model_args.tie_embeddings
            else nn.Linear(model_args.dim, model_args.vocab_size, bias=False)
        )
        self.sequence_width = 1  # ranks that the stream is split among, under tensor parallelism
        self._announced: set[str] = set()

    def init_weights(self, buffer_device: torch.device | None = None, *, seed: int | None = None) -> None:
        """Fills every parameter and buffer, the same however the model is sharded.

        Args:
            buffer_device: where the experts' buffers go, torchtitan's; None: they stay where they are.
            seed: of the draws; ``torch.initial_seed()`` if not given.
        """
        init = Initializer(seed)
        args = self.model_args
        # A tied head multiplies by the embedding, so its rows take the head's scale.
        head_std = args.dim**-0.5
        init.normal(self.tok_embeddings.weight, "tok_embeddings.weight", head_std if args.tie_embeddings else 1.0)
        for name, layer in self.layers.items():
            cast(Block, layer).init_weights(init, f"layers.{name}", buffer_device)
        self.norm.reset_parameters()
        if isinstance(self.output, nn.Linear):
            init.trunc_normal(self.output.weight, "output.weight", head_std)

    def get_attention_masks(
        self,
        input_batch: Tensor,
        tokenizer: BaseTokenizer,
        extra_inputs: dict[str, Tensor] | None = None,
    ) -> VarlenMetadata:
        """Where the documents of a batch [B, T] begin and end, for attn_type "varlen".

        ``extra_inputs`` may hold them already (``DocumentCollator``).

        Raises:
            TypeError: for attn_type "sdpa", which has no masks (torchtitan's validator asks all the same).
        """
        if self.model_args.attn_type != "varlen":
            raise TypeError("attn_type 'sdpa' has no document masks")
        if tokenizer.eos_id is None:
            raise ValueError("attn_type 'varlen' needs a tokenizer with an end-of-sequence token")
        # Ours or any loader's: taken out here, since what stays in the dictionary goes to forward() as well.
        cu_seqlens = None if extra_inputs is None else extra_inputs.pop(OFFSETS, None)
        if cu_seqlens is None:
            cu_seqlens = document_offsets(input_batch, tokenizer.eos_id)
        dynamo = sys.modules.get("torch._dynamo")  # loaded, which takes seconds, only where a model is compiled
        if dynamo is not None:
            dynamo.maybe_mark_dynamic(cu_seqlens, 0)  # the number of documents changes from step to step
        tokens = input_batch.shape[1]
        return DocumentMasks(cu_seqlens, cu_seqlens, tokens, tokens)

    def new_cache(self) -> ModelCache:
        """An empty cache; the first forward that is given it fills it for its sequences."""
        return [cast(Block, layer).mixer.new_cache() for layer in self.layers.values()]

    def forward(
        self,
        tokens: Tensor,
        attention_masks: VarlenMetadata | None = None,
        *,
        cache: ModelCache | None = None,
    ) -> Tensor:
        """tokens [B, T] to logits [B, T, vocab_size].

        Args:
            tokens: int64. With masks, the B rows are one stream of B * T tokens.
            attention_masks: where the stream's sequences begin and end; None: each row is a sequence.
            cache: what the sequences carry, advanced in place; for inference.
        """
        cu_seqlens = None if attention_masks is None else attention_masks.cu_seq_q
        max_tokens = tokens.shape[1] if attention_masks is None else int(attention_masks.max_q)
        h = self.tok_embeddings(tokens)
        self._announce(h, max_tokens, cu_seqlens is not None or cache is not None, cache)
        may_pad = not isinstance(attention_masks, DocumentMasks)
        for i, layer in enumerate(self.layers.values()):
            mixer = unwrapped(cast(Block, layer).mixer)
            if isinstance(mixer, KimiDeltaAttention):
                mixer.may_pad = may_pad
            gathered = cast(Block, layer).mixer.gather()
            h = layer(h, gathered, cu_seqlens, None if cache is None else cache[i], max_tokens)
        return self.output(self.norm(h))

    def _announce(self, hidden: Tensor, max_tokens: int, packed: bool, cache: ModelCache | None) -> None:
        """Logs, the first time each phase runs, which backend and implementation it runs on."""
        kinds: set[type] = set()
        for i, layer in enumerate(self.layers.values()):
            mixer = unwrapped(cast(Block, layer).mixer)
            if type(mixer) in kinds:
                continue
            kinds.add(type(mixer))
            own = None if cache is None else cast(Any, cache[i])
            if isinstance(mixer, KimiDeltaAttention):
                line = mixer.backends.ran(mixer.phase(own, max_tokens), max_tokens, hidden.device)
            elif isinstance(mixer, FullAttention):
                line = mixer.ran(mixer.phase(own, max_tokens), hidden, packed)
            else:
                continue
            if line not in self._announced:
                self._announced.add(line)
                logger.info(line)


# K = V = 128 for the flavors that train on GPUs; their sizes count the embedding at 32,000 tokens.
FLAVORS: dict[str, ModelArgs] = {
    "debugmodel": ModelArgs(
        vocab_size=264, dim=256, n_layers=2, n_heads=4, key_width=32, value_width=32, ffn_width=512
    ),
    "340M": ModelArgs(
        vocab_size=32000, dim=1024, n_layers=24, n_heads=8, key_width=128, value_width=128, ffn_width=2816
    ),
    "1.3B": ModelArgs(
        vocab_size=32000, dim=2048, n_layers=24, n_heads=16, key_width=128, value_width=128, ffn_width=5632
    ),
    "kimi_linear_debug": ModelArgs(
        vocab_size=264,
        dim=192,
        n_layers=4,
        layer_pattern=["kda", "kda", "kda", "mla"],
        n_heads=4,
        key_width=32,
        value_width=32,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        ffn_width=512,
        num_experts=8,
        num_experts_per_token=2,
        expert_width=128,
        routed_scaling_factor=2.446,
        gate="softplus",
    ),
    # 1.1 billion parameters, 0.28 billion of them at work on a token.
    "kimi_linear_1b_a300m": ModelArgs(
        vocab_size=32000,
        dim=1024,
        n_layers=16,
        layer_pattern=["kda", "kda", "kda", "mla"],
        n_heads=8,
        key_width=128,
        value_width=128,
        ffn_width=2816,
        num_experts=64,
        num_experts_per_token=8,
        expert_width=320,
        routed_scaling_factor=2.446,
        gate="softplus",
    ),
    # As released: layers 4, 8, ..., 24 and 27 (from 1) are full attention.
    "kimi_linear_48b_a3b": ModelArgs(
        vocab_size=163840,
        dim=2304,
        n_layers=27,
        layer_pattern=[*["kda", "kda", "kda", "mla"] * 6, "kda", "kda", "mla"],
        n_heads=32,
        key_width=128,
        value_width=128,
        ffn_width=9216,
        num_experts=256,
        num_experts_per_token=8,
        expert_width=1024,
        routed_scaling_factor=2.446,
        gate="softplus",
    ),
}
# What the hybrid is measured against: the same model with full attention in every layer.
FLAVORS["kimi_linear_1b_a300m_full"] = replace(FLAVORS["kimi_linear_1b_a300m"], layer_pattern=["mla"])
