"""The chunk suite: chunk_kda beside FLA's and cuDNN's, over eight rows, strong and weak gates, promised and not.

``python scripts/benchmark.py chunk`` runs it with the others; run by itself, this file takes the same options. No
initial state, output only. Core: unit q and k, v in bf16, the decay in FP32; ours takes the cumulative gate, the peers
the per-token natural log. Full: raw q, k and gate logits in bf16, A_log and dt_bias, as a layer holds them; ours then
counts l2norm, the gate and chunk_kda together, the peers do it inside. A row's floor counts each input and output once.

A work is named "core fwd", "core bwd", "core fwd + bwd" or "full fwd", then its shape and gate, so that
``--filter "core fwd" --filter strong`` picks. The error column is against ours with no promise: the tests hold that to
FP64, and here it says whether all compute one function.

FLA tunes its kernels for minutes on a number of heads that it has not seen. TRITON_CACHE_DIR keeps what it compiled for
the next process, TRITON_CACHE_AUTOTUNING=1 what it chose as well.
"""

import functools
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import benchmark
import torch
from benchmark import Bench, Contender

WIDTH = 128
BOUND = -5.0
GATES = {"strong": -2.5, "weak": -0.01}
MIXED = (1300, 547, 2048, 963, 271, 3063)
ROWS = [
    (1, 8192, 32, None),
    (8, 2048, 32, None),
    *((1, 8192, heads, lengths) for heads in (96, 64) for lengths in (None, MIXED, (1024,) * 8)),
]
Inputs = dict[str, Any]


def row_name(batch: int, tokens: int, heads: int, lengths: tuple[int, ...] | None, gate: str) -> str:
    pack = "" if lengths is None else " mixed pack" if lengths == MIXED else f" {len(lengths)} x {lengths[0]}"
    return f"B{batch} T{tokens} H{heads}{pack}, {gate}"


def make_offsets(batch: int, tokens: int, lengths: tuple[int, ...] | None) -> dict[str, torch.Tensor | None]:
    """Ours and FLA's offsets, None for a dense batch; and ``starts``, which cuDNN wants in any case."""
    ends = itertools.accumulate(lengths or (tokens,) * batch)
    starts = torch.tensor([0, *ends], dtype=torch.int32, device="cuda")
    return dict(cu_seqlens=starts if lengths else None, long_seqlens=starts.long() if lengths else None, starts=starts)


def core_inputs(batch: int, tokens: int, heads: int, lengths: tuple[int, ...] | None, nats: float, seed: int) -> Inputs:
    """One set of buffers; the per-token gate lies between twice ``nats`` and 0, above the bound."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, heads, WIDTH)

    def normal() -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    gate = 2 * nats * torch.rand(shape, device="cuda", generator=generator)
    cumulative = torch.empty_like(gate)
    ends = list(itertools.accumulate(lengths or (tokens,)))
    for start, end in itertools.pairwise([0, *ends]):
        for first in range(start, end, 64):
            rows = slice(first, min(first + 64, end))
            torch.cumsum(gate[:, rows] * benchmark.LOG2_E, 1, out=cumulative[:, rows])
    return dict(
        q=torch.nn.functional.normalize(normal(), dim=-1).bfloat16(),
        k=torch.nn.functional.normalize(normal(), dim=-1).bfloat16(),
        v=normal().bfloat16(),
        gate=gate,
        cumulative_gate=cumulative,
        beta=torch.rand(shape[:3], device="cuda", generator=generator),
        grad=normal().bfloat16(),
        **make_offsets(batch, tokens, lengths),
    )


def full_inputs(batch: int, tokens: int, heads: int, lengths: tuple[int, ...] | None, nats: float, seed: int) -> Inputs:
    """One set of buffers, as a layer holds them; the bias puts the bounded gate's middle at ``nats``."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, heads, WIDTH)
    share = nats / BOUND
    return dict(
        **{name: torch.randn(shape, device="cuda", generator=generator).bfloat16() for name in ("q", "k", "v", "raw")},
        A_log=torch.zeros(heads, device="cuda"),
        dt_bias=torch.full((heads, WIDTH), math.log(share / (1 - share)), device="cuda"),
        beta=torch.rand(shape[:3], device="cuda", generator=generator),
        **make_offsets(batch, tokens, lengths),
    )


