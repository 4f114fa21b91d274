"""Prefill, decode and sampling, in FP32 on a tiny decoder, against forwards without a cache."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.components.tokenizer import BaseTokenizer

from titan_kda.cache import KDACache, select
from titan_kda.data import ByteTokenizer
from titan_kda.generate import (
    NotFiniteError,
    Sample,
    Sampling,
    Speed,
    can_capture,
    decode,
    encode_prompt,
    generate,
    inference,
    prefill,
)
from titan_kda.model import Decoder, ModelArgs

TINY = dict(vocab_size=264, dim=32, n_layers=2, n_heads=2, key_width=8, value_width=12, ffn_width=48)
CPU = torch.device("cpu")
LENGTHS = (1, 2, 3, 5, 63, 64, 65, 100)  # one token, shorter than the convolution, about a chunk, more than one
NEW = 16
GREEDY = Sampling(NEW, temperature=0)
TIE = 1e-4
"""Two best logits that lie closer may swap: where they do, comparison ends."""


def make(**changes):
    model = Decoder(ModelArgs(**{**TINY, **changes}))
    with torch.no_grad():
        model.init_weights(seed=1)
        for layer in model.layers.values():  # a fresh model hardly looks back: its layers add little to the stream
            getattr(layer.mixer, "o_proj" if hasattr(layer.mixer, "o_proj") else "wo").weight *= 50
    return model


def some_tokens(length, seed=0):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


PROMPTS = [some_tokens(length) for length in LENGTHS]


@torch.no_grad()
def without_cache(model, prompt, count=NEW):
    """Greedy tokens by a whole forward for each, and how far ahead of the second best each was."""
    tokens, margins = list(prompt), []
    for _ in range(count):
        best = model(torch.tensor([tokens]))[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
    return tokens[len(prompt) :], margins


def compare(got, want, margins):
    """Asserts that two greedy texts are the same up to the first tie, which must come late."""
    assert len(got) == len(want) == len(margins)
    tie = next((i for i, margin in enumerate(margins) if margin < TIE), len(want))
    assert tie >= NEW // 2, "the prompts make no test: choose others"
    assert got[:tie] == want[:tie]


def run(model, prompts, sampling=GREEDY, keys=None, **options):
    samples = [Sample(list(prompt), key="" if keys is None else keys[i]) for i, prompt in enumerate(prompts)]
    generate(model, samples, sampling, **options)
    return samples


@pytest.fixture(scope="module")
def reference():
    """Each prompt's greedy text and margins."""
    model = make(eval_backend="chunk")
    return [without_cache(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("backend", ["chunk", "recurrent", "auto"])
def test_greedy_text_is_that_of_whole_forwards(reference, backend, together):
    model = make(prefill_backend=backend)
    if together:
        samples = run(model, PROMPTS)
    else:
        samples = [sample for prompt in PROMPTS for sample in run(model, [prompt])]
    for sample, (want, margins) in zip(samples, reference):
        compare(sample.tokens, want, margins)
        assert sample.finished == "length"


def test_the_reference_does_not_hang_on_its_backend(reference):
    model = make(eval_backend="recurrent")
    for i in (3, 6):
        compare(without_cache(model, PROMPTS[i])[0], *reference[i])


@pytest.mark.parametrize("lost", ["state", "conv_q", "conv_k", "conv_v"])
def test_the_comparison_sees_what_the_cache_holds(reference, lost):
    model = make()
    cache = model.new_cache()
    logits = prefill(model, [PROMPTS[5]], cache, CPU)
    tokens = []
    for _ in range(NEW):
        tokens.append(int(logits[0].argmax()))
        getattr(cache[0], lost).zero_()
        logits = decode(model, tokens[-1:], cache, CPU)
    assert tokens[0] == reference[5][0][0] and tokens != reference[5][0]


@pytest.mark.parametrize("backends", [("chunk", "chunk"), ("recurrent", "chunk"), ("chunk", "recurrent")])
@pytest.mark.parametrize("cuts", [(1,), (37,), (64,), (65, 66), (2, 3, 99)])
def test_a_prompt_in_pieces(reference, backends, cuts):
    """Pieces end at multiples of 64 and elsewhere; one of a single token is a decode step."""
    prompt, (want, margins) = PROMPTS[-1], reference[-1]
    models = [make(prefill_backend=backend) for backend in backends]
    cache = models[0].new_cache()
    for i, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(prompt)))):
        logits = prefill(models[min(i, 1)], [prompt[start:end]], cache, CPU)
    tokens = []
    for _ in range(NEW):
        tokens.append(int(logits[0].argmax()))
        logits = decode(models[0], tokens[-1:], cache, CPU)
    compare(tokens, want, margins)


