"""Text from a model: prefill fills a cache from the prompts, decode advances it by one token a sequence.

Prompts of different lengths are prefilled as one packed stream and never padded, so a sequence's numbers do not depend
on its neighbours. Each sequence draws by a random generator of its own, so neither do its samples.

Sequences decode in slots: one that ends leaves its slot to the next prompt. Tokens are drawn on the device and go
straight into the next step; the host looks at them every few steps. On a GPU a step is one captured CUDA graph, where
every layer's cache has a fixed size; where caches grow with their sequences or experts count their tokens, if the
caller asks for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.tensor import DTensor
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import VarlenMetadata

from .attention import KimiDeltaAttention
from .cache import KDACache, ModelCache, TokenCache, select
from .data import ByteTokenizer
from .model import SwiGLU
from .moe import MixtureOfExperts
from .sampling import sample_tokens


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
    """Tokens and seconds of a call's two halves, and of the captures of a decode step, which count in neither.

    ``graph`` tells whether decode replayed a CUDA graph.
    """

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    capture_seconds: float = 0.0
    graph: bool = False


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


def _to(device: torch.device, values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
    """A few numbers on the device, without waiting for it."""
    return torch.tensor(list(values), dtype=dtype).to(device, non_blocking=True)


@torch.no_grad()
def prefill(model: nn.Module, prompts: Sequence[Sequence[int]], cache: ModelCache, device: torch.device) -> Tensor:
    """Reads a piece of each sequence into the cache; returns the logits after its last token, [N, vocab_size].

    Raises:
        ValueError: a piece with no tokens.
    """
    lengths = [len(p) for p in prompts]
    if min(lengths) < 1:
        raise ValueError("a prompt needs at least one token")
    ends = list(accumulate(lengths))
    stream = _to(device, [t for p in prompts for t in p])[None]
    offsets = _to(device, [0, *ends], torch.int32)
    logits = _full(_forward(model, stream, VarlenMetadata(offsets, offsets, max(lengths), max(lengths)), cache))
    return logits[0].index_select(0, _to(device, [end - 1 for end in ends]))


@torch.no_grad()
def decode(model: nn.Module, tokens: Sequence[int], cache: ModelCache, device: torch.device) -> Tensor:
    """One token for each of the cache's N sequences; returns the next logits, [N, vocab_size]."""
    return _decode(model, _to(device, tokens), cache)


def _decode(model: nn.Module, tokens: Tensor, cache: ModelCache) -> Tensor:
    offsets = torch.arange(len(tokens) + 1, device=tokens.device, dtype=torch.int32)
    return _full(_forward(model, tokens[None], VarlenMetadata(offsets, offsets, 1, 1), cache))[0, : len(tokens)]


def _forward(model: nn.Module, stream: Tensor, masks: VarlenMetadata, cache: ModelCache) -> Tensor:
    """The model on a stream [1, T], padded past its last sequence to what sequence parallelism can divide."""
    if missing := -stream.shape[1] % getattr(model, "sequence_width", 1):
        stream = F.pad(stream, (0, missing))
    return model(stream, masks, cache=cache)


Pick = Callable[[Tensor, Tensor], Tensor]
"""Logits [N, V] and uniform numbers [N] to tokens int64 [N], the same on every rank."""


