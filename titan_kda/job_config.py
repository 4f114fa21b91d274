"""The TOML sections that this package adds to torchtitan's, and the checks of a whole job.

``[job] custom_config_module = "titan_kda.job_config"`` merges ``JobConfig`` with torchtitan's own. torchtitan refuses
unknown keys but takes any type of value; ``check_job`` refuses those too, and what no run could survive.
"""

# No `from __future__ import annotations`: torchtitan merges dataclasses by the types themselves.
import argparse
import difflib
import os
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

MODEL_NAME = "titan_kda"
"""The model's name in torchtitan's registry."""


class JobError(ValueError):
    """A job that cannot run as written; its message is one line that names the setting."""


class JobParser(argparse.ArgumentParser):
    """A command's arguments, where a mistake is a JobError of one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise JobError(message)


@dataclass
class KDA:
    """Which form of the core runs in which phase; see titan_kda.attention.Backends."""

    train_backend: str = "chunk"
    """Forwards with gradients on: "chunk" ("recurrent" does not differentiate and is refused)."""

    eval_backend: str = "recurrent"
    """Validation: "recurrent", "chunk" or "auto"."""

    prefill_backend: str = "auto"
    """Reading a prompt: "auto" is recurrent up to recurrent_max_tokens a sequence, chunk above."""

    recurrent_max_tokens: int = 64
    """Where "auto" changes from recurrent to chunk, tokens."""

    fuse_q_l2norm: bool = True
    """Prefill by chunk_kda normalises q inside the kernel; training and validation never do."""

    impl: str = "auto"
    """"triton", "reference" (plain PyTorch), or "auto": Triton on a GPU, the reference elsewhere."""

    reset_at_documents: bool = True
    """Start state and convolution anew at each document of a packed row."""


@dataclass
class Architecture:
    """The model's shape, over the flavor's; what is left out is the flavor's. See titan_kda.model.ModelArgs."""

    vocab_size: int | None = None
    dim: int | None = None
    n_layers: int | None = None
    layer_pattern: list[str] | None = None
    n_heads: int | None = None
    key_width: int | None = None
    value_width: int | None = None
    conv_width: int | None = None
    attn_heads: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    kv_heads: int | None = None
    head_width: int | None = None
    ffn_width: int | None = None
    num_experts: int | None = None
    num_experts_per_token: int | None = None
    num_shared_experts: int | None = None
    expert_width: int | None = None
    first_k_dense: int | None = None
    routed_scaling_factor: float | None = None
    moe_renormalize: bool | None = None
    load_balance_coeff: float | None = None
    num_expert_group: int | None = None
    topk_group: int | None = None
    norm_eps: float | None = None
    tie_embeddings: bool | None = None
    gate: str | None = None
    lower_bound: float | None = None
    allow_neg_eigval: bool | None = None
    output_gate: str | None = None


@dataclass
class Data:
    """The tokenizer, and the datasets that need no network (python_stdlib, text_files)."""

    tokenizer: str = "byte"
    """"byte" (256 bytes, BOS, EOS, PAD; no files) or "hf" (the tokenizer.json folder at model.hf_assets_path)."""

    piece_bytes: int = 2048
    """Files are cut at line ends into documents of about this many bytes."""

    shuffle_seed: int = 0
    """Of the fixed order that the pieces are read in."""

    validation_fraction: float = 0.05
    """Of the files, held out for the dataset's _validation half."""


@dataclass
class Generation:
    """Samples from the model in the training loop; needs [validation] enable = true."""

    enable: bool = False
    freq: int = 500
    """Every so many steps, and after the first. At these steps the trainer validates, then generates."""

    prompts: list[str] = field(default_factory=lambda: ["def "])
    max_new_tokens: int = 128
    temperature: float = 0.8
    """0 takes the likeliest token."""

    top_k: int = 0
    """Sample among so many likeliest tokens; 0: all."""

    top_p: float = 0.95
    """Sample among the likeliest tokens that hold this much probability; 1: all."""

    seed: int = 0
    cuda_graph: bool | None = None
    """Whether decode replays a captured CUDA graph; left out, it does on one GPU."""

    max_prompt_tokens: int = 1024
    """A longer prompt is refused when the job starts."""