def test_prompts_of_different_lengths_in_pieces(reference):
    """A second piece that is one token for one sequence and many for another."""
    model, pair = make(), (PROMPTS[3], PROMPTS[7])
    cache = model.new_cache()
    prefill(model, [pair[0][:4], pair[1][:2]], cache, CPU)
    logits = prefill(model, [pair[0][4:], pair[1][2:]], cache, CPU)
    tokens = [[], []]
    for _ in range(NEW):
        last = logits.argmax(-1).tolist()
        for text, token in zip(tokens, last):
            text.append(token)
        logits = decode(model, last, cache, CPU)
    compare(tokens[0], *reference[3])
    compare(tokens[1], *reference[7])


def test_prompts_that_are_the_same_are_read_once_and_go_their_own_ways(reference):
    model, speed = make(), Speed()
    order = [7, 2, 7, 7, 2]
    samples = run(model, [PROMPTS[i] for i in order], speed=speed)
    for i, sample in zip(order, samples):
        compare(sample.tokens, *reference[i])
    assert speed.prefill_tokens == LENGTHS[7] + LENGTHS[2]
    apart = run(model, [PROMPTS[2]] * 4, Sampling(NEW, temperature=1.0, top_p=1))
    assert len({tuple(sample.tokens) for sample in apart}) == 4


@pytest.mark.parametrize(
    "options",
    [
        dict(gate="softplus", allow_neg_eigval=True, output_gate="full"),
        dict(conv_width=1, tie_embeddings=True),
        dict(conv_width=7, n_heads=1, key_width=5, value_width=3, dim=24),
    ],
)
def test_other_layers(options):
    model = make(**options, eval_backend="chunk")
    prompts = [PROMPTS[0], PROMPTS[3], PROMPTS[6]]
    for sample, prompt in zip(run(model, prompts), prompts):
        want, margins = without_cache(model, prompt, 8)
        compare(sample.tokens[:8], want, margins)


def test_a_stream_padded_for_sequence_parallelism(reference):
    model = make()
    model.sequence_width = 6  # as tensor parallelism over six ranks sets it; 303 prompt tokens and 8 sequences
    for sample, (want, margins) in zip(run(model, PROMPTS), reference):
        compare(sample.tokens, want, margins)


def test_prompts_as_tokens():
    tokenizer = ByteTokenizer()
    assert encode_prompt(tokenizer, "") == [256] and encode_prompt(tokenizer, "aé\udcff") == [256, 97, 195, 169, 255]
    with pytest.raises(ValueError, match=r"'a\\ud800' is no text: surrogates not allowed"):
        encode_prompt(tokenizer, "a\ud800")

    class Words(BaseTokenizer):
        """As one of a tokenizer.json with no beginning-of-sequence token."""

        def encode(self, text, add_bos=False, add_eos=False):
            return [1] * len(text.split())

        def decode(self, ids):
            raise NotImplementedError

        def get_vocab_size(self):
            return 2

    assert encode_prompt(Words(), "a b") == [1, 1]
    for text, message in ((" ", "has no tokens"), ("a \udcff", "is no text")):
        with pytest.raises(ValueError, match=message):
            encode_prompt(Words(), text)


# ---- ends ----


def test_a_sequence_ends_at_eos_and_the_others_go_on(reference):
    eos = reference[3][0][4]
    at = [want.index(eos) if eos in want else NEW for want, _ in reference]
    assert at[3] <= 4 and NEW in at
    heard, ended = [[] for _ in PROMPTS], []
    samples = run(
        make(),
        PROMPTS,
        eos_id=eos,
        on_token=lambda i, token: heard[i].append(token),
        on_end=ended.append,
    )
    for sample, (want, _), end, tokens in zip(samples, reference, at, heard):
        assert sample.tokens == tokens == want[:end]  # the end-of-sequence token itself is left out
        assert sample.finished == ("length" if end == NEW else "eos")
    assert sorted(ended) == list(range(len(PROMPTS))) and ended[0] == at.index(min(at))


