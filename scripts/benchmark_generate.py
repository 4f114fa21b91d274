"""Times generation: decode with and without a CUDA graph, prefill, and what the training loop's samples cost.

    python scripts/benchmark_generate.py                       # the 1.3B model in bf16, batches of 1, 8 and 64
    python scripts/benchmark_generate.py --flavor 340M --batch 1 --batch 256
    python scripts/benchmark_generate.py --flavor kimi_linear_1b_a300m --flavor kimi_linear_1b_a300m:kda \\
        --flavor kimi_linear_1b_a300m_full --context 4096 --context 65536 --context 262144 --plot decode.png

A flavor may have another layer pattern behind a colon, "kimi_linear_1b_a300m:kda,mla".

The weights are random, which costs what trained ones do. A decode step must read every weight but the embedding's and
read and write every sequence's states: its bytes over its time is given as a part of the bandwidth of a copy measured
in the same run. "step" is a step alone, on the device; "tokens/s" is the whole of generate(), draws and looks at the
tokens included.

With --context, a decode step is timed instead where each sequence has so many tokens behind it. The model does not read
them: its caches take a prompt of a few tokens, then full attention's are filled up with random rows by their own
``extend``, which costs a step the same; a KDA layer's have the same size anyway. "as generate() runs it" is the step of
its own batch, by a CUDA graph where one can be captured, its caches grown beforehand.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from arguments import at_least, output_file, picture
from torch import Tensor, nn

from titan_kda.cache import TokenCache
from titan_kda.generate import (
    Pick,
    Sample,
    Sampling,
    Speed,
    _Batch,
    _Growing,
    _Slots,
    can_capture,
    generate,
    inference,
    new_batch,
    prefill,
)
from titan_kda.model import FLAVORS, MIXERS, Decoder
from titan_kda.sampling import sample_tokens


def build(flavor: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Decoder:
    name, _, pattern = flavor.partition(":")
    if pattern:
        changes = {"layer_pattern": pattern.split(","), **changes}
    with torch.device("meta"):
        model = Decoder(replace(FLAVORS[name], **changes))
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(seed=0)
    return model.to(dtype).eval()


def some_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def seconds_of(call: Callable[[], Any], device: torch.device, times: int = 5) -> float:
    """The median time of a call, work on the device included, after one call that is not counted."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def step_bytes(model: Decoder, batch: int) -> int:
    """What a decode step cannot but move: weights once, and each sequence's caches in and out."""
    embedding = model.tok_embeddings.weight if not model.model_args.tie_embeddings else None
    weights = sum(p.numel() * p.element_size() for p in model.parameters() if p is not embedding)
    args = model.model_args
    keys, values = args.n_heads * args.key_width, args.n_heads * args.value_width
    state = 4 * keys * args.value_width
    convolutions = model.norm.weight.element_size() * (args.conv_width - 1) * (2 * keys + values)
    return weights + batch * args.n_layers * 2 * (state + convolutions)


def picker(sampling: Sampling) -> Pick:
    def pick(logits: Tensor, numbers: Tensor) -> Tensor:
        return sample_tokens(
            logits, numbers, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )

    return pick


def admit_some(batch: _Slots | _Growing, count: int, length: int) -> Tensor:
    """Fills a batch with random prompts; returns a number for each row to draw by."""
    prompts = [tuple(p) for p in some_prompts(count, length, batch.model.model_args.vocab_size)]
    uniforms = torch.full((count,), 0.5, device=batch.device)
    batch.admit(list(range(count)), prompts, uniforms)
    return uniforms


def decode_steps(model: Decoder, batch: int, device: torch.device, graph: bool, sampling: Sampling) -> float:
    """Seconds of one decode step of ``batch`` sequences: many in a row, with no look at the tokens."""
    with inference(model):
        slots = _Slots(model, batch, device, picker(sampling), graph)
        uniforms = admit_some(slots, batch, 16)
        steps = 50 if graph else 10

        def run() -> None:
            for _ in range(steps):
                slots.step(uniforms)

        return seconds_of(run, device, times=3) / steps