# ---- ours ----


def our_name(bound: float | None) -> str:
    return f"titan_kda, {'no promise' if bound is None else 'promised'}"


def ours(bound: float | None, what: str) -> Contender:
    import titan_kda.kernels  # noqa: F401 (registers the operators)

    def make(x: Inputs) -> Callable[[], Any]:
        tensors = (x["q"], x["k"], x["v"], x["cumulative_gate"], x["beta"], None, x["cu_seqlens"])
        operators = torch.ops.titan_kda

        def forward():
            return operators.chunk_kda(*tensors, False, False, bound, "triton")

        def backward():
            return operators.chunk_kda_backward(x["grad"], None, *tensors, bound, "triton")

        return {"fwd": forward, "bwd": backward, "fwd + bwd": lambda: (forward(), backward())[1]}[what]

    return Contender(our_name(bound), make, output=lambda out: out[0])


def ours_in_full(bound: float | None, fuse: bool = False) -> Contender:
    from titan_kda.kernels import bounded_gate_cumsum, chunk_kda, l2norm

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        def call():
            gate = bounded_gate_cumsum(
                x["raw"], x["A_log"], x["dt_bias"], lower_bound=BOUND, cu_seqlens=x["cu_seqlens"]
            )  # fmt: skip
            q = x["q"] if fuse else l2norm(x["q"])
            return chunk_kda(
                q, l2norm(x["k"]), x["v"], gate, x["beta"], cu_seqlens=x["cu_seqlens"], fuse_q_l2norm=fuse,
                gate_lower_bound=bound,
            )[0]  # fmt: skip

        return call

    return Contender(our_name(bound) + (", fused q norm" if fuse else ""), make)


# ---- peers ----


def fla_forward(safe: bool, full: bool) -> Callable[[Inputs], torch.Tensor]:
    from fla.ops.kda import chunk_kda

    def forward(x: Inputs) -> torch.Tensor:
        options = dict(cu_seqlens=x["long_seqlens"], safe_gate=safe)
        if full:
            options.update(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, lower_bound=BOUND)
            options.update(A_log=x["A_log"], dt_bias=x["dt_bias"].flatten())
        return chunk_kda(x["q"], x["k"], x["v"], x["raw" if full else "gate"], x["beta"], **options)[0]

    return forward


def cudnn_forward(full: bool) -> Callable[[Inputs], torch.Tensor]:
    from cudnn.linear_attention.ops import kimi_delta_attention

    def forward(x: Inputs) -> torch.Tensor:
        options: dict[str, Any] = {}
        if full:
            options = dict(use_qk_l2norm_in_kernel=True, safe_gate=True, gate_lower_bound=BOUND)
            options.update(a_log=x["A_log"], dt_bias=x["dt_bias"])
        flat = [x[name].flatten(0, 1) for name in ("q", "k", "v", "raw" if full else "gate", "beta")]
        out = kimi_delta_attention(*flat, x["starts"], **options)
        return (out[0] if isinstance(out, tuple) else out).view_as(x["v"])

    return forward


@functools.cache
def peer_forwards(full: bool) -> dict[str, Callable[[Inputs], torch.Tensor]]:
    """The peers that can be imported. FLA's safe gate is a promise like ours: it allows faster products."""
    found = {}
    for name, get in (
        ("fla, safe gate", lambda: fla_forward(True, full)),
        *(() if full else (("fla", lambda: fla_forward(False, full)),)),
        ("cudnn", lambda: cudnn_forward(full)),
    ):
        try:
            found[name] = get()
        except Exception as error:  # a package that is not there, or cannot be imported here
            print(f"  without {name}: {benchmark.first_line(error)}")
    return found


