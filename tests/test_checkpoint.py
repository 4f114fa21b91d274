"""Weights from every layout's checkpoint, clear errors for the rest, no code run, and folders that survive a kill."""

import json
import os
import pickle
import random
import shutil
import signal
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config import JobConfig

from titan_kda.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointSettingError,
    InvalidCheckpointError,
    UnfinishedCheckpointError,
    latest_step,
    prepare_folder,
    read_weights,
    remove_half_written,
    resolve_checkpoint,
    set_aside_newer,
    validate_checkpoint_settings,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def make_model(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    model.register_buffer("steps", torch.tensor(seed + 7))
    return model


def shapes_of(model):
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def save_step(folder, step, seed=0, trainer=True):
    """A step as torchtitan lays it out: the model's names at the top, the trainer's under their prefixes."""
    state = dict(make_model(seed).state_dict())
    if trainer:
        state["optimizer"] = {"state.0.weight.exp_avg": torch.zeros(7, 5), "param_groups.lr": 0.1}
        state["dataloader"] = {"dp_rank_0": b"position", "world_size": 1}
        state["train_state"] = {"step": torch.tensor(step), "ntokens_seen": torch.tensor(9)}
    path = Path(folder, f"step-{step}")
    dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def assert_weights(got, model):
    want = model.state_dict()
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype, name


def one_line(error):
    return "\n" not in str(error.value) and len(str(error.value)) < 500


# ---- reading ----


def save_layouts(rank, port, folder):
    torch.cuda.is_available = lambda: False  # a forked child cannot use its parent's device
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = make_model()
    dcp.save(get_model_state_dict(nn.parallel.DistributedDataParallel(model)), checkpoint_id=f"{folder}/ddp")
    columns_rows = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "steps": Replicate()}
    state = {name: distribute_tensor(w, mesh, [columns_rows[name]]) for name, w in model.state_dict().items()}
    dcp.save(state, checkpoint_id=f"{folder}/tp")
    dcp.save(get_model_state_dict(fully_shard(model, mesh=mesh)), checkpoint_id=f"{folder}/fsdp")
    model = nn.Sequential(fully_shard(torch.compile(make_model()), mesh=mesh))
    dcp.save(get_model_state_dict(model[0]), checkpoint_id=f"{folder}/compiled")
    dist.destroy_process_group()


