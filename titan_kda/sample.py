"""``python -m titan_kda.sample``: text from a TOML job and a checkpoint.

    python -m titan_kda.sample --job kda_debug --prompt "def "

The checkpoint may be a step's folder, a run's folder (its newest step), or safetensors; any layout may have written it.
Text goes to standard output as it comes, everything else to standard error. Ctrl-C keeps what was generated.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from . import hf_format
from ._version import __version__
from .checkpoint import CheckpointError, read_weights, resolve_checkpoint
from .data import build_tokenizer, check_vocab, stream_decoder
from .generate import NotFiniteError, Sample, Speed, can_capture, encode_prompt, generate, settings_of
from .job_config import JobError, JobParser, check_sampling, model_args_of
from .model import Decoder
from .train import load_job

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_parser() -> argparse.ArgumentParser:
    parser = JobParser(
        prog="python -m titan_kda.sample",
        description="Continues prompts with a model trained by a TOML job.",
        epilog="Settings of the job can be given as well, as --kda.prefill_backend chunk.",
        allow_abbrev=False,
    )
    parser.add_argument("--job", required=True, help="the TOML job, a file or a shipped job's name")
    parser.add_argument(
        "--checkpoint",
        help="a step's folder, a run's folder (its newest step), or safetensors; the job's dump_folder by default",
    )
    parser.add_argument("--prompt", action="append", default=[], help="text to continue; may be given several times")
    parser.add_argument(
        "--prompt-file", action="append", default=[], help="a file that holds one prompt, '-' is standard input"
    )
    parser.add_argument("--num-samples", type=int, default=1, help="continuations of each prompt (default 1)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="tokens of each at the most (default 200)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)")
    parser.add_argument("--top-k", type=int, default=0, help="draw among so many likeliest tokens, 0: all (default)")
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="draw among those that hold this much probability (default 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    parser.add_argument("--slots", type=int, default=64, help="sequences generated at once (default 64)")
    parser.add_argument(
        "--cuda-graph",
        action=argparse.BooleanOptionalAction,
        help="decode by a captured CUDA graph, or without; by default with it on a GPU",
    )
    parser.add_argument("--stop", action="append", default=[], help="end at this string; may be given several times")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--json", action="store_true", help="one JSON object a sample, on a line, when it ends")
    parser.add_argument("--version", action="version", version=f"titan-kda {__version__}")
    return parser


class TextStream:
    """One sample's text as its tokens come, up to the first stop string.

    Attributes:
        text: what may be shown so far; an end that could begin a stop string is held back.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], stops: list[str]):
        self._decoder = stream_decoder(tokenizer, prompt)
        self._stops = stops
        self._held = ""
        self.text = ""

    def push(self, token: int) -> tuple[str, bool]:
        """The text that ``token`` lets through, and whether a stop string ended it."""
        return self._show(self._decoder.push([token]), last=False)

    def flush(self) -> str:
        """What is still held back, at the end of a sample that no stop string ended."""
        return self._show(self._decoder.flush(), last=True)[0]

    def _show(self, new: str, last: bool) -> tuple[str, bool]:
        pending = self._held + new
        found = [at for at in (pending.find(stop) for stop in self._stops) if at >= 0]
        if found:
            cut = min(found)
            self._held = ""
        else:
            could_begin = (n for stop in self._stops for n in range(1, len(stop)) if pending.endswith(stop[:n]))
            cut = len(pending) - (0 if last else max(could_begin, default=0))
            self._held = pending[cut:]
        self.text += pending[:cut]
        return pending[:cut], bool(found)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts of the command line, or of standard input if it names none.

    Raises:
        JobError: a file that cannot be read, or no prompt at all.
    """
    names = list(args.prompt_file)
    if not args.prompt and not names:
        if sys.stdin is None or sys.stdin.isatty():
            raise JobError("no prompt: give --prompt or --prompt-file, or write one to standard input")
        names = ["-"]
    prompts = list(args.prompt)
    for name in names:
        where = "standard input" if name == "-" else f"--prompt-file {name}"
        if name == "-" and sys.stdin is None:
            raise JobError(f"{where} is closed")
        try:
            prompts.append(sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise JobError(f"{where} is no UTF-8: {error.reason} at byte {error.start}") from None
        except (OSError, ValueError) as error:
            raise JobError(f"{where}: {getattr(error, 'strerror', None) or error}") from None
    return prompts


def load_model(job_config: Any, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The job's model in eval mode with a checkpoint's weights; A_log and dt_bias stay FP32.

    Raises:
        JobError, CheckpointError: one line that says what is wrong.
    """
    found = resolve_checkpoint(job_config.job.dump_folder if checkpoint is None else checkpoint)
    args = model_args_of(job_config)
    with torch.device("meta"):
        model = Decoder(args)
    # FP32 first, since an exported checkpoint may hold all of its weights, A_log and dt_bias too, in 16 bits.
    if found.kind == "safetensors" and hf_format.is_hf_folder(found.path):
        weights = hf_format.read_weights(found.path, args, dtype=torch.float32)
    else:
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        weights = read_weights(found, shapes, dtype=torch.float32)
    model.load_state_dict(weights, strict=True, assign=True)
    for module in model.modules():  # what no checkpoint holds: the experts' counts since the last step
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                setattr(module, name, torch.zeros_like(buffer, device="cpu"))
    step = "" if found.step is None else f", step {found.step}"
    print(f"{found.path}{step}: {sum(p.numel() for p in model.parameters()):,} parameters", file=sys.stderr)
    return model.to(device, dtype).eval()


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise JobError(f"--device {name}: {str(error).splitlines()[0]}") from None
    return device


