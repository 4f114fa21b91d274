"""``python -m titan_kda.train --job.config_file JOB``: torchtitan's own trainer, also where there is no GPU.

One process needs no torchrun; several are started with ``torchrun --nproc_per_node=N -m titan_kda.train ...``. JOB is a
TOML file, or the name of one that ships with the package. Any setting can be given on the command line, as
``--training.steps 100``; ``--help`` lists them all.

Beside torchtitan's main it resolves shipped jobs by name, refuses a mistaken job in one line before anything is
written, clears away a checkpoint that a killed run left half written, and on SIGINT or SIGTERM saves a checkpoint after
the step in progress and stops. A second signal stops at once.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ._version import __version__
from .job_config import JobConfig, JobError, check_arguments, check_job, check_layout, type_errors

if TYPE_CHECKING:
    from types import FrameType

try:
    import tomllib  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

_CONFIG_FLAGS = ("--job.config_file", "--job.config-file")
_MODULE_FLAGS = ("--job.custom_config_module", "--job.custom-config-module")


def find_config(args: list[str]) -> tuple[list[str], Path | None]:
    """Resolves a shipped job's name in ``--job.config_file``; returns the arguments with its path, and the path.

    Raises:
        JobError: neither a file nor a shipped job.
    """
    from .train_configs import find_job

    args = list(args)
    places = [i for i, arg in enumerate(args) if arg.partition("=")[0] in _CONFIG_FLAGS]
    if len(places) > 1:
        raise JobError("--job.config_file is given more than once")
    for i in places:
        flag, equals, value = args[i].partition("=")
        if not equals:
            if i + 1 == len(args):
                raise JobError(f"{flag} needs a TOML file or the name of a shipped job")
            value = args[i + 1]
        path = find_job(value)
        args[i : i + (1 if equals else 2)] = [f"{flag}={path}"]
        return args, path
    return args, None


def read_toml(path: Path) -> dict[str, Any]:
    """A job file's values.

    Raises:
        JobError: a file that cannot be read or is not TOML; one line that says where.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise JobError(f"{path}: not TOML that can be read: lists or tables in one another, too deep") from None
    except ValueError as error:  # tomllib's own, no UTF-8, or a number of thousands of digits
        raise JobError(f"{path}: not TOML: {error}") from None


def check_toml(path: Path) -> None:
    """Refuses unknown keys and values of the wrong type in a job file.

    Raises:
        JobError: the first mistake.
    """
    values = read_toml(path)
    module = values.get("job", {})
    module = module.get("custom_config_module") if isinstance(module, dict) else None
    if module != "titan_kda.job_config":
        raise JobError(f'{path}: [job] needs custom_config_module = "titan_kda.job_config", got {module!r}')
    for error in type_errors(_whole_config(), values):
        raise JobError(f"{path}: {error}")


def _whole_config() -> type:
    """torchtitan's JobConfig with this package's sections."""
    from torchtitan.config import ConfigManager
    from torchtitan.config import JobConfig as CoreConfig

    return ConfigManager._merge_configs(CoreConfig, JobConfig)


def load_job(args: list[str], *, reads_data: bool = True) -> Any:
    """The whole checked configuration: a job file (or a shipped job's name) and command-line settings over it.

    Args:
        args: command-line arguments.
        reads_data: whether the job's datasets and prompts must be there too; not so for sampling.

    Raises:
        JobError: a mistake in the file or in a setting.
    """
    from torchtitan.config import ConfigManager

    args, path = find_config(args)
    if path is not None:
        check_toml(path)
        if any(a.startswith(_MODULE_FLAGS) for a in args):
            raise JobError("job.custom_config_module cannot be set on the command line")
        check_arguments(_whole_config(), args)
    elif not any(a in ("-h", "--help") for a in args):
        raise JobError("--job.config_file is missing: give a TOML file or the name of a shipped job")
    elif not any(a.startswith(_MODULE_FLAGS) for a in args):
        args = [*args, "--job.custom_config_module=titan_kda.job_config"]  # so that --help lists our sections
    try:
        config = ConfigManager().parse_args(args)
    except (AssertionError, ValueError) as error:  # from a section's own checks
        raise JobError(f"{path}: {error}") from None
    if config.experimental.custom_import != "titan_kda.register":
        raise JobError(f'{path}: [experimental] needs custom_import = "titan_kda.register"')
    from .register import check_job_and_data

    if reads_data:
        check_job_and_data(config)
        check_layout(config, _processes(config))
    else:
        check_job(config)
    return config


