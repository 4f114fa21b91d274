"""Text from a model: prefill fills a cache from the prompts, decode advances it by one token a sequence.

Prompts of different lengths are prefilled as one packed stream and never padded, so a sequence's numbers do not depend
on its neighbours. Each sequence draws from a random generator of its own, so neither do its samples.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import VarlenMetadata

from .cache import ModelCache, select
from .data import ByteTokenizer


class NotFiniteError(ValueError):
    """Logits with NaN or infinity among them, of which no token can be drawn."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
        max_new_tokens: where a sequence ends at the latest.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw among so many likeliest tokens; 0: all.
        top_p: draw among the fewest likeliest tokens that hold this much probability; 1: all.
        seed: of the draws.
    """

    max_new_tokens: int = 128
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    seed: int = 0


@dataclass
class Sample:
    """One sequence as it grows.

    Attributes:
        prompt: its prompt's tokens.
        key: what makes its draws its own, beside the seed; its place in the batch if empty.
        tokens: what was generated, without the end-of-sequence token.
        finished: why it ended: "eos", "length" or "stop"; None while it grows, and for good if it was interrupted.
    """

    prompt: list[int]
    key: str = ""
    tokens: list[int] = field(default_factory=list)
    finished: str | None = None


@dataclass
class Speed:
    """Tokens and seconds of a call's two halves."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


def encode_prompt(tokenizer: BaseTokenizer, text: str) -> list[int]:
    """A prompt's tokens, after a beginning-of-sequence token where the tokenizer has one.

    Raises:
        ValueError: no tokens, or characters that no bytes stand for.
    """
    try:
        if not isinstance(tokenizer, ByteTokenizer):  # which takes the bytes that Python smuggles into a str
            text.encode()
        tokens = tokenizer.encode(text, add_bos=True, add_eos=False)
    except UnicodeEncodeError as error:
        raise ValueError(f"{text[:40]!r} is no text: {error.reason}") from None
    if not tokens:
        raise ValueError(f"{text[:40]!r} has no tokens")
    return tokens


def _full(logits: Tensor) -> Tensor:
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


def pick_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token from one row of logits [vocab_size], drawn on the CPU in FP64.

    Raises:
        NotFiniteError: logits that are not finite.
    """
    logits = logits.float().cpu()
    if not torch.isfinite(logits).all():
        raise NotFiniteError("the model's logits are not finite")
    if sampling.temperature < sys.float_info.min:  # 0, or a denormal, which may be flushed to it
        return int(logits.argmax())
    order = torch.sort(logits.double(), descending=True, stable=True)
    kept = (order.values - order.values[0]) / sampling.temperature  # at most 0, so that no temperature is too low
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    probabilities = torch.softmax(kept, 0)
    if sampling.top_p < 1:
        before = probabilities.cumsum(0) - probabilities  # the likeliest token always stays
        probabilities = torch.where(before < sampling.top_p, probabilities, 0)
    return int(order.indices[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def prefill(model: nn.Module, prompts: Sequence[Sequence[int]], cache: ModelCache, device: torch.device) -> Tensor:
    """Reads a piece of each sequence into the cache; returns the logits after its last token, [N, vocab_size].

    Raises:
        ValueError: a piece with no tokens.
    """
    lengths = [len(p) for p in prompts]
    if min(lengths) < 1:
        raise ValueError("a prompt needs at least one token")
    ends = torch.tensor(lengths).cumsum(0)
    stream = torch.tensor([t for p in prompts for t in p], device=device)[None]
    offsets = F.pad(ends, (1, 0)).to(device, torch.int32)
    logits = _full(_forward(model, stream, VarlenMetadata(offsets, offsets, max(lengths), max(lengths)), cache))
    return logits[0, ends.to(device) - 1]


@torch.no_grad()
def decode(model: nn.Module, tokens: Sequence[int], cache: ModelCache, device: torch.device) -> Tensor:
    """One token for each of the cache's N sequences; returns the next logits, [N, vocab_size]."""
    offsets = torch.arange(len(tokens) + 1, device=device, dtype=torch.int32)
    stream = torch.tensor(list(tokens), device=device)[None]
    return _full(_forward(model, stream, VarlenMetadata(offsets, offsets, 1, 1), cache))[0, : len(tokens)]