# ---- a decode step's time against the tokens behind it ----

GREEDY = Sampling(temperature=0)
STEPS_AHEAD = 64
"""More steps than any run takes from the context that is asked for."""


def lengthen(cache: Sequence[Any], tokens: int) -> None:
    """Gives each sequence so many further tokens, random ones, in the layers whose caches hold tokens."""
    for layer in cache:
        if isinstance(layer, TokenCache) and tokens:
            assert layer.rows is not None
            sequences, groups, _, width = layer.rows.shape
            offsets = torch.arange(sequences + 1, dtype=torch.int32, device=layer.rows.device) * tokens
            new = torch.randn(sequences * tokens, groups, width, dtype=layer.rows.dtype, device=layer.rows.device)
            layer.extend(new, offsets, tokens)


def cache_bytes(cache: Sequence[Any]) -> int:
    """What a step's caches hold, room to grow included."""
    tensors = [value for layer in cache for value in vars(layer).values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def steps_at(model: Decoder, context: int, batch: int, device: torch.device) -> tuple[float, bool, int]:
    """Seconds of a step of generate()'s own batch, whether it was a graph, and the bytes of its caches."""
    prompt = min(context, 16)
    rows: _Batch = new_batch(model, batch, device, picker(GREEDY), None)
    assert isinstance(rows, (_Slots, _Growing))
    uniforms = admit_some(rows, batch, prompt)
    lengthen(rows.cache, context - prompt)
    growing = [layer for layer in rows.cache if isinstance(layer, TokenCache)]
    for layer in growing:
        layer.reserve(STEPS_AHEAD)  # no run is to grow them, or to capture anew
    graph = isinstance(rows, _Slots) and rows.wants_graph
    steps = 30 if graph else 10 if device.type == "cuda" else 2

    def run() -> None:
        for layer in growing:  # every run starts from the same context
            layer.lengths.fill_(context)
            layer.bound = context
        if isinstance(rows, _Slots):
            rows.lengths = [context] * batch
        for _ in range(steps):
            rows.step(uniforms)

    seconds = seconds_of(run, device, times=3) / steps
    return seconds, isinstance(rows, _Slots) and rows.graph is not None, cache_bytes(rows.cache)


def context_step(model: Decoder, context: int, batch: int, device: torch.device) -> dict[str, Any]:
    """Times a decode step of ``batch`` sequences of ``context`` tokens each; see the top of this file."""
    against = can_capture(model, device)
    with inference(model):
        seconds, graph, size = steps_at(model, context, batch, device)
    return dict(
        kind="context", context=context, batch=batch, cache_bytes=size, graph=graph, against=against,
        step_us=seconds * 1e6,
    )  # fmt: skip


def contexts(
    flavors: Sequence[str], lengths: Sequence[int], batches: Sequence[int], device: torch.device, dtype: torch.dtype
) -> list[dict[str, Any]]:
    """The table of decode steps by context; its rows, the flavor in each."""
    print("\n| decode, flavor | batch | context, tokens | caches, MiB | as generate() runs it, us | graph |")
    print("|---|---|---|---|---|---|", flush=True)
    found: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    for flavor in flavors:
        model = build(flavor, device, dtype)
        for batch in batches:
            for length in lengths:
                row = {"flavor": flavor, "device": name, **context_step(model, length, batch, device)}
                found.append(row)
                print(
                    f"| {flavor} | {batch} | {length:,} | {row['cache_bytes'] / 2**20:,.1f} | {row['step_us']:,.0f} | "
                    f"{'on' if row['graph'] else 'off'} |",
                    flush=True,
                )
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for flavor in flavors:
        of_flavor = [row for row in found if row["flavor"] == flavor]
        if (against := of_flavor[0]["against"]) is not None:
            print(f"{flavor}: generate() captures no graph: {against}")
    return found


def write_rows(rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(rows, indent=1))


_DRAWN = {
    "flavor": str,
    "device": str,
    "batch": int,
    "context": int,
    "step_us": float | int,
    "graph": bool,
}


def read_contexts(file: Path) -> list[dict[str, Any]]:
    """The rows that a run with --context wrote.

    Raises:
        ValueError: a file of something else.
    """
    try:
        rows = json.loads(file.read_text())
    except (OSError, ValueError) as error:  # no JSON, or no text
        raise ValueError(f"{file}: {error}") from None
    if not (isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)) or not all(
        isinstance(row.get(name), kind) and name in row for row in rows for name, kind in _DRAWN.items()
    ):
        raise ValueError(f"{file} is not what a run with --context and --json writes")
    return rows