class _Batch:
    """Sequences that decode together, each in a row; what of it a cache's kind decides is in the two below.

    Attributes:
        rows: the sample in each row; None: no sample.
        tokens: [len(rows)], int64, each row's last token, on the device.
        burst: steps between two looks at the tokens; what is drawn past a sequence's end is thrown away.
        ahead: no more steps than these will follow, as far as the caller knows.
        capture_seconds: what capturing steps has taken.
    """

    def __init__(self, model: nn.Module, limit: int, device: torch.device, pick: Pick):
        self.model, self.limit, self.device, self.pick = model, limit, device, pick
        self.rows: list[int | None] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.burst = _BURST.get(device.type, 8)
        self.ahead = sys.maxsize
        self.capture_seconds = 0.0

    def live(self) -> list[int]:
        return [sample for sample in self.rows if sample is not None]

    def room(self) -> int:
        """How many samples can be admitted now."""
        raise NotImplementedError

    def admit(self, samples: list[int], prompts: list[tuple[int, ...]], uniforms: Tensor) -> Tensor:
        """Reads the samples' prompts, equal ones once; returns each one's first token."""
        unique = list(dict.fromkeys(prompts))
        row_of = {prompt: row for row, prompt in enumerate(unique)}
        fresh = self.model.new_cache()  # type: ignore[operator]
        logits = prefill(self.model, unique, fresh, self.device)
        source = [row_of[prompt] for prompt in prompts]
        if source != list(range(len(unique))):
            fresh, logits = select(fresh, source), logits.index_select(0, _to(self.device, source))
        tokens = self.pick(logits, uniforms)
        self._insert(samples, [len(prompt) for prompt in prompts], fresh, tokens)
        return tokens

    def _insert(self, samples: list[int], lengths: list[int], fresh: ModelCache, tokens: Tensor) -> None:
        raise NotImplementedError

    def step(self, uniforms: Tensor) -> Tensor:
        """One further token of every row."""
        raise NotImplementedError

    def release(self, done: set[int]) -> None:
        """Frees the rows of these samples."""
        raise NotImplementedError


class _Slots(_Batch):
    """Rows are slots of buffers that do not move under a graph.

    A step always computes every slot, the free ones without touching a state, so that it can be one CUDA graph, and so
    that the shapes of its matrix products, which decide how they round, are the same whatever else is in the batch.

    Caches that grow have one capacity for all slots, which is what the longest live sequence has asked for so far, by
    their own rule. To grow, they move, and a graph of the step is worth nothing then: it is captured anew, and only
    where at least ``pays`` steps follow before the next move or the end; others run without one.
    """

    def __init__(
        self, model: nn.Module, limit: int, device: torch.device, pick: Pick, graph: bool = False, pays: int = 1
    ):
        super().__init__(model, limit, device, pick)
        self.rows = [None] * limit
        self.lengths = [0] * limit  # tokens that each slot's sequence has in the cache
        self.tokens = torch.zeros(limit, dtype=torch.int64, device=device)
        self.uniforms = torch.zeros(limit, dtype=torch.float32, device=device)
        self.slots = torch.full((limit,), -1, dtype=torch.int32, device=device)
        self.cache: list[KDACache | TokenCache] = []
        self.wants_graph, self.pays = graph, pays
        self.graph: Any = None

    def room(self) -> int:
        return self.rows.count(None)

    def _insert(self, samples: list[int], lengths: list[int], fresh: ModelCache, tokens: Tensor) -> None:
        layers = cast("list[KDACache | TokenCache]", fresh)
        if not self.cache:
            self._allocate(layers)
        free = [row for row, sample in enumerate(self.rows) if sample is None][: len(samples)]
        target = _to(self.device, free)
        self._make_room(max(lengths), 0)
        for mine, new in zip(self.cache, layers):
            if isinstance(mine, TokenCache):
                mine.put(target, cast(TokenCache, new))
                continue
            for name in _FIXED_SIZE:
                getattr(mine, name).index_copy_(0, target, getattr(new, name))
        self.slots.index_copy_(0, target, target.to(torch.int32))
        self.tokens.index_copy_(0, target, tokens)
        for row, sample, length in zip(free, samples, lengths):
            self.rows[row], self.lengths[row] = sample, length

    def _allocate(self, like: list[KDACache | TokenCache]) -> None:
        for layer in like:
            mine: KDACache | TokenCache
            if isinstance(layer, TokenCache):
                assert layer.rows is not None
                mine = TokenCache()
                mine.rows = layer.rows.new_zeros(self.limit, *layer.rows.shape[1:])
                mine.lengths = layer.lengths.new_ones(self.limit)  # attention to no token at all is not a number
            else:
                tensors = [getattr(layer, name) for name in _FIXED_SIZE]
                mine = KDACache(*(t.new_zeros(self.limit, *t.shape[1:]) for t in tensors))
            mine.slots = self.slots
            self.cache.append(mine)

    def _make_room(self, bound: int, tokens: int) -> int:
        """Grows the caches where sequences of at most ``bound`` tokens need it for so many more; how many fit then."""
        room = sys.maxsize
        for layer in self.cache:
            if isinstance(layer, TokenCache):
                layer.bound = bound
                if layer.reserve(tokens):
                    self.graph = None
                room = min(room, layer.room())
        return room

    def _capture(self) -> None:
        kept = [(tensor, tensor.clone()) for tensor in (self.slots, self.tokens)]
        self.slots.fill_(-1)  # no slot is taken, so that the steps before the capture change no sequence
        self.graph, seconds = _captured(self._advance, self.device)
        for tensor, value in kept:
            tensor.copy_(value)
        self.capture_seconds += seconds

    def _advance(self) -> None:
        # A row that is not finite gives the token -1, which no embedding has; the host finds it at its next look.
        logits = _decode(self.model, self.tokens.clamp_min(0), cast(ModelCache, self.cache))
        self.tokens.copy_(self.pick(logits, self.uniforms))

    def step(self, uniforms: Tensor) -> Tensor:
        self.uniforms.copy_(uniforms)
        live = [row for row, sample in enumerate(self.rows) if sample is not None]
        room = self._make_room(max((self.lengths[row] for row in live), default=0), 1)
        if self.wants_graph and self.graph is None and min(room, self.ahead) >= self.pays:
            self._capture()
        if self.graph is None:
            self._advance()
        else:
            self.graph.replay()
        for row in live:
            self.lengths[row] += 1
        self.ahead -= 1
        return self.tokens.clone()

    def release(self, done: set[int]) -> None:
        freed = [row for row, sample in enumerate(self.rows) if sample in done]
        if freed:
            self.slots.index_fill_(0, _to(self.device, freed), -1)
        for row in freed:
            self.rows[row] = None


