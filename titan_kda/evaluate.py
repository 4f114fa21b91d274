"""``python -m titan_kda.evaluate``: how likely a TOML job's model holds text to be, and lm-evaluation-harness's tasks.

    python -m titan_kda.evaluate --job kda_debug --text README.md docs/*.md
    python -m titan_kda.evaluate --job kda_340m --task hellaswag --task arc_easy --limit 200      # titan-kda[eval]

The checkpoint may be a step's folder, a run's folder (its newest step), or safetensors; any layout may have written it.
Every text is scored whole, whatever its length: it is read in pieces, and the layers' caches carry over. Tables go to
standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.attention import VarlenMetadata

from ._version import __version__
from .checkpoint import CheckpointError
from .data import build_tokenizer, check_vocab, stream_decoder
from .generate import NotFiniteError, Sample, Sampling, _forward, _full, _to, encode_prompt, generate, inference
from .job_config import JobError, JobParser, model_args_of
from .sample import DTYPES, TextStream, _device, check_settings, load_model
from .train import load_job

PIECE = 8192
"""Tokens read at once."""
_ROWS = 2048
"""Rows of logits that are normalised in FP32 at once."""


@dataclass
class Score:
    """A sequence's likelihood from a given token on.

    Attributes:
        log_likelihood: of the tokens, nats.
        tokens: how many there are.
        greedy: whether each of them is the model's likeliest.
    """

    log_likelihood: float = 0.0
    tokens: int = 0
    greedy: bool = True


def score(
    model: nn.Module,
    sequences: Sequence[tuple[Sequence[int], int]],
    *,
    vocab_size: int | None = None,
    device: torch.device | None = None,
    piece: int = PIECE,
) -> list[Score]:
    """How likely each sequence's tokens are, each given those before it.

    Args:
        model: a Decoder on one device; called in eval mode and left in the mode it was in.
        sequences: (tokens, start): what comes before ``start``, at least one token, is given and not scored.
        vocab_size: the tokenizer's size, where the model's is rounded up: what lies past it has no probability.
        device: of the model's inputs; the parameters' if not given.
        piece: tokens read at once. Short sequences share a piece; a long one is read in several, with a cache.

    Raises:
        ValueError: nothing is given before the tokens to score.
        NotFiniteError: logits that are not finite.
    """
    device = next(model.parameters()).device if device is None else device
    scores = [Score() for _ in sequences]
    for tokens, start in sequences:
        if not 1 <= start <= len(tokens):
            raise ValueError(f"start must be from 1 to the number of tokens, {len(tokens)}, got {start}")

    def add(index: int, logits: Tensor, targets: Sequence[int]) -> None:
        """Counts the targets that the logits' rows give."""
        wanted = _to(device, targets)
        for begin in range(0, len(targets), _ROWS):
            rows = logits[begin : begin + _ROWS, :vocab_size].float()
            some = wanted[begin : begin + _ROWS]
            found = torch.log_softmax(rows, -1).gather(-1, some[:, None]).double().sum()
            greedy = (rows.argmax(-1) == some).all()
            log_likelihood, is_greedy = torch.stack([found, greedy.double()]).tolist()
            if not math.isfinite(log_likelihood):
                raise NotFiniteError("the model's logits are not finite")
            scores[index].log_likelihood += log_likelihood
            scores[index].greedy &= bool(is_greedy)
        scores[index].tokens += len(targets)

    with inference(model):
        for group in _groups([len(tokens) - 1 for tokens, _ in sequences], piece):
            if len(group) == 1 and len(sequences[group[0]][0]) - 1 > piece:
                tokens, start = sequences[group[0]]
                cache = model.new_cache()  # type: ignore[operator]
                for begin in range(0, len(tokens) - 1, piece):
                    end = min(begin + piece, len(tokens) - 1)
                    logits = _read(model, [tokens[begin:end]], cache, device)
                    if (first := max(begin, start - 1)) < end:
                        add(group[0], logits[first - begin : end - begin], tokens[first + 1 : end + 1])
                continue
            logits = _read(model, [sequences[i][0][:-1] for i in group], None, device)
            at = 0
            for i in group:
                tokens, start = sequences[i]
                add(i, logits[at + start - 1 : at + len(tokens) - 1], tokens[start:])
                at += len(tokens) - 1
    return scores


def _groups(lengths: Sequence[int], piece: int) -> Iterator[list[int]]:
    """Sequences that are read together, the longest first; sequences of no length to read are left out."""
    group: list[int] = []
    total = 0
    for i in sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i]):
        if group and total + lengths[i] > piece:
            yield group
            group, total = [], 0
        group.append(i)
        total += lengths[i]
    if group:
        yield group


