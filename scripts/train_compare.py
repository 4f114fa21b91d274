"""Trains one job several ways, one after another in this process, and prints their speed and how far their curves part.

    python scripts/train_compare.py --job kda_340m                                  # ours beside FLA's chunk_kda
    python scripts/train_compare.py --job kda_340m --variant ours \\
        --variant "reference --kda.impl=reference" --kda.no-reset-at-documents --training.seq_len=1024
    python scripts/train_compare.py --job kda_340m --variant ours --variant "eager --compile.no-enable"
    python scripts/train_compare.py --job kimi_linear_1b_a300m --steps 8 --warmup 4 --kda.no-reset-at-documents \\
        --variant "hybrid --training.seq_len=16384 --training.local_batch_size=4" \\
        --variant "full --model.flavor=kimi_linear_1b_a300m_full --training.seq_len=16384 --training.local_batch_size=4"

A variant is a name, of several words if need be, and settings of the job; settings given beside the variants hold for
all. With --kda.no-reset-at-documents a row is one sequence, however many documents it has; otherwise attention's cost
follows the documents' lengths.

A variant whose name begins with "fla" has FLA's chunk_kda in the layer, with FLA's own norm of q and k and FLA's own
gate, as FLA's layer calls it; the projections, convolutions, output gate and all else are the job's. It stands behind a
registered operator, so that torch.compile and selective activation checkpointing treat it as they treat ours. It needs
fla-core (pip install 'titan-kda[bench]'), whose first step tunes for minutes.

Every variant starts from the same weights and reads the same text. Speed and memory are taken after the warm-up steps;
a variant that runs out of memory is said and passed over. "apart" is the mean over the steps of |difference of the
20-step average loss| from the first variant, in nats; it is left out for another flavor or another text, whose
difference would say nothing.
"""

import argparse
import contextlib
import gc
import importlib.util
import itertools
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from arguments import at_least, output_file
from torch import Tensor

_OWN_OPTIONS = {"__training.steps": "own --steps", "__job.dump_folder": "own --folder"}

AVERAGED = 20
"""Steps in the average that curves are compared by."""

# ---- FLA's chunk_kda behind an operator ----

_LIVE_OFFSETS: list[Tensor] = []
"""The step's documents, int64, as FLA takes them."""


def _fla_context(lower_bound: float, scale: float) -> SimpleNamespace:
    """What FLA's autograd function keeps beside tensors."""
    return SimpleNamespace(
        chunk_size=64,
        safe_gate=lower_bound < 0,
        scale=scale,
        lower_bound=lower_bound if lower_bound < 0 else None,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        disable_recompute=False,
        cp_context=None,
        state_v_first=False,
        use_graph=False,
        _fwd_used_autocast=False,
        _dtype=torch.bfloat16,
    )


def _fla_offsets(cu_seqlens: Tensor | None) -> Tensor | None:
    return None if cu_seqlens is None else _LIVE_OFFSETS[0]


def _fla_forward(q, k, v, raw_gate, beta, A_log, dt_bias, cu_seqlens, lower_bound):
    from fla.ops.kda.chunk import ChunkKDAFunction

    saved: list[Tensor] = []
    scale = q.shape[-1] ** -0.5
    context = _fla_context(lower_bound, scale)
    context.save_for_backward = lambda *tensors: saved.extend(tensors)
    with torch.autocast(q.device.type, enabled=False):
        output, _ = ChunkKDAFunction.forward(
            context,
            q,
            k,
            v,
            raw_gate,
            beta,
            A_log,
            dt_bias.reshape(-1),
            scale,
            None,  # initial_state
            False,  # output_final_state
            True,  # use_qk_l2norm_in_kernel
            True,  # use_gate_in_kernel
            False,  # use_beta_sigmoid_in_kernel
            False,  # allow_neg_eigval
            False,  # state_v_first
            _fla_offsets(cu_seqlens),
            None,  # cu_seqlens_cpu
            context.safe_gate,
            context.lower_bound,
        )
    q_norm, q_rstd, k_norm, k_rstd = saved[:4]
    return output, q_norm, q_rstd, k_norm, k_rstd, saved[11], saved[12]


