"""Kimi Linear checkpoints in Hugging Face form (``KimiLinearForCausalLM``): names, shapes, config.json, folders.

A folder holds config.json, safetensors files and their index. ``layout`` says, for each tensor of such a folder, where
it lies in the model: a parameter under another name, in another shape, or one expert's part of a grouped one.
``config_of`` and ``parse_config`` are config.json out and in, and ``open_folder`` compares a whole folder with a model
before anything is loaded. Read are the released names, and those that transformers' own class holds in memory, where
convolutions and experts are packed; written are the released names.

``titan_kda.hf`` gives this to torchtitan, ``titan_kda.convert`` converts whole folders.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor

from .checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    InvalidCheckpointError,
    StoredSafetensor,
    open_safetensors,
)
from .model import Decoder, ModelArgs

MODEL_TYPE = "kimi_linear"
ARCHITECTURE = "KimiLinearForCausalLM"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5 * 10**9
"""Files are cut before they grow past this; a single larger tensor has a file of its own."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tiktoken.model",
    "chat_template.jinja",
)

_RELEASED_VOCAB = 163_840
_SHOWN = 20  # names shown in a message
_LOADABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class UnsupportedArchitectureError(CheckpointError, ValueError):
    """A model that Kimi Linear's Hugging Face form has no words for."""


# ---- names and shapes ----

_MODEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "mixer_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    # KDA
    **{
        f"mixer.{name}.weight": f"self_attn.{name}.weight"
        for name in ("q_proj", "k_proj", "v_proj", "f_a_proj", "f_b_proj", "b_proj", "g_a_proj", "g_b_proj")
    },
    **{f"mixer.{x}_conv.weight": f"self_attn.{x}_conv1d.weight" for x in "qkv"},
    "mixer.forget_gate.A_log": "self_attn.A_log",
    "mixer.forget_gate.dt_bias": "self_attn.dt_bias",
    "mixer.o_norm.weight": "self_attn.o_norm.weight",
    "mixer.o_proj.weight": "self_attn.o_proj.weight",
    # MLA
    "mixer.wq.weight": "self_attn.q_proj.weight",
    "mixer.wkv_a.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "mixer.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
    "mixer.wkv_b.weight": "self_attn.kv_b_proj.weight",
    "mixer.wo.weight": "self_attn.o_proj.weight",
    # dense feed-forward
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    # mixture of experts
    "moe.router.gate.weight": "block_sparse_moe.gate.weight",
    "moe.expert_bias": "block_sparse_moe.gate.e_score_correction_bias",
    "moe.experts.w1": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.w3": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.w2": "block_sparse_moe.experts.{}.w2.weight",
    "moe.shared_experts.w1.weight": "block_sparse_moe.shared_experts.gate_proj.weight",
    "moe.shared_experts.w3.weight": "block_sparse_moe.shared_experts.up_proj.weight",
    "moe.shared_experts.w2.weight": "block_sparse_moe.shared_experts.down_proj.weight",
}
_KEPT_FP32 = ("A_log", "dt_bias", "expert_bias")