def _read(model: nn.Module, pieces: Sequence[Sequence[int]], cache: Any, device: torch.device) -> Tensor:
    """The logits after every token of some packed sequences, [T, vocab_size]."""
    ends = [0]
    for tokens in pieces:
        ends.append(ends[-1] + len(tokens))
    offsets = _to(device, ends, torch.int32)
    longest = max(map(len, pieces))
    stream = _to(device, [t for tokens in pieces for t in tokens])[None]
    return _full(_forward(model, stream, VarlenMetadata(offsets, offsets, longest, longest), cache))[0]


def text_tokens(tokenizer: BaseTokenizer, text: str) -> tuple[list[int], int]:
    """A whole text as tokens, and where they begin: after a beginning-of-sequence token, or an end-of-sequence one."""
    tokens = tokenizer.encode(text, add_bos=False, add_eos=False)
    with_bos = tokenizer.encode(text, add_bos=True, add_eos=False)
    if len(with_bos) > len(tokens):
        return with_bos, len(with_bos) - len(tokens)
    eos = tokenizer.eos_id
    return ([eos, *tokens], 1) if eos is not None else (tokens, 1)


def harness_model(
    model: nn.Module, tokenizer: BaseTokenizer, device: torch.device | None = None, max_new_tokens: int = 256
) -> Any:
    """The model as lm-evaluation-harness's ``LM``, for ``lm_eval.simple_evaluate(model=...)``; needs titan-kda[eval].

    Raises:
        ImportError: lm_eval is not installed.
    """
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    vocab_size = tokenizer.get_vocab_size()

    def pair(context: str, continuation: str) -> tuple[list[int], int]:
        # A space between the two belongs to the continuation's first word.
        stripped = context.rstrip()
        context, continuation = stripped, context[len(stripped) :] + continuation
        if not context:
            return text_tokens(tokenizer, continuation)
        before, _ = text_tokens(tokenizer, context)
        whole, _ = text_tokens(tokenizer, context + continuation)
        return whole, min(len(before), len(whole))

    class TitanKDA(LM):
        def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
            found = score(model, [pair(*r.args) for r in requests], vocab_size=vocab_size, device=device)
            return [(s.log_likelihood, s.greedy) for s in found]

        def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
            texts = [text_tokens(tokenizer, r.args[0]) for r in requests]
            return [s.log_likelihood for s in score(model, texts, vocab_size=vocab_size, device=device)]

        def generate_until(self, requests: list[Any]) -> list[str]:
            texts: list[str] = [""] * len(requests)
            alike: dict[Sampling, list[int]] = {}
            for i, request in enumerate(requests):
                alike.setdefault(_sampling(request.args[1], max_new_tokens), []).append(i)
            for sampling, members in alike.items():
                samples = [Sample(encode_prompt(tokenizer, requests[i].args[0]), key=str(i)) for i in members]
                stops = [_stops(requests[i].args[1]) for i in members]
                streams = [TextStream(tokenizer, s.prompt, stop) for s, stop in zip(samples, stops)]
                generate(
                    model,
                    samples,
                    sampling,
                    eos_id=tokenizer.eos_id,
                    vocab_size=vocab_size,
                    device=device,
                    on_token=lambda n, token, streams=streams: streams[n].push(token)[1],
                )
                for i, sample, stream in zip(members, samples, streams):
                    if sample.finished != "stop":
                        stream.flush()
                    texts[i] = stream.text
            return texts

    return TitanKDA()


def _stops(settings: dict[str, Any]) -> list[str]:
    until = settings.get("until") or []
    return [until] if isinstance(until, str) else [stop for stop in until if stop]


def _sampling(settings: dict[str, Any], max_new_tokens: int) -> Sampling:
    """A harness's request; greedy unless it asks for a temperature or for sampling."""
    temperature = float(settings.get("temperature", 1.0 if settings.get("do_sample") else 0.0))
    return Sampling(
        int(settings.get("max_gen_toks", settings.get("max_new_tokens", max_new_tokens))),
        temperature if settings.get("do_sample", True) else 0.0,
        int(settings.get("top_k", 0)),
        float(settings.get("top_p", 1.0)),
    )


# ---- the command ----


def build_parser() -> argparse.ArgumentParser:
    parser = JobParser(
        prog="python -m titan_kda.evaluate",
        description="Scores text, or lm-evaluation-harness's tasks, with a model trained by a TOML job.",
        epilog="Settings of the job can be given as well, as --kda.eval_backend chunk.",
        allow_abbrev=False,
    )
    parser.add_argument("--job", required=True, help="the TOML job, a file or a shipped job's name")
    parser.add_argument(
        "--checkpoint",
        help="a step's folder, a run's folder (its newest step), or safetensors; the job's dump_folder by default",
    )
    parser.add_argument("--text", nargs="+", default=[], help="files to score, UTF-8; '-' is standard input")
    parser.add_argument("--prompt", action="append", default=[], help="text to continue greedily; several times")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of each continuation (default 64)")
    parser.add_argument("--task", action="append", default=[], help="an lm-evaluation-harness task; several times")
    parser.add_argument("--limit", type=int, help="examples of each task; all by default")
    parser.add_argument("--device", help="cpu, cuda, cuda:1 ...; the GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--version", action="version", version=f"titan-kda {__version__}")
    return parser


