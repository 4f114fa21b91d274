"""The elementwise suite: the gate, l2norm and the short convolution against copy bandwidth.

``python scripts/benchmark.py elementwise`` runs it with the others; run by itself, this file takes the same options.
A row counts each input and output tensor once; its floor is that many bytes at the copy bandwidth of the run. Beside
ours stands PyTorch's own copy of as many bytes, timed the same way: at small sizes it says what a launch costs.
"""

import dataclasses
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import benchmark
import torch
from benchmark import Bench, Contender

TOKENS, HEADS, WIDTH, TAPS = 8192, 32, 128, 4
CHANNELS = HEADS * WIDTH
MIXED = (1300, 547, 2048, 963, 271, 3063)


def documents(mean: float, tokens: int = TOKENS) -> tuple[int, ...]:
    """Lengths from an exponential distribution, the last cut off."""
    draw, lengths = random.Random(1), []
    while sum(lengths) < tokens:
        lengths.append(min(1 + int(draw.expovariate(1 / mean)), tokens - sum(lengths)))
    return tuple(lengths)


PACKS = {
    "packed": MIXED,
    "64 of 128": (128,) * 64,
    f"{len(documents(500))} documents": documents(500),
    f"{len(documents(100))} documents": documents(100),
}


def normal(seed: int) -> Callable[..., torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return lambda *shape: torch.randn(*shape, device="cuda", generator=generator)


def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def copy_of(bytes_moved: float) -> Contender:
    """PyTorch's copy, reading half of the bytes and writing the other half."""

    def make(_inputs: Any) -> Callable[[], torch.Tensor]:
        # a copy in a graph is slower by half if its size is no multiple of 32 KiB
        source = torch.empty(-(-int(bytes_moved) // 65536) * 8192, device="cuda").normal_()
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    return Contender("torch copy of as many bytes", make)


def variants(default: Any, **choices: tuple) -> Iterator[tuple[str, Any]]:
    for values in itertools.product(*choices.values()):
        settings = dict(zip(choices, values))
        yield "  " + " ".join(f"{k} {v}" for k, v in settings.items()), dataclasses.replace(default, **settings)


def rows(bench: Bench, work: str, contenders: list[Contender], make_inputs: Callable, bytes_moved: float) -> None:
    """One row and its copy, of small work over as many sets of buffers as keep the L2 cold. Correctness is the tests'
    matter: the inputs are too large for FP64 to be quick."""
    bench.row(work, [*contenders, copy_of(bytes_moved)], make_inputs, bytes_moved=bytes_moved, most_sets=2048)


def gate_rows(bench: Bench) -> None:
    from titan_kda.kernels import gate

    def make(batch: int, tokens: int) -> Callable[[int], dict[str, Any]]:
        def inputs(seed: int) -> dict[str, Any]:
            n = normal(seed)
            shape = (batch, tokens, HEADS, WIDTH)
            return dict(
                raw=n(*shape).bfloat16(), A=(1 + 15 * n(HEADS).sigmoid()).log(), bias=n(HEADS, WIDTH), grad=n(*shape)
            )

        return inputs

    def forward(bound: float | None, chunk: int = 64, pack: torch.Tensor | None = None, **launch: Any) -> Callable:
        return lambda x: lambda: gate._forward_triton(x["raw"], x["A"], x["bias"], chunk, bound, pack, **launch)

    def backward(bound: float | None, pack: torch.Tensor | None = None, **launch: Any) -> Callable:
        return lambda x: (
            lambda: gate._backward_triton(x["grad"], x["raw"], x["A"], x["bias"], 64, bound, pack, **launch)
        )

    elements = TOKENS * CHANNELS
    parameters = 4 * (HEADS + CHANNELS)
    for name, bound in (("bounded", -5.0), ("softplus", None)):
        tuned, tuned_back = [], []
        if bench.tune and bound is not None:
            tuned = [
                Contender(text, forward(bound, launch=launch))
                for text, launch in [
                    *variants(gate._FORWARD, rows=(4, 8, 16), warps=(2, 4)),
                    *variants(gate._FORWARD, rows=(8,), warps=(4,), registers=(64,)),
                ]
            ]
            tuned_back = [
                Contender(text, backward(bound, launch=launch))
                for text, launch in [
                    *variants(gate._BACKWARD, warps=(2, 4), registers=(None, 96)),
                    *variants(gate._BACKWARD, rows=(2, 4), span=(64,), registers=(None,)),
                ]
            ]
        ours = Contender(f"titan_kda.{name}_gate_cumsum", forward(bound))
        rows(bench, f"{name} gate, T {TOKENS}", [ours, *tuned], make(1, TOKENS), 6 * elements + parameters)
        ours = Contender(f"titan_kda.{name}_gate_cumsum", backward(bound))
        back_bytes = 8 * elements + 2 * parameters
        rows(bench, f"{name} gate backward, T {TOKENS}", [ours, *tuned_back], make(1, TOKENS), back_bytes)
    pack = offsets(MIXED)
    ours = Contender("titan_kda.bounded_gate_cumsum", forward(-5.0, pack=pack))
    rows(bench, f"bounded gate, packed, T {TOKENS}", [ours], make(1, TOKENS), 6 * elements + parameters)
    ours = Contender("titan_kda.bounded_gate_cumsum", backward(-5.0, pack))
    rows(bench, f"bounded gate backward, packed, T {TOKENS}", [ours], make(1, TOKENS), 8 * elements + 2 * parameters)
    for sequences in (1, 8, 64, 256, 1024):
        ours = Contender("titan_kda.bounded_gate_cumsum", forward(-5.0, 1))
        moved = 6 * sequences * CHANNELS + parameters
        rows(bench, f"bounded gate, decode N {sequences}", [ours], make(sequences, 1), moved)


def conv_rows(bench: Bench) -> None:
    from titan_kda.kernels import short_conv, short_conv_step

    def make(tokens: int) -> Callable[[int], dict[str, torch.Tensor]]:
        def inputs(seed: int) -> dict[str, torch.Tensor]:
            n = normal(seed)
            shape = (1, tokens, CHANNELS)
            return dict(x=n(*shape).bfloat16(), weight=n(CHANNELS, TAPS).bfloat16(), grad=n(*shape).bfloat16())

        return inputs

    def forward(pack: torch.Tensor | None = None, **launch: Any) -> Callable:
        return lambda x: lambda: short_conv._forward_triton(x["x"], x["weight"], "silu", pack, None, False, **launch)[0]

    def backward(pack: torch.Tensor | None = None, **launch: Any) -> Callable:
        return lambda x: (
            lambda: short_conv._backward_triton(
                x["grad"], x["grad"], x["x"], x["weight"], "silu", pack, None, False, **launch
            )
        )

    tuned, tuned_back, tuned_packed = [], [], []
    if bench.tune:
        tuned = [
            Contender(text, forward(launch=launch))
            for text, launch in [
                *variants(short_conv._FORWARD, span=(32, 64, 128)),
                *variants(short_conv._FORWARD, rows=(8,), registers=(None, 80)),
                *variants(short_conv._FORWARD, warps=(1, 2)),
            ]
        ]
        back = [
            *variants(short_conv._BACKWARD, rows=(3, 4, 6), span=(128, 256)),
            *variants(short_conv._BACKWARD, warps=(1, 2), streams=(1, 2)),
            *variants(short_conv._BACKWARD_PACKED, warps=(1, 2, 4)),
            *variants(short_conv._BACKWARD_PACKED, warps=(4,), per_thread=(4,), registers=(None, 128)),
        ]
        tuned_back = [Contender(text, backward(launch=launch)) for text, launch in back]
        tuned_packed = [Contender(text, backward(offsets(MIXED), launch=launch)) for text, launch in back]
    elements, weights = TOKENS * CHANNELS, 2 * CHANNELS * TAPS
    ours = Contender("titan_kda.causal_conv1d", forward())
    rows(bench, f"conv, T {TOKENS}", [ours, *tuned], make(TOKENS), 4 * elements + weights)
    ours = Contender("titan_kda.causal_conv1d", backward())
    rows(bench, f"conv backward, T {TOKENS}", [ours, *tuned_back], make(TOKENS), 6 * elements + 2 * weights)
    for name, lengths in PACKS.items():
        pack = offsets(lengths)
        ours = Contender("titan_kda.causal_conv1d", forward(pack))
        rows(bench, f"conv, {name}, T {TOKENS}", [ours], make(TOKENS), 4 * elements + weights)
        tuned = tuned_packed if name == "packed" else []
        ours = Contender("titan_kda.causal_conv1d", backward(pack))
        rows(bench, f"conv backward, {name}, T {TOKENS}", [ours, *tuned], make(TOKENS), 6 * elements + 2 * weights)

    def step_inputs(sequences: int) -> Callable[[int], dict[str, torch.Tensor]]:
        def inputs(seed: int) -> dict[str, torch.Tensor]:
            n = normal(seed)
            return dict(
                x=n(sequences, CHANNELS).bfloat16(),
                weight=n(CHANNELS, TAPS).bfloat16(),
                state=n(sequences, TAPS - 1, CHANNELS).bfloat16(),
                slots=torch.randperm(sequences, device="cuda").int(),
            )

        return inputs

    def step(**launch: Any) -> Callable:
        return lambda x: (
            lambda: short_conv_step._step_triton(x["x"], x["weight"], x["state"], "silu", x["slots"], **launch)
        )

    for sequences in (1, 8, 64, 256, 1024):
        tuned = []
        if bench.tune:
            tuned = [
                Contender(text, step(launch=launch))
                for text, launch in variants(short_conv_step._STEP, warps=(1, 4), per_thread=(4, 8))
            ]
        moved = sequences * (2 * CHANNELS * (2 + 2 * (TAPS - 1)) + 4) + weights
        ours = Contender("titan_kda.causal_conv1d_step", step())
        rows(bench, f"conv step, N {sequences}", [ours, *tuned], step_inputs(sequences), moved)


def l2norm_rows(bench: Bench) -> None:
    module = importlib.import_module("titan_kda.kernels.l2norm")  # the package's attribute is the function

    def inputs(seed: int) -> dict[str, torch.Tensor]:
        n = normal(seed)
        return dict(x=n(1, TOKENS, HEADS, WIDTH).bfloat16(), grad=n(1, TOKENS, HEADS, WIDTH).bfloat16())

    elements = TOKENS * CHANNELS
    ours = Contender("titan_kda.l2norm", lambda x: lambda: module._forward_triton(x["x"], 1e-6))
    rows(bench, f"l2norm, T {TOKENS}", [ours], inputs, 4 * elements)
    ours = Contender("titan_kda.l2norm", lambda x: lambda: module._backward_triton(x["grad"], x["x"], 1e-6))
    rows(bench, f"l2norm backward, T {TOKENS}", [ours], inputs, 6 * elements)


@benchmark.suite("elementwise")
def elementwise(bench: Bench) -> None:
    """The gate, l2norm and the convolution, forward and backward, B 1, T 8192, H 32, K 128, and the conv's step."""
    gate_rows(bench)
    conv_rows(bench)
    l2norm_rows(bench)


if __name__ == "__main__":
    sys.exit(benchmark.main(["elementwise", *sys.argv[1:]]))
