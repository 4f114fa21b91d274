"""Full attention beside KDA: the layers against their formulas in FP64, their cache, and hybrids that generate."""

import math
from dataclasses import replace

import forked
import jobs
import pytest
import torch

from titan_kda.cache import TokenCache, select
from titan_kda.data import ByteTokenizer
from titan_kda.full_attention import (
    LATENT_NORM_EPS,
    GroupedQueryAttention,
    LatentAttention,
    document_attention,
)
from titan_kda.generate import NotFiniteError, Sample, Sampling, Speed, decode, generate, new_batch, prefill
from titan_kda.initialize import Initializer
from titan_kda.model import FLAVORS, Decoder, ModelArgs

DIM, HEADS, GROUPS = 24, 4, 2
LATENT, NOPE, ROPE, V = 20, 10, 6, 12
KINDS = ["mla", "gqa"]
CPU = torch.device("cpu")


def make_layer(kind, seed=0):
    if kind == "mla":
        layer = LatentAttention(DIM, HEADS, LATENT, NOPE, ROPE, V)
    else:
        layer = GroupedQueryAttention(DIM, HEADS, GROUPS, V)
    layer.init_weights(Initializer(seed), "layer", output_std=0.5)
    for parameter in layer.parameters():
        parameter.data *= 3  # so that attention looks at some tokens more than at others
    if kind == "mla":
        layer.kv_norm.weight.data.uniform_(0.5, 1.5)
    return layer


def written_out(layer, x):
    """The layer's formula for one sequence x [T, dim], token by token and head by head, in FP64."""
    w = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x = x.detach().double()
    rows = []
    for t in range(len(x)):
        heads = []
        for h in range(HEADS):
            if isinstance(layer, LatentAttention):
                q = w["wq.weight"][h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)] @ x[t]
                c, r = (x[: t + 1] @ w["wkv_a.weight"].T).split([LATENT, ROPE], 1)
                c = c / (c.square().mean(1, keepdim=True) + LATENT_NORM_EPS).sqrt() * w["kv_norm.weight"]
                k, v = (c @ w["wkv_b.weight"][h * (NOPE + V) : (h + 1) * (NOPE + V)].T).split([NOPE, V], 1)
                scores = (k @ q[:NOPE] + r @ q[NOPE:]) / math.sqrt(NOPE + ROPE)
            else:
                g = h // (HEADS // GROUPS)
                q = w["wq.weight"][h * V : (h + 1) * V] @ x[t]
                k, v = (x[: t + 1] @ w[name][g * V : (g + 1) * V].T for name in ("wk.weight", "wv.weight"))
                scores = k @ q / math.sqrt(V)
            heads.append(torch.softmax(scores, 0) @ v)
        rows.append(w["wo.weight"] @ torch.cat(heads))
    return torch.stack(rows)


# ---- the layers ----


@pytest.mark.parametrize("kind", KINDS)
def test_layer_is_its_formula(kind):
    torch.manual_seed(1)
    layer, x = make_layer(kind), torch.randn(2, 19, DIM)
    want = torch.stack([written_out(layer, row) for row in x])
    offsets = torch.tensor([0, 19, 38], dtype=torch.int32)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for y in (layer(x), layer(x, offsets), layer(x.reshape(1, 38, DIM), offsets).reshape(2, 19, DIM)):
                assert (y - want).abs().max() <= 1e-5 * want.abs().max()
    # Attention that looks at all tokens alike would pass with any scores.
    assert (want[0, -1] - written_out(layer, x[0, :, :] * 0.1)[-1] * 10).abs().max() > 0.05 * want.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_packed_stream_are_those_of_rows(kind):
    torch.manual_seed(2)
    layer, x, weight = make_layer(kind), torch.randn(3, 11, DIM), torch.randn(3, 11, DIM)
    found = []
    for offsets in (None, torch.tensor([0, 11, 11, 22, 33, 33], dtype=torch.int32)):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        (layer(leaf, offsets) * weight).sum().backward()
        found.append([leaf.grad, *(parameter.grad for parameter in layer.parameters())])
    for row, packed in zip(*found):
        assert (packed - row).abs().max() <= 1e-5 * row.abs().max()
        assert row.abs().max() > 1e-3


