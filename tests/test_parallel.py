"""Every layout trains the same model: tensor parallelism as one process, FSDP as DDP, from one seed checkpoint."""

import shutil

import jobs
import pytest

TP = ("--parallelism.tensor_parallel_degree=2", "--parallelism.data_parallel_shard_degree=1")
DDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")

LAYOUTS = {"one": ((), 1), "tp": (TP, 2), "ddp": (DDP, 2), "fsdp": ((), 2)}


def train(folder, settings=None, args=(), processes=1, seed_checkpoint=None):
    toml = jobs.write_job(folder, settings)
    if seed_checkpoint is not None:
        shutil.copytree(seed_checkpoint, folder / "run" / "checkpoint" / "step-0")
    run = jobs.run_job(toml, *args, processes=processes, timeout=300)
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


def test_first_samples_are_the_same_text_on_every_layout(tmp_path_factory, seed_checkpoint):
    # The first samples come after a step, and two data-parallel ranks have read other text by then than one process: a
    # rate that moves no weight leaves the seed checkpoint's own text.
    settings = {"optimizer.lr": 1e-20, "training.steps": 1, "checkpoint.interval": 1000}
    files = {}
    for layout, (args, processes) in LAYOUTS.items():
        folder = tmp_path_factory.mktemp(f"samples-{layout}")
        train(folder, settings, args, processes, seed_checkpoint)
        files[layout] = (folder / "run" / "samples" / "step-1.jsonl").read_text()
    assert files["one"].count("\n") == 2
    assert files == dict.fromkeys(files, files["one"])


def test_the_log_says_what_each_phase_runs(runs):
    log = runs["one"][0]
    for line in (
        "KDA train: chunk_kda (reference)",
        "KDA eval: recurrent_kda (reference)",
        "KDA prefill: recurrent_kda up to 64 tokens (reference), chunk_kda above (reference)",
        "KDA decode: recurrent_kda_step (reference)",
        "KDA train runs chunk_kda (reference)",
        "KDA eval runs recurrent_kda (reference)",
        "KDA prefill runs recurrent_kda (reference)",
        "KDA decode runs recurrent_kda_step (reference)",
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
