"""Times the operators beside their peers: python scripts/benchmark.py SUITE [--json FILE] [--plot FILE] ...

How it measures. Each contender's calls are captured in a CUDA graph, over enough sets of buffers that the L2 cache is
cold when a set comes round again, every output kept alive so that no two calls write to one place. The contenders of a
row take turns, round by round, in this one process; the time of a call is the median over the rounds, and the spread is
from the 10th to the 90th percentile. Before it is timed, a contender's output is compared with the row's FP64
reference. The floor of a row is the bytes that it must move, each input read once and each output written once, over
the copy bandwidth measured in the same run. A time holds only beside the others of its own run.

A peer that raises is left out of its row, and says why; one that cannot be captured is timed by its own launches, and
its name says "eager". A failure of ours ends the run.

A suite is a function marked with ``@suite``: it takes a Bench and calls ``bench.row(...)`` for times and
``bench.quantity(...)`` for the rest.
"""

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton

if TYPE_CHECKING:
    from titan_kda.kernels.configs import RecurrentConfig

LOG2_E = 1.4426950408889634
GRAPH_US = 1500  # the least work of a graph, of which each costs some 5 us besides its calls
L2_BYTES = 60 << 20  # an H200's; what the buffers are rotated against is the device's own, where PyTorch tells it

Call = Callable[[], Any]

# ---- timing ----


def l2_bytes() -> int:
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", L2_BYTES)


def buffer_sets(bytes_per_call: float, *, most: int = 64) -> int:
    """How many sets of buffers to rotate: together at least three times the L2."""
    return max(2, min(most, math.ceil(3 * l2_bytes() / max(bytes_per_call, 1))))


@dataclass
class Timing:
    """Microseconds of one call: the median over rounds, and the 10th and 90th percentiles."""

    median_us: float
    low_us: float
    high_us: float