def test_document_attention_differentiates():
    torch.manual_seed(3)
    shapes = ((13, 4, 6), (16, 2, 6), (16, 2, 5))
    q, k, v = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    cu_q = torch.tensor([0, 3, 3, 10], dtype=torch.int32)  # an empty sequence, and rows that are nobody's
    cu_k = torch.tensor([0, 5, 5, 14], dtype=torch.int32)  # the queries are the last of their sequence
    assert torch.autograd.gradcheck(lambda *t: document_attention(*t, cu_q, cu_k, 0.4), (q, k, v))
    o = document_attention(q, k, v, cu_q, cu_k, 0.4)
    assert o[10:].eq(0).all() and o[:10].ne(0).all()
    o.sum().backward()
    assert q.grad[10:].eq(0).all() and k.grad[14:].eq(0).all() and v.grad[14:].eq(0).all()
    arguments = (*(t.detach().float() for t in (q, k, v)), cu_q, cu_k, 0.4)
    torch.library.opcheck(torch.ops.titan_kda.document_attention.default, arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_stream_is_each_sequence_alone(kind):
    torch.manual_seed(4)
    layer, lengths = make_layer(kind), [3, 0, 25, 1, 0, 11]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(1, 44, DIM)
    x[0, 40:] = float("nan")  # padding is nobody's
    with torch.no_grad():
        y = layer(x, offsets)
        for start, length in zip(offsets.tolist(), lengths):
            if length:
                alone = layer(x[:, start : start + length])
                torch.testing.assert_close(y[:, start : start + length], alone, atol=1e-5, rtol=1e-4)
        assert y[:, 40:].eq(0).all()
        # The rows of a batch may as well hold the stream.
        torch.testing.assert_close(layer(x.reshape(4, 11, DIM), offsets).reshape(1, 44, DIM), y)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_rotated(kind):
    """The last token sees the same whatever the order of the others: no position enters anywhere."""
    torch.manual_seed(5)
    layer, x = make_layer(kind), torch.randn(1, 12, DIM)
    order = torch.cat([torch.randperm(11), torch.tensor([11])])
    with torch.no_grad():
        torch.testing.assert_close(layer(x[:, order])[:, -1], layer(x)[:, -1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_causal_and_within_a_document(kind):
    torch.manual_seed(6)
    layer, x = make_layer(kind), torch.randn(1, 20, DIM, requires_grad=True)
    offsets = torch.tensor([0, 8, 20], dtype=torch.int32)
    (grad,) = torch.autograd.grad(layer(x, offsets)[0, 13].sum(), x)
    seen = grad[0].abs().sum(-1).gt(0).tolist()
    assert seen == [False] * 8 + [True] * 6 + [False] * 6
    (grad,) = torch.autograd.grad(layer(x)[0, 13].sum(), x)
    assert grad[0].abs().sum(-1).gt(0).tolist() == [True] * 14 + [False] * 6


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16(kind):
    torch.manual_seed(7)
    layer, x = make_layer(kind), torch.randn(2, 30, DIM)
    want = torch.stack([written_out(layer, row) for row in x])
    layer.bfloat16()
    cache = layer.new_cache()
    with torch.no_grad():
        whole = layer(x.bfloat16())
        pieces = [layer(x[:, :28].bfloat16(), cache=cache), layer(x[:, 28:29].bfloat16(), cache=cache)]
        pieces.append(layer(x[:, 29:].bfloat16(), cache=cache))
    assert cache.rows.dtype == torch.bfloat16
    for y in (whole, torch.cat(pieces, 1)):
        assert (y.double() - want).square().mean().sqrt() <= 0.02 * want.square().mean().sqrt()


# ---- the cache ----


@pytest.mark.parametrize("pieces", [[1] * 9, [5, 4], [30, 1, 1, 7, 1], [2, 1, 20]])
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_with_a_cache_are_the_whole(kind, pieces):
    torch.manual_seed(8)
    layer, x = make_layer(kind), torch.randn(3, sum(pieces), DIM)
    cache = layer.new_cache()
    with torch.no_grad():
        whole = layer(x)
        outputs = [layer(piece, cache=cache) for piece in x.split(pieces, 1)]
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=2e-5, rtol=1e-3)
    width, groups = (LATENT + ROPE, 1) if kind == "mla" else (2 * V, GROUPS)
    assert cache.rows.shape == (3, groups, TokenCache.PIECE, width)  # a token costs its latent alone
    assert cache.lengths.tolist() == [sum(pieces)] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_unequal_sequences_share_a_cache(kind):
    """Packed prompts, then further pieces of which some are empty, then single tokens, with padding rows in each."""
    torch.manual_seed(9)
    layer = make_layer(kind)
    pieces = [[4, 1, 9], [3, 0, 2], [1, 1, 1], [1, 1, 1], [2, 5, 0], [1, 1, 1]]
    totals = [sum(column) for column in zip(*pieces)]
    sequences = [torch.randn(total, DIM) for total in totals]
    with torch.no_grad():
        want = [layer(x[None])[0] for x in sequences]
        cache, done = layer.new_cache(), [0, 0, 0]
        for lengths in pieces:
            offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
            parts = [x[at : at + n] for x, at, n in zip(sequences, done, lengths)]
            stream = torch.cat([*parts, torch.full((3, DIM), float("nan") if max(lengths) > 1 else 0.5)])[None]
            y = layer(stream, offsets, cache, max(lengths))
            for i, (start, n) in enumerate(zip(offsets.tolist(), lengths)):
                torch.testing.assert_close(
                    y[0, start : start + n], want[i][done[i] : done[i] + n], atol=2e-5, rtol=1e-3
                )
                done[i] += n
    assert cache.lengths.tolist() == totals


def test_a_token_cache_grows_in_pieces_and_keeps_what_it_holds():
    cache, want = TokenCache(), torch.randn(2, 700, 3)
    cache.extend(want[:, :200].reshape(400, 1, 3), torch.tensor([0, 200, 400], dtype=torch.int32), 200)
    moved = 0
    for t in range(200, 700):
        before = cache.rows
        cache.append(want[:, t, None])
        moved += cache.rows is not before
    assert cache.rows.shape == (2, 1, 768, 3) and moved == 2
    assert torch.equal(cache.rows[:, 0, :700], want) and cache.rows[:, :, 700:].eq(0).all()
    assert cache.lengths.tolist() == [700, 700] and cache.bound == 700
    assert not cache.reserve(67) and cache.reserve(68)  # one slot more than tokens, for padding rows to fall into
    rows, offsets, longest = cache.packed()
    assert torch.equal(rows[:, 0], want.flatten(0, 1)) and offsets.tolist() == [0, 700, 1400] and longest == 700


def test_select_copies_sequences():
    cache = TokenCache()
    new = torch.arange(6.0)[:, None, None]
    cache.extend(new, torch.tensor([0, 1, 3, 6], dtype=torch.int32), 3)
    (chosen,) = select([cache], [2, 0, 2])
    assert chosen.lengths.tolist() == [3, 1, 3]
    assert chosen.rows[:, 0, :3, 0].tolist() == [[3, 4, 5], [0, 0, 0], [3, 4, 5]]
    chosen.append(torch.tensor([7.0, 8, 9])[:, None, None])
    assert chosen.lengths.tolist() == [4, 2, 4] and cache.lengths.tolist() == [1, 2, 3]
    assert chosen.rows[2, 0, :4, 0].tolist() == [3, 4, 5, 9] and cache.rows[2, 0, 3:].eq(0).all()
    (empty,) = select([TokenCache()], [0])
    assert empty.rows is None


def test_rows_that_hold_no_sequence():
    """They keep their length and what they hold, whatever is appended; a new sequence takes all of a row."""
    cache, new = TokenCache(), torch.arange(1.0, 7)[:, None, None]
    cache.extend(new, torch.tensor([0, 1, 3, 6], dtype=torch.int32), 3)
    cache.slots = torch.tensor([0, -1, 2], dtype=torch.int32)
    before = cache.rows.clone()
    assert cache.room() == TokenCache.PIECE - 4
    cache.append(torch.tensor([7.0, float("nan"), 9.0])[:, None, None])
    assert cache.lengths.tolist() == [2, 2, 4] and cache.bound == 3 and cache.rows.isfinite().all()
    assert torch.equal(cache.rows[1], before[1])
    assert cache.rows[0, 0, :3, 0].tolist() == [1, 7, 0] and cache.rows[2, 0, :5, 0].tolist() == [4, 5, 6, 9, 0]
    other = TokenCache()
    other.extend(torch.tensor([8.0, 6])[:, None, None], torch.tensor([0, 2], dtype=torch.int32), 2)
    assert cache.reserve(300) and cache.rows.shape[2] == 512
    cache.rows[2, 0, 400] = float("nan")  # of the sequence that was there
    cache.put(torch.tensor([2]), other)
    assert (
        cache.lengths.tolist() == [2, 2, 2] and cache.rows[2].sum() == 14 and cache.rows[2, 0, :2, 0].tolist() == [8, 6]
    )
    assert torch.equal(cache.rows[:2, :, :1], torch.cat([before[:1, :, :1], before[1:2, :, :1]]))
    other.bound = 512
    with pytest.raises(ValueError, match="room for 511 tokens, not for 512"):
        cache.put(torch.tensor([0]), other)


def test_a_cache_is_for_inference():
    for kind in KINDS:
        layer = make_layer(kind)
        with pytest.raises(RuntimeError, match="no_grad"):
            layer(torch.randn(1, 3, DIM), cache=layer.new_cache())


# ---- decoders ----

TINY = dict(
    **dict(vocab_size=264, dim=32, n_layers=3, n_heads=2, key_width=8, value_width=12, ffn_width=48),
    **dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12),
    **dict(num_experts=6, num_experts_per_token=2, expert_width=16, routed_scaling_factor=2.0, gate="softplus"),
)
PATTERNS = {
    "kimi": dict(layer_pattern=["kda", "kda", "mla"]),
    "gqa": dict(layer_pattern=["kda", "gqa"], attn_heads=4, kv_heads=2, head_width=10),
    "mla": dict(layer_pattern=["mla"], n_layers=2),
    "dense": dict(layer_pattern=["gqa", "kda", "mla"], num_experts=0),
}
LENGTHS = (1, 2, 5, 66)
NEW = 12
TIE = 1e-4
"""Two best logits that lie closer may swap: where they do, comparison ends."""


def make(**changes):
    model = Decoder(ModelArgs(**{**TINY, **changes}))
    with torch.no_grad():
        model.init_weights(seed=1)
        for layer in model.layers.values():  # a fresh model hardly looks back: its layers add little to the stream
            (layer.mixer.o_proj if hasattr(layer.mixer, "o_proj") else layer.mixer.wo).weight *= 50
    return model


PROMPTS = [
    torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS
]


@torch.no_grad()
def without_cache(model, prompt):
    """Greedy tokens by a whole forward for each, up to the first that is a tie."""
    tokens = list(prompt)
    for _ in range(NEW):
        best = model(torch.tensor([tokens]))[0, -1].topk(2)
        if best.values[0] - best.values[1] < TIE:
            break
        tokens.append(int(best.indices[0]))
    assert len(tokens) >= len(prompt) + NEW // 2, "the prompt makes no test: choose another"
    return tokens[len(prompt) :]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_greedy_text_is_that_of_whole_forwards(pattern):
    model = make(**PATTERNS[pattern])
    want = [without_cache(model, prompt) for prompt in PROMPTS]
    together = [Sample(list(prompt)) for prompt in PROMPTS]
    alone = [Sample(list(prompt)) for prompt in PROMPTS]
    generate(model, together, Sampling(NEW, temperature=0))
    for sample in alone:
        generate(model, [sample], Sampling(NEW, temperature=0))
    for batch in (together, alone):
        for sample, tokens in zip(batch, want):
            assert sample.tokens[: len(tokens)] == tokens and sample.finished == "length"


@pytest.mark.parametrize("pattern", ["kimi", "mla"])
def test_the_comparison_sees_what_the_cache_holds(pattern):
    model = make(**PATTERNS[pattern])
    want = without_cache(model, PROMPTS[2])
    cache, tokens = model.new_cache(), []
    logits = prefill(model, [PROMPTS[2]], cache, CPU)
    for _ in range(len(want)):
        tokens.append(int(logits[0].argmax()))
        cache[-1].rows.zero_()
        logits = decode(model, tokens[-1:], cache, CPU)
    assert tokens[0] == want[0] and tokens != want


def test_a_prompt_in_pieces():
    model = make(**PATTERNS["kimi"])
    want = without_cache(model, PROMPTS[-1])
    cache = model.new_cache()
    for start, end in ((0, 1), (1, 40), (40, 41), (41, 66)):
        logits = prefill(model, [PROMPTS[-1][start:end]], cache, CPU)
    tokens = []
    for _ in want:
        tokens.append(int(logits[0].argmax()))
        logits = decode(model, tokens[-1:], cache, CPU)
    assert tokens == want


def test_a_stream_padded_for_sequence_parallelism():
    model = make(**PATTERNS["kimi"])
    want = [without_cache(model, prompt) for prompt in PROMPTS]
    model.sequence_width = 4
    samples = [Sample(list(prompt)) for prompt in PROMPTS]
    generate(model, samples, Sampling(NEW, temperature=0))
    for sample, tokens in zip(samples, want):
        assert sample.tokens[: len(tokens)] == tokens


# ---- a step that is replayed ----


class Replay:
    """In a captured graph's place: the step, where all that a graph has fixed is as it was, and no Python counts."""

    def __init__(self, step):
        self.step, self.batch = step, step.__self__
        self.fixed = self.addresses()

    def addresses(self):
        layers = [vars(layer) for layer in self.batch.cache]
        own = {name: getattr(self.batch, name) for name in ("tokens", "uniforms", "slots")}
        return [x.data_ptr() for values in (*layers, own) for x in values.values() if isinstance(x, torch.Tensor)]

    def replay(self):
        bounds = [getattr(layer, "bound", None) for layer in self.batch.cache]
        assert self.addresses() == self.fixed
        self.step()
        assert self.addresses() == self.fixed
        assert bounds == [getattr(layer, "bound", None) for layer in self.batch.cache]


def held(layer):
    """A cache's tensors by name, without the place that is nobody's."""
    for name, value in vars(layer).items():
        if isinstance(value, torch.Tensor):
            yield name, (value[:, :, :-1] if isinstance(layer, TokenCache) and name == "rows" else value).clone()


@pytest.fixture
def captures(monkeypatch):
    """Each capture of a step: the batch's longest sequence and the caches' capacities at the time; graphs on a CPU."""
    found = []

    def capture(step, device):
        batch = step.__self__
        kept = [dict(held(layer)) for layer in batch.cache]
        step()
        step()
        for layer, old in zip(batch.cache, kept):  # a capture leaves no trace in them
            assert all(torch.equal(value, old[name]) for name, value in held(layer))
        live = [n for n, sample in zip(batch.lengths, batch.rows) if sample is not None]
        found.append((max(live), {layer.rows.shape[2] for layer in batch.cache if isinstance(layer, TokenCache)}))
        return Replay(step), 0.25

    monkeypatch.setattr("titan_kda.generate._captured", capture)
    monkeypatch.setattr("titan_kda.generate.can_capture", lambda model, device: None)
    return found


def texts(model, sampling, prompts=PROMPTS, stop=None, **options):
    """What generation gives, and its speed; sample 1 is stopped after ``stop`` tokens."""
    samples, speed = [Sample(list(prompt)) for prompt in prompts], Speed()

    def listen(i, token):
        return i == 1 and len(samples[1].tokens) == stop

    generate(model, samples, sampling, on_token=listen, speed=speed, **options)
    return [(sample.tokens, sample.finished) for sample in samples], speed


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_replayed_step_gives_the_same_text(captures, monkeypatch, pattern):
    """More prompts than slots, ends of every kind, and caches that outgrow their room several times."""
    monkeypatch.setattr(TokenCache, "PIECE", 4)
    monkeypatch.setattr("titan_kda.generate._CAPTURE_PAYS", 2)
    model = make(**PATTERNS[pattern])
    prompts = [*PROMPTS[:3], *PROMPTS[1:]]
    for sampling, burst, slots in ((Sampling(20, temperature=0), 1, 3), (Sampling(20, 0.9, 0, 0.9, seed=2), 4, 2)):
        monkeypatch.setattr("titan_kda.generate._BURST", {"cpu": burst})
        plain, _ = texts(model, sampling, prompts, cuda_graph=False)
        eos = plain[3][0][9]
        options = dict(prompts=prompts, eos_id=eos, stop=5, slots=slots)
        want, speed = texts(model, sampling, cuda_graph=False, **options)
        assert not captures and not speed.graph
        got, speed = texts(model, sampling, cuda_graph=True, **options)
        assert got == want and {"eos", "length", "stop"} == {finished for _, finished in got}
        assert speed.graph and speed.capture_seconds == 0.25 * len(captures)
        assert len(captures) > 3 and all(len(capacities) == 1 for _, capacities in captures)
        captures.clear()


def test_a_step_is_captured_where_enough_steps_follow(captures):
    model = make(**PATTERNS["kimi"])
    short, long = [PROMPTS[1]], [PROMPTS[1] * 120]  # 2 and 240 tokens, with room for 255 and 511
    for prompts, tokens, want in (
        (short, 32, []),  # the first of them comes with the prompt
        (short, 33, [(2, {256})]),
        (long, 33, [(240, {512})]),
    ):
        _, speed = texts(model, Sampling(tokens, temperature=0), prompts, cuda_graph=True)
        assert captures == want and speed.graph is bool(want)
        captures.clear()
    model = make(**PATTERNS["mla"], dim=16, vocab_size=32)
    middle = [[1] * 224]  # 31 steps to the end of its room: they run without a graph
    texts(model, Sampling(70, temperature=0), middle, cuda_graph=True)
    assert captures == [(255, {512})]
    captures.clear()
    # With others waiting for a slot the last steps are not the last, and the next sequences need no new capture.
    texts(model, Sampling(20, temperature=0), [[1, 2], [3], [4, 5, 6], [7]], cuda_graph=True, slots=2)
    assert captures == [(2, {256})]


def test_which_models_replay_a_graph(captures, monkeypatch):
    """Unasked, those whose steps wait for no host and whose caches do not grow; all others where they are told to."""

    def graph_of(cuda_graph, **changes):
        batch = new_batch(make(**changes), 2, CPU, lambda logits, numbers: logits.argmax(-1), cuda_graph)
        return type(batch).__name__, getattr(batch, "wants_graph", False)

    dense, experts, hybrid = (
        dict(layer_pattern=["kda"], num_experts=experts) if pattern == "kda" else PATTERNS[pattern]
        for pattern, experts in (("kda", 0), ("kda", 6), ("kimi", 6))
    )
    for asked in (None, True):
        assert all(graph_of(asked, **changes) == ("_Slots", True) for changes in (dense, experts, hybrid))
    assert not any(graph_of(False, **changes)[1] for changes in (dense, experts, hybrid))
    monkeypatch.setattr("titan_kda.generate.can_capture", lambda model, device: "the moon is full")
    assert not any(graph_of(None, **changes)[1] for changes in (dense, experts, hybrid))
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph: the moon is full"):
        texts(make(**hybrid), Sampling(3), cuda_graph=True)


def test_ends_that_are_none_under_a_graph(captures, monkeypatch):
    """An interruption keeps what there is; logits that are not finite are told."""
    monkeypatch.setattr("titan_kda.generate._CAPTURE_PAYS", 1)
    model, samples = make(**PATTERNS["kimi"]), [Sample(list(prompt)) for prompt in PROMPTS[1:3]]
    want = [without_cache(model, prompt) for prompt in PROMPTS[1:3]]

    def listen(i, token):
        if i == 1 and len(samples[1].tokens) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, samples, Sampling(NEW, temperature=0), cuda_graph=True, on_token=listen)
    assert [sample.tokens for sample in samples] == [want[0][:4], want[1][:4]] and captures
    heard = []

    def spoil(i, token):
        heard.append(token)
        if len(heard) == 5:
            model.norm.weight.data.fill_(float("nan"))

    with pytest.raises(NotFiniteError):
        generate(model, [Sample(PROMPTS[1])], Sampling(NEW, temperature=0), cuda_graph=True, on_token=spoil)
    assert heard == want[0][:5] and len(captures) == 2