def peers(what: str, full: bool, packed: bool) -> list[Contender]:
    """FLA's packed calls copy offsets to the host the first time, and no graph takes that; nor one a lone backward."""

    def make(forward: Callable[[Inputs], torch.Tensor], x: Inputs) -> Callable[[], Any]:
        if what == "fwd":
            return lambda: forward(x)
        leaves = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v", "gate", "beta")}
        tensors = list(leaves.values())
        if what == "fwd + bwd":
            return lambda: torch.autograd.grad(forward({**x, **leaves}), tensors, x["grad"])
        output = forward({**x, **leaves})
        return lambda: torch.autograd.grad(output, tensors, x["grad"], retain_graph=True)

    return [
        Contender(
            name,
            functools.partial(make, forward),
            output=(lambda out: out) if what == "fwd" else (lambda out: out[0]),
            peer=True,
            eager=what == "bwd" or (packed and name.startswith("fla")),
        )
        for name, forward in peer_forwards(full).items()
    ]


# ---- memory and the first call ----


def peak_memory(call: Callable[[], Any]) -> float:
    """Bytes that a call takes at its worst moment, beyond what was allocated before."""
    call()  # compiles
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak


def memory_rows(bench: Bench) -> None:
    for batch, tokens, heads, lengths in ROWS[:2]:
        work = f"memory fwd + bwd {row_name(batch, tokens, heads, lengths, 'strong')}"
        if not bench.wanted(work):
            continue
        x = core_inputs(batch, tokens, heads, lengths, GATES["strong"], 0)
        for contender in (ours(BOUND, "fwd + bwd"), ours(None, "fwd + bwd"), *peers("fwd + bwd", False, False)):
            if not bench.taken(contender.name) or (contender.peer and not bench.peers):
                continue
            try:
                peak = peak_memory(contender.make(x))
            except Exception as error:  # another library's failure is not the run's
                if not contender.peer:
                    raise
                print(f"  without {contender.name}: {benchmark.first_line(error)}")
                continue
            bench.quantity(work, contender.name, peak / 1e6, "MB")


def kernel_times(call: Callable[[], Any], names: tuple[str, ...], times: int = 15) -> dict[str, float]:
    """Median microseconds of the kernels so named, by the profiler, each call with a cold L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call()  # compiles
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(times):
            flush.zero_()
            call()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in names}
    for event in profile.events() or ():
        if event.name in found:
            found[event.name].append(event.device_time)
    return {name: statistics.median(values) for name, values in found.items() if values}


def norm_rows(bench: Bench) -> None:
    """What fuse_q_l2norm costs chunk_kda's kernels, and the pass over q that it spares."""
    from titan_kda.kernels import chunk_kda, l2norm

    work = "q norm by kernel B1 T8192 H32"
    if not bench.wanted(work):
        return
    x = core_inputs(1, 8192, 32, None, GATES["strong"], 0)
    tensors = (x["q"], x["k"], x["v"], x["cumulative_gate"], x["beta"])
    for bound, fuse in itertools.product((BOUND, None), (False, True)):
        call = functools.partial(chunk_kda, *tensors, fuse_q_l2norm=fuse, gate_lower_bound=bound)
        for name, us in kernel_times(call, ("prepare_kernel", "scan_kernel")).items():
            what = f"{our_name(bound)}{', fused' if fuse else ''}: {name}"
            bench.quantity(work, what, us, "us")
    for name, us in kernel_times(lambda: l2norm(x["q"]), ("_l2norm_kernel",)).items():
        bench.quantity(work, name, us, "us")


FIRST_CALL = """
import json, sys, time
import benchmark_chunk as b, torch
from benchmark import LOG2_E
contenders = {c.name: c for c in (b.ours(b.BOUND, "fwd + bwd"), b.ours(None, "fwd + bwd"))}
name = sys.argv[1]
if name not in contenders:
    contenders = {c.name: c for c in b.peers("fwd + bwd", False, False)}
x = b.core_inputs(2, 1024, 16, None, -2.5, 0)
call = contenders[name].make(x)
torch.cuda.synchronize()
start = time.perf_counter()
call()
torch.cuda.synchronize()
print(json.dumps(time.perf_counter() - start))
"""


