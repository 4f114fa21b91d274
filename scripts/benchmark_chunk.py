"""The chunk suite: chunk_kda's forward and backward beside FLA's and cuDNN's, strong and weak gates.

``python scripts/benchmark.py chunk`` runs it with the others; run by itself, this file takes the same options. Core
mode: unit q and k, v in bf16, the decay in FP32; no initial state, output only. Ours takes the cumulative gate, FLA
and cuDNN the per-token natural log. A row's floor counts each input and output once. FLA autotunes for minutes on a
shape that it
has not seen (TRITON_CACHE_AUTOTUNING=1 keeps what it found); its packed call cannot be captured,
so packed rows leave it
out.
"""

import functools
import itertools
import sys
from collections.abc import Callable
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


def row_name(batch: int, tokens: int, heads: int, lengths: tuple[int, ...] | None, gate: str) -> str:
    pack = "" if lengths is None else " mixed pack" if lengths == MIXED else f" {len(lengths)} x {lengths[0]}"
    return f"B{batch} T{tokens} H{heads}{pack}, {gate}"


def core_inputs(
    batch: int, tokens: int, heads: int, lengths: tuple[int, ...] | None, nats: float, seed: int
) -> dict[str, Any]:
    """One set of buffers; the per-token gate lies between twice ``nats`` and 0, above the bound."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shape = (batch, tokens, heads, WIDTH)

    def normal() -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    gate = 2 * nats * torch.rand(shape, device="cuda", generator=generator)
    if lengths is None:
        offsets = None
        starts = torch.arange(0, batch * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    else:
        offsets = starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    cumulative = torch.empty_like(gate)
    for row in range(batch):
        for start, end in itertools.pairwise([0, tokens] if lengths is None else starts.tolist()):
            for first in range(start, end, 64):
                rows = slice(first, min(first + 64, end))
                torch.cumsum(gate[row, rows] * benchmark.LOG2_E, 0, out=cumulative[row, rows])
    return dict(
        q=torch.nn.functional.normalize(normal(), dim=-1).bfloat16(),
        k=torch.nn.functional.normalize(normal(), dim=-1).bfloat16(),
        v=normal().bfloat16(),
        gate=gate,
        cumulative_gate=cumulative,
        beta=torch.rand(shape[:3], device="cuda", generator=generator),
        cu_seqlens=offsets,
        starts=starts,
        grad=normal().bfloat16(),
    )


def ours(bound: float | None, backward: bool) -> Contender:
    def make(x: dict[str, Any]) -> Callable[[], Any]:
        tensors = (x["q"], x["k"], x["v"], x["cumulative_gate"], x["beta"], None, x["cu_seqlens"])
        operators = torch.ops.titan_kda
        if backward:
            return lambda: operators.chunk_kda_backward(x["grad"], None, *tensors, bound, "triton")
        return lambda: operators.chunk_kda(*tensors, False, False, bound, "triton")

    return Contender(f"titan_kda, {'no promise' if bound is None else 'promised'}", make, output=lambda out: out[0])


def peers(packed: bool, backward: bool) -> list[Contender]:
    """FLA's and cuDNN's forward where installed; their backward belongs to autograd, and is timed with the forward."""
    found = []

    def training(forward: Callable[[dict[str, Any]], torch.Tensor], x: dict[str, Any]) -> Callable[[], Any]:
        leaves = {name: x[name].detach().requires_grad_() for name in ("q", "k", "v", "gate", "beta")}
        return lambda: torch.autograd.grad(forward({**x, **leaves}), list(leaves.values()), x["grad"])

    def add(name: str, forward: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        if backward:
            found.append(Contender(f"{name}, fwd + bwd", lambda x: training(forward, x), output=lambda out: out[0]))
        else:
            found.append(Contender(name, lambda x: lambda: forward(x)))

    if not packed:
        try:
            from fla.ops.kda import chunk_kda as fla_chunk_kda
        except ImportError as error:
            print(f"  without FLA: {error}")
        else:
            add("fla", lambda x: fla_chunk_kda(x["q"], x["k"], x["v"], x["gate"], x["beta"])[0])
    try:
        from cudnn.linear_attention.ops import kimi_delta_attention
    except ImportError as error:
        print(f"  without cuDNN: {error}")
    else:

        def cudnn(x: dict[str, Any]) -> torch.Tensor:
            flat = [x[name].flatten(0, 1) for name in ("q", "k", "v", "gate", "beta")]
            out = kimi_delta_attention(*flat, x["starts"])
            return (out[0] if isinstance(out, tuple) else out).view_as(x["v"])

        add("cudnn", cudnn)
    return found


def our_training(bound: float | None) -> Contender:
    forward, backward = ours(bound, False), ours(bound, True)

    def make(x: dict[str, Any]) -> Callable[[], Any]:
        calls = forward.make(x), backward.make(x)
        return lambda: [call() for call in calls][1]

    return Contender(f"{forward.name}, fwd + bwd", make, output=lambda out: out[0])


def print_peak_memory(x: dict[str, Any]) -> None:
    """What one forward and backward take beyond their inputs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = ours(BOUND, False).make(x)(), ours(BOUND, True).make(x)()
    torch.cuda.synchronize()
    print(f"  peak extra memory of fwd + bwd: {(torch.cuda.max_memory_allocated() - before) / 1e6:.0f} MB")
    del results


@benchmark.suite("chunk")
def chunk(bench: Bench) -> None:
    """chunk_kda forward, backward and both, K = V = 128, bf16; dense and packed, strong and weak gates."""
    for (batch, tokens, heads, lengths), (gate, nats) in itertools.product(ROWS, GATES.items()):
        work = row_name(batch, tokens, heads, lengths, gate)
        make = functools.partial(core_inputs, batch, tokens, heads, lengths, nats)
        rows = batch * tokens * heads
        forward_bytes = rows * (4 * 2 * WIDTH + 4 * WIDTH + 4)  # q, k, v, output; gate; beta
        backward_bytes = rows * (7 * 2 * WIDTH + 2 * 4 * WIDTH + 2 * 4)  # q, k, v, dO, dq, dk, dv; gates; betas
        packed, limits = lengths is not None, dict(most_sets=3, most_calls=4)
        for what, moved in (
            ("fwd", forward_bytes),
            ("bwd", backward_bytes),
            ("fwd + bwd", forward_bytes + backward_bytes),
        ):
            if not bench.wanted(f"{what} {work}"):
                continue
            if what == "fwd + bwd":
                contenders = [our_training(BOUND), our_training(None)]
            else:
                contenders = [ours(BOUND, what == "bwd"), ours(None, what == "bwd")]
            if bench.peers and what != "bwd":
                contenders += peers(packed, what != "fwd")
            bench.row(f"{what} {work}", contenders, make, bytes_moved=moved, **limits)
        if bench.wanted(f"fwd + bwd {work}"):
            print_peak_memory(make(0))


if __name__ == "__main__":
    sys.exit(benchmark.main(["chunk", *sys.argv[1:]]))