def test_documents_do_not_see_each_other():
    tokenizer = ByteTokenizer()
    first, second, other = (tokenizer.encode(text, add_bos=True) for text in ("import os", "def f(x):", "import re"))
    first, other = [*first, tokenizer.eos_id], [*other, tokenizer.eos_id]
    for pattern in ("kimi", "dense"):
        for attn_type, apart in (("varlen", False), ("sdpa", True)):
            model = make(**PATTERNS[pattern], attn_type=attn_type)
            logits = []
            for head in (first, other):
                row = torch.tensor([head + second])
                masks = model.get_attention_masks(row, tokenizer) if attn_type == "varlen" else None
                with torch.no_grad():
                    logits.append(model(row, masks)[0, len(first) :])
            assert (not torch.allclose(*logits, atol=1e-6)) is apart


def test_counts_of_a_hybrid():
    args = ModelArgs(**TINY, layer_pattern=["kda", "mla", "gqa"], kv_heads=1, head_width=10)
    model = Decoder(args)
    dim, vocab, heads, key, value = 32, 264, 2, 8, 12
    kda = dim * heads * (2 * key + value) + dim * heads + heads * value * dim + 4 * heads * (2 * key + value)
    kda += dim * key + key * heads * key + dim * value + value * heads * value + heads + heads * key + value
    mla = dim * heads * 12 + dim * 20 + 16 + 16 * heads * 20 + heads * 12 * dim
    gqa = dim * heads * 10 + 2 * dim * 10 + heads * 10 * dim
    shared, expert, gate = 3 * dim * 16, 3 * dim * 16, 6 * dim
    rest = kda + mla + gqa + 3 * dim * 48 + 2 * (shared + gate) + 3 * 2 * dim + dim + vocab * dim
    nparams, flops = args.get_nparams_and_flops(model, 512)
    assert nparams == rest + 2 * 6 * expert + vocab * dim
    core = heads * (2 * 64 * (3 * key + 2 * value) + 6 * key * value + 2 * 4 * (2 * key + value))
    attention = 2 * heads * (12 + 12) + 2 * heads * (10 + 10)  # the two products, for each token looked at
    assert flops == 6 * (rest + 2 * 2 * expert) + 3 * (core + 512 * attention)
    # Only attention's part grows with the sequence.
    assert args.get_nparams_and_flops(model, 2048)[1] - flops == 3 * 1536 * attention