def _fla_forward_fake(q, k, v, raw_gate, beta, A_log, dt_bias, cu_seqlens, lower_bound):
    pairs = k.new_empty(*k.shape[:3], 64)
    rstd = q.new_empty(q.shape[:3], dtype=torch.float32)
    return (
        q.new_empty(v.shape),
        q.new_empty(q.shape),
        rstd,
        k.new_empty(k.shape),
        torch.empty_like(rstd),
        pairs,
        torch.empty_like(pairs),
    )


def _fla_backward(grad, v, raw_gate, beta, A_log, dt_bias, cu_seqlens, q, q_rstd, k, k_rstd, a_qk, a_kk, lower_bound):
    from fla.ops.kda.chunk import ChunkKDAFunction
    from fla.ops.utils.index import prepare_chunk_indices

    context = _fla_context(lower_bound, q.shape[-1] ** -0.5)
    offsets = _fla_offsets(cu_seqlens)
    indices = None if offsets is None else prepare_chunk_indices(offsets, 64)
    v, raw_gate, beta = v.contiguous(), raw_gate.contiguous(), beta.contiguous()
    bias = dt_bias.reshape(-1)
    recomputed = (None,) * 6
    context.saved_tensors = (
        *(q, q_rstd, k, k_rstd, v, None, raw_gate, beta, beta, A_log, bias, a_qk, a_kk),
        *recomputed,
        *(None, offsets, indices, None),
    )
    found = ChunkKDAFunction.backward(context, grad, None)
    dq, dk, dv, dgate, dbeta, dA_log, dbias = found[:7]
    return dq, dk, dv, dgate, dbeta, dA_log.to(A_log.dtype), dbias.reshape(dt_bias.shape).to(dt_bias.dtype)


def register_fla() -> Any:
    """``torch.ops.titan_kda_compare.fla_chunk_kda``, with its backward; registered at the first call."""
    namespace = "titan_kda_compare"
    if hasattr(getattr(torch.ops, namespace), "fla_chunk_kda"):
        return torch.ops.titan_kda_compare.fla_chunk_kda.default
    inputs = "Tensor q, Tensor k, Tensor v, Tensor raw_gate, Tensor beta, Tensor A_log, Tensor dt_bias"
    kept = "Tensor q_norm, Tensor q_rstd, Tensor k_norm, Tensor k_rstd, Tensor a_qk, Tensor a_kk"
    seven = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
    torch.library.define(f"{namespace}::fla_chunk_kda", f"({inputs}, Tensor? cu_seqlens, float lower_bound) -> {seven}")
    torch.library.define(
        f"{namespace}::fla_chunk_kda_backward",
        f"(Tensor grad, {inputs.split(', ', 2)[2]}, Tensor? cu_seqlens, {kept}, float lower_bound) -> {seven}",
    )
    for name, function, fake in (
        ("fla_chunk_kda", _fla_forward, _fla_forward_fake),
        (
            "fla_chunk_kda_backward",
            _fla_backward,
            lambda grad, v, raw_gate, beta, A_log, dt_bias, cu, q, qr, k, kr, aqk, akk, bound: tuple(
                torch.empty_like(x, memory_format=torch.contiguous_format)
                for x in (q, k, v, raw_gate, beta, A_log, dt_bias)
            ),
        ),
    ):
        torch.library.impl(f"{namespace}::{name}", ("cpu", "cuda"), function)
        torch.library.register_fake(f"{namespace}::{name}", fake)

    def setup_context(ctx, inputs, output) -> None:
        ctx.set_materialize_grads(False)
        ctx.lower_bound = inputs[8]
        ctx.save_for_backward(*inputs[2:8], *output[1:])

    def backward(ctx, grad, *_):
        grads = torch.ops.titan_kda_compare.fla_chunk_kda_backward(
            grad.contiguous(), *ctx.saved_tensors, ctx.lower_bound
        )
        return (*grads, None, None)

    torch.library.register_autograd(f"{namespace}::fla_chunk_kda", backward, setup_context=setup_context)
    return torch.ops.titan_kda_compare.fla_chunk_kda.default


