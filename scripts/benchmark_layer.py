"""Times what stands around the core in a layer, forward and backward: python scripts/benchmark_layer.py

- the gated RMSNorm, rmsnorm(o) * sigmoid(gate): eager, and as torch.compile fuses it;
- the six products that read the layer's input: apart, and as one packed product;
- the whole layer without and with torch.compile, and its core's part;
- a mixture of experts under bf16 autocast, eager and compiled in parts as torchtitan does it.

Contenders take turns in one process; a time is the median over rounds, taken by CUDA events around several calls.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchtitan.models.moe.moe
from torch import Tensor, nn

from titan_kda.attention import KimiDeltaAttention
from titan_kda.initialize import Initializer
from titan_kda.kernels import chunk_kda
from titan_kda.moe import MixtureOfExperts


def in_turns(contenders: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, float]:
    """Microseconds a call."""
    for call in contenders.values():
        for _ in range(3):
            call()
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3 / repeats)
    return {name: statistics.median(values) for name, values in samples.items()}


def trained(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """A forward and a backward with respect to every input that requires grad."""
    leaves = [x for x in inputs if x.requires_grad]
    gradient = torch.randn_like(function(*inputs))
    return lambda: torch.autograd.grad(function(*inputs), leaves, gradient)


def gated_norm(o: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(o, (o.shape[-1],), weight, 1e-5).flatten(-2) * torch.sigmoid(gate)


def experts(args: argparse.Namespace, compiled: bool) -> MixtureOfExperts:
    """The layer, FP32 on the GPU; the experts' own products are compiled with it, for the whole process."""
    layer = MixtureOfExperts(args.dim, args.expert_width, args.experts, args.top_k)
    layer.init_weights(Initializer(0), "experts", 0.02)
    if compiled:
        moe = torchtitan.models.moe.moe
        moe._run_experts_grouped_mm = torch.compile(moe._run_experts_grouped_mm, fullgraph=True)
        for name, part in list(layer.named_children()):
            if name != "experts":
                setattr(layer, name, torch.compile(part, fullgraph=True))
    return layer.cuda()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128, help="K and V")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64, help="of the mixture; 0 leaves it out")
    parser.add_argument("--expert-width", type=int, default=320)
    parser.add_argument("--top-k", type=int, default=8, help="experts that a token meets")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="write the times to this file")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("benchmark_layer: error: needs a CUDA device", file=sys.stderr)
        return 2
    rows, heads, width, dim = args.batch * args.tokens, args.heads, args.width, args.dim
    options: dict[str, Any] = dict(device="cuda", dtype=torch.bfloat16)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, **options).requires_grad_()

    times: dict[str, float] = {}

    o, gate = random(args.batch, args.tokens, heads, width), random(args.batch, args.tokens, heads * width)
    weight = torch.ones(width, **options).requires_grad_()
    compiled_norm = torch.compile(gated_norm, fullgraph=True)
    norms = {"gated norm, eager": gated_norm, "gated norm, compiled": compiled_norm}
    times |= in_turns({name: trained(f, o, gate, weight) for name, f in norms.items()}, args.rounds, 10)
    print(f"the gated norm moves {8 * o.numel() * 2 / 1e6:.0f} MB at the least: 3 tensors forward, 5 backward")

    x = random(rows, dim)
    widths = [heads * width] * 3 + [width, heads, width]  # q, k, v, the gates' low-rank parts, beta
    weights = [random(out, dim) for out in widths]
    packed = torch.cat([w.detach() for w in weights]).requires_grad_()

    def apart() -> Any:
        outputs = [nn.functional.linear(x, w) for w in weights]
        return torch.autograd.grad(outputs, [x, *weights], gradients)

    gradients = [torch.randn(rows, out, **options) for out in widths]
    products = {"projections, apart": apart, "projections, packed": trained(nn.functional.linear, x, packed)}
    times |= in_turns(products, args.rounds, 5)

    layer = KimiDeltaAttention(dim, heads, width, width).cuda()
    layer.init_weights(Initializer(0), "layer", 0.02)
    layer.to(torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True)
    x = random(args.batch, args.tokens, dim)
    parameters = list(layer.parameters())
    gradient = torch.randn_like(x)

    def step(module: nn.Module) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(module(x), [x, *parameters], gradient)

    q, k, v = (random(args.batch, args.tokens, heads, width) for _ in range(3))
    q, k = (nn.functional.normalize(y.detach(), dim=-1).requires_grad_() for y in (q, k))
    per_token = -0.05 * torch.rand(args.batch, args.tokens, heads, width, device="cuda")
    summed = per_token.unflatten(1, (-1, 64)).cumsum(2).flatten(1, 2).requires_grad_()
    beta = torch.rand(args.batch, args.tokens, heads, device="cuda").requires_grad_()

    def core(*inputs: Tensor) -> Tensor:
        return chunk_kda(*inputs, gate_lower_bound=-5.0)[0]

    layers = {
        "layer, eager": step(layer),
        "layer, compiled": step(compiled),
        "its core alone": trained(core, q, k, v, summed, beta),
    }
    times |= in_turns(layers, args.rounds, 3)

    if args.experts:

        def mixture(layer: MixtureOfExperts) -> Callable[[], Any]:
            def call() -> Any:
                with torch.autocast("cuda", torch.bfloat16):
                    y = layer(x)
                return torch.autograd.grad(y, [x, *layer.parameters()], gradient)

            return call

        eager = in_turns({"experts, eager": mixture(experts(args, False))}, args.rounds, 3)
        parts = in_turns({"experts, compiled in parts": mixture(experts(args, True))}, args.rounds, 3)
        times |= eager | parts
    print(f"{torch.cuda.get_device_name()}, {args.batch} x {args.tokens} tokens, width {dim}, {heads} heads of {width}")
    print("| forward and backward | us |\n|---|---|")
    for name, us in times.items():
        print(f"| {name} | {us:,.0f} |")
    if args.json:
        Path(args.json).write_text(json.dumps(times, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