def test_every_parameter_and_buffer_is_filled_after_to_empty():
    with torch.device("meta"):
        model = Decoder(ModelArgs(**TINY, **PATTERNS["kimi"]))
    model.to_empty(device="cpu")
    tensors = [*model.parameters(), *model.buffers()]
    for tensor in tensors:
        tensor.data.fill_(float("nan"))
    with torch.no_grad():
        model.init_weights(seed=0)
    tensors = [*model.parameters(), *model.buffers()]
    assert all(torch.isfinite(tensor).all() for tensor in tensors)
    assert len(list(model.buffers())) == 4 and all(buffer.eq(0).all() for buffer in model.buffers())
    assert {name for name, _ in model.named_buffers()} & model.state_dict().keys() == {
        f"layers.{i}.moe.expert_bias" for i in (1, 2)
    }
    experts = model.layers["1"].moe.experts
    for weight in (experts.w1, experts.w2, experts.w3):
        assert (weight[0] - weight[1]).abs().max() > 0.01


# ---- the released model ----

# Shapes by name in the released checkpoint: what a layer's mixer and feed-forward hold, in multiplied numbers.
KDA = {
    **{f"{x}_proj.weight": (4096, 2304) for x in "qkv"},
    **{f"{x}_conv.weight": (4096, 4) for x in "qkv"},
    "forget_gate.A_log": (32,),
    "forget_gate.dt_bias": (32, 128),
    **{f"{x}_a_proj.weight": (128, 2304) for x in "fg"},
    **{f"{x}_b_proj.weight": (4096, 128) for x in "fg"},
    "b_proj.weight": (32, 2304),
    "o_norm.weight": (128,),
    "o_proj.weight": (2304, 4096),
}
MLA = {
    "wq.weight": (6144, 2304),
    "wkv_a.weight": (576, 2304),
    "kv_norm.weight": (512,),
    "wkv_b.weight": (8192, 512),
    "wo.weight": (2304, 4096),
}
DENSE = {"w1.weight": (9216, 2304), "w2.weight": (2304, 9216), "w3.weight": (9216, 2304)}
MOE = {
    "router.gate.weight": (256, 2304),
    "expert_bias": (256,),
    "experts.w1": (256, 1024, 2304),
    "experts.w2": (256, 2304, 1024),
    "experts.w3": (256, 1024, 2304),
    "shared_experts.w1.weight": (1024, 2304),
    "shared_experts.w2.weight": (2304, 1024),
    "shared_experts.w3.weight": (1024, 2304),
}


