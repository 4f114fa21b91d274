"""The output suite: the last stage of the chunked forward alone, against copy bandwidth and FLA's two forms.

``python scripts/benchmark.py output`` runs it with the others; run by itself, this file takes the same options. bf16,
K = V = 128, T 8192, batch x heads 8, 64 and 512 (B1 H8, B1 H64, B8 H64). "gk" has a gate per channel and the chunk's
weights given; "g" one gate per head, the weights formed from q and k. "grouped" rows have a query head for four value
heads. A row counts each input and the output once. Every block of values is in the table; ``--tune`` adds the other
launches, one line each.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import benchmark
import torch
from benchmark import Bench, Contender

WIDTH, CHUNK, TOKENS = 128, 64, 8192
SIZES = ((1, 8), (1, 64), (8, 64))  # batch, heads
Inputs = dict[str, Any]


def stage_inputs(form: str, batch: int, heads: int, query_heads: int, seed: int) -> Inputs:
    """One set of buffers; a decay of about an eighth of a bit a token, so that states and weights both count."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    def gate(*shape: int) -> torch.Tensor:
        steps = torch.rand(batch, TOKENS // CHUNK, CHUNK, *shape, device="cuda", generator=generator).mul_(-0.25)
        return steps.cumsum(2).view(batch, TOKENS, *shape)

    q = normal(batch, TOKENS, query_heads, WIDTH)
    x = dict(q=q, v_new=normal(batch, TOKENS, heads, WIDTH))
    x["h"] = normal(batch, TOKENS // CHUNK, heads, WIDTH, WIDTH)
    if form == "gk":
        x.update(gk=gate(heads, WIDTH), a_qk=normal(batch, TOKENS, heads, CHUNK))
    else:
        x.update(g=gate(heads), k=normal(batch, TOKENS, query_heads, WIDTH))
    return x


def bytes_moved(form: str, batch: int, heads: int, query_heads: int) -> float:
    """q, v_new, a 64th of a state, the output; and gate and weights, or k and the scalar gate."""
    token = 2 * (query_heads * WIDTH + heads * (WIDTH + WIDTH * WIDTH // CHUNK + WIDTH))
    token += heads * (4 * WIDTH + 2 * CHUNK) if form == "gk" else query_heads * 2 * WIDTH + heads * 4
    return batch * TOKENS * token


def naive(x: Inputs, most: int = 8) -> torch.Tensor:
    """FP64, for the last tokens of the first sequence alone, ``most`` chunks of them."""
    from titan_kda.kernels.reference import naive_chunk_output

    tail = {name: tensor[:1, -most if name == "h" else -most * CHUNK :].double() for name, tensor in x.items()}
    return naive_chunk_output(**tail)


def tail_of(output: torch.Tensor, most: int = 8) -> torch.Tensor:
    return output[:1, -most * CHUNK :]


# ---- ours ----


def launches(form: str) -> Iterator[Any]:
    """Candidates for configs.output_config."""
    from titan_kda.kernels.configs import OutputConfig

    for block_v, warps, registers in (
        (128, 4, None), (128, 4, 168), (128, 4, 200), (128, 4, 255), (128, 8, None), (128, 8, 128),
        (64, 4, None), (64, 4, 128), (64, 4, 168), (64, 4, 255), (64, 8, None), (32, 4, None),
    ):  # fmt: skip
        yield OutputConfig(block_v, warps, registers)
    for block_v, warps, stages, programs in (
        (64, 4, 2, 1), (64, 4, 3, 1), (128, 4, 2, 1), (128, 8, 2, 1), *(((64, 4, 2, 2),) if form == "g" else ()),
    ):  # fmt: skip
        yield OutputConfig(block_v, warps, stages=stages, programs=programs)


def launch_name(config: Any) -> str:
    cap = "" if config.registers is None else f" reg {config.registers}"
    turns = "" if config.stages is None else f" stages {config.stages} x {config.programs}"
    return f"  block {config.block_v} warps {config.num_warps}{cap}{turns}"


def ours(block_v: int | None = None, config: Any = None) -> Contender:
    from titan_kda.kernels import chunk_output
    from titan_kda.kernels.output import launch_chunk_output

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        if config is None:
            return lambda: chunk_output(**x, block_v=block_v)

        def launch() -> torch.Tensor:
            o = torch.empty_like(x["v_new"])
            launch_chunk_output(
                x["q"], x.get("k"), x["v_new"], x["h"], x.get("a_qk"), x.get("g"), x.get("gk"), o, WIDTH**-0.5, None,
                CHUNK, False, None, head_major=False, log2=True, config=config,
            )  # fmt: skip
            return o

        return launch

    if config is not None:
        return Contender(launch_name(config), make, output=tail_of)
    return Contender(
        "titan_kda.chunk_output" + ("" if block_v is None else f", block_v {block_v}"), make, output=tail_of
    )


def ours_head_major() -> Contender:
    """aiter's calling convention; the copies into it are not counted."""
    from titan_kda.kernels import chunk_fwd_o_vk

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        v, h, o = x["v_new"].transpose(1, 2).contiguous(), x["h"].mT.contiguous(), torch.empty_like(x["v_new"])
        g = x["g"].transpose(1, 2).contiguous() if "g" in x else None
        named = dict(gk=x.get("gk"), a_qk=x.get("a_qk"))
        return lambda: chunk_fwd_o_vk(x["q"], x.get("k"), v, o, h, g, **named)

    return Contender("titan_kda.chunk_fwd_o_vk", make, output=tail_of)


# ---- FLA ----


@functools.cache
def fla_form(form: str) -> Contender | None:
    """FLA's kernel of the form. The gk form wants its weights scaled beforehand, which is not counted, and zeroes its
    output first, which is; it tunes itself over 36 launches for each number of heads."""
    try:
        if form == "gk":
            from fla.ops.gla.chunk import chunk_gla_fwd_o_gk as stage
        else:
            from fla.ops.common.chunk_o import chunk_fwd_o as stage
    except Exception as error:  # a package that is not there, or cannot be imported here
        print(f"  without FLA: {benchmark.first_line(error)}")
        return None

    def make(x: Inputs) -> Callable[[], torch.Tensor]:
        if form == "g":
            return lambda: stage(x["q"], x["k"], x["v_new"], x["h"], g=x["g"])
        weights = x["a_qk"] * WIDTH**-0.5
        return lambda: stage(x["q"], x["v_new"], x["gk"], weights, x["h"], WIDTH**-0.5)

    return Contender(f"fla {stage.__name__}", make, output=tail_of, peer=True)


# ---- the suite ----


@benchmark.suite("output")
def output(bench: Bench) -> None:
    """The output stage, gk and g forms, T 8192, batch x heads 8, 64, 512, value blocks 32, 64, 128; FLA beside it."""
    for group in (1, 4):
        for batch, heads in SIZES:
            for form in ("gk", "g"):
                work = f"{form} batch x heads {batch * heads}{'' if group == 1 else ', grouped'}"
                if not bench.wanted(work):
                    continue
                peer = fla_form(form) if bench.peers else None
                contenders = [ours(), *map(ours, (32, 64, 128)), ours_head_major()]
                if bench.tune:
                    contenders += [ours(config=config) for config in launches(form)]
                bench.row(
                    work,
                    contenders + ([peer] if peer is not None else []),
                    functools.partial(stage_inputs, form, batch, heads, heads // group),
                    bytes_moved=bytes_moved(form, batch, heads, heads // group),
                    reference=naive,
                    most_sets=8,
                    most_calls=8,
                )


if __name__ == "__main__":
    sys.exit(benchmark.main(["output", *sys.argv[1:]]))
