"""Weights from checkpoints, without running code from them; and what a job does to its checkpoint folder at its start.

A DCP checkpoint is a folder: data files ``__<rank>_<n>.distcp``, each a row of ``torch.save`` records, and
``.metadata``, a pickle that says which record holds which part of which tensor. A save writes the data first and
renames ``.metadata`` into place last, so that a folder without it is a save that was not finished. Unpickling can run
anything, so ``.metadata`` is read by an unpickler that knows a few names and builds inert records for them, none of
DCP's own classes; the data records are loaded with ``weights_only=True``.

Sampling uses ``resolve_checkpoint`` and ``read_weights``; a job uses ``validate_checkpoint_settings`` and
``prepare_folder``.
"""

import io
import json
import logging
import math
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torchtitan.config import JobConfig

logger = logging.getLogger(__name__)

TRAINER_STATES = ("optimizer", "lr_scheduler", "dataloader", "train_state")
"""What torchtitan saves beside the model, each under its own prefix; the model's tensors have none."""

_METADATA = ".metadata"
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_STEP = re.compile(r"step-(\d+)")
_UNFINISHED = re.compile(r"unfinished-\d+(-\w+)?")
_DCP_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|__\d+\.metadata(\.tmp)?")
_SHOWN = 3  # names shown in a message

# What parsers raise on bytes that are not what they should be: pickle and the zip reader do not keep to one class.
_PARSE_ERRORS = (
    pickle.UnpicklingError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    OverflowError,
    RuntimeError,
    TypeError,
    ValueError,
    struct.error,
)


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message is one line that says which and why."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """Nothing there: no such path, or no checkpoint in the folder."""


class UnfinishedCheckpointError(CheckpointError, ValueError):
    """Half of a checkpoint: a save that was interrupted, or files that are missing or too short."""


class InvalidCheckpointError(CheckpointError, ValueError):
    """Something else than a checkpoint, or one that holds what a checkpoint has no need of, such as code."""


class CheckpointSettingError(CheckpointError, ValueError):
    """A [checkpoint] setting with which the job would fail."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint of another model."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint on disk.

    Args:
        path: the step's folder ("dcp", "safetensors"), or the file ("safetensors").
        kind: how it is stored.
        step: the training step its folder is named for, if it is.
    """

    path: Path
    kind: Literal["dcp", "safetensors"]
    step: int | None


# ---- finding a checkpoint ----


def resolve_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """The whole checkpoint that ``path`` means.

    Args:
        path: a DCP step folder (``.../step-100``); a run's folder, its dump folder or its checkpoint folder, meaning
            its newest whole step; a ``.safetensors`` file; or a folder of them, with or without an index.

    Raises:
        CheckpointNotFoundError, UnfinishedCheckpointError, InvalidCheckpointError: what is wrong with it.
    """
    root = Path(os.path.expanduser(path))
    if os.path.isfile(root):
        if root.suffix == ".safetensors":
            _open_safetensors([root])
            return Checkpoint(root, "safetensors", _step_of(root.parent))
        if _DCP_FILE.fullmatch(root.name) or root.name == _SAFETENSORS_INDEX:
            raise InvalidCheckpointError(f"{root} is a part of a checkpoint: give its folder, {root.parent}")
        raise InvalidCheckpointError(f"{root} is no checkpoint: neither a checkpoint's folder nor a .safetensors file")
    if not os.path.isdir(root):
        raise CheckpointNotFoundError(f"no such file or folder: {root}")
    if _kind_of(root) is not None or _step_of(root) is not None or any(root.glob("__*.distcp")):
        return _whole_checkpoint(root)
    return _newest_in_run(root)


def latest_step(folder: str | os.PathLike) -> int | None:
    """The newest step in a checkpoint folder from which training can go on, or None.

    Left out: half-written steps, weights exported in Hugging Face form, and steps saved with the model alone (but for
    step 0, the seed checkpoint, of which torchtitan loads only the model).

    Raises:
        InvalidCheckpointError: a newer step than any that would do has a ``.metadata`` that cannot be read.
    """
    for step, path in _steps(Path(folder)):
        if _resumable(path, step):
            return step
    return None


def _resumable(path: Path, step: int) -> bool:
    try:
        if _whole_checkpoint(path).kind != "dcp":
            return False
        return step == 0 or any(key.startswith("train_state.") for key in _read_dcp_index(path).keys)
    except UnfinishedCheckpointError as error:
        logger.warning("left out: %s", error)
        return False


def data_parallel_ranks(folder: str | os.PathLike) -> int:
    """How many data-parallel ranks saved where they were in the training text; 0 if the checkpoint does not say.

    Raises:
        CheckpointError: no DCP checkpoint, or one whose ``.metadata`` cannot be read.
    """
    return sum(key.startswith("dataloader.dp_rank_") for key in _read_dcp_index(Path(folder)).keys)


def _newest_in_run(root: Path) -> Checkpoint:
    folders = [folder for folder in _checkpoint_folders(root) if _steps(folder)]
    if not folders:
        names = sorted(entry.name for entry in root.iterdir())
        held = f"it holds {_some(names, 8)}" if names else "it is empty"
        raise CheckpointNotFoundError(f"no checkpoint in {root}: {held}")
    if len(folders) > 1:
        raise CheckpointNotFoundError(f"{root} holds the checkpoints of several runs, name one: {_some(folders, 8)}")
    problems = []
    for _, path in _steps(folders[0]):
        try:
            checkpoint = _whole_checkpoint(path)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            logger.warning("left out: %s", problem)
        return checkpoint
    raise UnfinishedCheckpointError(f"no whole checkpoint in {folders[0]}: {_some(problems, _SHOWN, '; ')}")


def _checkpoint_folders(root: Path) -> list[Path]:
    """Where a run's steps may lie: in ``root``, its folder "checkpoint", or (checkpoint.folder is free) another."""
    for folder in (root, root / "checkpoint"):
        if _steps(folder):
            return [folder]
    return sorted(entry for entry in root.iterdir() if entry.is_dir())


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """The folders named step-N in ``folder``, newest first."""
    if not folder.is_dir():
        return []
    steps = [(_step_of(entry), entry) for entry in folder.iterdir()]
    return sorted(((step, entry) for step, entry in steps if step is not None and entry.is_dir()), reverse=True)


