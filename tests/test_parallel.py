"""Every layout trains the same model: tensor parallelism as one process, FSDP as DDP, from one seed checkpoint."""

import shutil
from types import SimpleNamespace

import forked
import jobs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titan_kda.model import Decoder, ModelArgs
from titan_kda.parallelize import apply_fsdp
from titan_kda.train import load_job

TP = ("--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1")
DDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")

LAYOUTS = {"one": ((), 1), "tp": (TP, 2), "ddp": (DDP, 2), "fsdp": ((), 2)}


def train(folder, settings=None, args=(), processes=1, seed_checkpoint=None):
    toml = jobs.write_job(folder, settings)
    if seed_checkpoint is not None:
        shutil.copytree(seed_checkpoint, folder / "run" / "checkpoint" / "step-0")
    run = forked.run_job(toml, *args, processes=processes)
    assert run.returncode == 0, jobs.log_of(run)[-4000:]
    return jobs.log_of(run)


def apart(one, other):
    assert one.keys() == other.keys() and one
    return max(abs(one[step] - other[step]) for step in one)


@pytest.fixture(scope="module")
def seed_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seed")
    train(folder, args=["--checkpoint.create_seed_checkpoint", "--debug.seed=7"])
    return folder / "run" / "checkpoint" / "step-0"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, seed_checkpoint):
    """{layout: (log, its folder)}; each starts from the seed checkpoint, and none from its own initialisation."""
    found = {}
    for layout, (args, processes) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(layout)
        found[layout] = (train(folder, None, args, processes, seed_checkpoint), folder / "run")
    return found


def test_tensor_parallelism_gives_the_single_process_losses(runs):
    assert len(jobs.losses(runs["one"][0])) == jobs.STEPS
    assert apart(jobs.losses(runs["tp"][0]), jobs.losses(runs["one"][0])) <= 1e-4
    assert apart(jobs.validation_losses(runs["tp"][0]), jobs.validation_losses(runs["one"][0])) <= 1e-4


def test_fsdp_gives_ddp_losses(runs):
    assert apart(jobs.losses(runs["fsdp"][0]), jobs.losses(runs["ddp"][0])) <= 1e-4
    assert apart(jobs.validation_losses(runs["fsdp"][0]), jobs.validation_losses(runs["ddp"][0])) <= 1e-4
    # Two ranks read other text than one, so that equal curves would mean that the second was not there.
    assert apart(jobs.losses(runs["fsdp"][0]), jobs.losses(runs["one"][0])) > 1e-3


@pytest.mark.parametrize("layout", ["one", "ddp", "fsdp"])
def test_accumulated_gradients_are_those_of_the_whole_batch(tmp_path_factory, seed_checkpoint, layout):
    """Four micro-batches a step and rank, beside one of four times the rows: from the second step on the losses show
    what the first has done, and the gradients' norms show it at once."""
    args, processes = LAYOUTS[layout]
    settings = {"training.steps": 3, "validation.enable": False, "generation.enable": False}
    whole = settings | {"training.local_batch_size": 4, "training.global_batch_size": 4 * processes}
    logs = [
        train(tmp_path_factory.mktemp(f"{layout}-{size}"), job, args, processes, seed_checkpoint)
        for size, job in (("whole", whole), ("parts", whole | {"training.local_batch_size": 1}))
    ]
    assert apart(*map(jobs.losses, logs)) <= 1e-4
    assert apart(*map(jobs.gradient_norms, logs)) <= 1e-3


def test_first_samples_are_the_same_text_on_every_layout(tmp_path_factory, seed_checkpoint, runs):
    # The first samples come after a step, and two data-parallel ranks have read other text by then than one process.
    # Those that read the same are compared after it; one of either kind at a rate that moves no weight, which leaves
    # the seed checkpoint's own text.
    settings = {"optimizer.lr": 1e-20, "training.steps": 1, "checkpoint.interval": 1000}
    files = {layout: (folder / "samples" / "step-1.jsonl").read_text() for layout, (_, folder) in runs.items()}
    assert files["one"].count("\n") == 2
    assert files["tp"] == files["one"] and files["fsdp"] == files["ddp"]
    files = {}
    for layout in ("one", "fsdp"):
        args, processes = LAYOUTS[layout]
        folder = tmp_path_factory.mktemp(f"samples-{layout}")
        train(folder, settings, args, processes, seed_checkpoint)
        files[layout] = (folder / "run" / "samples" / "step-1.jsonl").read_text()
    assert files["one"].count("\n") == 2 and files["fsdp"] == files["one"]