def test_every_layout_gives_the_whole_tensors(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(save_layouts, (port, str(tmp_path)), nprocs=2, start_method="fork")
    model = make_model()
    for layout in ("ddp", "tp", "fsdp", "compiled"):
        files = sorted(path.name for path in (tmp_path / layout).iterdir())
        assert files == [".metadata", "__0_0.distcp", "__1_0.distcp"], layout
        assert_weights(read_weights(resolve_checkpoint(tmp_path / layout), shapes_of(model)), model)


def test_only_the_models_tensors_are_read(tmp_path):
    model = make_model()
    checkpoint = resolve_checkpoint(save_step(tmp_path, 20))
    assert checkpoint == Checkpoint(tmp_path / "step-20", "dcp", 20)
    assert_weights(read_weights(checkpoint, shapes_of(model)), model)
    half = read_weights(checkpoint, shapes_of(model), dtype=torch.bfloat16)
    assert half["0.weight"].dtype == torch.bfloat16 and half["steps"].dtype == torch.int64
    assert torch.equal(half["0.weight"], model[0].weight.bfloat16())


def test_a_run_means_its_newest_whole_step(tmp_path, caplog):
    run = tmp_path / "run"
    for step in (5, 10, 100):
        save_step(run / "checkpoint", step, seed=step)
    (run / "samples").mkdir()
    (run / "samples" / "step-200.jsonl").write_text("{}")
    for path in (run, run / "checkpoint"):
        checkpoint = resolve_checkpoint(path)
        assert (checkpoint.path, checkpoint.step) == (run / "checkpoint" / "step-100", 100)
    assert_weights(read_weights(checkpoint, shapes_of(make_model())), make_model(100))
    (run / "checkpoint" / "step-100" / ".metadata").unlink()
    assert resolve_checkpoint(run).step == 10
    assert "step-100 is half written" in caplog.text
    (run / "checkpoint").rename(run / "ckpt")  # checkpoint.folder may have any name
    assert resolve_checkpoint(run).step == 10
    save_step(run / "other", 3)
    with pytest.raises(CheckpointNotFoundError, match=r"several runs.*ckpt.*other") as error:
        resolve_checkpoint(run)
    assert one_line(error)


def test_safetensors_file_and_folders(tmp_path):
    model = make_model()
    state = model.state_dict()
    save_file(state, tmp_path / "one.safetensors")
    checkpoint = resolve_checkpoint(tmp_path / "one.safetensors")
    assert checkpoint.kind == "safetensors" and checkpoint.step is None
    assert_weights(read_weights(checkpoint, shapes_of(model)), model)

    folder = tmp_path / "step-30"
    folder.mkdir()
    parts = {"a.safetensors": ["0.weight", "steps"], "b.safetensors": ["0.bias", "1.weight"]}
    for name, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / name)
    assert_weights(read_weights(resolve_checkpoint(folder), shapes_of(model)), model)
    index = {"weight_map": {key: name for name, keys in parts.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = resolve_checkpoint(folder)
    assert checkpoint.step == 30
    got = read_weights(checkpoint, shapes_of(model), dtype=torch.float64)
    assert got["0.bias"].dtype == torch.float64 and torch.equal(got["0.bias"].float(), state["0.bias"])

    (folder / "b.safetensors").unlink()
    with pytest.raises(UnfinishedCheckpointError, match=r"b\.safetensors is missing"):
        resolve_checkpoint(folder)
    data = (tmp_path / "one.safetensors").read_bytes()
    for size in (0, 4, 100, len(data) - 1):
        (tmp_path / "one.safetensors").write_bytes(data[:size])
        with pytest.raises(UnfinishedCheckpointError, match="half written or damaged") as error:
            resolve_checkpoint(tmp_path / "one.safetensors")
        assert one_line(error)


# ---- errors ----


def test_what_is_not_there_or_no_checkpoint(tmp_path):
    for name in ("x" * 5000, "~no such user/x"):
        with pytest.raises(CheckpointNotFoundError, match="no such file or folder"):
            resolve_checkpoint(name)
    with pytest.raises(CheckpointNotFoundError, match="no such file or folder") as error:
        resolve_checkpoint(tmp_path / "none")
    assert isinstance(error.value, FileNotFoundError) and isinstance(error.value, CheckpointError)
    with pytest.raises(CheckpointNotFoundError, match="it is empty"):
        resolve_checkpoint(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "tb").mkdir()
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .*: it holds notes\.txt, tb"):
        resolve_checkpoint(tmp_path)
    with pytest.raises(InvalidCheckpointError, match=r"notes\.txt is no checkpoint"):
        resolve_checkpoint(tmp_path / "notes.txt")
    step = save_step(tmp_path, 1)
    with pytest.raises(InvalidCheckpointError, match="give its folder"):
        resolve_checkpoint(step / "__0_0.distcp")


@pytest.mark.parametrize("damage", ["no metadata", "no data", "short data", "empty step"])
def test_half_written_steps(tmp_path, damage):
    step = save_step(tmp_path, 40)
    data = step / "__0_0.distcp"
    if damage == "no metadata":
        (step / ".metadata").rename(step / ".metadata.tmp")
    elif damage == "no data":
        data.unlink()
    elif damage == "short data":
        data.write_bytes(data.read_bytes()[:-1])
    else:
        shutil.rmtree(step)
        step.mkdir()
    with pytest.raises(UnfinishedCheckpointError, match="step-40 is half written") as error:
        resolve_checkpoint(step)
    assert one_line(error)
    with pytest.raises(UnfinishedCheckpointError, match=r"no whole checkpoint in .*step-40 is half written") as error:
        resolve_checkpoint(tmp_path)
    assert one_line(error)
    assert latest_step(tmp_path) is None


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_another_model_is_named(tmp_path, kind):
    if kind == "dcp":
        checkpoint = resolve_checkpoint(save_step(tmp_path, 2))
    else:
        save_file(make_model().state_dict(), tmp_path / "m.safetensors")
        checkpoint = resolve_checkpoint(tmp_path / "m.safetensors")
    expected = dict(shapes_of(make_model()))
    expected["0.weight"] = torch.Size([7, 6])
    del expected["0.bias"]
    expected |= {f"layers.{i}.weight": torch.Size([1]) for i in range(5)}
    with pytest.raises(CheckpointMismatchError) as error:
        read_weights(checkpoint, expected)
    message = str(error.value)
    assert one_line(error) and "is of another model" in message
    assert "5 tensor(s) missing (layers.0.weight, layers.1.weight, layers.2.weight, and 2 more)" in message
    assert "1 unexpected (0.bias)" in message
    assert "1 of another shape (0.weight: [7, 5] there, [7, 6] in the model)" in message
    assert "optimizer" not in message


# ---- no code is run ----


class Payload:
    """Unpickled by pickle.load, it creates a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_metadata_cannot_run_code(tmp_path):
    step = save_step(tmp_path, 50)
    proof = tmp_path / "proof"
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for attack in (Payload(proof), metadata):
        if attack is metadata:
            metadata.planner_data = {"0.weight": Payload(proof)}
        (step / ".metadata").write_bytes(pickle.dumps(attack))
        for read in (resolve_checkpoint, lambda path: read_weights(Checkpoint(path, "dcp", 50), {})):
            with pytest.raises(InvalidCheckpointError, match=r"\.metadata names .*open.*not loaded") as error:
                read(step)
            assert one_line(error)
        with pytest.raises(InvalidCheckpointError):  # newest and unreadable: no silent step back
            latest_step(tmp_path)
    assert not proof.exists()
    pickle.load((step / ".metadata").open("rb"))
    assert proof.exists()  # the attack is a real one


def test_metadata_cannot_change_dcps_classes(tmp_path):
    """A pickle may set attributes of the classes that it names (a class, then BUILD with (None, attributes))."""
    step = save_step(tmp_path, 50)
    attack = pickle.PROTO + b"\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}X\x05\x00\x00\x00spoilI1\ns\x86b."
    (step / ".metadata").write_bytes(attack)
    with pytest.raises(InvalidCheckpointError, match="no DCP metadata"):
        resolve_checkpoint(step)
    assert not hasattr(dcp.Metadata, "spoil")
    pickle.loads(attack)
    assert dcp.Metadata.spoil == 1
    del dcp.Metadata.spoil


def rewrite_record(step, name, record):
    """Puts other bytes in place of a tensor's record, and makes .metadata point to them."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            info.relative_path, info.offset, info.length = "__9_0.distcp", 0, len(record)
    (step / "__9_0.distcp").write_bytes(record)
    return metadata


def test_data_file_cannot_run_code(tmp_path):
    step = save_step(tmp_path, 50)
    proof = tmp_path / "proof"
    torch.save(Payload(proof), tmp_path / "record")
    record = (tmp_path / "record").read_bytes()
    metadata = rewrite_record(step, "0.weight", record)
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    checkpoint = resolve_checkpoint(step)
    with pytest.raises(InvalidCheckpointError, match=r"record of 0\.weight is damaged, or holds more") as error:
        read_weights(checkpoint, shapes_of(make_model()))
    assert one_line(error)
    # DCP itself unpickles freely what metadata calls bytes, also where a tensor is wanted
    metadata.state_dict_metadata["0.weight"] = BytesStorageMetadata()
    (step / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointMismatchError, match=r"0\.weight: no tensor"):
        read_weights(checkpoint, shapes_of(make_model()))
    assert not proof.exists()
    torch.load(tmp_path / "record", weights_only=False)
    assert proof.exists()


def test_data_files_lie_in_their_folder(tmp_path):
    step = save_step(tmp_path, 50)
    shutil.copy(step / "__0_0.distcp", tmp_path / "outside")
    metadata = pickle.loads((step / ".metadata").read_bytes())
    for name in ("../outside", str(tmp_path / "outside"), ".."):
        for info in metadata.storage_data.values():
            info.relative_path = name
        (step / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(InvalidCheckpointError, match="outside its folder"):
            resolve_checkpoint(step)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_damaged_bytes_give_a_checkpoint_error_or_numbers(tmp_path, file):
    step = save_step(tmp_path, 50)
    expected = shapes_of(make_model())
    whole = (step / file).read_bytes()
    rng = random.Random(0)
    refused = 0
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice([1, 4, 64])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (step / file).write_bytes(data)
        try:
            read_weights(resolve_checkpoint(step), expected)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 30


# ---- a job's folder ----


def torchtitans_choice(folder):
    manager = object.__new__(CheckpointManager)
    manager.enable = False  # read when it is deleted
    manager.folder = str(folder)
    return manager._find_load_step()


def killed_save(folder, step, seed, calls):
    """Saves in a child process, killed with SIGKILL at its ``calls``-th file operation; False if there are fewer."""
    child = os.fork()
    if child == 0:
        torch.cuda.is_available = lambda: False  # a forked child cannot use its parent's device
        count = 0

        def counted(operation):
            def run(*args, **kwargs):
                nonlocal count
                count += 1
                if count == calls:
                    os.kill(os.getpid(), signal.SIGKILL)
                return operation(*args, **kwargs)

            return run

        os.fsync = counted(os.fsync)
        for name in ("open", "mkdir", "rename", "unlink"):
            setattr(Path, name, counted(getattr(Path, name)))
        save_step(folder, step, seed)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or status == 0
    return os.WIFSIGNALED(status)


def test_killed_at_any_moment_of_a_save(tmp_path):
    calls = 0
    killed = True
    while killed:
        calls += 1
        folder = tmp_path / str(calls)
        save_step(folder, 10)
        killed = killed_save(folder, 20, 1, calls)
        step = latest_step(folder)
        assert step == (10 if killed else 20) == torchtitans_choice(folder)
        removed = remove_half_written(folder)
        assert removed == ([folder / "step-20"] if killed and removed else [])
        assert sorted(path.name for path in folder.iterdir()) == (["step-10"] if killed else ["step-10", "step-20"])
        save_step(folder, 20, 2)
        assert latest_step(folder) == 20
        assert_weights(read_weights(resolve_checkpoint(folder), shapes_of(make_model())), make_model(2))
    assert calls > 5  # mkdir, data opened and synced, metadata opened and synced, renamed


def test_a_kill_while_overwriting_is_why_newer_steps_are_set_aside(tmp_path):
    """DCP keeps the old .metadata while it writes new data: it then vouches for a mixture."""
    for step in (10, 20):
        save_step(tmp_path, step, seed=step)
    calls = 1
    while torch.equal(
        read_weights(resolve_checkpoint(tmp_path / "step-20"), shapes_of(make_model()))["0.weight"],
        make_model(20)[0].weight,
    ):
        assert killed_save(tmp_path, 20, 99, calls)
        assert torchtitans_choice(tmp_path) == 20
        calls += 1
    shutil.rmtree(tmp_path / "step-20")
    save_step(tmp_path, 20, seed=20)
    assert set_aside_newer(tmp_path, 10) == [tmp_path / "step-20"]
    assert torchtitans_choice(tmp_path) == latest_step(tmp_path) == 10
    assert_weights(read_weights(resolve_checkpoint(tmp_path / "set-aside-20"), shapes_of(make_model())), make_model(20))


def test_remove_half_written_touches_nothing_else(tmp_path):
    for step in (10, 20, 30, 40, 50):
        save_step(tmp_path, step)
    (tmp_path / "step-20" / "__0_0.distcp").unlink()  # as an interrupted deletion of an old step leaves it
    (tmp_path / "step-30" / ".metadata").unlink()
    (tmp_path / "step-40" / ".metadata").unlink()
    (tmp_path / "step-40" / "notes.txt").write_text("mine")
    (tmp_path / "step-50" / ".metadata").write_bytes(b"no pickle")
    (tmp_path / "step-60").mkdir()
    (tmp_path / "step-70").mkdir()
    save_file(make_model().state_dict(), tmp_path / "step-70" / "model.safetensors")
    (tmp_path / "step-80").symlink_to(tmp_path / "step-30")
    (tmp_path / "step-90.bak").mkdir()
    (tmp_path / "step-95").write_text("a file")
    gone = remove_half_written(tmp_path)
    assert [path.name for path in gone] == ["step-60", "step-30", "step-20"]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"step-10", "set-aside-20", "step-40", "step-50", "step-70", "step-80", "step-90.bak", "step-95"}
    assert remove_half_written(tmp_path / "none") == []


def test_latest_step_is_one_that_training_can_go_on_from(tmp_path):
    assert latest_step(tmp_path / "none") is None
    save_step(tmp_path, 0, trainer=False)
    assert latest_step(tmp_path) == 0  # the seed checkpoint
    save_step(tmp_path, 9)
    save_step(tmp_path, 10)
    save_step(tmp_path, 100, trainer=False)
    export = tmp_path / "step-200"
    export.mkdir()
    save_file(make_model().state_dict(), export / "model.safetensors")
    (export / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {name: "model.safetensors" for name in make_model().state_dict()}})
    )
    assert torchtitans_choice(tmp_path) == 200  # and it would fail on it
    assert latest_step(tmp_path) == 10
    assert resolve_checkpoint(tmp_path).step == 200  # for sampling, weights alone are enough