def test_the_released_model_on_the_meta_device():
    want = {"tok_embeddings.weight": (163840, 2304), "norm.weight": (2304,), "output.weight": (163840, 2304)}
    for i in range(27):
        mixer = MLA if i + 1 in (4, 8, 12, 16, 20, 24, 27) else KDA
        want |= {f"layers.{i}.mixer.{name}": shape for name, shape in mixer.items()}
        kind, ffn = ("feed_forward", DENSE) if i == 0 else ("moe", MOE)
        want |= {f"layers.{i}.{kind}.{name}": shape for name, shape in ffn.items()}
        want |= {f"layers.{i}.{norm}.weight": (2304,) for norm in ("mixer_norm", "ffn_norm")}
    args = FLAVORS["kimi_linear_48b_a3b"]
    with torch.device("meta"):
        model = Decoder(args)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == want
    count = sum(math.prod(shape) for name, shape in want.items() if "expert_bias" not in name)
    nparams, flops = args.get_nparams_and_flops(model, 4096)
    assert nparams == count == 49_122_675_072
    active = count - 26 * 248 * 3 * 1024 * 2304 - 163840 * 2304  # what a token meets; the embedding only looks up
    assert 3.0e9 < active < 3.2e9
    attention = 7 * 2 * 32 * (192 + 128) * 4096
    assert flops == 6 * active + 3 * (attention + 20 * model.layers["0"].mixer.core_flops_per_token(1))
    assert model.layers["0"].mixer.o_norm.eps == model.norm.eps == 1e-5
    assert model.layers["3"].mixer.kv_norm.eps == 1e-6
    moe = model.layers["1"].moe
    assert (moe.router.top_k, moe.router.route_scale, moe.router.route_norm) == (8, 2.446, True)
    assert model.layers["0"].mixer.forget_gate.gate == "softplus"