@dataclass
class JobConfig:
    """What titan-kda adds to torchtitan's JobConfig."""

    kda: KDA = field(default_factory=KDA)
    architecture: Architecture = field(default_factory=Architecture)
    data: Data = field(default_factory=Data)
    generation: Generation = field(default_factory=Generation)


def overrides(job_config: Any) -> dict[str, Any]:
    """ModelArgs' fields that a job sets, by name."""
    kda, architecture = job_config.kda, job_config.architecture
    values = {f.name: getattr(architecture, f.name) for f in fields(Architecture)}
    values = {name: value for name, value in values.items() if value is not None}
    names = ("train_backend", "eval_backend", "prefill_backend", "recurrent_max_tokens", "fuse_q_l2norm", "impl")
    for name in names:
        values[name] = getattr(kda, name)
    values["attn_type"] = "varlen" if kda.reset_at_documents else "sdpa"
    return values


def model_args_of(job_config: Any) -> Any:
    """A fresh, checked ModelArgs: the flavor with the job's overrides."""
    from dataclasses import replace

    from .model import FLAVORS

    flavor = job_config.model.flavor
    if flavor not in FLAVORS:
        raise JobError(f"model.flavor must be one of {', '.join(FLAVORS)}, got {flavor!r}")
    args = replace(FLAVORS[flavor], **overrides(job_config))
    try:
        args.check()
    except ValueError as error:
        raise JobError(f"[kda] or [architecture]: {error}") from None
    return args


# ---- types ----


def _name(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_name(k) for k in get_args(kind) if k is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(repr(v) for v in get_args(kind))
    if origin is not None:
        return f"{origin.__name__} of {', '.join(_name(k) for k in get_args(kind))}"
    return getattr(kind, "__name__", str(kind))


def conforms(value: Any, kind: Any) -> bool:
    """Whether a TOML value has a field's type; an integer will do for a float, a boolean for neither."""
    origin = get_origin(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(conforms(value, k) for k in get_args(kind))
    if origin is Literal:
        return value in get_args(kind)
    if origin is list:
        return isinstance(value, list) and all(conforms(v, get_args(kind)[0]) for v in value)
    if origin is not None:
        return isinstance(value, origin)
    if kind is float:  # not a number is none
        return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
    if kind is int:  # of 64 bits, as tensors hold them
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    return not isinstance(kind, type) or isinstance(value, kind) or is_dataclass(kind)


def shown(value: Any) -> str:
    """A mistaken value as a message of one line tells it."""
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text)} characters)"


def _mistaken(name: str, kind: Any, value: Any) -> str:
    digits = str(value).lstrip("+-")
    hint = " (64 bits are the most)" if kind is int and digits.isdigit() and len(digits) > 18 else ""
    return f"{name} must be {_name(kind)}, got {shown(value)}{hint}"


def type_errors(cls: Any, values: dict[str, Any], path: str = "") -> Iterator[str]:
    """What is wrong with a parsed TOML table: unknown keys, and values of another type than the dataclass's fields."""
    known = {f.name: f.type for f in fields(cls)}
    for key, value in values.items():
        name = key if key.isprintable() and 0 < len(key) <= 200 else shown(key)
        where = f"{path}.{name}" if path else name
        if key not in known:
            near = f"[{path}] has {', '.join(known)}" if path else f"the sections are {', '.join(known)}"
            yield f"unknown key {where}; {near}"
        elif is_dataclass(known[key]):
            if isinstance(value, dict):
                yield from type_errors(known[key], value, where)
            else:
                yield f"{where} must be a table, got {shown(value)}"
        elif not conforms(value, known[key]):
            yield _mistaken(where, known[key], value)


# ---- the command line ----


def settings_of(cls: Any, section: str = "") -> Iterator[tuple[str, Any]]:
    """The name, "section.key", and the type of every setting in a job's dataclass."""
    for f in fields(cls):
        if is_dataclass(f.type):
            yield from settings_of(f.type, f"{section}{f.name}.")
        else:
            yield section + f.name, f.type


