"""A pre-norm decoder whose layers are built from a pattern of mixers.

    h = embed(tokens)
    for each layer:  h = h + mixer(norm(h));  h = h + swiglu(norm(h))
    logits = head(norm(h))

``MIXERS`` maps a name in ``ModelArgs.layer_pattern`` to what builds the layer's token mixer; "kda" is the one there is.
A new mixer is a module with the methods of ``Mixer`` and one line in that table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols.model import BaseModelArgs, ModelProtocol
from torchtitan.tools.logging import logger

from .attention import Backends, KimiDeltaAttention
from .cache import LayerCache, ModelCache
from .initialize import Initializer

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
        ffn_width: hidden width of the SwiGLU.
        norm_eps: of every RMSNorm.
        tie_embeddings: the head uses the embedding's weight.
        gate, lower_bound, allow_neg_eigval, output_gate: of the KDA layers, see ``KimiDeltaAttention``.
        attn_type: torchtitan's name for how documents are told apart: "varlen" resets state and convolution at each
            document's end, "sdpa" lets them run through a row.
        train_backend, eval_backend, prefill_backend, recurrent_max_tokens, impl: see ``Backends``.
    """

    vocab_size: int = 264
    dim: int = 256
    n_layers: int = 2
    layer_pattern: list[str] = field(default_factory=lambda: ["kda"])
    n_heads: int = 4
    key_width: int = 32
    value_width: int = 32
    conv_width: int = 4
    ffn_width: int = 512
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
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "key_width", "value_width", "conv_width", "ffn_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.key_width > 256:
            raise ValueError(f"key_width must be at most 256, got {self.key_width}")
        if not self.layer_pattern:
            raise ValueError("layer_pattern must name at least one mixer")
        for name in self.layer_pattern:
            if name not in MIXERS:
                raise ValueError(f"layer_pattern: no mixer is called {name!r}; there are {', '.join(sorted(MIXERS))}")
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
            impl=cast(Any, self.impl),
        )

    def mixer_of(self, layer: int) -> str:
        return self.layer_pattern[layer % len(self.layer_pattern)]

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters, and operations a token of a training step (forward and backward).

        6 for each parameter that multiplies (an untied embedding only looks up), and 3 times the mixers' own forward
        operations: the backward costs twice the forward, what it recomputes not counted.
        """
        decoder = cast(Decoder, model)
        nparams = sum(p.numel() for p in decoder.parameters())
        embedding = decoder.tok_embeddings.weight.numel()
        multiplied = nparams if self.tie_embeddings else nparams - embedding
        core = sum(cast(Block, layer).mixer.core_flops_per_token() for layer in decoder.layers.values())
        return nparams, 6 * multiplied + 3 * core


class Mixer(Protocol):
    """What a layer asks of its token mixer, beside being an ``nn.Module``."""

    num_heads: int

    def gather(self) -> tuple[Tensor, ...]:
        """Parameters that FSDP gathers apart from the layer's own, passed back to ``mix``."""
        ...

    def new_cache(self) -> LayerCache: ...

    def core_flops_per_token(self) -> int: ...

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