def test_a_listener_stops_a_sequence(reference):
    heard = [0, 0]

    def listen(i, token):
        heard[i] += 1
        return i == 1 and heard[1] == 3

    samples = run(make(), [PROMPTS[4], PROMPTS[5]], on_token=listen)
    assert (samples[0].finished, samples[1].finished) == ("length", "stop")
    assert samples[1].tokens == reference[5][0][:3] and heard == [NEW, 3]


def test_one_token_needs_no_decode_step():
    speed = Speed()
    (sample,) = run(make(), [PROMPTS[2]], Sampling(1, temperature=0), speed=speed)
    assert len(sample.tokens) == 1 and sample.finished == "length"
    assert (speed.prefill_tokens, speed.decode_tokens) == (3, 0) and speed.prefill_seconds > 0
    run(make(), [PROMPTS[2]] * 2, Sampling(4, temperature=0), speed=(speed := Speed()))
    assert (speed.prefill_tokens, speed.decode_tokens) == (3, 6) and speed.decode_seconds > 0


def test_nothing_to_do_and_nothing_to_read():
    generate(make(), [], GREEDY)
    with pytest.raises(ValueError, match="at least one token"):
        run(make(), [PROMPTS[1], []])


# ---- slots ----


@pytest.mark.parametrize("slots, burst", [(1, 2), (3, 1), (3, 5), (99, 7)])
def test_more_prompts_than_slots(reference, monkeypatch, slots, burst):
    """A sequence takes the slot of one that has ended, and no trace of it; ends of every kind, inside bursts too."""
    monkeypatch.setattr("titan_kda.generate._BURST", {"cpu": burst})
    eos = reference[3][0][4]
    heard, ended = [[] for _ in PROMPTS], []

    def listen(i, token):
        heard[i].append(token)
        return i == 6 and len(heard[i]) == 3

    samples = run(make(), PROMPTS, eos_id=eos, slots=slots, on_token=listen, on_end=ended.append)
    for i, (sample, (want, margins)) in enumerate(zip(samples, reference)):
        end = want.index(eos) if eos in want else NEW
        finished = "length" if end == NEW else "eos"
        if i == 6 and end >= 3:
            end, finished = 3, "stop"
        assert sample.tokens == heard[i] == want[:end] and sample.finished == finished, (i, margins)
    assert sorted(ended) == list(range(len(PROMPTS)))


@pytest.mark.parametrize("pattern", [["kda"], ["kda", "mla"]])
def test_draws_do_not_depend_on_slots_or_bursts(monkeypatch, pattern):
    """With caches of a fixed size, and with one that grows."""
    model, drawn = make(layer_pattern=pattern), Sampling(NEW, temperature=1.0, top_p=0.9, seed=3)
    keys = [f"sample {i}" for i in range(len(PROMPTS))]
    eos = 7
    alone = [run(model, [p], drawn, keys=[k], eos_id=eos)[0] for p, k in zip(PROMPTS, keys)]
    for slots, burst in ((2, 1), (3, 4), (99, 7)):
        monkeypatch.setattr("titan_kda.generate._BURST", {"cpu": burst})
        together = run(model, PROMPTS, drawn, keys=keys, eos_id=eos, slots=slots)
        assert [(s.tokens, s.finished) for s in together] == [(s.tokens, s.finished) for s in alone]