class Slot(NamedTuple):
    """Where a tensor of a Hugging Face folder lies in the model.

    Attributes:
        name: the parameter or buffer.
        own_shape: that one's shape in the model.
        shape: the tensor's in the folder.
        expert: the row of a grouped parameter [E, ...], if the tensor is one expert's.
    """

    name: str
    own_shape: tuple[int, ...]
    shape: tuple[int, ...]
    expert: int | None = None

    def take(self, parameter: Tensor) -> Tensor:
        """The folder's tensor as a view of the whole parameter."""
        return (parameter if self.expert is None else parameter[self.expert]).view(self.shape)

    def place(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Offsets and sizes in the folder's tensor of a part of the parameter (of one expert, if it is one's)."""
        leaf = self.name.rpartition(".")[2]
        (start, *inner), (size, *rest) = offsets, sizes
        if leaf == "A_log":  # [H] to [1, 1, H, 1]
            return [0, 0, start, 0], [1, 1, size, 1]
        if leaf == "dt_bias":  # [H, K] to [H K]
            if rest != list(self.own_shape[1:]):
                raise NotImplementedError(f"{self.name} is split inside a head, which no layout of ours does")
            return [start * rest[0]], [size * rest[0]]
        if len(self.shape) == 3:  # a convolution: [C, W] to [C, 1, W]
            return [start, 0, *inner], [size, 1, *rest]
        return list(offsets), list(sizes)


def keeps_fp32(name: str) -> bool:
    """Whether a parameter or buffer is written as FP32 whatever the others are."""
    return name.rpartition(".")[2] in _KEPT_FP32


def layout(shapes: Mapping[str, Sequence[int]]) -> dict[str, Slot]:
    """The folder's keys in the model's order, each with its place in the model.

    Args:
        shapes: the model's state dict's names and shapes.

    Raises:
        UnsupportedArchitectureError: names that have no counterpart there; the message lists them.
    """
    slots: dict[str, Slot] = {}
    unknown = []
    for name, size in shapes.items():
        own = tuple(size)
        if name in _MODEL:
            slots[_MODEL[name]] = Slot(name, own, own)
            continue
        layer, _, rest = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers.") or rest not in _LAYER:
            unknown.append(name)
            continue
        key = f"model.layers.{layer}.{_LAYER[rest]}"
        if "{}" in key:
            slots |= {key.format(e): Slot(name, own, own[1:], e) for e in range(own[0])}
        elif rest.endswith("A_log"):
            slots[key] = Slot(name, own, (1, 1, *own, 1))
        elif rest.endswith("dt_bias"):
            slots[key] = Slot(name, own, (own[0] * own[1],))
        elif rest.endswith("_conv.weight"):
            slots[key] = Slot(name, own, (own[0], 1, own[1]))
        else:
            slots[key] = Slot(name, own, own)
    if unknown:
        raise UnsupportedArchitectureError(f"Kimi Linear's Hugging Face form has no place for {listed(unknown)}")
    if "output.weight" not in shapes and "tok_embeddings.weight" in shapes:
        # Tied: transformers' class ties nothing, so the head's copy is written out.
        slots["lm_head.weight"] = slots["model.embed_tokens.weight"]
    return slots


def shapes_of(args: ModelArgs) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the model's state dict; nothing is allocated."""
    with torch.device("meta"):
        model = Decoder(args)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def listed(items: Iterable[object], separator: str = ", ") -> str:
    texts = [str(item) for item in items]
    more = f"{separator}and {len(texts) - _SHOWN:,} more" if len(texts) > _SHOWN else ""
    return separator.join(texts[:_SHOWN]) + more


# ---- config.json ----


class TokenIds(NamedTuple):
    """Ids for config.json; None where there is none."""

    bos: int | None = None
    eos: int | None = None
    pad: int | None = None


def token_ids(vocab_size: int, tokenizer: Any = None, assets: str | os.PathLike | None = None) -> TokenIds:
    """The special tokens' ids.

    They are those of config.json in ``assets`` (``model.hf_assets_path``) if a Kimi Linear one lies there, else the
    tokenizer's, else for a vocabulary of the released size the released model's.
    """
    path = Path(assets, CONFIG) if assets else None
    if path is not None and path.is_file():
        config = _read_json(path)
        if config.get("model_type") == MODEL_TYPE:
            eos = config.get("eos_token_id")
            eos = eos[0] if isinstance(eos, list) and eos else eos
            return TokenIds(config.get("bos_token_id"), cast(Any, eos), config.get("pad_token_id"))
    if tokenizer is not None:
        return TokenIds(*(getattr(tokenizer, f"{name}_id", None) for name in TokenIds._fields))
    return TokenIds(163_584, 163_586, 163_839) if vocab_size == _RELEASED_VOCAB else TokenIds()


def unsupported(args: ModelArgs) -> list[str]:
    """What of a model Kimi Linear's Hugging Face form cannot say, each with the setting's name."""
    layers = range(args.n_layers)
    problems = []
    if others := sorted({args.mixer_of(i) for i in layers} - {"kda", "mla"}):
        problems.append(f"layer_pattern has {' and '.join(others)} layers")
    if any(args.mixer_of(i) == "kda" for i in layers):
        for name, want in (("gate", "softplus"), ("output_gate", "low_rank"), ("allow_neg_eigval", False)):
            if getattr(args, name) != want:
                problems.append(f"{name} is {getattr(args, name)!r}, not {want!r}")
        if args.key_width != args.value_width:
            problems.append(f"key_width {args.key_width} is not value_width {args.value_width}")
    if any(args.has_experts(i) for i in layers) and not args.num_shared_experts:
        problems.append("num_shared_experts is 0")
    return problems