def capture(calls: Sequence[Call]) -> tuple[torch.cuda.CUDAGraph, list[Any]]:
    """One graph of all the calls, one after another; their outputs stay alive, each with a place of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:  # compiles and autotunes, outside the capture
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    outputs = []
    with torch.cuda.graph(graph):
        for call in calls:
            outputs.append(call())
    return graph, outputs


def launched(calls: Sequence[Call]) -> Call:
    """Runs the calls one after another without a graph; once at the start, to compile and autotune."""

    def run() -> None:
        for call in calls:
            call()

    run()
    torch.cuda.synchronize()
    return run


def time_in_turns(
    contenders: dict[str, tuple[Call, int]], *, rounds: int = 25, least_us: float = 300
) -> dict[str, Timing]:
    """Times contenders in turns: what each runs, a graph's replay as a rule, and how many calls that is.

    A measured interval is at least ``least_us`` long: short graphs are replayed several times in a row.
    """
    repeats = {}

    def interval(name: str, times: int) -> float:
        run = contenders[name][0]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    for name in contenders:
        interval(name, 2)  # the first replay uploads the graph
        repeats[name] = max(1, math.ceil(least_us / interval(name, 2) * 2))
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (_, calls) in contenders.items():
            samples[name].append(interval(name, repeats[name]) / (repeats[name] * calls))
    timings = {}
    for name, values in samples.items():
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        timings[name] = Timing(statistics.median(values), deciles[0], deciles[-1])
    return timings


def copy_bandwidth(gigabytes: float = 2.0, times: int = 10) -> float:
    """Bytes a second of a device-to-device copy, read and write counted; eager, since a graph's copy node is slower."""
    source = torch.empty(int(gigabytes * 2**30) // 4, device="cuda").normal_()
    target = torch.empty_like(source)
    samples = []
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(times):
            target.copy_(source)
        end.record()
        end.synchronize()
        samples.append(times * 2 * source.numel() * 4 / (start.elapsed_time(end) * 1e-3))
    return statistics.median(samples)


# ---- rows and suites ----


@dataclass
class Contender:
    """One implementation of a row's work: ``make(inputs)`` gives a call on one set of inputs.

    A ``peer`` is another library's: it may fail. ``eager`` is for calls that no graph takes.
    """

    name: str
    make: Callable[[Any], Call]
    output: Callable[[Any], torch.Tensor] = lambda result: result  # what of a call's result is compared
    peer: bool = False
    eager: bool = False


@dataclass
class Result:
    """One line of the table."""

    suite: str
    work: str
    contender: str
    us: float
    low_us: float
    high_us: float
    bytes: float
    floor_us: float
    error: float | None = None

    @property
    def tb_per_s(self) -> float:
        return self.bytes / self.us * 1e-6

    @property
    def of_floor(self) -> float:
        return self.floor_us / self.us


@dataclass
class Quantity:
    """A line of the table that is no time of a call: peak memory, a first call."""

    suite: str
    work: str
    contender: str
    value: float
    unit: str


@dataclass
class Bench:
    """What a suite is given: the options, the run's copy bandwidth, and ``row`` to time one piece of work."""

    suite: str
    bandwidth: float
    rounds: int = 25
    filters: Sequence[str] = ()
    contenders: Sequence[str] = ()
    peers: bool = True
    tune: bool = False
    results: list[Result] = field(default_factory=list)
    quantities: list[Quantity] = field(default_factory=list)

    def wanted(self, work: str) -> bool:
        return all(text in work for text in self.filters)

    def taken(self, contender: str) -> bool:
        return not self.contenders or any(text in contender for text in self.contenders)

    def quantity(self, work: str, contender: str, value: float, unit: str) -> None:
        self.quantities.append(Quantity(self.suite, work, contender, value, unit))
        print(f"{work:<{WORK_WIDTH}}{contender:<38}{value:>9.1f} {unit}", flush=True)

    def row(
        self,
        work: str,
        contenders: Iterable[Contender],
        make_inputs: Callable[[int], Any],
        *,
        bytes_moved: float,
        reference: Callable[[Any], torch.Tensor] | None = None,
        most_sets: int = 64,
        most_calls: int = 64,
    ) -> None:
        """Times one piece of work.

        Args:
            work: the row's name; rows without the texts of --filter in it are skipped.
            contenders: who does it.
            make_inputs: one set of buffers from a seed.
            bytes_moved: the fewest bytes that a call must read and write: the floor.
            reference: the FP64 result on a set of buffers, or its first rows along axis 0; for work too large for
                FP64, another contender's.
            most_sets, most_calls: limits on the sets of buffers and on the calls in a graph.
        """
        if not self.wanted(work):
            return
        sets = [make_inputs(seed) for seed in range(min(buffer_sets(bytes_moved), most_sets))]
        calls_in_graph = max(len(sets), min(most_calls, math.ceil(GRAPH_US / (bytes_moved / self.bandwidth * 1e6 + 4))))
        errors, runs = {}, {}
        kept = []  # graphs, their outputs, and the calls: a graph holds addresses, not the buffers that a call made
        want = reference(sets[0]) if reference is not None else None
        for contender in contenders:
            if not self.taken(contender.name) or (contender.peer and not self.peers):
                continue
            name = contender.name
            try:
                if want is not None:
                    got = contender.output(contender.make(sets[0])())[: want.shape[0]].double()
                    error = ((got - want).norm() / want.norm()).item()
                calls = [contender.make(sets[i % len(sets)]) for i in range(calls_in_graph)]
                run = None
                if not contender.eager:
                    try:
                        graph, outputs = capture(calls)
                        run = graph.replay
                        kept.append((graph, outputs, calls))
                    except RuntimeError as reason:
                        if not contender.peer:
                            raise
                        print(f"  {name}: no graph ({first_line(reason)})")
                        torch.cuda.synchronize()
                if run is None:
                    name += " (eager)"
                    run = launched(calls)
            except Exception as reason:  # another library's failure, of whatever kind, is not the run's
                if not contender.peer:
                    raise
                print(f"  without {name}: {first_line(reason)}")
                continue
            runs[name] = run, len(calls)
            if want is not None:
                errors[name] = error
        floor_us = bytes_moved / self.bandwidth * 1e6
        for name, timing in time_in_turns(runs, rounds=self.rounds).items():
            line = Result(
                self.suite,
                work,
                name,
                timing.median_us,
                timing.low_us,
                timing.high_us,
                bytes_moved,
                floor_us,
                errors.get(name),
            )
            self.results.append(line)
            print_result(line)
        del sets, runs, kept
        torch.cuda.empty_cache()


SUITES: dict[str, Callable[[Bench], None]] = {}


def suite(name: str) -> Callable[[Callable[[Bench], None]], Callable[[Bench], None]]:
    """Registers a suite; its docstring's first line is its help."""

    def add(function: Callable[[Bench], None]) -> Callable[[Bench], None]:
        SUITES[name] = function
        return function

    return add


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0][:200]}"