def _captured(step: Callable[[], None], device: torch.device) -> tuple[Any, float]:
    """A step as a CUDA graph, after two of it that are run, and how long that took, seconds."""
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    with torch.cuda.device(device):
        for _ in range(2):  # on no stream of their own, which would keep a workspace of the matrix products' for good
            step()
        graph = torch.cuda.CUDAGraph()
        # Other threads, a process group's watchdog or a data loader, may speak to the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
    torch.cuda.synchronize(device)
    return graph, time.perf_counter() - began


class _Growing(_Batch):
    """Rows are the sequences still going: for caches that grow with their sequences, without a graph.

    Caches are cut down to the rows that are left. New samples come in when all are done.
    """

    def __init__(self, model: nn.Module, limit: int, device: torch.device, pick: Pick):
        super().__init__(model, limit, device, pick)
        self.cache: ModelCache = []

    def room(self) -> int:
        return 0 if self.rows else self.limit

    def _insert(self, samples: list[int], lengths: list[int], fresh: ModelCache, tokens: Tensor) -> None:
        self.rows = list[int | None](samples)
        self.cache, self.tokens = fresh, tokens

    def step(self, uniforms: Tensor) -> Tensor:
        self.tokens = self.pick(_decode(self.model, self.tokens.clamp_min(0), self.cache), uniforms)
        return self.tokens

    def release(self, done: set[int]) -> None:
        going = [row for row, sample in enumerate(self.rows) if sample not in done]
        if len(going) < len(self.rows):
            self.rows = list[int | None](self.rows[row] for row in going)
            self.cache, self.tokens = select(self.cache, going), self.tokens.index_select(0, _to(self.device, going))


_BURST = {"cpu": 1}
"""Steps between two looks at the tokens, by device; a look costs a GPU its work ahead."""
_FIXED_SIZE = ("state", "conv_q", "conv_k", "conv_v")
_PREFILL_TOKENS = 16384
"""Prompts are read together up to so many tokens: their logits take memory."""
_CAPTURE_PAYS = 32
"""A step of a model with experts or caches that grow is captured where at least so many steps follow: a capture takes
as long as a dozen or so."""