def job(tmp_path, **settings):
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.training.steps = 1000
    for name, value in {"enable": True, "last_save_model_only": False, **settings}.items():
        assert hasattr(config.checkpoint, name)
        setattr(config.checkpoint, name, value)
    return config


def test_prepare_folder(tmp_path):
    folder = tmp_path / "checkpoint"
    assert prepare_folder(job(tmp_path)) == -1 and not folder.exists()
    save_step(folder, 10)
    (folder / "step-10" / ".metadata").unlink()
    assert prepare_folder(job(tmp_path), rank=1) == -1
    assert prepare_folder(job(tmp_path, load_only=True)) == -1
    assert (folder / "step-10").exists()  # only rank 0 of a job that saves changes anything
    assert prepare_folder(job(tmp_path)) == -1
    assert not folder.exists()  # or torchtitan would not read initial_load_path
    for step in (10, 20, 30):
        save_step(folder, step)
    (folder / "step-30" / "__0_0.distcp").unlink()
    assert torchtitans_choice(folder) == 30
    assert prepare_folder(job(tmp_path), rank=1) == prepare_folder(job(tmp_path)) == 20
    assert torchtitans_choice(folder) == 20
    assert prepare_folder(job(tmp_path, load_step=10), rank=1) == 10 and (folder / "step-20").exists()
    assert prepare_folder(job(tmp_path, load_step=10)) == 10
    assert {path.name for path in folder.iterdir()} == {"step-10", "set-aside-20", "set-aside-30"}
    with pytest.raises(CheckpointNotFoundError, match="load_step = 20"):
        prepare_folder(job(tmp_path, load_step=20))


