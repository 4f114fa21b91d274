"""The model, generation and jobs on GPUs: what the CPU's tests cannot see."""

import os
import shutil
import signal
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import jobs
import pytest
import torch
import torch.nn.functional as F

from titan_kda.data import ByteTokenizer
from titan_kda.generate import Sample, Sampling, Speed, _Slots, decode, generate, inference, prefill
from titan_kda.model import FLAVORS, Decoder, ModelArgs

pytestmark = pytest.mark.gpu

SHAPE = dict(vocab_size=264, dim=256, n_layers=3, n_heads=2, key_width=128, value_width=128, ffn_width=512)
LENGTHS = (1, 3, 63, 64, 65, 200, 7, 130)


def make(dtype=torch.bfloat16, **changes):
    return built(ModelArgs(**{**SHAPE, **changes}), dtype)


def built(args, dtype):
    model = Decoder(args).cuda()
    with torch.no_grad():
        model.init_weights(seed=1)
        for layer in model.layers.values():  # so that the layers, and not the last token alone, make the logits
            (layer.mixer.o_proj if hasattr(layer.mixer, "o_proj") else layer.mixer.wo).weight *= 30
    return model.to(dtype)


def some_tokens(length, seed=0):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()


PROMPTS = [some_tokens(length) for length in LENGTHS]


def run(model, sampling, prompts=PROMPTS, **options):
    samples, speed = [Sample(list(p)) for p in prompts], Speed()
    generate(model, samples, sampling, vocab_size=259, speed=speed, **options)
    return [sample.tokens for sample in samples], speed


# ---- prefill and decode ----


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prefill_and_decode_are_the_training_forward(dtype, gate):
    """Teacher forcing, at every position of two texts: the same likeliest token, but for ties."""
    model = make(dtype, gate=gate)
    texts = [some_tokens(150, seed=3), some_tokens(150, seed=4)]
    want = model(torch.tensor(texts).cuda()).float().detach()  # gradients are on: chunk_kda, as in training
    start = 70  # what lies before is read as prompts of other lengths in one pack
    device = torch.device("cuda")
    cache = model.new_cache()
    with inference(model):
        got = [prefill(model, [texts[0][: start - 5], texts[1][:start]], cache, device)]
        prefill(model, [texts[0][start - 5 : start], texts[1][start : start + 1]], cache, device)
        texts[1] = texts[1][1:]
        for i in range(start, 148):
            got.append(decode(model, [texts[0][i], texts[1][i]], cache, device))
    torch.testing.assert_close(got[0][0].float(), want[0, start - 6], atol=0.15, rtol=0.05)
    got = torch.stack(got[1:]).float()  # [steps, 2, vocab]
    want = torch.stack([want[0, start:148], want[1, start + 1 : 149]], 1)
    best = want.topk(2).values
    tied = best[..., 0] - best[..., 1] <= (2**-6 if dtype == torch.bfloat16 else 1e-4) * want.abs().amax(-1)
    same = got.argmax(-1) == want.argmax(-1)
    assert (same | tied).all()
    assert tied.float().mean() < 0.3 and same.float().mean() > 0.9


# ---- CUDA graphs ----


@pytest.mark.parametrize("sampling", [Sampling(24, temperature=0), Sampling(24, 0.9, 50, 0.9, seed=3)], ids=str)
def test_the_graph_changes_no_token(sampling):
    """More prompts than slots, so that slots are taken again; then with ends at another token."""
    model = make()
    plain, speed = run(model, sampling, slots=3, cuda_graph=False)
    assert not speed.graph
    graphed, speed = run(model, sampling, slots=3)
    assert speed.graph and speed.capture_seconds > 0
    assert graphed == plain and all(len(tokens) == 24 for tokens in plain)
    # Prompts are now read in other packs, whose products round otherwise in 16 bits.
    model = make(torch.float32)
    plain, _ = run(model, sampling, slots=3)
    eos = plain[4][3]
    cut, _ = run(model, sampling, slots=3, eos_id=eos)
    assert cut == [tokens[: tokens.index(eos)] if eos in tokens else tokens for tokens in plain]