def _step_of(path: Path) -> int | None:
    match = _STEP.fullmatch(path.name)
    return int(match.group(1)) if match else None


def _kind_of(folder: Path) -> Literal["dcp", "safetensors"] | None:
    if (folder / _METADATA).is_file():
        return "dcp"
    if (folder / _SAFETENSORS_INDEX).is_file() or any(folder.glob("*.safetensors")):
        return "safetensors"
    return None


def _whole_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder`` itself, after a look at every file it needs."""
    kind = _kind_of(folder)
    if kind is None:
        raise UnfinishedCheckpointError(f"{folder} is half written: it has no {_METADATA}, which a save writes last")
    if kind == "dcp":
        _check_dcp_files(folder, _read_dcp_index(folder))
    else:
        _open_safetensors(_safetensors_files(folder))
    return Checkpoint(folder, kind, _step_of(folder))


# ---- reading weights ----


def read_weights(
    checkpoint: Checkpoint, expected: Mapping[str, Sequence[int]], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The model's tensors, whole and on the CPU, whatever layout (DDP, FSDP, TP, pipeline) wrote them.

    Args:
        checkpoint: from ``resolve_checkpoint``.
        expected: the model's state dict's names and shapes; other names of the model's are refused, what the trainer
            saved beside the model is not read.
        dtype: the type that floating tensors come in; as stored if None.

    Raises:
        CheckpointMismatchError: names or shapes differ from ``expected``.
        UnfinishedCheckpointError, InvalidCheckpointError: the files are damaged, or hold something else than tensors.
    """
    reader = open_weights(checkpoint, expected)
    weights = {name: reader.read(name) for name in expected}
    if dtype is None:
        return weights
    return {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}


@dataclass(frozen=True)
class WeightReader:
    """A checkpoint's tensors one at a time, for models that do not fit into memory; from ``open_weights``.

    Args:
        dtypes: of the tensors as stored, by name.
        read: a name to the whole tensor, on the CPU; raises as ``read_weights`` does.
    """

    dtypes: dict[str, torch.dtype]
    read: Callable[[str], Tensor]