def test_the_twin_differs_in_its_mixers_alone():
    hybrid, full = FLAVORS["kimi_linear_1b_a300m"], FLAVORS["kimi_linear_1b_a300m_full"]
    assert replace(full, layer_pattern=hybrid.layer_pattern) == hybrid
    assert hybrid.mixers() == {"kda", "mla"} and full.mixers() == {"mla"}


# ---- a whole job ----


def test_a_hybrid_trains_samples_and_goes_on(tmp_path):
    settings = {"model.flavor": "kimi_linear_debug", "training.local_batch_size": 2, "training.steps": 6}
    settings |= {"architecture.dim": 32, "architecture.ffn_width": 64, "architecture.expert_width": 16}
    settings |= {"architecture.layer_pattern": ["kda", "mla"], "architecture.n_layers": 2, "architecture.n_heads": 2}
    settings |= {"validation.freq": 3, "generation.freq": 3, "checkpoint.interval": 3}
    toml = jobs.write_job(tmp_path, settings)
    run = forked.run_job(toml)
    assert run.returncode == 0, jobs.log_of(run)[-4000:]
    whole = jobs.losses(jobs.log_of(run))
    assert len(whole) == 6 and whole[6] < whole[1] - 0.5
    samples = jobs.samples(tmp_path / "run")
    assert sorted(samples) == [1, 3, 6]
    for line in ("train runs document_attention", "eval runs document_attention", "decode runs token_attention"):
        assert jobs.log_of(run).count(f"Full attention {line}\n") == 1
    # From the middle, with the experts' bias and all else as it was: the same losses and the same text.
    for name in ("step-6", "samples"):
        folder = tmp_path / "run" / ("checkpoint" if name != "samples" else "") / name
        folder.rename(tmp_path / name)
    again = forked.run_job(toml)
    assert again.returncode == 0, jobs.log_of(again)[-4000:]
    resumed = jobs.losses(jobs.log_of(again))
    assert {step: whole[step] for step in (4, 5, 6)} == resumed
    assert jobs.samples(tmp_path / "run")[6] == samples[6]