def can_capture(model: nn.Module, device: torch.device) -> str | None:
    """None where a decode step of ``model`` can be one CUDA graph, else what stands against it.

    Under autocast as it is where this is called: it decides whether experts count their tokens on the device.
    """
    if device.type != "cuda":
        return "the device is no GPU"
    if _world_size() > 1 or any(isinstance(p, DTensor) for p in model.parameters()):
        return "the model is spread over several processes"
    if not all(isinstance(layer, (KDACache, TokenCache)) for layer in model.new_cache()):  # type: ignore[operator]
        return "a layer's cache is none that a graph can hold"
    reasons = (module.waits_for(device) for module in model.modules() if isinstance(module, MixtureOfExperts))
    return next((reason for reason in reasons if reason is not None), None)


def new_batch(model: nn.Module, limit: int, device: torch.device, pick: Pick, cuda_graph: bool | None) -> _Batch:
    """An empty batch of up to ``limit`` sequences; ``generate`` says what ``cuda_graph`` chooses.

    Raises:
        ValueError: a graph was asked for that cannot be captured.
    """
    against = can_capture(model, device)
    if cuda_graph and against is not None:
        raise ValueError(f"decode cannot be captured in a CUDA graph: {against}")
    fixed = all(isinstance(layer, KDACache) for layer in model.new_cache())  # type: ignore[operator]
    plain = fixed and not any(isinstance(module, MixtureOfExperts) for module in model.modules())
    graph = against is None and cuda_graph is not False
    if fixed or graph:
        return _Slots(model, limit, device, pick, graph, pays=1 if plain else _CAPTURE_PAYS)
    return _Growing(model, limit, device, pick)