def open_weights(checkpoint: Checkpoint, expected: Mapping[str, Sequence[int]]) -> WeightReader:
    """What ``read_weights`` reads, tensor by tensor; names and shapes are compared here, with the same errors."""
    if checkpoint.kind == "dcp":
        index = _read_dcp_index(checkpoint.path)
        _check_dcp_files(checkpoint.path, index)
        keys = [key for key in index.keys if key in expected or key.split(".", 1)[0] not in TRAINER_STATES]
        _check_names(checkpoint, {key: index.shape(key) for key in keys}, expected)
        return WeightReader(
            {name: index.tensors[name].dtype for name in expected},
            lambda name: _read_dcp_tensor(checkpoint.path, name, index.tensors[name]),
        )
    files = [checkpoint.path] if checkpoint.path.is_file() else _safetensors_files(checkpoint.path)
    stored = _open_safetensors(files)
    _check_names(checkpoint, {name: tensor.shape for name, tensor in stored.items()}, expected)

    def read(name: str) -> Tensor:
        with safe_open(str(stored[name].file), framework="pt", device="cpu") as file:
            return file.get_tensor(name)

    return WeightReader({name: stored[name].dtype for name in expected}, read)


def _check_names(
    checkpoint: Checkpoint, stored: Mapping[str, Sequence[int] | None], expected: Mapping[str, Sequence[int]]
) -> None:
    problems = []
    if missing := [name for name in expected if name not in stored]:
        problems.append(f"{len(missing)} tensor(s) missing ({_some(missing)})")
    if unexpected := [name for name in stored if name not in expected]:
        problems.append(f"{len(unexpected)} unexpected ({_some(unexpected)})")
    differing = []
    for name, want in expected.items():
        have = stored.get(name, want)
        if have is None:
            differing.append(f"{name}: no tensor")
        elif tuple(have) != tuple(want):
            differing.append(f"{name}: {list(have)} there, {list(want)} in the model")
    if differing:
        problems.append(f"{len(differing)} of another shape ({_some(differing, separator='; ')})")
    if problems:
        raise CheckpointMismatchError(f"{checkpoint.path} is of another model: {', '.join(problems)}")


def _some(items: Iterable[object], count: int = _SHOWN, separator: str = ", ") -> str:
    texts = [str(item) for item in items]
    more = f"{separator}and {len(texts) - count} more" if len(texts) > count else ""
    return separator.join(texts[:count]) + more


# ---- DCP folders ----


class _Chunk(NamedTuple):
    """A part of a tensor, and the record that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class _StoredTensor(NamedTuple):
    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: list[_Chunk]


class _DcpIndex(NamedTuple):
    keys: list[str]  # of tensors and of everything else
    tensors: dict[str, _StoredTensor]
    file_sizes: dict[str, int]  # the least that each data file must have

    def shape(self, key: str) -> tuple[int, ...] | None:
        return self.tensors[key].size if key in self.tensors else None


class _Record:
    """Stands for an object of a class of DCP's: it holds what the pickle says, and does nothing."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


_RECORDS = {
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "PurePosixPath")),
}


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # New classes for each file: a pickle can set attributes of the classes it names.
        self._classes = {key: type(key[1], (_Record,), {}) for key in _RECORDS}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in self._classes:
            return self._classes[module_name, global_name]
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return dict
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return vars(torch)[global_name]
        raise InvalidCheckpointError(f"names {module_name}.{global_name}, which no checkpoint needs: not loaded")

    def is_a(self, name: str, value: object) -> bool:
        return type(value) is self._classes["torch.distributed.checkpoint.metadata", name]


def _read_dcp_index(folder: Path) -> _DcpIndex:
    path = folder / _METADATA
    try:
        with path.open("rb") as file:
            unpickler = _MetadataUnpickler(file)
            return _to_index(unpickler, unpickler.load())
    except FileNotFoundError:
        raise UnfinishedCheckpointError(f"{folder} is half written: {_METADATA} is missing") from None
    except InvalidCheckpointError as error:
        raise InvalidCheckpointError(f"{path} {error}") from None
    except _PARSE_ERRORS as error:
        raise InvalidCheckpointError(f"{path} is no DCP metadata, or is damaged: {_one_line(error)}") from None