def test_the_log_says_what_each_phase_runs(runs):
    log = runs["one"][0]
    for line in (
        "KDA train: chunk_kda (reference)",
        "KDA eval: recurrent_kda (reference)",
        "KDA prefill: recurrent_kda up to 64 tokens (reference), chunk_kda above (reference)",
        "KDA decode: recurrent_kda_conv_step (reference)",
        "KDA train runs chunk_kda (reference)",
        "KDA eval runs recurrent_kda (reference)",
        "KDA prefill runs recurrent_kda (reference)",
        "KDA decode runs recurrent_kda_conv_step (reference)",
    ):
        assert log.count(line + "\n") == 1, line
    assert log.index("KDA train: ") < log.index("step:  1 ")


def test_fsdp_with_tp_compile_and_checkpointing_trains_alike(tmp_path_factory):
    """The other form of everything: softplus gate, full output gate, tied head, chunk everywhere."""
    settings = {
        "training.steps": 4,
        "validation.freq": 4,
        "generation.freq": 4,
        "architecture.gate": "softplus",
        "architecture.output_gate": "full",
        "architecture.tie_embeddings": True,
        "architecture.allow_neg_eigval": True,
        "kda.eval_backend": "chunk",
        "kda.prefill_backend": "chunk",
    }
    plain = train(tmp_path_factory.mktemp("plain"), settings, (), 2)
    folder = tmp_path_factory.mktemp("spread")
    spread = train(
        folder,
        settings | {"compile.enable": True, "activation_checkpoint.mode": "full"},
        ["--parallelism.tensor_parallel_degree=2"],
        4,
    )
    assert apart(jobs.losses(spread), jobs.losses(plain)) <= 1e-4
    assert apart(jobs.validation_losses(spread), jobs.validation_losses(plain)) <= 1e-4
    assert "KDA eval runs chunk_kda (reference)" in spread
    assert "KDA prefill runs chunk_kda (reference)" in spread
    assert "Compiling each layer" in spread


def test_decay_parameters_stay_fp32_under_fsdps_mixed_precision(tmp_path):
    """The rest is gathered in bf16; A_log, dt_bias and their gradients never are."""
    toml = jobs.write_job(tmp_path, {"training.mixed_precision_param": "bfloat16"})
    config = load_job([f"--job.config_file={toml}"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = Decoder(ModelArgs(dim=32, n_layers=1, n_heads=2, key_width=8, value_width=8, ffn_width=48))
        model.init_weights(seed=0)
        dims = SimpleNamespace(dp_replicate_enabled=False, ep_enabled=False, get_mesh=lambda names: mesh)
        apply_fsdp(model, dims, config)
        gathered = {}

        def note(name):
            def hook(module, args):
                gathered[name] = {parameter.dtype for parameter in module.parameters(recurse=False)}

            return hook

        mixer = model.layers["0"].mixer
        for name in ("forget_gate", "q_proj", "q_conv", "o_norm"):
            getattr(mixer, name).register_forward_pre_hook(note(name))
        model(torch.randint(0, 256, (1, 12))).float().sum().backward()
    finally:
        dist.destroy_process_group()
    assert gathered.pop("forget_gate") == {torch.float32}
    assert set(map(frozenset, gathered.values())) == {frozenset({torch.bfloat16})}
    for parameter in mixer.forget_gate.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32 and parameter.grad.to_local().any()


@pytest.mark.gpu
def test_gpu_the_job_runs_on_the_kernels(tmp_path):
    log = train(tmp_path)
    for line in ("train runs chunk_kda", "eval runs recurrent_kda", "decode runs recurrent_kda_conv_step"):
        assert f"KDA {line} (triton)\n" in log
    found = jobs.losses(log)
    assert len(found) == jobs.STEPS and found[jobs.STEPS] < found[1] - 1
    assert all(row["tokens"] for rows in jobs.samples(tmp_path / "run").values() for row in rows)
