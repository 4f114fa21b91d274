"""Tiny jobs for tests: a TOML file, a run of it in processes of its own, and what its log and folder say."""

import copy
import functools
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import torch

import titan_kda

STEPS = 20

TINY = {
    "job": {"description": "tiny", "custom_config_module": "titan_kda.job_config"},
    "experimental": {"custom_import": "titan_kda.register"},
    "model": {"name": "titan_kda", "flavor": "debugmodel", "hf_assets_path": "."},
    "architecture": {"dim": 64, "n_heads": 4, "key_width": 16, "value_width": 16, "ffn_width": 128},
    "training": {
        "dataset": "python_stdlib",
        "local_batch_size": 4,
        "seq_len": 96,
        "steps": STEPS,
        "mixed_precision_param": "float32",
    },
    "optimizer": {"lr": 3e-3, "implementation": "foreach"},
    "lr_scheduler": {"warmup_steps": 5},
    "validation": {
        "enable": True,
        "dataset": "python_stdlib_validation",
        "local_batch_size": 4,
        "seq_len": 96,
        "freq": 10,
        "steps": 2,
    },
    "generation": {
        "enable": True,
        "freq": 10,
        "prompts": ["def ", "import os, s"],
        "max_new_tokens": 12,
        "temperature": 0.0,
    },
    "checkpoint": {"enable": True, "interval": 10, "last_save_model_only": False},
    "metrics": {"log_freq": 1, "disable_color_printing": True},
    "debug": {"seed": 0},
    "activation_checkpoint": {"mode": "none"},
}


def job_values(folder, settings=None):
    """The tiny job's sections, dumping to ``folder``/run, with ``{"section.key": value}`` over them; None removes one.

    A key with no dot stands outside every section, and "a.b.c" in the section [a.b].
    """
    values = copy.deepcopy(TINY)
    values["job"]["dump_folder"] = str(Path(folder, "run"))
    for name, value in (settings or {}).items():
        section, _, key = name.rpartition(".")
        table = values.setdefault(section, {})
        if value is None:
            table.pop(key, None)
        else:
            table[key] = value
    return values


def to_toml(values):
    """TOML of ``{"section": {"key": value}}``; the section "" comes first."""
    # JSON's strings, numbers, booleans and lists of them are TOML's too.
    sections = sorted(values.items(), key=lambda item: item[0] != "")
    lines = []
    for section, table in sections:
        lines += [f"[{section}]"] if section else []
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def write_job(folder, settings=None, name="job.toml"):
    """Writes the tiny job with ``settings`` (see ``job_values``) into ``folder``; returns the file's path."""
    path = Path(folder, name)
    path.write_text(to_toml(job_values(folder, settings)), encoding="utf-8")
    return path


@functools.cache
def _python_path():
    """PYTHONPATH with which any folder's ``import titan_kda`` finds what this process imported."""
    ours = Path(titan_kda.__file__).resolve()
    found = subprocess.run(
        [sys.executable, "-c", "import titan_kda; print(titan_kda.__file__)"],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    if found.returncode == 0 and Path(found.stdout.strip()).resolve() == ours:
        return None
    return str(ours.parents[1])


def environment(**changes):
    """The environment of a process of ours: one thread, this process's titan_kda, no interpreted Triton."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    for name in ("TRITON_INTERPRET", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        env.pop(name, None)
    if _python_path() is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [_python_path(), os.environ.get("PYTHONPATH")]))
    return env | changes


def run_module(module, *args, cwd, timeout=300, processes=1, env=None, **kwargs):
    """``python -m module args`` (under torchrun for several processes); rank 0's stdout and stderr are text, apart.

    Where there is one CUDA device, it is every process's, each a node of its own.
    """
    kwargs |= dict(cwd=cwd, encoding="utf-8", errors="replace")
    env = environment() if env is None else env
    python, program = [sys.executable, "-m"], [module, *map(str, args)]
    if processes == 1:
        return subprocess.run([*python, *program], env=env, capture_output=True, timeout=timeout, **kwargs)
    torchrun = [*python, "torch.distributed.run"]
    if torch.cuda.device_count() != 1:
        torchrun += ["--standalone", f"--nproc_per_node={processes}", "--local-ranks-filter", "0", "-m"]
        return subprocess.run([*torchrun, *program], env=env, capture_output=True, timeout=timeout, **kwargs)

    # NCCL takes one device twice only from what it believes to be two hosts.
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun += [f"--nnodes={processes}", "--nproc_per_node=1", "--master_addr=127.0.0.1", f"--master_port={port}"]
    nodes = [
        ([*torchrun, f"--node_rank={rank}", "-m", *program], env | dict(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo"))
        for rank in range(processes)
    ]
    (first, first_env), *rest = nodes
    others = [subprocess.Popen(command, env=e, stdout=subprocess.DEVNULL, **kwargs) for command, e in rest]
    try:
        run = subprocess.run(first, env=first_env, capture_output=True, timeout=timeout, **kwargs)
        run.returncode = run.returncode or max(other.wait(60) for other in others)
        return run
    finally:
        for other in others:
            other.kill()


def run_job(toml, *args, processes=1, timeout=300, module="titan_kda.train", cwd=None, env=None):
    """Trains a job file, in its own folder unless ``cwd`` says another; ``log_of`` gives what it wrote."""
    return run_module(
        module,
        *("--job.config_file", toml, *args),
        cwd=Path(toml).parent if cwd is None else cwd,
        timeout=timeout,
        processes=processes,
        env=env,
    )


def log_of(run):
    """Everything that a run wrote: the log on stdout, then warnings and errors."""
    return run.stdout + run.stderr


def losses(log):
    """{step: loss} of the training steps in a log. A resumed step's last line counts."""
    return {int(step): float(loss) for step, loss in re.findall(r"(?<!validate )step:\s*(\d+)\s+loss:\s*(\S+)", log)}


def gradient_norms(log):
    """{step: norm of the gradients} of the training steps in a log."""
    return {int(step): float(norm) for step, norm in re.findall(r"step:\s*(\d+)\s+loss:.*?grad_norm:\s*(\S+)", log)}


def validation_losses(log):
    """{step: loss} of the validations in a log."""
    return {int(step): float(loss) for step, loss in re.findall(r"validate step:\s*(\d+)\s+loss:\s*(\S+)", log)}


def samples(dump_folder):
    """{step: [one dict a prompt]} of a run's in-loop samples."""
    return {
        int(path.stem.removeprefix("step-")): [
            json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()
        ]
        for path in sorted(Path(dump_folder, "samples").glob("step-*.jsonl"))
    }