def _to_index(unpickler: _MetadataUnpickler, metadata: Any) -> _DcpIndex:
    """What the records say, every value checked, since any file can be named .metadata."""
    if not unpickler.is_a("Metadata", metadata):
        raise TypeError(f"holds {type(metadata).__name__}, not Metadata")
    records: dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]] = {}
    file_sizes: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        file, start, length = info.relative_path, info.offset, info.length
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise InvalidCheckpointError(f"names a data file outside its folder: {file!r}: not loaded")
        if getattr(info, "transform_descriptors", None):
            raise InvalidCheckpointError(f"has data in a form that is not read here: {info.transform_descriptors}")
        start, length = _count(start), _count(length)
        offset = getattr(index, "offset", None)
        records[index.fqn, None if offset is None else _sizes(offset)] = (file, start, length)
        file_sizes[file] = max(file_sizes.get(file, 0), start + length)
    tensors = {}
    for key, stored in metadata.state_dict_metadata.items():
        if not isinstance(key, str):
            raise TypeError(f"a name is {type(key).__name__}")
        if not unpickler.is_a("TensorStorageMetadata", stored):
            continue
        dtype = stored.properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{key} has the dtype {dtype!r}")
        chunks = []
        for chunk in stored.chunks:
            offsets, sizes = _sizes(chunk.offsets), _sizes(chunk.sizes)
            chunks.append(_Chunk(offsets, sizes, *records[key, offsets]))
        tensors[key] = _StoredTensor(_sizes(stored.size), dtype, chunks)
    return _DcpIndex(list(metadata.state_dict_metadata), tensors, file_sizes)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(_count(size) for size in value)


def _check_dcp_files(folder: Path, index: _DcpIndex) -> None:
    for name, size in sorted(index.file_sizes.items()):
        try:
            there = (folder / name).stat().st_size
        except FileNotFoundError:
            raise UnfinishedCheckpointError(f"{folder} is half written: {name} is missing") from None
        if there < size:
            raise UnfinishedCheckpointError(f"{folder} is half written: {name} has {there} bytes of {size}")


def _read_dcp_tensor(folder: Path, name: str, stored: _StoredTensor) -> Tensor:
    whole = torch.empty(stored.size, dtype=stored.dtype)
    if sum(math.prod(chunk.sizes) for chunk in stored.chunks) != whole.numel():
        raise InvalidCheckpointError(f"{folder}: the parts of {name} do not make up its shape {list(stored.size)}")
    for chunk in stored.chunks:
        with (folder / chunk.file).open("rb") as file:
            file.seek(chunk.start)
            record = io.BytesIO(file.read(chunk.length))
        try:
            part = torch.load(record, map_location="cpu", weights_only=True)
        except _PARSE_ERRORS as error:
            raise InvalidCheckpointError(
                f"{folder / chunk.file}: the record of {name} is damaged, or holds more than a tensor: "
                f"{_one_line(error)}"
            ) from None
        plain = isinstance(part, Tensor) and part.layout == torch.strided and part.device.type == "cpu"
        if not plain or tuple(part.shape) != chunk.sizes or part.dtype != stored.dtype:
            raise InvalidCheckpointError(f"{folder / chunk.file}: the record of {name} is not what {_METADATA} says")
        place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
        if whole[place].shape != part.shape:
            raise InvalidCheckpointError(f"{folder}: a part of {name} lies outside its shape {list(stored.size)}")
        whole[place] = part.detach()
    return whole


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


# ---- safetensors ----


def _safetensors_files(folder: Path) -> list[Path]:
    index = folder / _SAFETENSORS_INDEX
    if not index.is_file():
        return sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise InvalidCheckpointError(f"{index} is damaged: {_one_line(error)}") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidCheckpointError(f"{index} names a file outside its folder: {name!r}")
        if not (folder / name).is_file():
            raise UnfinishedCheckpointError(f"{folder} is half written: {name} is missing")
    return [folder / name for name in names]