# ---- on a GPU ----


def apart(got, want):
    """Relative RMS error."""
    got, want = got.detach().double().cpu(), want.detach().double()
    return float((got - want).square().mean().sqrt() / want.square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_bf16_on_a_gpu_is_fp32_on_a_cpu(kind):
    """At the released widths: packed with empty and dead rows, rows alone, and a cache; forward and backward."""
    torch.manual_seed(11)
    layer = LatentAttention(256, 4) if kind == "mla" else GroupedQueryAttention(256, 8, 2, 128)
    layer.init_weights(Initializer(0), "layer", output_std=0.1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((parameter * 2).bfloat16())
    there = type(layer)(256, 4) if kind == "mla" else type(layer)(256, 8, 2, 128)
    there.load_state_dict(layer.state_dict())
    there = there.cuda().bfloat16()
    x, weight = (torch.randn(1, 600, 256).bfloat16().float() for _ in range(2))
    offsets = torch.tensor([0, 130, 130, 131, 500, 560, 560], dtype=torch.int32)
    weight[:, 560:] = 0
    for cu in (None, offsets):
        leaves = [x.clone().requires_grad_(), x.cuda().bfloat16().requires_grad_()]
        y = layer(leaves[0], cu)
        got = there(leaves[1], None if cu is None else cu.cuda(), None, 600)
        (y * weight).sum().backward()
        (got.float() * weight.cuda()).sum().backward()
        assert apart(got, y) <= 0.02 and apart(leaves[1].grad, leaves[0].grad) <= 0.04
        if cu is not None:
            assert got[:, 560:].eq(0).all() and leaves[1].grad[:, 560:].eq(0).all()
        for (name, mine), (_, theirs) in zip(layer.named_parameters(), there.named_parameters()):
            assert apart(theirs.grad, mine.grad) <= 0.04, name
        layer.zero_grad()
        there.zero_grad()
    with torch.no_grad():
        want, cache = layer(x), there.new_cache()
        pieces = [there(piece.cuda().bfloat16(), cache=cache) for piece in x.split([300, 1, 1, 200, 98], 1)]
    assert apart(torch.cat(pieces, 1), want) <= 0.02


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", ["kimi", "gqa"])
def test_greedy_text_on_a_gpu_is_that_of_whole_forwards(pattern):
    model = make(**{**PATTERNS[pattern], "key_width": 16, "value_width": 16}).cuda()
    with torch.device("cuda"):
        want = [without_cache(model, prompt) for prompt in PROMPTS]
    samples = [Sample(list(prompt)) for prompt in PROMPTS]
    generate(model, samples, Sampling(NEW, temperature=0))
    for sample, tokens in zip(samples, want):
        assert sample.tokens[: len(tokens)] == tokens


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_hybrid_trains_on_a_gpu(tmp_path, compiled):
    settings = {"model.flavor": "kimi_linear_debug", "training.mixed_precision_param": "bfloat16"}
    settings |= {"training.seq_len": 512, "validation.seq_len": 512, "compile.enable": compiled}
    settings |= {"activation_checkpoint.mode": "selective" if compiled else "none"}
    settings |= {f"architecture.{name}": None for name in jobs.TINY["architecture"]}
    run = jobs.run_job(jobs.write_job(tmp_path, settings), timeout=580)
    log = jobs.log_of(run)
    assert run.returncode == 0, log[-4000:]
    losses = jobs.losses(log)
    assert len(losses) == jobs.STEPS and losses[jobs.STEPS] < losses[1] - 1
    assert "Full attention train runs varlen_attn" in log and len(jobs.samples(tmp_path / "run")) == 3
