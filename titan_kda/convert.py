"""``python -m titan_kda.convert``: a training checkpoint to a Hugging Face folder, and back.

    python -m titan_kda.convert export --job JOB --checkpoint CHECKPOINT --out FOLDER
    python -m titan_kda.convert import --job JOB --folder FOLDER [--out CHECKPOINT]

``export`` writes a folder that loads as ``KimiLinearForCausalLM``. ``import`` writes a seed checkpoint, step-0, from
which the job starts, on any number of devices. Either holds one parameter and one output file in memory, whatever the
model's size, and its output takes its name only when it is whole. Everything it says goes to standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint

from . import hf_format
from ._version import __version__
from .checkpoint import Checkpoint, CheckpointError, open_weights, resolve_checkpoint, unfinished_name
from .data import build_tokenizer
from .job_config import JobError, JobParser, model_args_of
from .model import ModelArgs
from .train import load_job

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Progress = Callable[[str, int, int], None]
"""Called after each file: its name, the bytes written so far, and those of the whole."""


def _quiet(name: str, done: int, total: int) -> None:
    pass


@contextmanager
def _growing(target: Path) -> Iterator[Path]:
    """A new folder beside ``target`` that takes its name when the block ends, and is removed if the block fails.

    Raises:
        CheckpointError: the target is there already.
    """
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} is there already: name another, or move it away")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        growing = Path(tempfile.mkdtemp(prefix=unfinished_name(target).name + "-", dir=target.parent))
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from None
    try:
        growing.chmod(0o777 & ~_umask())  # a temporary folder is its owner's alone
        yield growing
        growing.rename(target)
    except BaseException:
        shutil.rmtree(growing, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def export_checkpoint(
    checkpoint: Checkpoint,
    args: ModelArgs,
    out: str | os.PathLike,
    *,
    tokens: hf_format.TokenIds | None = None,
    dtype: torch.dtype | None = None,
    assets: str | os.PathLike | None = None,
    max_shard_bytes: int = hf_format.MAX_SHARD_BYTES,
    progress: Progress = _quiet,
) -> None:
    """Writes a checkpoint as a Hugging Face folder.

    Args:
        checkpoint: from ``resolve_checkpoint``, of a model of ``args``.
        args: the model.
        out: the folder to write, which must not exist.
        tokens: the special tokens' ids; none by default.
        dtype: of the weights, as stored if None. A_log, dt_bias and the routers' biases are FP32 always.
        assets: a folder whose tokenizer files are copied.
        max_shard_bytes: files are cut before they grow past this.
        progress: called after each file.

    Raises:
        CheckpointError: one line that says what is wrong; nothing is left behind then.
    """
    hf_format.check_exportable(args)
    shapes = hf_format.shapes_of(args)
    slots = hf_format.layout(shapes)
    weights = open_weights(checkpoint, shapes)

    def type_of(slot: hf_format.Slot) -> torch.dtype:
        return torch.float32 if hf_format.keeps_fp32(slot.name) else dtype or weights.dtypes[slot.name]

    sizes = {key: torch.Size(slot.shape).numel() * type_of(slot).itemsize for key, slot in slots.items()}
    shards = hf_format.plan_shards(sizes, max_shard_bytes)
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    total, done = sum(sizes.values()), 0
    with _growing(Path(out)) as folder:
        # The index first: without the files that it names, the folder is half written to whoever reads it.
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: name for name, keys in zip(names, shards) for key in keys},
        }
        (folder / hf_format.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        read: tuple[str, Tensor] | None = None
        for name, keys in zip(names, shards):
            tensors: dict[str, Tensor] = {}
            for key in keys:
                slot = slots[key]
                if read is None or read[0] != slot.name:
                    read = None  # the last parameter's memory, before the next one's
                    read = slot.name, weights.read(slot.name)
                tensors[key] = slot.take(read[1]).to(type_of(slot), copy=True)
            save_file(tensors, folder / name, metadata={"format": "pt"})
            done += sum(sizes[key] for key in keys)
            progress(name, done, total)
        kept = dtype or weights.dtypes["norm.weight"]
        hf_format.write_config(folder, args, tokens or hf_format.TokenIds(), kept, assets)


class _Reading(DefaultSavePlanner):
    """Plans from empty tensors, and reads each one when its turn to be written comes."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def import_folder(
    path: str | os.PathLike,
    args: ModelArgs,
    out: str | os.PathLike,
    *,
    dtype: torch.dtype | None = None,
    progress: Progress = _quiet,
) -> None:
    """Writes a Hugging Face folder as a seed checkpoint, of which torchtitan loads the model alone.

    Args:
        path: the folder.
        args: the model that it must be of.
        out: the checkpoint to write, ``.../step-0``, which must not exist.
        dtype: of the weights, as stored if None; a job casts them to its own. A_log, dt_bias and the routers' biases
            are FP32 always.
        progress: called after each parameter.

    Raises:
        CheckpointError: one line that says what is wrong; nothing is left behind then.
    """
    with hf_format.open_folder(path, args) as folder:
        own = {slot.name: (slot.own_shape, key) for key, slot in folder.slots.items()}
        types = {
            name: torch.float32 if hf_format.keeps_fp32(name) else dtype or folder.dtypes[key]
            for name, (_, key) in own.items()
        }
        state_dict = {name: torch.empty(shape, dtype=types[name], device="meta") for name, (shape, _) in own.items()}
        total, done = sum(tensor.nbytes for tensor in state_dict.values()), 0

        def read(name: str) -> Tensor:
            nonlocal done
            done += state_dict[name].nbytes
            progress(name, done, total)
            return folder.parameter(name, types[name])

        with _growing(Path(out)) as checkpoint, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is what is meant
            writer = FileSystemWriter(checkpoint, single_file_per_rank=False)
            save_checkpoint(state_dict, storage_writer=writer, planner=_Reading(read), no_dist=True)


