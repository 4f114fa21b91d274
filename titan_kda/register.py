"""Registers titan-kda's models with torchtitan: ``[experimental] custom_import = "titan_kda.register"``.

Importing this module is all it takes. The model is called "titan_kda"; its flavors are in titan_kda.model.FLAVORS.
"""

from __future__ import annotations

from typing import Any

from .cpu import use_cpu_if_no_accelerator

use_cpu_if_no_accelerator()  # before the modules below copy torchtitan's device

from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.lr_scheduler import build_lr_schedulers  # noqa: E402
from torchtitan.components.optimizer import (  # noqa: E402
    OptimizersContainer,
    build_optimizers_with_moe_load_balancing,
)
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.protocols import train_spec  # noqa: E402
from torchtitan.tools import utils  # noqa: E402
from torchtitan.tools.logging import logger  # noqa: E402

from . import data, deal  # noqa: E402
from .attention import ForgetGate  # noqa: E402
from .checkpoint import CheckpointError, validate_checkpoint_settings  # noqa: E402
from .hf import KimiLinearAdapter, check_settings, extend_checkpoint_manager  # noqa: E402
from .job_config import MODEL_NAME, JobError, check_dump_folder, check_job, model_args_of  # noqa: E402
from .model import FLAVORS, Decoder  # noqa: E402
from .parallelize import build_loss, parallelize  # noqa: E402
from .validate import build_validator, encode_prompts  # noqa: E402

# What torchtitan does with a GPU's own means.
_NEEDS_ACCELERATOR = (
    ("training", "enable_cpu_offload"),
    ("profiling", "enable_profiling"),
    ("profiling", "enable_memory_snapshot"),
)


def build_tokenizer(job_config: Any) -> BaseTokenizer:
    """The job's tokenizer. torchtitan builds it first of all, so a job that cannot run is refused here."""
    return check_job_and_data(job_config)


def check_job_and_data(job_config: Any) -> BaseTokenizer:
    """Refuses a job that could not run, its data and prompts included; returns its tokenizer. Reads no data.

    Raises:
        JobError: one line that names the setting.
    """
    check_job(job_config)
    check_dump_folder(job_config.job.dump_folder)
    args = model_args_of(job_config)
    if utils.device_type == "cpu":
        for section, name in _NEEDS_ACCELERATOR:
            if getattr(getattr(job_config, section), name):
                raise JobError(f"{section}.{name} must be false: it needs an accelerator, and there is none")
    try:
        args.backends().describe(utils.device_type)  # raises for an implementation that this device cannot run
    except ValueError as error:
        raise JobError(f"kda.impl: {error}") from None
    try:
        data.check_data(job_config)
        tokenizer = data.build_tokenizer(job_config)
        data.check_vocab(tokenizer, args.vocab_size)
        validate_checkpoint_settings(job_config, has_adapter=True)
        check_settings(job_config, args)
    except (CheckpointError, ValueError, TypeError, FileNotFoundError) as error:
        raise JobError(str(error)) from None
    if job_config.kda.reset_at_documents and tokenizer.eos_id is None:
        raise JobError(
            "kda.reset_at_documents needs a tokenizer with an end-of-sequence token, and that in "
            f"model.hf_assets_path = {job_config.model.hf_assets_path!r} has none: set it to false"
        )
    if job_config.generation.enable:
        encode_prompts(tokenizer, job_config.generation)
    return tokenizer


def build_dataloader(**kwargs: Any) -> ParallelAwareDataloader:
    """torchtitan's ``build_dataloader_fn``.

    Raises:
        JobError: text that is missing or malformed, in one line.
    """
    try:
        return data.build_dataloader(**kwargs)
    except (ValueError, FileNotFoundError) as error:
        raise JobError(f"training.dataset: {error}") from None


def build_kda_optimizers(
    model_parts: list[Any], optimizer_config: Any, parallel_dims: Any, **kwargs: Any
) -> OptimizersContainer:
    """torchtitan's optimizers, which balance the experts' load before each step, with no weight decay on A_log and
    dt_bias: decay would pull every gate to one value."""
    if optimizer_config.early_step_in_backward:
        logger.warning(
            "optimizer.early_step_in_backward leaves no gradients to clip: training.max_norm has no effect, and the "
            "logged grad_norm is 0"
        )
    container = build_optimizers_with_moe_load_balancing(model_parts, optimizer_config, parallel_dims, **kwargs)
    undecayed = {
        parameter
        for part in model_parts
        for module in part.modules()
        if isinstance(module, ForgetGate)
        for parameter in module.parameters(recurse=False)
    }
    for optimizer in container.optimizers:
        groups = optimizer.param_groups
        moved = [p for group in groups for p in group["params"] if p in undecayed]
        if len(groups) == 1 and len(moved) == len(groups[0]["params"]):
            groups[0]["weight_decay"] = 0.0  # an optimizer a parameter (early_step_in_backward)
        elif moved:
            for group in groups:
                group["params"] = [p for p in group["params"] if p not in undecayed]
            optimizer.add_param_group({"params": moved, "weight_decay": 0.0})
    return container


def get_train_spec() -> train_spec.TrainSpec:
    return train_spec.TrainSpec(
        model_cls=Decoder,
        model_args=FLAVORS,
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_kda_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_loss_fn=build_loss,
        build_validator_fn=build_validator,
        state_dict_adapter=KimiLinearAdapter,
    )


extend_checkpoint_manager()
deal.extend_checkpoint_manager()
if MODEL_NAME not in train_spec._extra_train_specs:  # a second registration of a name raises
    train_spec.register_train_spec(MODEL_NAME, get_train_spec())