def ratios(results: Sequence[Result], ours: str, peer: str, prefix: str) -> list[float]:
    """How many times longer the peer takes, for each work that starts with ``prefix`` and that both did."""
    times = {
        name: {line.work: line.us for line in results if line.contender in (name, f"{name} (eager)")}
        for name in (ours, peer)
    }
    return [
        times[peer][work] / us for work, us in times[ours].items() if work in times[peer] and work.startswith(prefix)
    ]


WORK_WIDTH = 44
HEADER = f"{'work':<{WORK_WIDTH}}{'contender':<38}{'us':>9}{'10% to 90%':>18}{'TB/s':>7}" + (
    f"{'floor us':>10}{'% floor':>9}{'error':>9}"
)


def print_result(line: Result) -> None:
    error = "" if line.error is None else f"{line.error:.0e}"
    spread = f"{line.low_us:.2f} - {line.high_us:.2f}"
    print(
        f"{line.work:<{WORK_WIDTH}}{line.contender:<38}{line.us:>9.2f}{spread:>18}{line.tb_per_s:>7.2f}{line.floor_us:>10.2f}"
        f"{100 * line.of_floor:>9.1f}{error:>9}",
        flush=True,
    )


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """What the numbers were measured on: none holds without it."""
    device = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device.name,
        "sms": device.multi_processor_count,
        "l2_mib": l2_bytes() >> 20,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "fla-core": version("fla-core"),
        "attn-gym": version("attn-gym"),
        "nvidia-cudnn-frontend": version("nvidia-cudnn-frontend"),
    }


# ---- decode: recurrent_kda and the decode steps ----


def scan_inputs(sequences: int, tokens: int, heads: int, width: int = 128) -> Callable[[int], dict[str, torch.Tensor]]:
    """bf16 rows with unit q and k, an FP32 decay of about half a bit a token, and FP32 states."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        rows = (sequences, tokens, heads)
        return dict(
            q=torch.nn.functional.normalize(normal(*rows, width), dim=-1).bfloat16(),
            k=torch.nn.functional.normalize(normal(*rows, width), dim=-1).bfloat16(),
            v=normal(*rows, width).bfloat16(),
            gate=-normal(*rows, width).abs() * 0.6,
            beta=torch.sigmoid(normal(*rows)),
            state=normal(sequences, heads, width, width),
        )

    return make


def scan_bytes(sequences: int, tokens: int, heads: int, width: int = 128) -> float:
    state = 2 * 4 * width * width
    row = 3 * 2 * width + 4 * width + 4 + 2 * width  # q, k, v; gate; beta; output
    return sequences * heads * (state + tokens * row)


def naive_scan(x: dict[str, torch.Tensor], most: int = 2) -> torch.Tensor:
    """FP64, for the first sequences alone: it says whether a contender computes this row's function at all."""
    from titan_kda.kernels.reference import naive_recurrent_kda

    first = {name: tensor[:most].double() for name, tensor in x.items()}
    return naive_recurrent_kda(*(first[name] for name in ("q", "k", "v", "gate", "beta", "state")))[0]


def tile_name(config: "RecurrentConfig") -> str:
    cap = "" if config.registers is None else f", {config.registers} registers"
    return f"  {config.block_v} columns, {config.num_warps} warps{cap}"


def our_scan(config: "RecurrentConfig | None" = None) -> Contender:
    from titan_kda.kernels import recurrent_kda
    from titan_kda.kernels.recurrent import launch_recurrent_kda

    rows = ("q", "k", "v", "gate", "beta", "state")
    if config is None:
        return Contender(
            "titan_kda.recurrent_kda",
            lambda x: lambda: recurrent_kda(*(x[name] for name in rows), output_final_state=True),
            output=lambda result: result[0],
        )
    return Contender(
        tile_name(config),
        lambda x: lambda: launch_recurrent_kda(*(x[name] for name in rows), None, True, config),
        output=lambda result: result[0],
    )