def first_call(contender: str, limit_s: float) -> float | None:
    """Seconds of the first forward and backward in a new process with an empty cache of compiled kernels, imports not
    counted; None past the limit."""
    folder = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TRITON_CACHE_DIR": cache, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        try:
            done = subprocess.run(
                [sys.executable, "-c", FIRST_CALL, contender],
                env=environment, capture_output=True, text=True, timeout=limit_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None
    if done.returncode:
        raise RuntimeError(f"the first call of {contender} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def first_call_rows(bench: Bench, limit_s: float = 200) -> None:
    work = "first call fwd + bwd, cold caches"
    if not bench.wanted(work):
        return
    names = [our_name(BOUND), our_name(None), *(("fla, safe gate", "cudnn") if bench.peers else ())]
    for name in filter(bench.taken, names):
        try:
            seconds = first_call(name, limit_s)
        except RuntimeError as error:
            if name.startswith("titan_kda"):
                raise
            print(f"  without {name}: {str(error).splitlines()[-1]}")
            continue
        if seconds is None:
            print(f"  {name}: more than {limit_s:.0f} s")
        else:
            bench.quantity(work, name, seconds, "s")


# ---- the suite ----


def print_speedups(bench: Bench) -> None:
    """Geometric means over the rows of this run that both did."""
    for prefix, ours_name, peer in itertools.product(
        ("core fwd B", "core bwd", "core fwd + bwd", "full fwd"),
        (our_name(BOUND), our_name(None)),
        ("fla, safe gate", "fla", "cudnn"),
    ):
        times = benchmark.ratios(bench.results, ours_name, peer, prefix)
        if times:
            mean = math.exp(sum(map(math.log, times)) / len(times))
            print(
                f"{prefix.removesuffix(' B'):<16}{ours_name:<24} {mean:.2f}x the speed of {peer}"
                f" ({min(times):.2f} to {max(times):.2f}, {len(times)} rows)"
            )


@benchmark.suite("chunk")
def chunk(bench: Bench) -> None:
    """chunk_kda, K = V = 128, bf16: eight rows, two gates, core and full; peak memory; the first call, caches cold."""
    for (batch, tokens, heads, lengths), (gate, nats) in itertools.product(ROWS, GATES.items()):
        shape = row_name(batch, tokens, heads, lengths, gate)
        rows = batch * tokens * heads
        forward = rows * (4 * 2 * WIDTH + 4 * WIDTH + 4)  # q, k, v, output; gate; beta
        backward = rows * (7 * 2 * WIDTH + 2 * 4 * WIDTH + 2 * 4)  # q, k, v, dO, dq, dk, dv; gates; betas
        for what, moved in (("fwd", forward), ("bwd", backward), ("fwd + bwd", forward + backward)):
            work = f"core {what} {shape}"
            if bench.wanted(work):
                bench.row(
                    work,
                    [
                        ours(BOUND, what),
                        ours(None, what),
                        *(peers(what, False, lengths is not None) if bench.peers else ()),
                    ],
                    functools.partial(core_inputs, batch, tokens, heads, lengths, nats),
                    bytes_moved=moved,
                    reference=lambda x, what=what: ours(None, what).make(x)()[0].double(),
                    most_sets=3,
                    most_calls=3,
                )
        work = f"full fwd {shape}"
        if bench.wanted(work):
            bench.row(
                work,
                [
                    *(ours_in_full(bound, fuse) for bound in (BOUND, None) for fuse in (False, True)),
                    *(peers("fwd", True, lengths is not None) if bench.peers else ()),
                ],
                functools.partial(full_inputs, batch, tokens, heads, lengths, nats),
                bytes_moved=rows * (5 * 2 * WIDTH + 4),  # q, k, v, gate logits, output; beta
                reference=lambda x: ours_in_full(None).make(x)().double(),
                most_sets=3,
                most_calls=3,
            )
    norm_rows(bench)
    memory_rows(bench)
    first_call_rows(bench)
    print_speedups(bench)


if __name__ == "__main__":
    sys.exit(benchmark.main(["chunk", *sys.argv[1:]]))