@contextlib.contextmanager
def fla_in_the_layer() -> Iterator[None]:
    """The training forward of the KDA layer with FLA's operator; the package itself knows nothing of it."""
    from titan_kda import attention, parallelize

    operator = register_fla()

    def chunk_kda(q, k, v, gate, beta, initial_state=None, *, cu_seqlens=None, gate_lower_bound=None, **options):
        raw_gate, A_log, dt_bias = gate
        bound = 0.0 if gate_lower_bound is None else gate_lower_bound
        return operator(q, k, v, raw_gate, beta, A_log, dt_bias, cu_seqlens, bound)[0], None

    def log2_decay(self, raw_gate, decay, chunk_size, cu_seqlens, impl):
        return (raw_gate, *decay)

    ours = attention.chunk_kda, attention.l2norm, attention.ForgetGate.log2_decay
    attention.chunk_kda, attention.l2norm, attention.ForgetGate.log2_decay = (
        chunk_kda,
        lambda x, impl=None: x,
        log2_decay,
    )
    parallelize._SAVED_OPERATORS.add(operator)
    try:
        yield
    finally:
        attention.chunk_kda, attention.l2norm, attention.ForgetGate.log2_decay = ours
        parallelize._SAVED_OPERATORS.discard(operator)


# ---- a variant's run ----


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train(settings: list[str], steps: int, warmup: int, job: str, folder: str) -> dict[str, Any]:
    """Trains a fresh model; returns its losses and what it took."""
    from titan_kda.model import FLAVORS

    flavors = dict(FLAVORS)
    FLAVORS.update(
        {name: replace(flavor) for name, flavor in flavors.items()}
    )  # torchtitan writes into the one it takes
    try:
        return _train(settings, steps, warmup, job, folder)
    finally:
        FLAVORS.update(flavors)


def _train(settings: list[str], steps: int, warmup: int, job: str, folder: str) -> dict[str, Any]:
    from titan_kda.job_config import check_dump_folder
    from titan_kda.train import load_job, single_process_environment

    check_dump_folder(folder)
    config = load_job([f"--job.config_file={job}", *settings])
    config.training.steps = steps
    config.job.dump_folder = folder
    config.checkpoint.enable = config.validation.enable = config.generation.enable = False
    config.metrics.enable_tensorboard = False
    config.metrics.log_freq = steps + 1
    single_process_environment()
    os.environ["MASTER_PORT"] = free_port()

    from torchtitan.tools import utils
    from torchtitan.train import Trainer

    class Measured(Trainer):
        def post_dataloading_process(self, input_dict, labels):
            found = super().post_dataloading_process(input_dict, labels)
            masks = found[3].get("attention_masks")
            if masks is not None and needs_live_offsets:
                _LIVE_OFFSETS[:] = [masks.cu_seq_q.long()]
            return found

        def forward_backward_step(self, **arguments):
            loss = super().forward_backward_step(**arguments)
            losses[-1].append(loss.detach())
            return loss

    from titan_kda import attention

    needs_live_offsets = attention.chunk_kda.__module__ == __name__
    losses: list[list[Tensor]] = []
    trainer = Measured(config)
    on_gpu = trainer.device.type == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else lambda: None
    result: dict[str, Any] = {}
    try:
        batches = trainer.batch_generator(trainer.dataloader)
        began = time.perf_counter()
        for step in range(1, steps + 1):
            trainer.step = step
            losses.append([])
            trainer.train_step(batches)
            if step in (1, warmup):
                synchronize()
                now = time.perf_counter()
                if step == 1:
                    result["first_step_seconds"] = now - began
                if step == warmup:
                    began = now
                    if on_gpu:
                        torch.cuda.reset_peak_memory_stats()
        synchronize()
        seconds = time.perf_counter() - began
        tokens = config.training.local_batch_size * config.training.seq_len * trainer.gradient_accumulation_steps
        rate = tokens * (steps - warmup) / seconds
        device = torch.cuda.get_device_name() if on_gpu else "CPU"
        rows = config.training.local_batch_size * trainer.gradient_accumulation_steps
        result |= {
            "flavor": config.model.flavor,
            "rows": rows,
            "seq_len": config.training.seq_len,
            "text": repr((config.training.dataset, config.training.dataset_path, config.data, config.debug.seed)),
            "tokens_per_second": rate,
            "mfu": trainer.metrics_processor.num_flops_per_token * rate / utils.get_peak_flops(device),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
            "losses": [float(sum(parts)) for parts in losses],
            "device": device,
        }
    finally:
        trainer.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    return result