def scan_peers() -> list[Contender]:
    peers = []
    if version("fla-core"):
        from fla.ops.kda import fused_recurrent_kda

        def fla(x):  # natural log decay; the same state layout
            gate = x["gate"] / LOG2_E
            return lambda: fused_recurrent_kda(
                x["q"], x["k"], x["v"], gate, x["beta"], initial_state=x["state"], output_final_state=True
            )

        peers.append(Contender("fla fused_recurrent_kda", fla, output=lambda result: result[0], peer=True))
    if version("attn-gym"):
        from attn_gym.linear import recurrent_kda

        def gym(x):  # natural log decay; the state is [V, K]
            gate, state = x["gate"] / LOG2_E, x["state"].mT.contiguous()
            return lambda: recurrent_kda(
                x["q"], x["k"], x["v"], gate, x["beta"], initial_state=state, output_final_state=True
            )

        peers.append(Contender("attn_gym recurrent_kda", gym, output=lambda result: result[0], peer=True))
    return peers


def step_inputs(sequences: int, heads: int, width: int = 128) -> Callable[[int], dict[str, torch.Tensor]]:
    """What a layer holds in decode: bf16 rows and logits, the gate's FP32 parameters, FP32 states."""

    def make(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator)

        return dict(
            q=normal(sequences, heads, width).bfloat16(),
            k=normal(sequences, heads, width).bfloat16(),
            v=normal(sequences, heads, width).bfloat16(),
            raw_gate=normal(sequences, heads, width).bfloat16(),
            beta_logits=normal(sequences, heads).bfloat16(),
            A_log=normal(heads),
            dt_bias=normal(heads, width),
            state=normal(sequences, heads, width, width),
            indices=torch.randperm(sequences, device="cuda", generator=generator).int(),
        )

    return make


def step_bytes(sequences: int, heads: int, width: int = 128) -> float:
    return sequences * (heads * (2 * 4 * width * width + 5 * 2 * width + 2) + 4) + heads * (width + 1) * 4


STEP_ROWS = ("q", "k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias")


def naive_step(x: dict[str, torch.Tensor], most: int = 2) -> torch.Tensor:
    from titan_kda.kernels.reference import naive_recurrent_kda_step

    slots = x["indices"][:most].long()
    rows = [x[name].double() if name in ("A_log", "dt_bias") else x[name][:most].double() for name in STEP_ROWS]
    return naive_recurrent_kda_step(*rows, x["state"][slots].double())


def our_step(config: "RecurrentConfig | None" = None) -> Contender:
    from titan_kda.kernels import recurrent_kda_step
    from titan_kda.kernels.recurrent import launch_recurrent_kda_step

    def make(x):
        state = x["state"].clone()  # every contender advances a pool of its own
        rows = [x[name] for name in STEP_ROWS]
        if config is None:
            return lambda: recurrent_kda_step(*rows, state, state_indices=x["indices"])
        return lambda: launch_recurrent_kda_step(*rows, state, x["indices"], "bounded", -5.0, 1.0, config)

    if config is None:
        return Contender("titan_kda.recurrent_kda_step", make)
    return Contender(tile_name(config), make)


def separate_operators() -> Contender:
    """What the fused step replaces: l2norm of q and k in one launch, the gate, the sigmoid, and recurrent_kda. It reads
    and writes the states where they lie, so it needs no gathering by slot: the comparison favours it."""
    from titan_kda.kernels import bounded_gate_cumsum, l2norm, recurrent_kda

    def make(x):
        slots = x["indices"].long()
        state = x["state"][slots]
        qk = torch.stack([x["q"], x["k"]])
        v, raw_gate, beta_logits = x["v"][:, None], x["raw_gate"][:, None], x["beta_logits"][:, None]

        def call():
            q, k = l2norm(qk).unsqueeze(2)
            gate = bounded_gate_cumsum(raw_gate, x["A_log"], x["dt_bias"], chunk_size=1)
            return recurrent_kda(q, k, v, gate, torch.sigmoid(beta_logits), state, output_final_state=True)

        return call

    return Contender("l2norm, gate, sigmoid, recurrent_kda", make, output=lambda result: result[0][:, 0])