def _processes(config: Any) -> int:
    """How many there are, or how many ranks one process plans for (comm.mode = "fake_backend")."""
    if config.comm.mode == "default":
        return int(os.environ.get("WORLD_SIZE", 1))
    ranks = os.environ.get("NGPU", "")
    if not ranks.isdecimal():
        raise JobError(f"comm.mode = {config.comm.mode!r} needs the number of ranks in the environment's NGPU")
    return int(ranks)


def single_process_environment() -> None:
    """What torchrun would set, for one process."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


class StopSignal:
    """Remembers SIGINT or SIGTERM; a second one is not held back."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        os.write(2, b"\ntitan_kda: stopping after this step; once more to stop at once\n")
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _saves_alone(dcp_save: Callable[..., Any]) -> Callable[..., Any]:
    """torchtitan's ``dcp_save`` for a single process, without its collectives.

    gloo copies what a save gathers in threads of its own, each with OpenMP threads of its own. From then on OpenMP
    counts more threads than cores and puts them to sleep between operators instead of letting them spin: a quarter of
    the speed on two cores.
    """
    from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
    from torchtitan.components.checkpoint import AsyncMode
    from torchtitan.tools.utils import GarbageCollection

    def save(
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        if to_hf or async_mode != AsyncMode.DISABLED:
            return dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        save_checkpoint(state_dict, checkpoint_id=checkpoint_id, no_dist=True)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    return save


def trainer_class(stop: StopSignal) -> type:
    """torchtitan's Trainer, which looks at ``stop`` after each step."""
    import torch
    import torch.distributed as dist
    from torchtitan.tools.logging import logger
    from torchtitan.train import Trainer

    from .checkpoint import CheckpointError, prepare_folder, validate_checkpoint_settings
    from .validate import GeneratingValidator

    class KDATrainer(Trainer):
        def train(self) -> None:
            job_config = self.job_config
            several = dist.get_world_size() > 1 and job_config.comm.mode == "default"
            self._hosts: Any = dist.new_group(backend="gloo") if several else None
            self._resumed = False
            for warning in validate_checkpoint_settings(job_config, has_adapter=True):
                logger.warning(warning)
            try:
                job_config.checkpoint.load_step = prepare_folder(job_config, rank=dist.get_rank())
            except CheckpointError as error:
                raise JobError(str(error)) from None
            if self._hosts is not None:
                dist.barrier(self._hosts)
            elif self.device.type == "cpu":
                self.checkpointer.dcp_save = _saves_alone(self.checkpointer.dcp_save)
            super().train()

        def should_continue_training(self) -> bool:
            if not self._resumed:
                self._resumed = True
                self._rewrite_samples()
            if not super().should_continue_training():
                return False
            if not self._stop_received():
                return True
            checkpoint = self.job_config.checkpoint
            if not checkpoint.enable or checkpoint.load_only:
                logger.warning(f"Stopped at step {self.step}; [checkpoint] saves nothing, so this run cannot go on")
                return False
            if self.step > 0 and self.step % checkpoint.interval:
                self.checkpointer.interval = self.step  # so that this step is one to save
                self.checkpointer.save(self.step)
            self.checkpointer._async_wait()
            logger.info(f"Stopped at step {self.step} with a checkpoint; the same command goes on from there")
            return False

        def _rewrite_samples(self) -> None:
            """A run killed between a step's checkpoint and its samples left none, or an earlier run's."""
            if self.step > 0 and self.job_config.validation.enable:
                validator = cast(GeneratingValidator, self.validator)
                if validator.should_generate(self.step):
                    validator.generate(self.model_parts[0], self.step)

        def _stop_received(self) -> bool:
            """Whether any rank was told to stop: a host-side sum, so that all ranks stop at one step."""
            received = torch.tensor(int(stop.received is not None))
            if self._hosts is not None:
                dist.all_reduce(received, group=self._hosts)
            return bool(received)

    return KDATrainer


def refuse(error: JobError) -> int:
    """Tells a mistake in one line; returns the exit status."""
    print("titan_kda.train: error:", *str(error).splitlines(), file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if "--version" in args:
        print(f"titan-kda {__version__}")
        return 0
    try:
        load_job(args)
    except JobError as error:
        return refuse(error)
    args, _ = find_config(args)
    single_process_environment()

    import torch.distributed as dist
    from torchtitan.config import ConfigManager
    from torchtitan.train import main as torchtitan_main

    # torchtitan's main reads the arguments that its module saw at import.
    ConfigManager.parse_args.__defaults__ = (args,)
    stop = StopSignal()
    try:
        torchtitan_main(trainer_class(stop))
    except JobError as error:
        return refuse(error)
    finally:
        stop.restore()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