def plot_contexts(rows: Sequence[dict[str, Any]], image: Path) -> None:
    """Draws a step's time against the context, a line a flavor and batch."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker

    batches = {row["batch"] for row in rows}
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for i, (flavor, batch) in enumerate(dict.fromkeys((row["flavor"], row["batch"]) for row in rows)):
        line = [row for row in rows if (row["flavor"], row["batch"]) == (flavor, batch)]
        line.sort(key=lambda row: row["context"])
        places = [row["context"] for row in line]
        name = flavor if len(batches) == 1 else f"{flavor}, batch {batch}"
        graph = "one CUDA graph" if all(row["graph"] for row in line) else "without a graph"
        axis.plot(places, [row["step_us"] for row in line], "o-", color=f"C{i}", label=f"{name}, {graph}")
    ticks = sorted({row["context"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [f"{t // 1024}k" if t % 1024 == 0 else f"{t:,}" for t in ticks])
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_ylim(bottom=0)
    axis.set(xlabel="context, tokens", ylabel="time of one decode step, microseconds")
    axis.set_title(f"{rows[0]['device']}, batch {', '.join(map(str, sorted(batches)))}", fontsize=9)
    axis.grid(linewidth=0.3)
    axis.legend(fontsize=8)
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    plt.close(figure)


def generate_once(
    model: nn.Module, prompts: list[list[int]], sampling: Sampling, **options: Any
) -> tuple[Speed, float]:
    speed, began = Speed(), time.perf_counter()
    generate(model, [Sample(list(p)) for p in prompts], sampling, speed=speed, **options)
    return speed, time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--flavor", action="append", metavar="FLAVOR[:MIXER,...]", help="several with --context (default 1.3B)"
    )
    parser.add_argument(
        "--batch",
        type=at_least(1),
        action="append",
        help="sequences at once; several (default 1, 8, 64; with --context 1)",
    )
    parser.add_argument("--context", type=at_least(1), action="append", help="tokens behind a timed step; several")
    parser.add_argument("--plot", type=picture, metavar="FILE", help="with --context, draw the steps' times")
    parser.add_argument(
        "--read", type=Path, metavar="JSON", help="draw what a run with --context wrote, timing nothing"
    )
    parser.add_argument(
        "--tokens",
        type=at_least(2),
        default=128,
        help="generated for each sequence, the prefill's one too (default 128)",
    )
    parser.add_argument(
        "--prompt-tokens", type=at_least(1), action="append", help="of a prefill (default 512 and 8192)"
    )
    parser.add_argument("--skip", action="append", choices=("decode", "prefill", "loop"), default=[])
    parser.add_argument("--json", type=output_file, help="write the rows to this file")
    args = parser.parse_args(argv)
    if args.read is not None:
        if args.plot is None:
            parser.error("--read needs --plot")
        given = ("flavor", "batch", "context", "prompt_tokens", "skip", "json")
        if others := [f"--{name.replace('_', '-')}" for name in given if getattr(args, name)]:
            parser.error(f"--read times nothing: leave out {', '.join(others)}")
        try:
            rows = read_contexts(args.read)
        except ValueError as error:
            parser.error(str(error))
        plot_contexts(rows, args.plot)
        print(args.plot)
        return 0
    flavors = args.flavor or ["1.3B"]
    for flavor in flavors:
        name, _, pattern = flavor.partition(":")
        if name not in FLAVORS:
            parser.error(f"no flavor is called {name!r}; there are {', '.join(FLAVORS)}")
        if unknown := set(pattern.split(",") if ":" in flavor else ()) - set(MIXERS):
            parser.error(f"no mixer is called {min(unknown)!r}; there are {', '.join(MIXERS)}")
    if args.context is None and (args.plot is not None or len(flavors) > 1):
        parser.error("--plot and more than one --flavor need --context")
    if args.context is not None and (args.prompt_tokens or args.skip):
        parser.error("--context times decode steps alone: leave out --prompt-tokens and --skip")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    rows: list[dict[str, Any]] = []
    bandwidth = None
    if on_gpu:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        from benchmark import copy_bandwidth

        bandwidth = copy_bandwidth()
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth / 1e12:.2f} TB/s", flush=True
        )

    if args.context is not None:
        rows = contexts(flavors, args.context, args.batch or [1], device, dtype)
        write_rows(rows, args.json)
        if args.plot is not None:
            plot_contexts(rows, args.plot)
            print(args.plot)
        return 0

    model = build(flavors[0], device, dtype)
    vocab_size = model.model_args.vocab_size
    draws = {"greedy": Sampling(args.tokens, temperature=0), "top-p 0.95": Sampling(args.tokens, 0.8, 0, 0.95)}
    if "decode" not in args.skip:
        print("\n| decode, batch | graph | draw | step, us | of the copy's bandwidth | tokens/s of generate() |")
        print("|---|---|---|---|---|---|")
        for batch in args.batch or [1, 8, 64]:
            prompts = some_prompts(batch, 16, vocab_size)
            for graph in (True, False) if on_gpu else (False,):
                for name, sampling in draws.items():
                    if not graph and name != "greedy" and on_gpu:
                        continue
                    step = decode_steps(model, batch, device, graph, sampling)
                    speed, _ = generate_once(model, prompts, sampling, slots=batch, cuda_graph=graph)
                    part = None if bandwidth is None else step_bytes(model, batch) / step / bandwidth
                    rate = speed.decode_tokens / speed.decode_seconds
                    rows.append(
                        dict(kind="decode", batch=batch, graph=graph, draw=name, step_us=step * 1e6, of_bandwidth=part)
                        | dict(tokens_per_second=rate, capture_seconds=speed.capture_seconds)
                    )
                    shown = "" if part is None else f"{part:.1%}"
                    onoff = "on" if graph else "off"
                    print(f"| {batch} | {onoff} | {name} | {step * 1e6:,.0f} | {shown} | {rate:,.0f} |", flush=True)

    if "prefill" not in args.skip:
        print("\n| prefill, tokens | q's norm | ms | tokens/s |\n|---|---|---|---|")
        for length in args.prompt_tokens or [512, 8192]:
            prompts = some_prompts(1, length, vocab_size)
            for fuse in (True, False):
                for layer in model.layers.values():
                    mixer: Any = layer.mixer
                    mixer.backends = type(mixer.backends)(prefill="chunk", fuse_q_l2norm=fuse)
                with inference(model):
                    took = seconds_of(lambda p=prompts: prefill(model, p, model.new_cache(), device), device)
                form = "in chunk_kda" if fuse else "apart"
                rows.append(dict(kind="prefill", tokens=length, fuse_q_l2norm=fuse, seconds=took))
                print(f"| {length} | {form} | {took * 1e3:.2f} | {length / took:,.0f} |", flush=True)

    if "loop" not in args.skip:
        # As in the loop of a job on one GPU: FP32 weights under autocast, which casts them anew each time.
        model = build(flavors[0], device, torch.float32).train()
        prompts = [p[: 4 + 3 * i] for i, p in enumerate(some_prompts(8, 32, vocab_size))]
        for turn in ("first", "second"):
            with torch.autocast(device.type, torch.bfloat16) if on_gpu else nullcontext():
                speed, took = generate_once(model, prompts, draws["top-p 0.95"])
            rows.append(dict(kind="loop", turn=turn, seconds=took, graph=speed.graph))
            print(f"in the loop, 8 prompts x {args.tokens} tokens, {turn} time: {took:.2f} s (graph: {speed.graph})")
    write_rows(rows, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