class StoredSafetensor(NamedTuple):
    """Where a tensor lies among safetensors files, and what their headers say of it."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype


SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _open_safetensors(files: Sequence[Path]) -> dict[str, StoredSafetensor]:
    """The files' tensors, from their headers. Opening a file checks its length against its header."""
    stored: dict[str, StoredSafetensor] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                for name in file.keys():
                    if name in stored:
                        raise InvalidCheckpointError(f"{name} is both in {stored[name].file} and in {path.name}")
                    header = file.get_slice(name)
                    dtype = SAFETENSORS_DTYPES.get(header.get_dtype())
                    if dtype is None:
                        raise InvalidCheckpointError(f"{path}: {name} has the dtype {header.get_dtype()}")
                    stored[name] = StoredSafetensor(path, tuple(header.get_shape()), dtype)
        except SafetensorError as error:
            raise UnfinishedCheckpointError(f"{path} is half written or damaged: {_one_line(error)}") from None
    return stored


def open_safetensors(folder: Path) -> dict[str, StoredSafetensor]:
    """The tensors of a folder's safetensors files, those of its index if it has one, after a look at every file.

    Raises:
        UnfinishedCheckpointError, InvalidCheckpointError: the files are missing, too short, damaged or at odds.
    """
    return _open_safetensors(_safetensors_files(folder))


# ---- a job's folder ----


def validate_checkpoint_settings(job_config: JobConfig, *, has_adapter: bool = False) -> list[str]:
    """What in ``[checkpoint]`` loses work, torchtitan's defaults included, as warnings of one line each.

    Args:
        has_adapter: whether the model's train spec has a state_dict_adapter, for weights in Hugging Face form.

    Raises:
        CheckpointSettingError: a setting with which the job fails, perhaps only at its last step.
    """
    settings = job_config.checkpoint
    if not settings.enable:
        return []
    saves = not (settings.load_only or settings.create_seed_checkpoint)
    if settings.interval < 1:
        raise CheckpointSettingError(f"checkpoint.interval must be at least 1, got {settings.interval}")
    if settings.keep_latest_k < 0 or settings.keep_latest_k == 1:
        raise CheckpointSettingError(
            f"checkpoint.keep_latest_k must be 0 (keep all) or at least 2, got {settings.keep_latest_k}"
        )
    if settings.initial_load_path and not os.path.isdir(settings.initial_load_path):
        raise CheckpointSettingError(f"checkpoint.initial_load_path is no folder: {settings.initial_load_path}")
    if saves and settings.last_save_in_hf and not has_adapter:
        raise CheckpointSettingError("checkpoint.last_save_in_hf needs a state_dict_adapter, which this model lacks")
    if saves and settings.last_save_in_hf and not settings.last_save_model_only:
        raise CheckpointSettingError("checkpoint.last_save_in_hf needs checkpoint.last_save_model_only = true")
    warnings = []
    if settings.load_step >= 0:
        warnings.append(
            f"checkpoint.load_step = {settings.load_step}: started again, the job goes back to that step each time"
        )
    if saves and settings.last_save_model_only:
        warnings.append(
            "checkpoint.last_save_model_only = true: the last step is saved without the optimizer, and no job can go "
            "on from it"
        )
    if saves and settings.interval > job_config.training.steps:
        warnings.append(
            f"checkpoint.interval = {settings.interval} is above training.steps: only the last step is saved"
        )
    return warnings