def read_texts(names: Iterable[str]) -> dict[str, str]:
    """Raises JobError for a file that cannot be read."""
    texts = {}
    for name in names:
        try:
            texts[name] = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise JobError(f"--text {name} is no UTF-8: {error.reason} at byte {error.start}") from None
        except (OSError, ValueError) as error:
            raise JobError(f"--text {name}: {getattr(error, 'strerror', None) or error}") from None
    return texts


def run(args: argparse.Namespace, settings: list[str]) -> int:
    if not (args.text or args.prompt or args.task):
        raise JobError("nothing to do: give --text, --prompt or --task")
    for name in ("max_new_tokens", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise JobError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.task:
        try:
            import lm_eval  # noqa: F401  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise JobError(f"--task needs lm-evaluation-harness (pip install 'titan-kda[eval]'): {error}") from None
    check_settings(settings)
    config = load_job([f"--job.config_file={args.job}", *settings], reads_data=False)
    device = _device(args.device)
    dtype = DTYPES[args.dtype] if args.dtype else (torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        tokenizer = build_tokenizer(config)
        check_vocab(tokenizer, model_args_of(config).vocab_size)
    except (ValueError, FileNotFoundError) as error:
        raise JobError(str(error)) from None
    texts = read_texts(args.text)
    model = load_model(config, args.checkpoint, device, dtype)
    try:
        result = _evaluate(args, model, tokenizer, texts, device)
    except NotFiniteError as error:
        raise JobError(f"{error}: the checkpoint or --dtype is at fault") from None
    if args.json:
        print(json.dumps(result, ensure_ascii=False))
    return 0


def _evaluate(
    args: argparse.Namespace, model: nn.Module, tokenizer: BaseTokenizer, texts: dict[str, str], device: torch.device
) -> dict[str, Any]:
    shown = (lambda *parts: None) if args.json else print
    result: dict[str, Any] = {}
    vocab_size = tokenizer.get_vocab_size()
    if texts:
        result["text"] = {}
        scores = score(model, [text_tokens(tokenizer, t) for t in texts.values()], vocab_size=vocab_size, device=device)
        shown("| text | tokens | bytes | nats a token | perplexity | bits a byte |\n|---|---|---|---|---|---|")
        rows = [(name, s, len(text.encode())) for (name, text), s in zip(texts.items(), scores)]
        if len(rows) > 1:
            whole = Score(sum(s.log_likelihood for s in scores), sum(s.tokens for s in scores))
            rows.append(("all", whole, sum(size for *_, size in rows)))
        for name, s, size in rows:
            nats = -s.log_likelihood / max(s.tokens, 1)
            bits = -s.log_likelihood / math.log(2) / max(size, 1)
            result["text"][name] = {
                "log_likelihood": s.log_likelihood,
                "tokens": s.tokens,
                "bytes": size,
                "nats_per_token": nats,
                "perplexity": math.exp(min(nats, 700.0)),
                "bits_per_byte": bits,
            }
            shown(f"| {name} | {s.tokens} | {size} | {nats:.4f} | {math.exp(min(nats, 700.0)):.3f} | {bits:.4f} |")
    if args.prompt:
        samples = [Sample(encode_prompt(tokenizer, prompt)) for prompt in args.prompt]
        sampling = Sampling(args.max_new_tokens, temperature=0)
        generate(model, samples, sampling, eos_id=tokenizer.eos_id, vocab_size=vocab_size, device=device)
        result["generated"] = []
        for prompt, sample in zip(args.prompt, samples):
            decoder = stream_decoder(tokenizer, sample.prompt)
            text = decoder.push(sample.tokens) + decoder.flush()
            result["generated"].append({"prompt": prompt, "text": text, "finished": sample.finished})
            shown(f"---- {prompt!r} ----\n{prompt}{text}")
    if args.task:
        from lm_eval import simple_evaluate  # pyright: ignore[reportMissingImports]
        from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]

        found = simple_evaluate(model=harness_model(model, tokenizer, device), tasks=args.task, limit=args.limit)
        assert found is not None
        result["tasks"] = found["results"]
        shown(make_table(found))
    return result


def main(argv: list[str] | None = None) -> int:
    try:
        return run(*build_parser().parse_known_args(argv))
    except (JobError, CheckpointError) as error:
        print("titan_kda.evaluate: error:", *str(error).splitlines(), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