def _forward(model: nn.Module, stream: Tensor, masks: VarlenMetadata, cache: ModelCache) -> Tensor:
    """The model on a stream [1, T], padded past its last sequence to what sequence parallelism can divide."""
    missing = -stream.shape[1] % getattr(model, "sequence_width", 1)
    return model(F.pad(stream, (0, missing)), masks, cache=cache)


def generate(
    model: nn.Module,
    samples: Sequence[Sample],
    sampling: Sampling,
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | None = None,
    on_token: Callable[[int, int], bool] | None = None,
    on_end: Callable[[int], None] | None = None,
    speed: Speed | None = None,
) -> None:
    """Continues each sample's prompt, in place: what there is at an interruption stays.

    Args:
        model: a Decoder, in any layout; called uncompiled, in eval mode, and left in the mode it was in.
        samples: prompts of at least one token; lengths may differ. Prompts that are the same are read once.
        sampling: how tokens are drawn.
        eos_id: the token that ends a sequence; None: none does.
        vocab_size: the tokenizer's size, where the model's is rounded up: what lies past it is never drawn.
        device: of the model's inputs; the parameters' if not given.
        on_token: called with (sample, token) for each new token but eos; returning True ends that sequence ("stop").
        on_end: called with each sample when it ends.
        speed: filled as generation goes.

    Raises:
        ValueError: a prompt of no tokens.
        NotFiniteError: logits that are not finite.
    """
    if not samples:
        return
    device = next(model.parameters()).device if device is None else device
    speed = Speed() if speed is None else speed
    generators = [_generator(sampling.seed, sample.key or str(i)) for i, sample in enumerate(samples)]
    prompts = list(dict.fromkeys(tuple(sample.prompt) for sample in samples))
    row_of = {prompt: row for row, prompt in enumerate(prompts)}
    rows = [row_of[tuple(sample.prompt)] for sample in samples]
    with inference(model):
        cache = model.new_cache()  # type: ignore[operator]
        began = time.perf_counter()
        logits = prefill(model, prompts, cache, device)
        if rows != list(range(len(prompts))):
            cache, logits = select(cache, rows), logits[rows]
        active = list(range(len(samples)))
        while active:
            tokens = _agree(
                [pick_token(row[:vocab_size], sampling, generators[i]) for row, i in zip(logits, active)], device
            )
            now = time.perf_counter()
            if speed.prefill_tokens == 0:  # the first token comes out of prefill
                speed.prefill_tokens, speed.prefill_seconds = sum(map(len, prompts)), now - began
                began = now
            else:
                speed.decode_tokens, speed.decode_seconds = speed.decode_tokens + len(active), now - began
            going = []
            for row, (i, token) in enumerate(zip(active, tokens)):
                sample = samples[i]
                if token == eos_id:
                    sample.finished = "eos"
                else:
                    sample.tokens.append(token)
                    if on_token is not None and on_token(i, token):
                        sample.finished = "stop"
                    elif len(sample.tokens) >= sampling.max_new_tokens:
                        sample.finished = "length"
                if sample.finished is None:
                    going.append(row)
                elif on_end is not None:
                    on_end(i)
            if len(going) < len(active):
                cache = select(cache, going)
            active, tokens = [active[row] for row in going], [tokens[row] for row in going]
            if active:
                logits = decode(model, tokens, cache, device)


def _generator(seed: int, key: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _agree(tokens: list[int], device: torch.device) -> list[int]:
    """Rank 0's tokens on every rank: a last bit's difference must not send ranks down different texts."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return tokens
    shared = torch.tensor(tokens, device=device)
    dist.broadcast(shared, src=0)
    return shared.tolist()


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, compiled layers run eagerly; the model's mode comes back however this ends."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(training)


def settings_of(section: Any) -> Sampling:
    """Sampling from a job's [generation] section or parsed arguments of the same names."""
    return Sampling(section.max_new_tokens, section.temperature, section.top_k, section.top_p, section.seed)