def _reads_as(text: str, kind: Any) -> bool:
    """Whether a word of the command line can be read as a setting's type; lists are left to the parser."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(_reads_as(text, k) for k in get_args(kind))
    if origin is Literal:
        return text in map(str, get_args(kind))
    if kind is type(None):
        return text == "None"
    if kind is bool:
        return text in ("True", "False")
    if kind is int or kind is float:
        try:
            return conforms(kind(text), kind)
        except ValueError:
            return False
    return True


def _begins_a_setting(word: str) -> bool:
    """Whether the parser takes a word that follows a setting's name for another setting: "-1" and "-inf" are values."""
    if word.startswith("--"):
        return True
    return word[:1] == "-" and word[1:2].isalpha() and word[1:].lower() not in ("inf", "infinity", "nan")


def _nearest(name: str, names: list[str]) -> str:
    """ "; did you mean ...?", or where to look."""
    key = name.rpartition(".")[2]
    same = [other for other in names if other.rpartition(".")[2] == key]
    near = difflib.get_close_matches(name, same or names, n=1, cutoff=0.0 if same else 0.6)
    return f"did you mean --{near[0]}?" if near else "--help lists them all"


def check_arguments(cls: Any, args: list[str]) -> None:
    """Refuses settings on the command line that the job's dataclass does not have, and values it could not hold.

    ``--section.key value`` and ``--section.key=value``, with "-" or "_" between words; a boolean takes no value, and
    ``--section.no-key`` makes it false. A value that begins with "-" and a letter takes the second form. ``--help``
    among them is the parser's own business, and so are all others then.

    Raises:
        JobError: the first mistake.
    """
    if "-h" in args or "--help" in args:
        return
    kinds = dict(settings_of(cls))
    flags = {name for name, kind in kinds.items() if kind is bool}
    flags |= {"{}.no_{}".format(*name.rsplit(".", 1)) for name in flags}
    words = list(reversed(args))
    while words:
        word = words.pop()
        if not word.startswith("--"):
            raise JobError(f"unexpected argument {shown(word)}: a setting is given as --section.key value")
        given, equals, value = word.partition("=")
        name = given[2:].replace("-", "_")
        many = list[list[str]] in get_args(kinds.get(name))  # a word for each of the inner lists
        values = [value] if equals else []
        while not equals and words and not _begins_a_setting(words[-1]) and (many or not values):
            values.append(words.pop())
        if name in flags:
            if values:
                raise JobError(
                    f"{given} takes no value, got {shown(values[0])}: --section.no-key makes a setting false"
                )
            continue
        if name not in kinds:
            unknown = given if given.isprintable() and len(given) <= 200 else shown(given)
            raise JobError(f"unknown setting {unknown}; {_nearest(name[:200], [*kinds, *flags])}")
        if not values:
            wanted = _name(kinds[name]).replace("bool", "True or False")
            hint = ""
            if words and _reads_as(words[-1], kinds[name]):
                hint = f' (one that begins with "-" as in {given}={words[-1][:20]!r})'
            raise JobError(f"{given} needs a value: {wanted}{hint}")
        if wrong := [value for value in values if not _reads_as(value, kinds[name])]:
            raise JobError(_mistaken(name, kinds[name], wrong[0]).replace("bool", "True or False", 1))


def _as_table(config: Any) -> dict[str, Any]:
    return {
        f.name: _as_table(value) if is_dataclass(value) and not isinstance(value, type) else value
        for f in fields(config)
        for value in [getattr(config, f.name)]
    }


# ---- the whole job ----

# What torchtitan takes, and then divides by, asserts or loops over.
_AT_LEAST = {
    "training.steps": 1,
    "training.seq_len": 1,
    "training.local_batch_size": 1,
    "training.gc_freq": 1,
    "metrics.log_freq": 1,
    "optimizer.lr": 0,
    "optimizer.eps": 0,
    "optimizer.weight_decay": 0,
    "lr_scheduler.warmup_steps": 0,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.expert_parallel_degree": 1,
    "parallelism.expert_tensor_parallel_degree": 1,
    "parallelism.data_parallel_replicate_degree": 1,
    "generation.max_prompt_tokens": 1,
}
_AT_LEAST_IF_VALIDATING = {"validation.freq": 1, "validation.seq_len": 1, "validation.local_batch_size": 1}
_MUST_BE_ONE = {
    "parallelism.context_parallel_degree": "KDA layers do not have context parallelism yet",
    "parallelism.pipeline_parallel_degree": "these models do not have pipeline stages yet",
}