def step_peers() -> list[Contender]:
    peers = []
    if version("fla-core"):
        from fla.ops.kda import fused_recurrent_kda

        def fla(x):  # its state goes to a new tensor, not into the pool
            state = x["state"][x["indices"].long()]
            q, k, v, raw_gate, beta = (x[name][:, None] for name in STEP_ROWS[:5])
            dt_bias = x["dt_bias"].flatten()
            return lambda: fused_recurrent_kda(
                q,
                k,
                v,
                raw_gate,
                beta,
                x["A_log"],
                dt_bias,
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True,
                lower_bound=-5.0,
            )

        name = "fla fused_recurrent_kda, all in kernel"
        peers.append(Contender(name, fla, output=lambda result: result[0][:, 0], peer=True))
    if version("attn-gym"):
        from attn_gym.linear import recurrent_kda_decode

        def gym(x):  # slot 0 is its padding; the state is [V, K]
            state = torch.cat([x["state"][:1], x["state"]]).mT.contiguous()
            packed = torch.cat([x[name].flatten(1) for name in ("q", "k", "v")], 1)
            raw_gate, raw_beta, slots = x["raw_gate"][None], x["beta_logits"][None], x["indices"] + 1
            return lambda: recurrent_kda_decode(packed, raw_gate, raw_beta, x["A_log"], x["dt_bias"], state, slots)

        peers.append(Contender("attn_gym recurrent_kda_decode", gym, output=lambda result: result[0], peer=True))
    return peers


def conv_step_inputs(sequences: int, heads: int, width: int = 128, taps: int = 4) -> Callable[[int], dict[str, Any]]:
    """step_inputs, with q, k and v not yet convolved, the filters, and a pool of the convolutions' last inputs."""
    step = step_inputs(sequences, heads, width)
    channels = heads * width

    def make(seed: int) -> dict[str, Any]:
        generator = torch.Generator("cuda").manual_seed(-1 - seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

        x = step(seed)
        return x | dict(
            rows=[x.pop(name).flatten(1) for name in ("q", "k", "v")],
            weights=[normal(channels, taps) for _ in range(3)],
            caches=[normal(sequences, taps - 1, channels) for _ in range(3)],
        )

    return make


def conv_step_bytes(sequences: int, heads: int, width: int = 128, taps: int = 4) -> float:
    rows = 3 * 2 * width * 2 * (taps - 1)  # the caches, read and written; q, k and v are step_bytes' own
    return step_bytes(sequences, heads, width) + sequences * heads * rows + heads * 3 * 2 * width * taps


def naive_conv_step(x: dict[str, Any], most: int = 2) -> torch.Tensor:
    from titan_kda.kernels.reference import naive_causal_conv1d_step, naive_recurrent_kda_step

    slots, heads = x["indices"][:most].long(), x["A_log"].shape[0]
    convolved = [
        naive_causal_conv1d_step(row[:most].double(), weight.double(), cache[slots].double())
        for row, weight, cache in zip(x["rows"], x["weights"], x["caches"])
    ]
    q, k, v = (row.unflatten(1, (heads, -1)) for row in convolved)
    rest = [x[name].double() if name in ("A_log", "dt_bias") else x[name][:most].double() for name in STEP_ROWS[3:]]
    return naive_recurrent_kda_step(q, k, v, *rest, x["state"][slots].double())


def conv_steps() -> list[Contender]:
    """The convolutions and the step in one launch, and in the four that it replaces."""
    from titan_kda.kernels import causal_conv1d_step, recurrent_kda_conv_step, recurrent_kda_step

    def pools(x):
        return x["state"].clone(), [cache.clone() for cache in x["caches"]]

    def fused(x):
        state, caches = pools(x)
        arguments = (*x["rows"], *x["weights"], *caches, *(x[name] for name in STEP_ROWS[3:]), state)
        return lambda: recurrent_kda_conv_step(*arguments, state_indices=x["indices"])

    def separate(x):
        state, caches = pools(x)
        rest, heads = [x[name] for name in STEP_ROWS[3:]], x["A_log"].shape[0]

        def call():
            convolved = [
                causal_conv1d_step(row, weight, cache, state_indices=x["indices"]).unflatten(1, (heads, -1))
                for row, weight, cache in zip(x["rows"], x["weights"], caches)
            ]
            return recurrent_kda_step(*convolved, *rest, state, state_indices=x["indices"])

        return call

    return [
        Contender("titan_kda.recurrent_kda_conv_step", fused),
        Contender("causal_conv1d_step x 3, kda_step", separate),
    ]


@suite("decode")
def decode(bench: Bench) -> None:
    """recurrent_kda over one token, 8 x 64 and 1 x 512 tokens, and the fused decode steps; K = V = 128, 32 heads."""
    from titan_kda.kernels.configs import RecurrentConfig

    heads = 32
    tiles = [RecurrentConfig(*tile) for tile in ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4), (64, 4, 128), (128, 4))]
    for sequences, tokens in [(1, 1), (8, 1), (64, 1), (256, 1), (1024, 1), (8, 64), (1, 512)]:
        bench.row(
            f"scan N {sequences} x H {heads}, T {tokens}",
            [our_scan(), *(map(our_scan, tiles) if bench.tune else ()), *(scan_peers() if bench.peers else ())],
            scan_inputs(sequences, tokens, heads),
            bytes_moved=scan_bytes(sequences, tokens, heads),
            reference=naive_scan,
        )
    for sequences in (1, 8, 64, 256, 1024):
        contenders = [our_step(), *(map(our_step, tiles) if bench.tune else ()), separate_operators()]
        bench.row(
            f"step N {sequences} x H {heads}",
            [*contenders, *(step_peers() if bench.peers else ())],
            step_inputs(sequences, heads),
            bytes_moved=step_bytes(sequences, heads),
            reference=naive_step,
        )
    for sequences in (1, 8, 64, 256, 1024):
        bench.row(
            f"conv step N {sequences} x H {heads}",
            conv_steps(),
            conv_step_inputs(sequences, heads),
            bytes_moved=conv_step_bytes(sequences, heads),
            reference=naive_conv_step,
        )