def test_prepare_folder_refuses_weights_alone(tmp_path):
    folder = tmp_path / "checkpoint"
    save_step(folder, 50, trainer=False)
    before = sorted(folder.rglob("*"))
    with pytest.raises(CheckpointError, match="step-50 holds weights alone") as error:
        prepare_folder(job(tmp_path))
    assert one_line(error) and "load_step" not in str(error.value)
    save_step(folder, 40)
    with pytest.raises(CheckpointError, match=r"step-50 holds weights alone.*load_step = 40"):
        prepare_folder(job(tmp_path))
    assert set(before) <= set(folder.rglob("*"))
    assert prepare_folder(job(tmp_path, load_step=40)) == 40
    assert prepare_folder(job(tmp_path)) == 40


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"interval": 0}, "interval must be at least 1"),
        ({"keep_latest_k": 1}, "keep_latest_k"),
        ({"initial_load_path": "/no/such"}, "initial_load_path is no folder"),
        ({"last_save_in_hf": True, "last_save_model_only": True}, "state_dict_adapter"),
    ],
)
def test_settings_with_which_a_job_fails(tmp_path, settings, text):
    with pytest.raises(CheckpointSettingError, match=text) as error:
        validate_checkpoint_settings(job(tmp_path, **settings))
    assert one_line(error)