def test_a_free_slot_is_not_touched():
    """Its state, its convolution and its output: whatever lies in it."""
    model = make()
    cache = model.new_cache()
    prefill(model, [PROMPTS[3], PROMPTS[5], PROMPTS[4]], cache, CPU)
    alone = select(cache, [2, 0])
    for layer in cache:
        layer.state[1] = float("nan")
        layer.slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    logits = decode(model, [9, 1, 8], cache, CPU)
    torch.testing.assert_close(logits[[0, 2]], decode(model, [9, 8], alone, CPU), atol=1e-5, rtol=1e-5)
    assert logits[1].isfinite().all()
    for layer, want in zip(cache, alone):
        assert layer.state[1].isnan().all()
        torch.testing.assert_close(layer.state[[2, 0]], want.state, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(layer.conv_v[[2, 0]], want.conv_v, atol=1e-6, rtol=1e-5)


def test_long_prompts_are_read_in_parts(reference, monkeypatch):
    monkeypatch.setattr("titan_kda.generate._PREFILL_TOKENS", 70)
    speed = Speed()
    for sample, (want, margins) in zip(run(make(), PROMPTS, speed=speed), reference):
        compare(sample.tokens, want, margins)
    assert speed.prefill_tokens == sum(LENGTHS)


def test_what_cannot_be_captured_is_refused(monkeypatch):
    model, cuda = make(), torch.device("cuda")
    assert can_capture(model, CPU) == "the device is no GPU"
    assert can_capture(model, cuda) is None
    assert can_capture(make(layer_pattern=["kda", "mla"]), cuda) is None
    strange = make()
    strange.new_cache = lambda: [object()]
    assert can_capture(strange, cuda) == "a layer's cache is none that a graph can hold"
    with pytest.raises(ValueError, match="cannot be captured in a CUDA graph: the device is no GPU"):
        run(model, PROMPTS[:1], cuda_graph=True)
    with pytest.raises(ValueError, match="slots must be at least 1, got 0"):
        run(model, PROMPTS[:1], slots=0)


def test_experts_are_captured_where_they_count_on_the_device(monkeypatch):
    cuda, capability = torch.device("cuda"), [9]
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (capability[0], 0))
    model = make(num_experts=4, num_experts_per_token=2, expert_width=16)
    for dtype, name in ((torch.float32, "float32"), (torch.float16, "float16")):
        assert can_capture(model.to(dtype), cuda) == f"experts count their tokens on the host in {name}"
    assert can_capture(model.bfloat16(), cuda) is None
    capability[0] = 8
    assert can_capture(model, cuda) == "experts count their tokens on the host on this GPU"
    capability[0] = 10
    model.float()
    monkeypatch.setattr("torch.is_autocast_enabled", lambda kind: kind == "cuda")
    for dtype in (torch.bfloat16, torch.float16):  # what autocast is set to decides, whatever the weights are
        monkeypatch.setattr("torch.get_autocast_dtype", lambda kind, dtype=dtype: dtype)
        assert (can_capture(model, cuda) is None) is (dtype == torch.bfloat16)
    assert can_capture(model, CPU) == "the device is no GPU"


def test_prefill_normalises_q_where_it_is_told_to(monkeypatch):
    seen = []
    import titan_kda.attention as attention

    monkeypatch.setattr(attention, "chunk_kda", spy(attention.chunk_kda, seen))
    logits = {}
    for fuse in (True, False):
        model = make(prefill_backend="chunk", eval_backend="chunk", fuse_q_l2norm=fuse)
        logits[fuse] = prefill(model, [PROMPTS[7]], model.new_cache(), CPU)
        with torch.no_grad():
            model(torch.tensor([PROMPTS[4]]))  # as validation does
        model(torch.tensor([PROMPTS[4]]))  # as training does
    assert [call["fuse_q_l2norm"] for call in seen] == [True] * 2 + [False] * 4 + [False] * 6
    torch.testing.assert_close(logits[True], logits[False], atol=1e-4, rtol=1e-4)


def spy(function, calls):
    def wrapped(*args, **kwargs):
        calls.append(kwargs)
        return function(*args, **kwargs)

    return wrapped


def test_activation_checkpointing_steps_aside():
    """Its wrapper would read the random state of the GPU, which a graph's capture refuses."""
    model = make()
    saved = []

    def checkpoint(function, *args, **kwargs):
        saved.append(function)
        return function(*args, **kwargs)

    for name, layer in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(layer, checkpoint_fn=checkpoint))
    run(model, PROMPTS[:2])
    assert not saved
    model(torch.tensor([PROMPTS[3]]))
    assert len(saved) == 2


# ---- draws ----


def test_draws_depend_on_the_seed_and_the_sample_alone():
    model, drawn = make(), Sampling(NEW, temperature=1.0, top_p=1.0, seed=5)
    prompts = [PROMPTS[3], PROMPTS[6]]
    state = torch.get_rng_state()
    first = [sample.tokens for sample in run(model, prompts, drawn, keys=["a", "b"])]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert [sample.tokens for sample in run(model, prompts, drawn, keys=["a", "b"])] == first
    assert [run(model, [p], drawn, keys=[k])[0].tokens for p, k in zip(prompts, "ab")] == first
    assert run(model, prompts[:1], drawn, keys=["b"])[0].tokens != first[0]
    assert run(model, prompts[:1], Sampling(NEW, 1.0, 0, 1.0, seed=6), keys=["a"])[0].tokens != first[0]


def test_top_k_of_one_is_greedy(reference):
    samples = run(make(), PROMPTS, Sampling(NEW, temperature=5.0, top_k=1, top_p=1.0))
    for sample, (want, margins) in zip(samples, reference):
        compare(sample.tokens, want, margins)