def _setting(job_config: Any, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(job_config, section), key)


def check_job(job_config: Any) -> None:
    """Refuses a job that could not run to its end, before anything is built or written.

    Raises:
        JobError: one line that names the setting, what it got and what it needs.
    """
    for section in fields(JobConfig):
        if not hasattr(job_config, section.name):
            raise JobError('[job] needs custom_config_module = "titan_kda.job_config"')
    for error in type_errors(type(job_config), _as_table(job_config)):
        raise JobError(error)

    if job_config.model.name != MODEL_NAME:
        raise JobError(f"model.name must be {MODEL_NAME!r}, got {job_config.model.name!r}")
    for name, why in _MUST_BE_ONE.items():
        if _setting(job_config, name) != 1:
            raise JobError(f"{name} must be 1, got {_setting(job_config, name)}: {why}")
    for name, least in (_AT_LEAST | (_AT_LEAST_IF_VALIDATING if job_config.validation.enable else {})).items():
        if not least <= _setting(job_config, name) < float("inf"):
            raise JobError(f"{name} must be at least {least}, got {_setting(job_config, name)}")
    for name in ("optimizer.beta1", "optimizer.beta2"):
        if not 0 <= _setting(job_config, name) < 1:
            raise JobError(f"{name} must be from 0 to below 1, got {_setting(job_config, name)}")
    if job_config.optimizer.name not in ("Adam", "AdamW"):
        raise JobError(f"optimizer.name must be 'Adam' or 'AdamW', got {job_config.optimizer.name!r}")
    args = model_args_of(job_config)
    tp = job_config.parallelism.tensor_parallel_degree
    mixers = args.mixers()
    heads = {"kda": args.n_heads, "mla": args.full_heads, "gqa": args.group_heads}
    for name, count in heads.items():
        if name in mixers and count % tp:
            raise JobError(
                f"parallelism.tensor_parallel_degree must divide the number of heads: got {tp} with {count} heads"
            )
    _check_experts(job_config, args)
    for name in ("training.seq_len", "validation.seq_len"):
        if _setting(job_config, name) % tp and (name != "validation.seq_len" or job_config.validation.enable):
            raise JobError(f"{name} must be a multiple of tensor_parallel_degree = {tp}")

    generation = job_config.generation
    if generation.enable:
        if not job_config.validation.enable:
            raise JobError("generation.enable needs validation.enable = true: samples are drawn after a validation")
        if generation.freq < 1:
            raise JobError(f"generation.freq must be at least 1, got {generation.freq}")
        if not generation.prompts:
            raise JobError("generation.prompts must hold at least one prompt")
        check_sampling(generation)


def _check_experts(job_config: Any, args: Any) -> None:
    parallelism = job_config.parallelism
    ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    tp = parallelism.tensor_parallel_degree
    if not any(args.has_experts(layer) for layer in range(args.n_layers)):
        if ep != 1:
            raise JobError(f"parallelism.expert_parallel_degree must be 1, got {ep}: this model has no experts")
        return
    if args.num_experts % ep:
        raise JobError(
            f"parallelism.expert_parallel_degree must divide the number of experts: got {ep} with "
            f"{args.num_experts} experts"
        )
    # torchtitan 0.2.2 can split tokens over the tensor-parallel ranks instead; what comes before then loses gradient.
    needed = tp if ep > 1 else 1
    if etp != needed:
        raise JobError(
            f"parallelism.expert_tensor_parallel_degree must be {needed}, got {etp}: with expert parallelism it is "
            "tensor_parallel_degree, without it 1"
        )
    if args.expert_width % tp:
        raise JobError(
            f"parallelism.tensor_parallel_degree must divide the experts' width: got {tp} with expert_width = "
            f"{args.expert_width}"
        )
    if parallelism.expert_parallel_comm_backend != "standard":
        raise JobError(
            f"parallelism.expert_parallel_comm_backend must be 'standard', got "
            f"{parallelism.expert_parallel_comm_backend!r}"
        )
    if ep > 1 and job_config.optimizer.early_step_in_backward:
        raise JobError("optimizer.early_step_in_backward does not combine with expert parallelism")