# ---- the command ----


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n", 1)[0],
        epilog="suites:\n"
        + "\n".join(f"  {name:<13}{(run.__doc__ or '').split(chr(10))[0]}" for name, run in SUITES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("suite", choices=[*SUITES, "all"], help="what to time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the run as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the run (needs matplotlib)")
    parser.add_argument(
        "--filter",
        action="append",
        default=[],
        metavar="TEXT",
        help="only rows whose work contains TEXT; repeatable: all",
    )
    parser.add_argument(
        "--contender",
        action="append",
        default=[],
        metavar="TEXT",
        help="only contenders named with TEXT; repeatable: any",
    )
    parser.add_argument("--rounds", type=int, default=25, help="rounds of turns; default %(default)s")
    parser.add_argument("--no-peers", action="store_true", help="leave other libraries' operators out")
    parser.add_argument("--tune", action="store_true", help="also time each candidate launch configuration")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    for path in (options.json, options.plot):
        if path is not None and not path.parent.is_dir():
            parser.error(f"no such folder: {path.parent}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device: these are timings of GPU kernels")

    warnings.filterwarnings("ignore", module="fla")
    about = machine()
    about["copy_tb_per_s"] = copy_bandwidth() / 1e12
    print(", ".join(f"{key} {value}" for key, value in about.items() if value is not None))
    data: dict[str, Any] = {"machine": about, "results": [], "quantities": []}
    for name in SUITES if options.suite == "all" else [options.suite]:
        print(f"\n{name}\n{HEADER}")
        bench = Bench(
            name,
            about["copy_tb_per_s"] * 1e12,
            rounds=options.rounds,
            filters=options.filter,
            contenders=options.contender,
            peers=not options.no_peers,
            tune=options.tune,
        )
        SUITES[name](bench)
        for line in bench.results:
            data["results"].append({**asdict(line), "tb_per_s": line.tb_per_s, "of_floor": line.of_floor})
        data["quantities"] += map(asdict, bench.quantities)
        if options.json:  # after each suite: what has been measured is kept
            options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.plot:
        from plot_benchmark import plot

        plot(data, options.plot)
    return 0


if __name__ == "__main__":
    # The other suites register with the module of this file's name, which is not the one that runs as __main__.
    import benchmark
    import benchmark_chunk  # noqa: F401
    import benchmark_elementwise  # noqa: F401
    import benchmark_output  # noqa: F401

    sys.exit(benchmark.main())