def prepare_folder(job_config: JobConfig, *, rank: int = 0) -> int:
    """Makes a job's checkpoint folder fit to go on from, at the job's start; returns the step to load, or -1 for none.

    torchtitan takes the newest folder with a ``.metadata`` (or a Hugging Face index) for the newest checkpoint, counts
    half-written ones among those to keep, writes over newer steps than the one it loads while their old ``.metadata``
    still vouches for them, and forgets ``initial_load_path`` once the folder exists. So, where steps are saved: half-
    written steps are removed, whole steps newer than ``load_step`` are set aside, and an empty folder is removed.

    Every rank may call it; only rank 0 changes anything, and all get the same answer. Set ``checkpoint.load_step`` to
    it. No other job may be writing to the folder.

    Raises:
        CheckpointNotFoundError: ``checkpoint.load_step`` is no whole step.
        CheckpointError: the newest step is weights alone, so that training cannot go on from it.
    """
    settings = job_config.checkpoint
    folder = Path(job_config.job.dump_folder, settings.folder)
    if not settings.enable or settings.create_seed_checkpoint:
        return settings.load_step
    if not folder.is_dir() and (settings.load_step < 0 or settings.initial_load_path):
        return -1
    if settings.load_step >= 0:
        step: int | None = settings.load_step
        if not (folder / f"step-{step}").is_dir():
            raise CheckpointNotFoundError(f"checkpoint.load_step = {step}, but there is no {folder / f'step-{step}'}")
        _whole_checkpoint(folder / f"step-{step}")
    else:
        step = latest_step(folder)
        weights = [number for number, path in _steps(folder) if number > (step or 0) and _is_whole(path)]
        if weights:
            advice = "give the job another job.dump_folder"
            if step is not None:
                advice += f", or set checkpoint.load_step = {step} to go on from there"
            raise CheckpointError(
                f"{folder / f'step-{weights[0]}'} holds weights alone, so that training cannot go on from it: {advice}"
            )
    if rank == 0 and not settings.load_only:
        remove_half_written(folder)
        if settings.load_step >= 0:
            set_aside_newer(folder, settings.load_step)
        for entry in folder.iterdir():
            if _STEP.search(entry.name) and not _STEP.fullmatch(entry.name):
                logger.warning("%s: torchtitan takes it for one of the job's steps, and may delete it: move it", entry)
        if not any(folder.iterdir()):
            folder.rmdir()
    return -1 if step is None else step


def _is_whole(path: Path) -> bool:
    try:
        _whole_checkpoint(path)
    except CheckpointError:
        return False
    return True


def remove_half_written(folder: str | os.PathLike) -> list[Path]:
    """Removes the saves in a checkpoint folder that were never finished; returns the paths that are gone.

    Folders named unfinished-N, in which exports and imports grow, are deleted. Of the folders named step-N, one
    without ``.metadata`` that holds nothing but DCP's files is deleted; one whose ``.metadata`` names files that are
    missing or short (a deletion that was interrupted) is set aside, as ``set_aside_newer`` does. Links, exports in
    Hugging Face form and folders that hold anything else stay.
    """
    gone = []
    for path in sorted(Path(folder).glob("unfinished-*")):
        if _UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            logger.warning("removing %s: it was not finished", path)
            shutil.rmtree(path)
            gone.append(path)
    for _, path in _steps(Path(folder)):
        if path.is_symlink() or _kind_of(path) == "safetensors":
            continue
        if (path / _METADATA).is_file():
            try:
                _whole_checkpoint(path)
            except UnfinishedCheckpointError as error:
                set_aside(path, str(error))
                gone.append(path)
            except CheckpointError as error:
                logger.warning("left where it is: %s", error)
        elif all(_DCP_FILE.fullmatch(entry.name) and entry.is_file() for entry in path.iterdir()):
            logger.warning("removing %s: a save that was not finished", path)
            shutil.rmtree(path)
            gone.append(path)
        else:
            logger.warning("left where it is: %s has no %s, but files that are not DCP's", path, _METADATA)
    return gone


def set_aside_newer(folder: str | os.PathLike, step: int) -> list[Path]:
    """Renames the steps after ``step`` to ``set-aside-N``, which torchtitan neither loads nor deletes."""
    gone = []
    for number, path in _steps(Path(folder)):
        if number > step:
            set_aside(path, f"{path} is newer than step {step}, from which the job goes on")
            gone.append(path)
    return gone


def unfinished_name(target: Path) -> Path:
    """Where a folder grows until it is whole: beside it, and no name that torchtitan would take for a step's."""
    return target.with_name(f"unfinished-{target.name.replace('step-', '')}")


def set_aside(path: Path, reason: str) -> None:
    # torchtitan looks for "step-<number>" anywhere in a name, so the new name must not have it.
    number = _step_of(path)
    target = path.with_name(f"set-aside-{number}")
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"set-aside-{number}-{count}")
    logger.warning("%s: renamed to %s", reason, target.name)
    path.rename(target)