def check_layout(job_config: Any, processes: int) -> None:
    """Refuses a parallel layout that ``processes`` cannot make up, and a batch that it cannot share.

    Raises:
        JobError: one line that names the settings.
    """
    parallelism, training = job_config.parallelism, job_config.training
    tp, replicate = parallelism.tensor_parallel_degree, parallelism.data_parallel_replicate_degree
    given = parallelism.data_parallel_shard_degree
    shard = processes // (tp * replicate) if given == -1 else given
    if shard < 1 or tp * replicate * shard != processes:
        raise JobError(
            f"parallelism: tensor_parallel_degree {tp} x data_parallel_replicate_degree {replicate} x "
            f"data_parallel_shard_degree {given} does not make the number of processes, {processes}"
        )
    ep, etp = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    if ep > 1 and (shard < 2 or shard * tp % (ep * etp)):
        raise JobError(
            f"parallelism.expert_parallel_degree: {ep} x expert_tensor_parallel_degree {etp} must divide "
            f"data_parallel_shard_degree {shard} x tensor_parallel_degree {tp}, and data_parallel_shard_degree must be "
            "at least 2"
        )
    if replicate > 1 and shard == 1 and tp > 1:
        raise JobError(
            "parallelism.data_parallel_replicate_degree: DDP does not combine with tensor parallelism; "
            "use data_parallel_shard_degree"
        )
    rows = training.local_batch_size * replicate * shard
    if training.global_batch_size >= 0 and (training.global_batch_size < 1 or training.global_batch_size % rows):
        raise JobError(
            f"training.global_batch_size must be a multiple of local_batch_size x data-parallel ranks = "
            f"{training.local_batch_size} x {replicate * shard}, got {training.global_batch_size}"
        )
    if job_config.optimizer.early_step_in_backward:  # a parameter's step follows each backward pass at once
        if replicate > 1 and shard == 1:
            raise JobError(
                "optimizer.early_step_in_backward does not combine with DDP: it would step before the ranks' gradients "
                "are added up; use data_parallel_shard_degree"
            )
        if training.global_batch_size > rows:
            raise JobError(
                "optimizer.early_step_in_backward does not combine with training.global_batch_size above "
                f"local_batch_size x data-parallel ranks = {rows}: it would step after each micro-batch"
            )
    if job_config.validation.enable and job_config.validation.steps == -1 and replicate * shard > 1:
        raise JobError(
            "validation.steps must be above 0 with several data-parallel ranks: their texts differ in length, "
            "and the first to finish would leave the others waiting"
        )


def check_dump_folder(path: str) -> None:
    """Refuses a job.dump_folder that cannot be made or written to; makes nothing.

    Raises:
        JobError: one line that says why.
    """
    folder = Path(path).absolute()
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or that no file can have
        raise JobError(f"job.dump_folder {shown(path)}: {getattr(error, 'strerror', None) or error}") from None
    there = next(p for p in (folder, *folder.parents) if os.path.lexists(p))
    if not there.is_dir():
        raise JobError(f"job.dump_folder {path!r}: {there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise JobError(f"job.dump_folder {path!r}: {there} cannot be written to")


def check_sampling(settings: Any, name: Callable[[str], str] = "generation.{}".format) -> None:
    """Checks max_new_tokens, temperature, top_k and top_p, wherever they come from; ``name`` says how to call one.

    Raises:
        JobError: one line that names the setting.
    """
    if settings.max_new_tokens < 1:
        raise JobError(f"{name('max_new_tokens')} must be at least 1, got {settings.max_new_tokens}")
    if not 0 <= settings.temperature < float("inf"):
        raise JobError(f"{name('temperature')} must be at least 0 and finite, got {settings.temperature}")
    if settings.top_k < 0:
        raise JobError(f"{name('top_k')} must be at least 0, got {settings.top_k}")
    if not 0 < settings.top_p <= 1:
        raise JobError(f"{name('top_p')} must be above 0 and at most 1, got {settings.top_p}")