def apart(one: list[float], other: list[float]) -> float:
    """Mean |difference of the 20-step averages|; over all steps there are, if fewer."""
    width = min(AVERAGED, len(one))

    def averages(values: list[float]) -> list[float]:
        return [sum(values[i - width : i]) / width for i in range(width, len(values) + 1)]

    pairs = list(zip(averages(one), averages(other)))
    return sum(abs(a - b) for a, b in pairs) / len(pairs)


SAME = ("flavor", "rows", "seq_len", "text")
"""What two curves must share to be compared."""


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of what ``train`` gave, by name; sets each one's "apart", None where curves do not compare."""
    first = next(iter(results.values()))
    for result in results.values():
        comparable = all(result[key] == first[key] for key in SAME)
        result["apart"] = apart(first["losses"], result["losses"]) if comparable else None
    compared = sum(result["apart"] is not None for result in results.values()) > 1
    averaged = min(AVERAGED, len(first["losses"]))
    heads = ["variant", "rows x tokens", "tokens/s", "MFU", "peak GiB", "first step, s", f"last {averaged} steps' loss"]
    heads += ["apart, nats"] * compared
    lines = [heads, ["---"] * len(heads)]
    for name, result in results.items():
        last = result["losses"][-averaged:]
        cells = [
            name.replace("|", "\\|"),
            f"{result['rows']} x {result['seq_len']:,}",
            f"{result['tokens_per_second']:,.0f}",
        ]
        cells += [f"{result['mfu']:.1%}", "" if result["peak_gib"] is None else f"{result['peak_gib']:.1f}"]
        cells += [f"{result['first_step_seconds']:.1f}", f"{sum(last) / len(last):.4f}"]
        if compared:
            cells.append("" if result["apart"] is None else f"{result['apart']:.4f}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def split_variant(text: str) -> tuple[str, list[str]]:
    """A variant's name, the words before its first setting, and its settings.

    Raises:
        ValueError: a quotation that does not end.
    """
    words = shlex.split(text)
    named = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    return " ".join(words[:named]), words[named:]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--job", default="kda_340m", help="the TOML job, a file or a shipped job's name")
    parser.add_argument("--variant", action="append", help="NAME [--SETTING ...]; several (default: ours and fla)")
    parser.add_argument("--steps", type=at_least(2), default=60)
    parser.add_argument("--warmup", type=at_least(1), default=10, help="steps before the clock starts")
    parser.add_argument("--folder", default="outputs/train_compare", help="where torchtitan may write")
    parser.add_argument("--json", type=output_file, help="write results, losses too, to this file")
    args, settings = parser.parse_known_args(argv)
    if args.warmup >= args.steps:
        parser.error(f"--warmup must be below --steps, got {args.warmup} and {args.steps}")
    variants = []
    for variant in args.variant or ["ours", "fla"]:
        try:
            variants.append(split_variant(variant))
        except ValueError as error:
            parser.error(f"--variant {variant!r}: {error}")
    for word in itertools.chain(settings, *(own for _, own in variants)):
        if own := _OWN_OPTIONS.get(word.partition("=")[0].replace("-", "_")):
            parser.error(f"{word}: a comparison has its {own}")
    names = [name for name, _ in variants]
    if not all(names) or len(set(names)) < len(names):
        parser.error("every --variant needs a name of its own")
    if any(name.startswith("fla") for name in names) and importlib.util.find_spec("fla") is None:
        parser.error("a variant named fla... needs fla-core: pip install 'titan-kda[bench]'")
    from torchtitan.tools.logging import init_logger

    from titan_kda.job_config import JobError

    init_logger()
    results: dict[str, dict[str, Any]] = {}
    for name, own in variants:
        swapped = fla_in_the_layer() if name.startswith("fla") else contextlib.nullcontext()
        try:
            with swapped:
                results[name] = train([*settings, *own], args.steps, args.warmup, args.job, args.folder)
        except JobError as error:
            print(f"train_compare: error: {error}", file=sys.stderr)
            return 2
        except torch.OutOfMemoryError as error:
            print(f"{name}: out of memory: {str(error).splitlines()[0]}", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if name in results:
            shown = {key: value for key, value in results[name].items() if key not in ("losses", "text")}
            print(f"{name}: {json.dumps(shown)}", flush=True)

    if not results:
        return 1
    first = next(iter(results.values()))
    print(f"\n{args.job}, {args.steps} steps, {args.warmup} of them before the clock, {first['device']}")
    print(table(results))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