def test_in_the_loop_each_capture_sees_the_weights_of_its_step():
    """FP32 weights under autocast, which keeps 16-bit copies: none of an earlier step's may be left."""
    model = make(torch.float32)
    model.train()
    texts = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            graphed, speed = run(model, Sampling(12, temperature=0), PROMPTS[:3])
            plain, _ = run(model, Sampling(12, temperature=0), PROMPTS[:3], cuda_graph=False)
        assert speed.graph and graphed == plain
        texts.append(graphed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn_like(parameter)
    assert texts[0] != texts[1] and model.training


DEBUG = FLAVORS["kimi_linear_debug"]
HYBRIDS = {
    "kimi": DEBUG,
    "gqa": replace(DEBUG, layer_pattern=["kda", "gqa"], attn_heads=4, kv_heads=2, head_width=64),
    "mla": replace(DEBUG, layer_pattern=["mla"]),
    "dense": replace(DEBUG, num_experts=0),
    "experts": replace(DEBUG, layer_pattern=["kda"]),
}


@pytest.fixture
def plain_steps(monkeypatch):
    """A call by which each step that would be replayed from then on is run: the same work, launched by the host."""

    def switch():
        monkeypatch.setattr("titan_kda.generate._captured", lambda step, device: (SimpleNamespace(replay=step), 1.0))

    return switch


@pytest.mark.parametrize("sampling", [Sampling(90, temperature=0), Sampling(90, 0.9, 50, 0.9, seed=3)], ids=str)
@pytest.mark.parametrize("pattern", HYBRIDS)
def test_the_graph_changes_no_token_of_a_hybrid(plain_steps, pattern, sampling):
    """In bf16: slots are taken again, ends lie in the middle of a burst, and the caches outgrow 256 tokens."""
    model = built(HYBRIDS[pattern], torch.bfloat16)
    free, speed = run(model, sampling, slots=3, cuda_graph=True)
    assert speed.graph and speed.capture_seconds > 0 and all(len(tokens) == 90 for tokens in free)
    eos = free[4][40]

    def listen(i, token):
        return i == 2 and token == free[2][30]

    options = dict(slots=3, cuda_graph=True, eos_id=eos, on_token=listen)
    graphed, speed = run(model, sampling, **options)
    assert graphed != free and graphed == run(model, sampling, **options)[0]
    plain_steps()
    assert run(model, sampling, slots=3, cuda_graph=True)[0] == free
    assert run(model, sampling, **options)[0] == graphed


@pytest.mark.parametrize("pattern", HYBRIDS)
def test_by_a_graph_or_not_at_all(pattern):
    """Sequences that start and end together: the batch without a graph makes products of the same shapes."""
    model, sampling = built(HYBRIDS[pattern], torch.bfloat16), Sampling(90, 0.9, 50, 0.9, seed=4)
    plain, speed = run(model, sampling, cuda_graph=False)
    assert not speed.graph
    graphed, speed = run(model, sampling, cuda_graph=True)
    assert speed.graph and graphed == plain
    rate = {}
    for graph in (False, True):
        _, speed = run(model, Sampling(300, temperature=0), PROMPTS[:1], cuda_graph=graph)
        rate[graph] = speed.decode_tokens / speed.decode_seconds
    assert rate[True] > 1.5 * rate[False], rate


def test_a_capture_among_live_sequences_leaves_them_as_they_are(monkeypatch):
    """A capture at every step, each after two steps that are run on the buffers themselves."""
    model, sampling = built(DEBUG, torch.bfloat16), Sampling(12, temperature=0)
    monkeypatch.setattr("titan_kda.generate._CAPTURE_PAYS", 1)
    once, _ = run(model, sampling, slots=3, cuda_graph=True)
    step, captures = _Slots.step, []

    def forgetful(self, uniforms):
        self.graph = None
        captures.append(None)
        return step(self, uniforms)

    monkeypatch.setattr(_Slots, "step", forgetful)
    assert run(model, sampling, slots=3, cuda_graph=True)[0] == once and len(captures) >= 33


def test_a_hybrid_in_the_loop(plain_steps):
    """FP32 weights under autocast, which the experts follow; without it they wait for the device."""
    model, sampling = built(DEBUG, torch.float32).train(), Sampling(40, temperature=0)
    with pytest.raises(ValueError, match="experts count their tokens on the host in float32"):
        run(model, sampling, cuda_graph=True)
    counts = [module.tokens_per_expert.clone() for module in model.modules() if hasattr(module, "tokens_per_expert")]
    texts = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            graphed, speed = run(model, sampling, PROMPTS[:3], cuda_graph=True)
        assert speed.graph
        texts.append(graphed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).cuda()
    after = [module.tokens_per_expert for module in model.modules() if hasattr(module, "tokens_per_expert")]
    assert texts[0] != texts[1] and model.training and all(map(torch.equal, counts, after))
    plain_steps()
    model = built(DEBUG, torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        assert run(model, sampling, PROMPTS[:3], cuda_graph=True)[0] == texts[0]


def test_graphs_give_their_memory_back():
    """Of many captures in one call, no more than the last one's memory is held, and none after it."""
    model = built(DEBUG, torch.bfloat16)
    run(model, Sampling(40), cuda_graph=True)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    _, speed = run(model, Sampling(1200, temperature=0), PROMPTS[:4], cuda_graph=True)  # five capacities
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert speed.graph and torch.cuda.memory_reserved() - before < 2**26


def synchronisations(call):
    """How often a call waits for the device."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)


def test_generation_looks_at_the_tokens_every_few_steps():
    model = make()
    run(model, Sampling(33))
    assert synchronisations(lambda: torch.ones(1, device="cuda").item()) == 1
    assert synchronisations(lambda: run(model, Sampling(33))) <= 8  # one prefill, and 32 steps eight at a time


# ---- training ----


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_and_backward_do_not_wait_for_the_device(compiled):
    model = make(torch.bfloat16)
    if compiled:
        for name, layer in model.layers.named_children():
            model.layers.register_module(name, torch.compile(layer, fullgraph=True))
    tokens = torch.randint(0, 256, (2, 256), device="cuda")
    tokens[:, 100] = 257
    labels = tokens.roll(-1, 1)

    def step():
        masks = model.get_attention_masks(tokens, ByteTokenizer())
        F.cross_entropy(model(tokens, masks).flatten(0, 1).float(), labels.flatten()).backward()

    for _ in range(2):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# ---- jobs ----

SETTINGS = {
    "architecture.dim": 256,
    "architecture.key_width": 64,
    "architecture.value_width": 64,
    "training.seq_len": 256,
    "validation.seq_len": 256,
    "training.mixed_precision_param": "bfloat16",
    "kda.eval_backend": "chunk",
}


def test_a_killed_job_goes_on_exactly(tmp_path):
    settings = SETTINGS | {"debug.deterministic": True, "compile.enable": True}
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    run = jobs.run_job(jobs.write_job(tmp_path / "whole", settings))
    assert run.returncode == 0, jobs.log_of(run)[-3000:]
    whole = jobs.losses(jobs.log_of(run))
    toml = jobs.write_job(tmp_path / "killed", settings)
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_kda.train", f"--job.config_file={toml}"],
        cwd=toml.parent,
        env=jobs.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    for text in process.stdout:
        if "step: 14 " in text:
            process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    run = jobs.run_job(toml)
    assert run.returncode == 0 and "Training starts at step 11\n" in jobs.log_of(run), jobs.log_of(run)[-3000:]
    assert jobs.losses(jobs.log_of(run)) == {step: whole[step] for step in range(11, jobs.STEPS + 1)}
    assert jobs.samples(tmp_path / "killed" / "run") == jobs.samples(tmp_path / "whole" / "run")


TP = ("--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1")
DDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")
LAYOUTS = {
    "one": ((), 1),
    "tp": (TP, 2),
    "ddp": (DDP, 2),
    "fsdp": ((), 2),
    "fsdp, compiled": (("--compile.enable", "--activation_checkpoint.mode=selective"), 2),
}


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    train(folder, SETTINGS, ["--checkpoint.create_seed_checkpoint", "--debug.seed=7"])
    return folder / "run" / "checkpoint" / "step-0"


def train(folder, settings, args=(), processes=1, seed_checkpoint=None):
    toml = jobs.write_job(folder, settings)
    if seed_checkpoint is not None:
        shutil.copytree(seed_checkpoint, folder / "run" / "checkpoint" / "step-0")
    run = jobs.run_job(toml, *args, processes=processes)
    assert run.returncode == 0, jobs.log_of(run)[-4000:]
    return jobs.log_of(run)


def train_layouts(tmp_path_factory, settings, seed_checkpoint):
    """Every layout's folder and log, trained at once: a job hardly keeps a GPU busy, and takes a while to start."""
    folders = {layout: tmp_path_factory.mktemp("layout") for layout in LAYOUTS}
    with ThreadPoolExecutor(len(LAYOUTS)) as pool:
        logs = {
            layout: pool.submit(train, folders[layout], settings, args, processes, seed_checkpoint)
            for layout, (args, processes) in LAYOUTS.items()
        }
    return {layout: (folders[layout], log.result()) for layout, log in logs.items()}


def test_layouts_follow_one_curve(tmp_path_factory, seed_checkpoint):
    """Mean |difference of the 20-step average loss| under 0.02 nats; bf16, and FP32 under TP alone, from one start.

    One process and TP's read the same text; DDP's and FSDP's ranks read other text than they, and the same.
    """
    settings = SETTINGS | {"training.steps": 40, "generation.enable": False, "validation.enable": False}
    curves = {}
    for layout, (_, log) in train_layouts(tmp_path_factory, settings, seed_checkpoint).items():
        losses = [loss for _, loss in sorted(jobs.losses(log).items())]
        assert len(losses) == 40
        curves[layout] = torch.tensor(losses).unfold(0, 20, 1).mean(1)
    for one, other in (("tp", "one"), ("fsdp", "ddp"), ("fsdp, compiled", "fsdp")):
        assert (curves[one] - curves[other]).abs().mean() < 0.02, (one, other)
    assert curves["one"][0] - curves["one"][-1] > 0.2  # it learns, so that the curves have something to say


def test_fp32_samples_are_the_same_text_on_every_layout(tmp_path_factory, seed_checkpoint):
    settings = SETTINGS | {
        "training.mixed_precision_param": "float32",
        "optimizer.lr": 1e-20,  # the ranks' texts differ, and the first samples come after a step
        "training.steps": 1,
        "generation.max_new_tokens": 32,
        "checkpoint.interval": 1000,
    }
    trained = train_layouts(tmp_path_factory, settings, seed_checkpoint)
    files = {name: (folder / "run" / "samples" / "step-1.jsonl").read_text() for name, (folder, _) in trained.items()}
    assert files["one"].count("\n") == 2 and files == dict.fromkeys(files, files["one"])


def test_the_likeliest_tokens_are_the_same_on_every_layout(tmp_path):
    """bf16, one trained checkpoint, every position of a text given the true ones before it: 99% of them."""
    settings = SETTINGS | {"training.steps": 40, "generation.enable": False, "validation.enable": False}
    train(tmp_path, settings)
    here = jobs.environment(PYTHONPATH=os.pathsep.join(sys.path))

    def likeliest(layout):
        args, processes = LAYOUTS[layout]
        file = tmp_path / f"{layout}.txt"
        settings = ("--job.config_file", tmp_path / "job.toml", *args)
        run = jobs.run_module("teacher_forcing", file, *settings, cwd=tmp_path, processes=processes, env=here)
        assert run.returncode == 0, jobs.log_of(run)[-4000:]
        return torch.tensor([list(map(int, line.split())) for line in file.read_text().splitlines()])

    with ThreadPoolExecutor(len(LAYOUTS)) as pool:
        found = dict(zip(LAYOUTS, pool.map(likeliest, LAYOUTS)))
    assert found["one"].unique().numel() > 20  # it has learnt something to disagree on
    for layout, tokens in found.items():
        assert (tokens == found["one"]).float().mean() >= 0.99, layout