def test_a_hugging_face_save_of_more_than_the_model_is_refused(tmp_path):
    with pytest.raises(CheckpointSettingError, match=r"last_save_in_hf needs checkpoint\.last_save_model_only"):
        validate_checkpoint_settings(job(tmp_path, last_save_in_hf=True), has_adapter=True)
    settings = {"last_save_in_hf": True, "last_save_model_only": True}
    assert len(validate_checkpoint_settings(job(tmp_path, **settings), has_adapter=True)) == 1


@pytest.mark.parametrize(
    "settings,text",
    [
        ({"last_save_model_only": True}, "saved without the optimizer"),
        ({"interval": 2000}, "only the last step"),
        ({"load_step": 5}, "goes back to that step each time"),
    ],
)
def test_settings_that_lose_work(tmp_path, settings, text):
    (warning,) = validate_checkpoint_settings(job(tmp_path, **settings))
    assert text in warning and "\n" not in warning


def test_sound_settings_have_no_warnings(tmp_path):
    assert validate_checkpoint_settings(job(tmp_path)) == []
    assert validate_checkpoint_settings(job(tmp_path, enable=False, interval=0)) == []
    assert validate_checkpoint_settings(job(tmp_path, load_only=True, last_save_model_only=True)) == []
    defaults = JobConfig()
    defaults.checkpoint.enable = True
    assert len(validate_checkpoint_settings(defaults)) == 1  # last_save_model_only