def _report(speed: Speed) -> None:
    def rate(tokens: int, seconds: float) -> str:
        return f"{tokens} tokens in {seconds:.2f} s" + (f", {tokens / seconds:,.0f} a second" if seconds > 0 else "")

    if speed.prefill_tokens:
        print(f"prefill: {rate(speed.prefill_tokens, speed.prefill_seconds)}", file=sys.stderr)
    if speed.decode_tokens:
        graph = f" (CUDA graph, captured in {speed.capture_seconds:.2f} s)" if speed.graph else ""
        print(f"decode: {rate(speed.decode_tokens, speed.decode_seconds)}{graph}", file=sys.stderr)


class Printer:
    """Writes samples to standard output: a single one as it grows, several each when it ends."""

    def __init__(self, args: argparse.Namespace, prompts: list[str], streams: list[TextStream], samples: list[Sample]):
        self.as_json, self.seed = args.json, args.seed
        self.prompts, self.streams, self.samples = prompts, streams, samples
        self.live = len(samples) == 1 and not args.json
        self.ended: set[int] = set()
        if self.live:
            print(prompts[0], end="", flush=True)

    def token(self, i: int, token: int) -> bool:
        shown, stopped = self.streams[i].push(token)
        if self.live:
            print(shown, end="", flush=True)
        return stopped

    def end(self, i: int) -> None:
        if i in self.ended:
            return
        self.ended.add(i)
        sample, stream = self.samples[i], self.streams[i]
        rest = "" if sample.finished == "stop" else stream.flush()
        if self.live:
            print(rest, flush=True)
        elif self.as_json:
            row = {
                "prompt": self.prompts[i],
                "text": stream.text,
                "tokens": sample.tokens,
                "finished": sample.finished or "interrupted",
                "seed": self.seed,
                "sample": i,
            }
            print(json.dumps(row, ensure_ascii=False), flush=True)
        else:
            print(f"---- sample {i + 1} of {len(self.samples)} ----\n{self.prompts[i]}{stream.text}", flush=True)


def run(args: argparse.Namespace, settings: list[str]) -> int:
    check_sampling(args, lambda name: "--" + name.replace("_", "-"))
    if args.num_samples < 1:
        raise JobError(f"--num-samples must be at least 1, got {args.num_samples}")
    if args.slots < 1:
        raise JobError(f"--slots must be at least 1, got {args.slots}")
    if any(not stop for stop in args.stop):
        raise JobError("--stop must not be empty")
    if args.checkpoint == "":
        raise JobError("--checkpoint must not be empty")
    check_settings(settings)
    job_config = load_job([f"--job.config_file={args.job}", *settings], reads_data=False)
    device = _device(args.device)
    dtype = DTYPES[args.dtype] if args.dtype else (torch.bfloat16 if device.type == "cuda" else torch.float32)
    model_args = model_args_of(job_config)
    try:
        tokenizer = build_tokenizer(job_config)
        check_vocab(tokenizer, model_args.vocab_size)
    except (ValueError, FileNotFoundError) as error:
        raise JobError(str(error)) from None
    try:
        model_args.backends().describe(device)  # raises for an implementation that this device cannot run
    except ValueError as error:
        raise JobError(f"kda.impl: {error}") from None
    texts = read_prompts(args)
    try:
        encoded = [encode_prompt(tokenizer, text) for text in texts]
    except ValueError as error:
        raise JobError(f"prompt: {error}") from None
    model = load_model(job_config, args.checkpoint, device, dtype)
    if args.cuda_graph and (against := can_capture(model, device)) is not None:
        raise JobError(f"--cuda-graph: {against}")

    samples = [
        Sample(list(tokens), key=f"{i}/{n}") for i, tokens in enumerate(encoded) for n in range(args.num_samples)
    ]
    prompts = [text for text in texts for _ in range(args.num_samples)]
    streams = [TextStream(tokenizer, sample.prompt, args.stop) for sample in samples]
    printer = Printer(args, prompts, streams, samples)
    speed = Speed()
    status = 0
    try:
        generate(
            model,
            samples,
            settings_of(args),
            eos_id=None if args.ignore_eos else tokenizer.eos_id,
            vocab_size=tokenizer.get_vocab_size(),
            device=device,
            slots=args.slots,
            cuda_graph=args.cuda_graph,
            on_token=printer.token,
            on_end=printer.end,
            speed=speed,
        )
    except KeyboardInterrupt:
        status = 130
    except NotFiniteError as error:
        raise JobError(f"{error}: the checkpoint or --dtype is at fault") from None
    for i in range(len(samples)):
        printer.end(i)
    _report(speed)
    return status


def check_settings(settings: list[str]) -> None:
    """Refuses arguments that are neither this command's nor a job's, which have a dot in their names."""
    for i, word in enumerate(settings):
        if word.startswith("--") and "." not in word.partition("=")[0]:
            raise JobError(f"unknown option {word}; see --help")
        if i == 0 and not word.startswith("--"):
            raise JobError(f"unexpected argument {word!r}: a prompt is given by --prompt")


def _drop_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter's last flush does not fail again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def main(argv: list[str] | None = None) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # bytes that are no text, or a terminal of another encoding
    try:
        return run(*build_parser().parse_known_args(argv))
    except (JobError, CheckpointError) as error:
        print("titan_kda.sample: error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone
        _drop_output()
        return 141
    except OSError as error:  # a full disk, say
        print(f"titan_kda.sample: error: {error}", file=sys.stderr)
        _drop_output()
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