def check_exportable(args: ModelArgs) -> None:
    """
    Raises:
        UnsupportedArchitectureError: one line with everything that the form cannot say.
    """
    if problems := unsupported(args):
        raise UnsupportedArchitectureError(f"Kimi Linear's Hugging Face form cannot hold it: {'; '.join(problems)}")


def config_of(args: ModelArgs, tokens: TokenIds, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a model.

    Args:
        args: the model.
        tokens: the special tokens' ids, from ``token_ids``.
        dtype: of the folder's weights.

    Raises:
        UnsupportedArchitectureError: one line with everything that the form cannot say.
    """
    check_exportable(args)
    layers = range(args.n_layers)
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": str(dtype).removeprefix("torch."),
        "vocab_size": args.vocab_size,
        "hidden_size": args.dim,
        "num_hidden_layers": args.n_layers,
        "hidden_act": "silu",
        "intermediate_size": args.ffn_width,
        "rms_norm_eps": args.norm_eps,
        "tie_word_embeddings": args.tie_embeddings,
        "num_attention_heads": args.full_heads,
        "num_key_value_heads": args.full_heads,
        "q_lora_rank": None,
        "kv_lora_rank": args.kv_lora_rank,
        "qk_nope_head_dim": args.qk_nope_head_dim,
        "qk_rope_head_dim": args.qk_rope_head_dim,
        "v_head_dim": args.v_head_dim,
        "mla_use_nope": True,
        "linear_attn_config": {
            "num_heads": args.n_heads,
            "head_dim": args.key_width,
            "short_conv_kernel_size": args.conv_width,
            "kda_layers": [i + 1 for i in layers if args.mixer_of(i) == "kda"],
            "full_attn_layers": [i + 1 for i in layers if args.mixer_of(i) == "mla"],
        },
        "first_k_dense_replace": sum(not args.has_experts(i) for i in layers),
    }
    if args.num_experts:
        config |= {
            "moe_intermediate_size": args.expert_width,
            "num_experts": args.num_experts,
            "num_experts_per_token": args.num_experts_per_token,
            "num_shared_experts": args.num_shared_experts,
            "num_expert_group": args.num_expert_group,
            "topk_group": args.topk_group,
            "use_grouped_topk": True,
            "moe_layer_freq": 1,
            "moe_router_activation_func": "sigmoid",
            "moe_renormalize": args.moe_renormalize,
            "routed_scaling_factor": args.routed_scaling_factor,
        }
    config |= {
        "bos_token_id": tokens.bos,
        "eos_token_id": tokens.eos,
        "pad_token_id": tokens.pad,
        "initializer_range": 0.02,
        "model_max_length": 1_048_576,  # the released one; without positions, memory alone bounds it
        "use_cache": any(args.mixer_of(i) == "mla" for i in layers),  # transformers' cache wants a layer of that kind
    }
    return config


# Names that transformers' own class writes, and what they are called in the released file.
_ALIASES = {
    "num_local_experts": "num_experts",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
# What a missing value means, as transformers' class reads it. What is not here must be there.
_DEFAULTS = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "q_lora_rank": None,
    "mla_use_nope": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "num_nextn_predict_layers": 0,
    "quantization_config": None,
}
_COMPARED = ("vocab_size", "hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "tie_word_embeddings")
_COMPARED += ("attention_bias", "num_nextn_predict_layers", "quantization_config")
_COMPARED_MLA = ("num_attention_heads", "num_key_value_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")
_COMPARED_MLA += ("qk_rope_head_dim", "v_head_dim", "mla_use_nope")
_COMPARED_MOE = ("num_experts", "num_experts_per_token", "num_shared_experts", "moe_intermediate_size")
_COMPARED_MOE += ("routed_scaling_factor", "moe_renormalize", "moe_router_activation_func")
_COMPARED_MOE += ("num_expert_group", "topk_group")
_MISSING = "nothing"


def parse_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """What of a config.json decides a model's mathematics and shapes, under one name each; ``_MISSING`` if absent.

    Layers are counted from 1. Values that the model has no use for (of experts, where there are none) are left out.
    """
    given = {**{_ALIASES.get(key, key): value for key, value in config.items() if key in _ALIASES}, **config}

    def value(name: str) -> Any:
        found = given.get(name)
        return _DEFAULTS.get(name, _MISSING) if found is None and name not in ("q_lora_rank",) else found

    count = value("num_hidden_layers")
    layers = range(count if isinstance(count, int) else 0)
    parsed = {name: value(name) for name in _COMPARED}

    linear = given.get("linear_attn_config")
    if isinstance(linear, Mapping):
        full = sorted(linear.get("full_attn_layers") or [])
        parsed["kda_layers"] = sorted(linear.get("kda_layers") or [])
    else:
        linear = {
            "num_heads": value("linear_num_heads"),
            "head_dim": value("linear_head_dim"),
            "short_conv_kernel_size": value("linear_conv_kernel_dim"),
        }
        kinds = given.get("layer_types") or []
        full = [i + 1 for i, kind in enumerate(kinds) if kind == "full_attention"]
        parsed["kda_layers"] = [i + 1 for i, kind in enumerate(kinds) if kind == "linear_attention"]
    parsed["full_attn_layers"] = full
    if parsed["kda_layers"]:
        for name in ("num_heads", "head_dim", "short_conv_kernel_size"):
            parsed[f"linear_attn_config.{name}"] = linear.get(name, _MISSING)
    if full:
        parsed |= {name: value(name) for name in _COMPARED_MLA}
        if parsed["num_key_value_heads"] == _MISSING:
            parsed["num_key_value_heads"] = parsed["num_attention_heads"]

    kinds = given.get("mlp_layer_types")
    if kinds:
        experts = [i + 1 for i, kind in enumerate(kinds) if kind == "sparse"]
    elif given.get("num_experts") is None:
        experts = []
    else:
        first, every = given.get("first_k_dense_replace", 1), given.get("moe_layer_freq") or 1
        experts = [i + 1 for i in layers if i >= first and i % every == 0]
    parsed["layers of experts"] = experts
    if experts:
        parsed |= {name: value(name) for name in _COMPARED_MOE}
    if len(experts) < len(layers):
        parsed["intermediate_size"] = value("intermediate_size")
    return parsed


def config_differences(config: Mapping[str, Any], args: ModelArgs) -> list[str]:
    """Every difference between a folder's config.json and a model, a text each.

    Raises:
        UnsupportedArchitectureError: the model has no form to compare.
    """
    if config.get("model_type") != MODEL_TYPE:
        return [f"model_type is {config.get('model_type')!r}, not {MODEL_TYPE!r}"]
    there = parse_config(config)
    ours = parse_config(config_of(args, TokenIds(), torch.float32))
    # A setting that only one of the two has use for follows from another difference, which is listed.
    return [
        f"{name}: {there[name]} there, {ours[name]} in the job"
        for name in ours
        if there.get(name, ours[name]) != ours[name]
    ]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise InvalidCheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict):
        raise InvalidCheckpointError(f"{path} holds no table")
    return values


def is_hf_folder(path: str | os.PathLike) -> bool:
    """Whether a folder has a config.json of a Kimi Linear model."""
    file = Path(path, CONFIG)
    return file.is_file() and _read_json(file).get("model_type") == MODEL_TYPE


# ---- a folder, read ----


@dataclass(frozen=True)
class _Source:
    """Where a folder's file holds a tensor: rows from ``start`` of a stored one, or of its entry ``expert``."""

    key: str
    shapes: tuple[tuple[int, ...], ...]
    start: int = 0
    expert: int | None = None


def _sources(key: str, slots: Mapping[str, Slot]) -> Iterator[_Source]:
    """The forms in which a folder may hold a tensor, the released one first."""
    slot = slots[key]
    shape = slot.shape
    prefix, _, leaf = key.rpartition("self_attn.")
    if leaf == "A_log" and prefix:
        heads = shape[2]
        yield _Source(key, (shape, (heads, 1), (heads,)))
    else:
        yield _Source(key, (shape,))
    # transformers' own class gathers the forget gate in a module of its own, packs the three convolutions into one and
    # the experts into two tensors, and calls a mixture of experts "mlp"; when it saves, it calls the dense layer
    # "block_sparse_moe" too (5.24).
    if prefix and leaf.startswith(("A_log", "dt_bias", "f_a_proj", "f_b_proj")):
        yield _Source(f"{prefix}self_attn.forget_gate.{leaf}", (shape, (shape[2],)) if leaf == "A_log" else (shape,))
    elif prefix and leaf.endswith("_conv1d.weight"):
        parts = [slots[f"{prefix}self_attn.{x}_conv1d.weight"].shape for x in "qkv"]
        start = sum(part[0] for part in parts[: "qkv".index(leaf[0])])
        packed = (sum(part[0] for part in parts), *shape[1:])
        yield _Source(f"{prefix}self_attn.conv1d.weight", (packed,), start)
    elif ".mlp." in key:
        yield _Source(key.replace(".mlp.", ".block_sparse_moe."), (shape,))
    elif slot.expert is not None:
        experts, part = slot.own_shape[0], leaf_of(slot.name)
        for folder in ("mlp", "block_sparse_moe"):
            packed = f"{key.partition('.block_sparse_moe.')[0]}.{folder}.experts."
            if part == "w2":
                yield _Source(packed + "down_proj", ((experts, *shape),), 0, slot.expert)
            else:
                start = 0 if part == "w1" else shape[0]
                yield _Source(packed + "gate_up_proj", ((experts, 2 * shape[0], *shape[1:]),), start, slot.expert)
    elif ".block_sparse_moe." in key:
        yield _Source(key.replace(".block_sparse_moe.", ".mlp."), (shape,))
    elif key == "lm_head.weight" and slot.name != "output.weight":
        yield _Source("model.embed_tokens.weight", (shape,))


def leaf_of(name: str) -> str:
    return name.rpartition(".")[2]


class Folder:
    """An open folder whose every tensor has been found fit for the model; a context manager. From ``open_folder``.

    Attributes:
        slots: the tensors, under their released names.
        dtypes: as stored, by the same names.
    """

    def __init__(
        self,
        path: Path,
        slots: dict[str, Slot],
        sources: Mapping[str, _Source],
        stored: Mapping[str, StoredSafetensor],
    ):
        self.path, self.slots = path, slots
        self._sources, self._stored = sources, stored
        self._keys: dict[str, list[str]] = {}
        for key, slot in slots.items():
            if not is_copy(key, slot):
                self._keys.setdefault(slot.name, []).append(key)
        self._files: dict[Path, Any] = {}
        self._open = ExitStack()
        self.dtypes = {key: stored[source.key].dtype for key, source in sources.items()}

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._open.close()

    def read(self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None) -> Tensor:
        """A part of a tensor (all of it by default), in the shape that its slot says, as stored."""
        slot, source = self.slots[key], self._sources[key]
        stored = self._stored[source.key]
        if stored.file not in self._files:
            self._files[stored.file] = self._open.enter_context(
                cast(Any, safe_open(str(stored.file), framework="pt", device="cpu"))
            )
        view = self._files[stored.file].get_slice(source.key)
        offsets = [0] * len(slot.shape) if offsets is None else offsets
        sizes = slot.shape if sizes is None else sizes
        place = tuple(slice(start, start + size) for start, size in zip(offsets, sizes))
        if len(stored.shape) != len(slot.shape) and source.expert is None:  # another shape of A_log
            return view[:].reshape(slot.shape)[place]
        if source.start:
            place = (slice(place[0].start + source.start, place[0].stop + source.start), *place[1:])
        if source.expert is None:
            return view[place]
        return view[(slice(source.expert, source.expert + 1), *place)][0]

    def parameter(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole parameter or buffer of the model, as stored if no dtype is given."""
        keys = self._keys[name]
        first = self.slots[keys[0]]
        if first.expert is None:
            return self.read(keys[0]).to(dtype).reshape(first.own_shape)
        whole = torch.empty(first.own_shape, dtype=dtype or self.dtypes[keys[0]])
        for key in keys:
            whole[self.slots[key].expert] = self.read(key)
        return whole


def is_copy(key: str, slot: Slot) -> bool:
    """Whether a tensor is the head's copy of a tied embedding."""
    return key == "lm_head.weight" and slot.name != "output.weight"


def open_folder(path: str | os.PathLike, args: ModelArgs) -> Folder:
    """Opens a folder after comparing its config.json and every tensor's name, shape and dtype with a model.

    Raises:
        CheckpointMismatchError: one line that lists all that differs.
        UnsupportedArchitectureError: the model has no Hugging Face form.
        CheckpointNotFoundError, UnfinishedCheckpointError, InvalidCheckpointError: no folder, or a damaged one.
    """
    root = Path(os.path.expanduser(path))
    if not os.path.isdir(root):
        raise CheckpointNotFoundError(f"no such folder: {root}")
    config = _read_json(root / CONFIG)
    if problems := config_differences(config, args):
        raise CheckpointMismatchError(f"{root / CONFIG} is of another model: {'; '.join(problems)}")
    stored = open_safetensors(root)
    slots = layout(shapes_of(args))
    sources: dict[str, _Source] = {}
    missing, shapes, dtypes, used = [], [], [], set()
    for key in slots:
        source = next((source for source in _sources(key, slots) if source.key in stored), None)
        if source is None:
            missing.append(key)
            continue
        sources[key] = source
        if source.key in used and source.expert is None and not source.start:
            continue
        held = stored[source.key]
        if source.key not in used and held.shape not in source.shapes:
            shapes.append(f"{source.key}: {list(held.shape)} there, {list(source.shapes[0])} in the model")
        if source.key not in used and held.dtype not in _LOADABLE:
            dtypes.append(f"{source.key}: {str(held.dtype).removeprefix('torch.')}")
        used.add(source.key)
    unexpected = [key for key in stored if key not in used]
    problems = [
        f"{len(found):,} tensor(s) {what}: {listed(found, separator)}"
        for found, what, separator in (
            (missing, "missing", ", "),
            (unexpected, "unexpected", ", "),
            (shapes, "of another shape", "; "),
            (dtypes, "of a type that is not read", "; "),
        )
        if found
    ]
    if problems:
        raise CheckpointMismatchError(f"{root} is of another model: {'; '.join(problems)}")
    folder = Folder(root, slots, sources, stored)
    for key, slot in slots.items():
        if is_copy(key, slot) and sources[key].key == key:
            _check_copy(folder, key)
    return folder


def _check_copy(folder: Folder, key: str, rows: int = 4096) -> None:
    shape = folder.slots[key].shape
    for start in range(0, shape[0], rows):
        part = ([start, 0], [min(rows, shape[0] - start), shape[1]])
        if not torch.equal(folder.read(key, *part), folder.read("model.embed_tokens.weight", *part)):
            folder.__exit__()
            raise CheckpointMismatchError(
                f"{folder.path}: lm_head.weight is not model.embed_tokens.weight, and the job ties them"
            )


def read_weights(path: str | os.PathLike, args: ModelArgs, *, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """A folder's weights under the model's own names, whole; raises as ``open_folder`` does."""
    with open_folder(path, args) as folder:
        return {name: folder.parameter(name, dtype) for name in dict.fromkeys(s.name for s in folder.slots.values())}


# ---- a folder, written ----


def write_config(
    folder: Path, args: ModelArgs, tokens: TokenIds, dtype: torch.dtype, assets: str | os.PathLike | None = None
) -> None:
    """config.json, and copies of the tokenizer's files from ``assets``."""
    text = json.dumps(config_of(args, tokens, dtype), indent=2) + "\n"
    (folder / CONFIG).write_text(text, encoding="utf-8")
    for name in TOKENIZER_FILES if assets else ():
        if Path(cast(Any, assets), name).is_file():
            shutil.copy(Path(cast(Any, assets), name), folder / name)


def plan_shards(sizes: Mapping[str, int], limit: int = MAX_SHARD_BYTES) -> list[list[str]]:
    """Keys split, in their order, among files of at most ``limit`` bytes. sizes: bytes of each tensor."""
    shards: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(key)
        filled += size
    return shards
