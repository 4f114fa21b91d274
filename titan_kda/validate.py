"""torchtitan's validator, and at its steps text from the model in training.

At a generation step the trainer validates, then continues each of ``[generation] prompts`` with the recurrent backend
and a cache. The text goes to the log, to ``{dump_folder}/samples/step-N.jsonl`` and to TensorBoard. Every rank of every
layout runs the same forwards and takes rank 0's tokens. The model is left in training mode and the random state as it
was, so the loss curve is the same with generation and without.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.loss import LossFunction
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor, TensorBoardLogger
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import BaseValidator, ValidationContext, Validator
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from .data import build_validation_dataloader
from .generate import NotFiniteError, Sample, Speed, can_capture, encode_prompt, generate, settings_of
from .job_config import JobError


def encode_prompts(tokenizer: BaseTokenizer, generation: Any) -> list[list[int]]:
    """The job's prompts as tokens, each after a beginning-of-sequence token where the tokenizer has one.

    Raises:
        JobError: a prompt of no tokens, or of more than ``generation.max_prompt_tokens``.
    """
    encoded = []
    for prompt in generation.prompts:
        try:
            tokens = encode_prompt(tokenizer, prompt)
        except ValueError as error:
            raise JobError(f"generation.prompts: {error}") from None
        if len(tokens) > generation.max_prompt_tokens:
            raise JobError(
                f"generation.prompts: {prompt[:40]!r} has {len(tokens)} tokens, more than "
                f"generation.max_prompt_tokens = {generation.max_prompt_tokens}"
            )
        encoded.append(tokens)
    return encoded


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Leaves Python's and torch's random generators as they were."""
    state = random.getstate()
    accelerators = [] if utils.device_type == "cpu" else [utils.device_module.current_device()]
    with torch.random.fork_rng(accelerators, device_type=utils.device_type if accelerators else "cuda"):
        yield
    random.setstate(state)


class GeneratingValidator(Validator):
    """torchtitan's Validator, which also generates at the job's generation steps."""

    job_config: Any

    def __init__(
        self,
        job_config: Any,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        parallel_dims: ParallelDims,
        loss_fn: LossFunction,
        validation_context: ValidationContext,
        maybe_enable_amp: AbstractContextManager[None],
        metrics_processor: MetricsProcessor,
        **pipeline: Any,
    ):
        # Not Validator's own __init__, which would read the data a second time, through torchtitan's loader.
        BaseValidator.__init__(self, job_config)
        self.tokenizer = tokenizer
        self.parallel_dims = parallel_dims
        self.loss_fn = loss_fn
        try:
            self.validation_dataloader = build_validation_dataloader(dp_world_size, dp_rank, tokenizer, job_config)
        except (ValueError, FileNotFoundError) as error:
            raise JobError(f"validation.dataset: {error}") from None
        self.validation_context = validation_context
        self.maybe_enable_amp = maybe_enable_amp
        self.metrics_processor = metrics_processor
        self.pp_schedule = None  # a job with pipeline stages is refused before this
        self.prompts = encode_prompts(tokenizer, job_config.generation) if job_config.generation.enable else []

    def should_generate(self, step: int) -> bool:
        generation = self.job_config.generation
        return generation.enable and (step == 1 or step % generation.freq == 0)

    def should_validate(self, step: int) -> bool:
        return super().should_validate(step) or self.should_generate(step)

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        with preserved_random_state():
            super().validate(model_parts, step)
            if self.should_generate(step):
                self.generate(model_parts[0], step)

    def generate(self, model: nn.Module, step: int) -> None:
        """Continues the job's prompts and writes what comes.

        Raises:
            JobError: the weights are not finite any more, or generation.cuda_graph asks for what cannot be captured.
        """
        section = self.job_config.generation
        samples = [Sample(prompt) for prompt in self.prompts]
        speed, device = Speed(), torch.device(utils.device_type)
        try:
            with self.maybe_enable_amp:
                if section.cuda_graph and (against := can_capture(model, device)) is not None:
                    raise JobError(f"generation.cuda_graph: {against}")
                generate(
                    model,
                    samples,
                    settings_of(section),
                    eos_id=self.tokenizer.eos_id,
                    vocab_size=self.tokenizer.get_vocab_size(),
                    device=device,
                    cuda_graph=section.cuda_graph,
                    speed=speed,
                )
        except NotFiniteError as error:
            raise JobError(f"step {step}: training has diverged: {error}") from None
        texts = [self.tokenizer.decode(sample.tokens) for sample in samples]
        for prompt, text in zip(section.prompts, texts):
            logger.info(f"step {step} sample: {prompt}{text}")
        if speed.decode_seconds > 0:
            rate = speed.decode_tokens / speed.decode_seconds
            seconds = speed.prefill_seconds + speed.capture_seconds + speed.decode_seconds
            graph = ", by a CUDA graph" if speed.graph else ""
            logger.info(
                f"step {step} generated {speed.decode_tokens} tokens at {rate:,.0f} a second{graph}; "
                f"{seconds:.2f} s with the prompts"
            )
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._write(step, samples, texts)
            self._log_text(step, texts)

    def _write(self, step: int, samples: list[Sample], texts: list[str]) -> None:
        """One JSON object a prompt; the file appears whole or not at all, over what an earlier run left."""
        folder = os.path.join(self.job_config.job.dump_folder, "samples")
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, f"step-{step}.jsonl")
        partial = f"{path}.partial"
        with open(partial, "w", encoding="utf-8", errors="replace") as file:
            for prompt, sample, text in zip(self.job_config.generation.prompts, samples, texts):
                row = {
                    "step": step,
                    "prompt": prompt,
                    "text": text,
                    "tokens": sample.tokens,
                    "finished": sample.finished,
                }
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        os.replace(partial, path)

    def _log_text(self, step: int, texts: list[str]) -> None:
        metrics = self.metrics_processor.logger
        writers = metrics._loggers if isinstance(metrics, LoggerContainer) else [metrics]
        for writer in writers:
            if isinstance(writer, TensorBoardLogger):
                for prompt, text in zip(self.job_config.generation.prompts, texts):
                    indented = "\n".join("    " + line for line in (prompt + text).split("\n"))
                    writer.writer.add_text(f"samples/{prompt.strip() or 'empty'}", indented, step)


def build_validator(**kwargs: Any) -> GeneratingValidator:
    """torchtitan's ``build_validator_fn``."""
    return GeneratingValidator(**kwargs)
