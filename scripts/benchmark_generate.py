"""Times generation: decode with and without a CUDA graph, prefill, and what the training loop's samples cost.

    python scripts/benchmark_generate.py                       # the 1.3B model in bf16, batches of 1, 8 and 64
    python scripts/benchmark_generate.py --flavor 340M --batch 1 --batch 256

The weights are random, which costs what trained ones do. A decode step must read every weight but the embedding's and
read and write every sequence's states: its bytes over its time is given as a part of the bandwidth of a copy measured
in the same run. "step" is a step alone, on the device; "tokens/s" is the whole of generate(), draws and looks at the
tokens included.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from titan_kda.generate import Sample, Sampling, Speed, _Slots, generate, inference, prefill
from titan_kda.model import FLAVORS, Decoder
from titan_kda.sampling import sample_tokens


def build(flavor: str, device: torch.device, dtype: torch.dtype, **changes: Any) -> Decoder:
    from dataclasses import replace

    with torch.device("meta"):
        model = Decoder(replace(FLAVORS[flavor], **changes))
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


def decode_steps(model: Decoder, batch: int, device: torch.device, graph: bool, sampling: Sampling) -> float:
    """Seconds of one decode step of ``batch`` sequences: many in a row, with no look at the tokens."""

    def pick(logits: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return sample_tokens(
            logits, numbers, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )

    with inference(model):
        slots = _Slots(model, batch, device, pick, graph)
        prompts = [tuple(p) for p in some_prompts(batch, 16, model.model_args.vocab_size)]
        slots.admit(list(range(batch)), prompts, torch.full((batch,), 0.5, device=device))
        uniforms = torch.full((batch,), 0.5, device=device)
        steps = 50 if graph else 10

        def run() -> None:
            for _ in range(steps):
                slots.step(uniforms)

        return seconds_of(run, device, times=3) / steps


def generate_once(
    model: nn.Module, prompts: list[list[int]], sampling: Sampling, **options: Any
) -> tuple[Speed, float]:
    speed, began = Speed(), time.perf_counter()
    generate(model, [Sample(list(p)) for p in prompts], sampling, speed=speed, **options)
    return speed, time.perf_counter() - began


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flavor", choices=FLAVORS, default="1.3B")
    parser.add_argument("--batch", type=int, action="append", help="sequences at once; several (default 1, 8, 64)")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each sequence (default 128)")
    parser.add_argument("--prompt-tokens", type=int, action="append", help="of a prefill (default 512 and 8192)")
    parser.add_argument("--skip", action="append", choices=("decode", "prefill", "loop"), default=[])
    parser.add_argument("--json", help="write the rows to this file")
    args = parser.parse_args(argv)
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

    model = build(args.flavor, device, dtype)
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
        model = build(args.flavor, device, torch.float32).train()
        prompts = [p[: 4 + 3 * i] for i, p in enumerate(some_prompts(8, 32, vocab_size))]
        for turn in ("first", "second"):
            with torch.autocast(device.type, torch.bfloat16) if on_gpu else nullcontext():
                speed, took = generate_once(model, prompts, draws["top-p 0.95"])
            rows.append(dict(kind="loop", turn=turn, seconds=took, graph=speed.graph))
            print(f"in the loop, 8 prompts x {args.tokens} tokens, {turn} time: {took:.2f} s (graph: {speed.graph})")
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