def test_tokens_past_the_tokenizers_are_never_drawn():
    for sampling in (GREEDY, Sampling(64, temperature=20.0, top_p=1.0)):
        tokens = {token for sample in run(make(), PROMPTS, sampling, vocab_size=7) for token in sample.tokens}
        assert 1 < len(tokens) and max(tokens) < 7


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_not_finite(value):
    model = make()
    model.train()
    with torch.no_grad():
        model.output.weight[5, 0] = value
    for sampling in (GREEDY, Sampling()):
        with pytest.raises(NotFiniteError, match="not finite"):
            run(model, PROMPTS[:1], sampling)
        assert model.training and torch.is_grad_enabled()


# ---- what is left behind ----


@pytest.mark.parametrize("training", [True, False])
def test_mode_and_gradients_come_back_however_it_ends(training):
    model = make()
    model.train(training)
    seen = []

    def listen(i, token):
        seen.append((model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
        if len(seen) == 3:
            raise RuntimeError("enough")

    run(model, PROMPTS[:1], Sampling(2, temperature=0), on_token=listen)
    assert model.training is training and torch.is_grad_enabled()
    with pytest.raises(RuntimeError, match="enough"):
        run(model, PROMPTS[:1], on_token=listen)
    assert model.training is training and all(module.training is training for module in model.modules())
    assert torch.is_grad_enabled() and set(seen) == {(False, False, False)}
    loss = model(torch.tensor([PROMPTS[6]])).square().mean()  # and it trains on
    loss.backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())
    frozen = next(iter(model.layers.values()))
    frozen.eval()
    with pytest.raises(KeyboardInterrupt), inference(model):
        raise KeyboardInterrupt
    assert model.training is training and torch.is_grad_enabled()
    assert [m.training for m in model.layers.values()] == [False] + [training] * (len(model.layers) - 1)


def test_a_call_inside_another_leaves_it_its_packed_weights(monkeypatch):
    model = make()
    modules = [m for m in model.modules() if hasattr(m, "unpack")]
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    with inference(model):
        weights = [m._packed.weight for m in modules]
        with inference(model):
            pass
        assert all(m._packed.weight is weight for m, weight in zip(modules, weights, strict=True))
    assert weights and not any(m.packed for m in modules)


def test_an_interruption_keeps_what_there_is(reference):
    model, ended = make(), []
    samples = [Sample(PROMPTS[3]), Sample(PROMPTS[4]), Sample(PROMPTS[5])]

    def listen(i, token):
        if i == 1 and len(samples[1].tokens) == 4:
            raise KeyboardInterrupt
        return i == 2

    with pytest.raises(KeyboardInterrupt):
        generate(model, samples, GREEDY, on_token=listen, on_end=ended.append)
    assert [len(sample.tokens) for sample in samples] == [4, 4, 1] and ended == [2]
    assert [sample.finished for sample in samples] == [None, None, "stop"]
    for sample, (want, _) in zip(samples, reference[3:]):
        assert sample.tokens == want[: len(sample.tokens)]


# ---- the cache ----


def test_select_copies_rows():
    def draw(*shape):
        return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))

    cache = [KDACache(draw(3, 2, 8, 12), draw(3, 3, 16), draw(3, 3, 16), draw(3, 3, 24)) for _ in range(2)]
    kept = [layer.state.clone() for layer in cache]
    chosen = select(cache, [2, 0, 2])
    for layer, old in zip(chosen, cache):
        for name in ("state", "conv_q", "conv_k", "conv_v"):
            assert torch.equal(getattr(layer, name), getattr(old, name)[[2, 0, 2]])
        layer.state.zero_()  # a decode step writes into its cache
        layer.state[0] = 1
        assert layer.state[2].eq(0).all()
    assert all(torch.equal(layer.state, state) for layer, state in zip(cache, kept))
    assert select(cache, [])[0].state.shape == (0, 2, 8, 12)
    assert set(vars(select([KDACache()], [0])[0]).values()) == {None}


def test_a_cache_is_as_large_after_many_tokens_as_after_one():
    model = make()

    def size(cache):
        return sum(t.numel() for layer in cache for t in vars(layer).values() if t is not None)

    short, long = model.new_cache(), model.new_cache()
    prefill(model, [PROMPTS[0]], short, CPU)
    prefill(model, [PROMPTS[7]], long, CPU)
    assert size(short) == size(long) > 0 and long[0].state.dtype == torch.float32