# ---- the command ----


def build_parser() -> argparse.ArgumentParser:
    parser = JobParser(
        prog="python -m titan_kda.convert",
        description="Kimi Linear weights to Hugging Face's form (KimiLinearForCausalLM) and back.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"titan-kda {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="export|import")
    settings = "Settings of the job can be given as well, as --architecture.n_layers 8."
    export = commands.add_parser(
        "export",
        help="a training checkpoint to a Hugging Face folder",
        description="Writes config.json, safetensors files of bounded size and their index.",
        epilog=settings,
        allow_abbrev=False,
    )
    export.add_argument("--job", required=True, help="the TOML job, a file or a shipped job's name")
    export.add_argument(
        "--checkpoint", help="a step's folder or a run's folder (its newest step); the job's dump_folder by default"
    )
    export.add_argument("--out", required=True, help="the folder to write, which must not exist")
    export.add_argument("--dtype", choices=DTYPES, help="of the weights; as stored by default")
    export.add_argument(
        "--max-shard-gb",
        type=float,
        default=hf_format.MAX_SHARD_BYTES / 1e9,
        help="largest file, GB (default %(default)g)",
    )
    seed = commands.add_parser(
        "import",
        help="a Hugging Face folder to a seed checkpoint",
        description="Writes step-0, from which the job starts; a config or a tensor that is not the job's is refused.",
        epilog=settings,
        allow_abbrev=False,
    )
    seed.add_argument("--job", required=True, help="the TOML job, a file or a shipped job's name")
    seed.add_argument("--folder", required=True, help="the Hugging Face folder")
    seed.add_argument("--out", help="the checkpoint to write; step-0 of the job's checkpoint folder by default")
    seed.add_argument("--dtype", choices=DTYPES, help="of the weights; as stored by default")
    return parser


def _report(name: str, done: int, total: int) -> None:
    print(f"{100 * done // max(total, 1):3d}%  {done / 1e9:9.3f} of {total / 1e9:.3f} GB  {name}", file=sys.stderr)


def run(args: argparse.Namespace, settings: list[str]) -> int:
    for word in settings:
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise JobError(f"unknown option {word}; see --help")
    if settings and not settings[0].startswith("--"):
        raise JobError(f"unexpected argument {settings[0]!r}; see --help")
    job_config = load_job([f"--job.config_file={args.job}", *settings], reads_data=False)
    model_args = model_args_of(job_config)
    dtype = DTYPES[args.dtype] if args.dtype else None
    if args.command == "export":
        if not 0 < args.max_shard_gb < float("inf"):
            raise JobError(f"--max-shard-gb must be above 0, got {args.max_shard_gb}")
        hf_format.check_exportable(model_args)
        assets = job_config.model.hf_assets_path if job_config.data.tokenizer == "hf" else None
        try:
            tokens = hf_format.token_ids(model_args.vocab_size, build_tokenizer(job_config), assets)
        except (ValueError, FileNotFoundError) as error:
            raise JobError(str(error)) from None
        found = resolve_checkpoint(job_config.job.dump_folder if args.checkpoint is None else args.checkpoint)
        export_checkpoint(
            found,
            model_args,
            args.out,
            tokens=tokens,
            dtype=dtype,
            assets=assets,
            max_shard_bytes=int(args.max_shard_gb * 1e9),
            progress=_report,
        )
        print(f"{found.path} is now in {args.out}", file=sys.stderr)
        return 0
    out = args.out or Path(job_config.job.dump_folder, job_config.checkpoint.folder, "step-0")
    import_folder(args.folder, model_args, out, dtype=dtype, progress=_report)
    print(f"{args.folder} is now in {out}", file=sys.stderr)
    return 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(*build_parser().parse_known_args(argv))
    except (JobError, CheckpointError, OSError) as error:
        print("titan_kda.convert: error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