def generate(
    model: nn.Module,
    samples: Sequence[Sample],
    sampling: Sampling,
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    device: torch.device | None = None,
    slots: int = 64,
    cuda_graph: bool | None = None,
    on_token: Callable[[int, int], bool] | None = None,
    on_end: Callable[[int], None] | None = None,
    speed: Speed | None = None,
) -> None:
    """Continues each sample's prompt, in place: what there is at an interruption stays.

    A sample's tokens depend on the model, its prompt, its key and the seed, and not on its neighbours: each row of the
    arithmetic is its own. On a GPU matrix products of other shapes may round otherwise, which can turn a draw: the same
    call gives the same text, and other prompts beside it change no text as long as the number of slots and the lengths
    read in one prefill are the same.

    What full attention keeps grows with the text. Replaying a graph, each slot has room for the longest sequence that
    has been in the batch, and an eighth over, in multiples of 256 tokens, whatever it holds itself: ``slots`` times so
    many tokens in all. Without a graph it is the sequences still going that have as much, and the others wait until
    all of them have ended; that cuts matrix products down as sequences end, so that the two may round otherwise.

    Args:
        model: a Decoder, in any layout; called uncompiled, in eval mode, and left in the mode it was in.
        samples: prompts of at least one token; lengths may differ. Prompts that are the same are read once.
        sampling: how tokens are drawn.
        eos_id: the token that ends a sequence; None: none does.
        vocab_size: the tokenizer's size, where the model's is rounded up: what lies past it is never drawn.
        device: of the model's inputs; the parameters' if not given.
        slots: how many sequences decode at once; the others wait for one to end.
        cuda_graph: whether decode replays a captured CUDA graph; None: where ``can_capture`` finds nothing against it.
            Steps of a model with experts or full attention are captured where 32 or more of them follow, and again
            whenever their caches have outgrown their room.
        on_token: called with (sample, token) for each new token but eos; returning True ends that sequence ("stop").
            On a GPU tokens come in bursts of a few.
        on_end: called with each sample when it ends.
        speed: filled as generation goes.

    Raises:
        ValueError: a prompt of no tokens; ``slots`` below 1; a graph was asked for that cannot be captured.
        NotFiniteError: logits that are not finite.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}")
    if not all(sample.prompt for sample in samples):
        raise ValueError("a prompt needs at least one token")
    if not samples:
        return
    device = next(model.parameters()).device if device is None else device
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    speed = Speed() if speed is None else speed
    greedy = sampling.temperature < sys.float_info.min
    generators = [_generator(sampling.seed, sample.key or str(i)) for i, sample in enumerate(samples)]

    def uniforms(of: Sequence[int | None], steps: int) -> Tensor:
        """The next ``steps`` numbers of each sample [steps, len(of)]: one a token, whatever the samples beside it."""
        table = torch.zeros(len(of), steps)
        for row, sample in enumerate(of):
            if sample is not None and not greedy:
                table[row] = torch.rand(steps, generator=generators[sample])
        return table.T.contiguous().to(device, non_blocking=True)

    def pick(logits: Tensor, numbers: Tensor) -> Tensor:
        tokens = sample_tokens(
            logits[:, :vocab_size],
            numbers,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
        )
        if _world_size() > 1:  # a last bit's difference must not send ranks down different texts
            dist.broadcast(tokens, src=0)
        return tokens

    batch = new_batch(model, min(slots, len(samples)), device, pick, cuda_graph)
    with inference(model):
        waiting = deque(range(len(samples)))
        began, captured = time.perf_counter(), 0.0
        while waiting or batch.live():
            drawn: list[tuple[list[int | None], Tensor]] = []  # the samples of some rows, and a token of each
            room, read = batch.room(), 0
            admitted: list[int] = []
            while waiting and len(admitted) < room:
                read += len(samples[waiting[0]].prompt)
                if admitted and read > _PREFILL_TOKENS:
                    break
                admitted.append(waiting.popleft())
            if admitted:
                prompts = [tuple(samples[i].prompt) for i in admitted]
                drawn.append(([*admitted], batch.admit(admitted, prompts, uniforms(admitted, 1)[0])))
                speed.prefill_tokens += sum(map(len, set(prompts)))
            else:
                longest = max(sampling.max_new_tokens - len(samples[i].tokens) for i in batch.live())
                batch.ahead = longest + (sampling.max_new_tokens if waiting else 0)
                for numbers in uniforms(batch.rows, min(batch.burst, longest)):
                    drawn.append(([*batch.rows], batch.step(numbers)))
            values = torch.cat([tokens for _, tokens in drawn]).tolist()  # the one wait for the device
            now = time.perf_counter()
            began += batch.capture_seconds - captured
            captured = batch.capture_seconds
            speed.graph, speed.capture_seconds = captured > 0, captured
            done: set[int] = set()
            for i, token in zip([i for row in drawn for i in row[0]], values):
                if i is None or i in done:
                    continue
                sample = samples[i]
                if token < 0:
                    raise NotFiniteError("the model's logits are not finite")
                if not admitted:
                    speed.decode_tokens += 1
                if token == eos_id:
                    sample.finished = "eos"
                else:
                    sample.tokens.append(token)
                    if on_token is not None and on_token(i, token):
                        sample.finished = "stop"
                    elif len(sample.tokens) >= sampling.max_new_tokens:
                        sample.finished = "length"
                if sample.finished is not None:
                    done.add(i)
                    if on_end is not None:
                        on_end(i)
            batch.release(done)
            if admitted:
                speed.prefill_seconds += now - began
            else:
                speed.decode_seconds += now - began
            began = now


def _generator(seed: int, key: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextlib.contextmanager
def inference(model: nn.Module) -> Iterator[None]:
    """Eval mode, no gradients, compiled layers run eagerly, and activation checkpointing, which has nothing to save
    here but would read random states, steps aside; on a GPU a layer's products with its input are packed. The model
    must keep its weights meanwhile; it comes back as it was however this ends."""
    training = {module: module.training for module in model.modules()}
    wrappers = [module for module in training if isinstance(module, CheckpointWrapper)]
    checkpointing = [wrapper.checkpoint_fn for wrapper in wrappers]
    # What is packed already is another call's around this one, to which its packed weights belong.
    packing = [m for m in training if isinstance(m, (KimiDeltaAttention, SwiGLU)) and not m.packed]
    try:
        model.eval()
        for wrapper in wrappers:
            cast(Any, wrapper).checkpoint_fn = _call
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for module in packing:
                module.pack()
            yield
    finally:
        for module in packing:
            module.unpack()
        for wrapper, function in zip(wrappers, checkpointing):
            cast(Any, wrapper).checkpoint_fn = function
        for module, mode in training.items():
            module.training = mode


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def settings_of(section: Any) -> Sampling:
    """Sampling from a job's [generation] section or parsed arguments of the same names."""
    return Sampling(section.max_new_tokens, section.temperature, section.top_k, section.top_p, section.seed)
