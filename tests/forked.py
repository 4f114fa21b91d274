"""Jobs in processes forked from one that has imported torchtitan: the import is most of what a tiny job takes.

They run the command's own main, each in a process of its own. That the command also starts from nothing, alone and
under torchrun, is for the tests that call ``jobs.run_job``. Where there is a CUDA device ``run_job`` is that one, since
torch cannot be forked once it has looked for devices.
"""

import atexit
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import jobs
import torch


def run_job(toml, *args, processes=1, timeout=300, **env):
    """As ``jobs.run_job``, with ``env`` over the environment: rank 0's output, or that of all where one fails."""
    if torch.cuda.is_available():
        return jobs.run_job(toml, *args, processes=processes, timeout=timeout, env=jobs.environment(**env))
    if processes > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        # What torchrun sets, but for the ranks.
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(processes))
    args = ["--job.config_file", *map(str, (toml, *args))]
    with tempfile.TemporaryDirectory() as logs:
        order = {"args": args, "cwd": str(Path(toml).parent), "env": env, "processes": processes, "timeout": timeout}
        server = _server()
        server.stdin.write(json.dumps(order | {"logs": logs}) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            _server.cache_clear()
            raise RuntimeError(f"the process that forks jobs ended with status {server.wait()}")
        status = int(answer)
        ranks = range(processes if status else 1)
        out, err = (
            "".join(Path(logs, f"{rank}.{kind}").read_text(encoding="utf-8", errors="replace") for rank in ranks)
            for kind in ("out", "err")
        )
    return subprocess.CompletedProcess(args, status, out, err)


@functools.cache
def _server():
    """This process's server, which ends with it."""
    server = subprocess.Popen(
        [sys.executable, __file__],
        cwd=tempfile.gettempdir(),  # where no folder of the checkout is a module
        env=jobs.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    )
    atexit.register(server.wait)  # last: it runs first what came last
    atexit.register(server.kill)
    return server


# ---- in the server ----


def end_with_the_parent():
    """Has this process killed when its parent ends, however that ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def serve():
    """For each order on standard input, forks its ranks, waits for them and writes the job's status."""
    end_with_the_parent()
    import torchtitan.train  # noqa: F401

    import titan_kda.register
    import titan_kda.train  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        order = json.loads(line)
        living = set()
        for rank in range(order["processes"]):
            pid = os.fork()
            if pid == 0:
                run_rank(order, rank)
            living.add(pid)
        status = 0
        while living:
            pid, ended = os.wait()
            living.remove(pid)
            if ended and not status:
                status = os.waitstatus_to_exitcode(ended)
                for other in living:  # they would wait for it
                    os.kill(other, signal.SIGKILL)
        print(status, file=answers, flush=True)


def run_rank(order, rank):
    """One rank of a job, in the forked process, which it ends."""
    status = 1
    try:
        end_with_the_parent()
        signal.alarm(order["timeout"])  # which kills
        for number, name, mode in ((0, os.devnull, "r"), (1, f"{rank}.out", "w"), (2, f"{rank}.err", "w")):
            with open(Path(order["logs"], name), mode) as file:
                os.dup2(file.fileno(), number)
        os.chdir(order["cwd"])
        os.environ |= order["env"]
        if order["processes"] > 1:
            os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
        else:
            # Two seconds at the end of a job, for other ranks to finish.
            sys.modules["torchtitan.train"].time = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        from titan_kda.train import main

        status = main(order["args"])
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