MIXERS: dict[str, Callable[[ModelArgs], Mixer]] = {"kda": _build_kda}


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.w1 = nn.Linear(dim, width, bias=False)
        self.w2 = nn.Linear(width, dim, bias=False)
        self.w3 = nn.Linear(dim, width, bias=False)

    def init_weights(self, init: Initializer, name: str, output_std: float) -> None:
        std = self.w1.in_features**-0.5
        init.trunc_normal(self.w1.weight, f"{name}.w1.weight", std)
        init.trunc_normal(self.w3.weight, f"{name}.w3.weight", std)
        init.trunc_normal(self.w2.weight, f"{name}.w2.weight", output_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """One layer: a mixer and a SwiGLU, each behind its norm and added to the stream."""

    def __init__(self, args: ModelArgs, layer: int):
        super().__init__()
        self.mixer_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.mixer = MIXERS[args.mixer_of(layer)](args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = SwiGLU(args.dim, args.ffn_width)
        # Projections start at 1 / sqrt(dim), 0.022 at a width of 2,048; the stream sums 2 n_layers outputs.
        self.output_std = args.dim**-0.5 / (2 * args.n_layers) ** 0.5

    def init_weights(self, init: Initializer, name: str) -> None:
        self.mixer_norm.reset_parameters()
        self.ffn_norm.reset_parameters()
        self.mixer.init_weights(init, f"{name}.mixer", self.output_std)
        self.feed_forward.init_weights(init, f"{name}.feed_forward", self.output_std)

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
        return x + self.feed_forward(self.ffn_norm(x))


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
        """Fills every parameter (there are no buffers), the same however the model is sharded.

        Args:
            buffer_device: torchtitan's; unused.
            seed: of the draws; ``torch.initial_seed()`` if not given.
        """
        init = Initializer(seed)
        args = self.model_args
        # A tied head multiplies by the embedding, so its rows take the head's scale.
        head_std = args.dim**-0.5
        init.normal(self.tok_embeddings.weight, "tok_embeddings.weight", head_std if args.tie_embeddings else 1.0)
        for name, layer in self.layers.items():
            cast(Block, layer).init_weights(init, f"layers.{name}")
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

        Raises:
            TypeError: for attn_type "sdpa", which has no masks (torchtitan's validator asks all the same).
        """
        if self.model_args.attn_type != "varlen":
            raise TypeError("attn_type 'sdpa' has no document masks")
        if tokenizer.eos_id is None:
            raise ValueError("attn_type 'varlen' needs a tokenizer with an end-of-sequence token")
        cu_seqlens = document_offsets(input_batch, tokenizer.eos_id)
        tokens = input_batch.shape[1]
        return VarlenMetadata(cu_seqlens, cu_seqlens, tokens, tokens)

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
        self._announce(tokens.device, max_tokens, cache)
        h = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers.values()):
            gathered = cast(Block, layer).mixer.gather()
            h = layer(h, gathered, cu_seqlens, None if cache is None else cache[i], max_tokens)
        return self.output(self.norm(h))

    def _announce(self, device: torch.device, max_tokens: int, cache: ModelCache | None) -> None:
        """Logs, the first time each phase runs, which backend and implementation it runs on."""
        for layer in self.layers.values():
            mixer = cast(Block, layer).mixer
            if isinstance(mixer, KimiDeltaAttention):
                phase = mixer.phase(None if cache is None else cast(Any, cache[0]), max_tokens)
                line = mixer.backends.ran(phase, max_tokens, device)
                if line not in self._announced:
                    self._announced.add(line)
                    logger.info(line)
                return


def document_offsets(tokens: Tensor, eos_id: int) -> Tensor:
    """Packed offsets of the documents in a batch, laid end to end.

    A document ends after each end-of-sequence token and at each row's end. On a GPU the number of documents is not
    known to the host, so the offsets have a fixed capacity and are filled up with repeated ends: empty sequences.

    Args:
        tokens: [B, T].
        eos_id: the end-of-sequence token.

    Returns:
        int32 [N + 1], from 0 to B * T, on the tokens' device; made without a synchronisation.

    Raises:
        RuntimeError: (asynchronously, on a GPU) more documents than the capacity, one for every eight tokens a row.
    """
    rows, length = tokens.shape
    total = rows * length
    ends = tokens == eos_id
    ends[:, -1] = True
    ends = ends.flatten()
    if not tokens.is_cuda:
        return F.pad(ends.nonzero().squeeze(1) + 1, (1, 0)).to(torch.int32)
    capacity = rows * (length // 8 + 1)
    message = "document_offsets: more documents than one for every eight tokens"
    torch.ops.aten._assert_async.msg(ends.sum() <= capacity, message)
    positions = torch.arange(1, total + 1, device=tokens.device, dtype=torch.int32)
    slots = torch.where(ends, ends.cumsum(0), capacity + 1)  # what ends nothing goes to one slot past the last
    slots = slots.clamp(max=capacity + 1)
    offsets = torch.full((capacity + 2,), total, device=tokens.device, dtype=torch.int32)
    offsets[0] = 0
    return offsets.scatter(0, slots, positions)[: capacity + 1].contiguous()


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
}
