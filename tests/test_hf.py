"""Kimi Linear in Hugging Face form: parity with transformers' own model, both ways, and what is refused."""

import gc
import json
import os
import random
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import forked
import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save as save_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_kda import convert, hf, hf_format
from titan_kda.checkpoint import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    UnfinishedCheckpointError,
    latest_step,
    read_weights,
    remove_half_written,
    resolve_checkpoint,
    unfinished_name,
)
from titan_kda.generate import Sample, Sampling, generate
from titan_kda.job_config import JobError
from titan_kda.model import FLAVORS, Decoder, ModelArgs
from titan_kda.sample import main as sample_main
from titan_kda.train import load_job

CHECKOUT = Path(__file__).resolve().parents[1]


def import_transformers():
    """transformers, which would take the checkout's folder kernels/ for another project's package of that name."""
    before = list(sys.path)
    sys.path[:] = [path for path in before if Path(path or os.curdir).resolve() != CHECKOUT]
    try:
        import transformers
        from transformers.utils.import_utils import is_kernels_available

        is_kernels_available()  # looks once and remembers
        return transformers.KimiLinearConfig, transformers.KimiLinearForCausalLM
    finally:
        sys.path[:] = before


HYBRID = ModelArgs(
    vocab_size=61,
    dim=32,
    n_layers=5,
    layer_pattern=["kda", "kda", "kda", "mla"],
    n_heads=3,
    key_width=12,
    value_width=12,
    attn_heads=2,
    kv_lora_rank=10,
    qk_nope_head_dim=8,
    qk_rope_head_dim=6,
    v_head_dim=10,
    ffn_width=40,
    num_experts=6,
    num_experts_per_token=2,
    expert_width=14,
    num_shared_experts=2,
    routed_scaling_factor=2.446,
    gate="softplus",
)


def random_hybrid(seed):
    """Layers of every kind in some order, widths that divide nothing."""
    draw = random.Random(seed)
    width = draw.randint(5, 20)
    return ModelArgs(
        vocab_size=draw.randint(30, 90),
        dim=draw.randint(20, 50),
        n_layers=4,
        layer_pattern=draw.sample(["kda", "kda", "mla", draw.choice(["kda", "mla"])], 4),
        n_heads=draw.randint(1, 4),
        key_width=width,
        value_width=width,
        conv_width=draw.randint(2, 5),
        attn_heads=draw.randint(1, 4),
        kv_lora_rank=draw.randint(5, 20),
        qk_nope_head_dim=draw.randint(4, 20),
        qk_rope_head_dim=draw.randint(1, 10),
        v_head_dim=draw.randint(4, 20),
        ffn_width=draw.randint(20, 60),
        num_experts=draw.randint(4, 9),
        num_experts_per_token=draw.randint(2, 4),  # of one, renormalised, the router would get no gradient
        num_shared_experts=draw.randint(1, 2),
        expert_width=draw.randint(8, 24),
        first_k_dense=draw.randint(1, 2),
        routed_scaling_factor=draw.uniform(0.5, 3),
        norm_eps=draw.choice([1e-5, 1e-3]),
        gate="softplus",
    )


ARCHITECTURES = {
    "hybrid": HYBRID,
    "random hybrid 1": random_hybrid(1),
    "random hybrid 2": random_hybrid(2),
    "dense, all KDA, another convolution": replace(
        HYBRID, n_layers=2, layer_pattern=["kda"], num_experts=0, conv_width=3, key_width=16, value_width=16
    ),
    "all MLA, experts from the first layer, no renormalisation": replace(
        HYBRID, n_layers=2, layer_pattern=["mla"], first_k_dense=0, moe_renormalize=False, num_shared_experts=1
    ),
}


def their_config(args):
    """The same architecture for transformers' class, by its own names."""
    make, _ = import_transformers()
    return make(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        num_hidden_layers=args.n_layers,
        layer_types=[
            "full_attention" if args.mixer_of(i) == "mla" else "linear_attention" for i in range(args.n_layers)
        ],
        mlp_layer_types=["sparse" if args.has_experts(i) else "dense" for i in range(args.n_layers)],
        linear_num_heads=args.n_heads,
        linear_head_dim=args.key_width,
        linear_conv_kernel_dim=args.conv_width,
        num_attention_heads=args.full_heads,
        num_key_value_heads=args.full_heads,
        kv_lora_rank=args.kv_lora_rank,
        qk_nope_head_dim=args.qk_nope_head_dim,
        qk_rope_head_dim=args.qk_rope_head_dim,
        v_head_dim=args.v_head_dim,
        intermediate_size=args.ffn_width,
        moe_intermediate_size=args.expert_width,
        num_local_experts=max(args.num_experts, 2),
        num_experts_per_tok=args.num_experts_per_token,
        n_shared_experts=args.num_shared_experts,
        routed_scaling_factor=args.routed_scaling_factor,
        norm_topk_prob=args.moe_renormalize,
        rms_norm_eps=args.norm_eps,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        use_cache="mla" in args.layer_pattern,  # their cache wants a layer of full attention
    )


def their_model(args, seed=0):
    """transformers' model with weights that make every part count: its own initial ones are nearly zero."""
    _, make = import_transformers()
    torch.manual_seed(seed)
    model = make(their_config(args)).eval()
    model.set_experts_implementation("eager")  # the other one wants widths that are multiples of 16 bytes
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith(("A_log", "dt_bias")):
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif name.endswith("e_score_correction_bias"):
                tensor.copy_(0.2 * torch.randn_like(tensor))
            elif tensor.ndim == 1:
                tensor.copy_(1 + 0.3 * torch.randn_like(tensor))
            else:
                scale = 1.0 if "embed_tokens" in name else tensor.shape[-1] ** -0.5
                tensor.copy_(scale * torch.randn_like(tensor))
    return model


def their_load(folder):
    """What transformers loads of a folder, and nothing missing or left over."""
    _, make = import_transformers()
    model, info = make.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model.eval()


def our_model(folder, args):
    with torch.device("meta"):
        model = Decoder(args)
    model.load_state_dict(hf_format.read_weights(folder, args), strict=True, assign=True)
    for layer in model.layers.values():
        if layer.moe is not None:
            layer.moe.tokens_per_expert = torch.zeros(args.num_experts)  # not among the weights
    return model.eval()


def fresh_model(args, seed=0):
    with torch.device("meta"):
        model = Decoder(args)
    model.to_empty(device="cpu")
    model.init_weights(seed=seed)
    draw = torch.Generator().manual_seed(seed)
    for layer in model.layers.values():
        if layer.moe is not None:
            torch.nn.init.normal_(layer.moe.expert_bias, std=0.1, generator=draw)
    return model.eval()


def prompt(args, rows=2, tokens=80):
    return torch.randint(args.vocab_size, (rows, tokens), generator=torch.Generator().manual_seed(1))


def tensors_of(folder):
    return {
        key: tensor for file in sorted(Path(folder).glob("*.safetensors")) for key, tensor in load_file(file).items()
    }


def edit(folder, change):
    """Rewrites a folder as one file after ``change(tensors)``."""
    tensors = tensors_of(folder)
    change(tensors)
    for file in [*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.index.json")]:
        file.unlink()
    save_file(tensors, Path(folder, "model.safetensors"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """A fresh hybrid model and its export."""
    folder = tmp_path_factory.mktemp("hybrid")
    return fresh_model(HYBRID), export(fresh_model(HYBRID), folder, max_shard_bytes=40_000)


@pytest.fixture
def folder(hybrid, tmp_path):
    """A copy of the hybrid's export, to be spoilt."""
    return Path(shutil.copytree(hybrid[1], tmp_path / "folder"))


def export(model, folder, **kwargs):
    """Saves a model as training does, and exports that."""
    save_checkpoint(model.state_dict(), checkpoint_id=folder / "step-3", no_dist=True)
    out = folder / "exported"
    convert.export_checkpoint(resolve_checkpoint(folder / "step-3"), model.model_args, out, **kwargs)
    return out


# ---- parity ----


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_of_transformers_gives_its_logits_gradients_and_text_and_goes_back(name, tmp_path):
    args = ARCHITECTURES[name]
    theirs = their_model(args)
    theirs.save_pretrained(tmp_path / "released")
    ours = our_model(tmp_path / "released", args)
    tokens = prompt(args)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.5
        torch.testing.assert_close(ours(tokens), expected, rtol=0, atol=1e-4)  # the recurrent core

    def loss(logits):
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    logits = ours(tokens)  # the chunked core
    torch.testing.assert_close(logits.detach(), expected, rtol=0, atol=1e-4)
    loss(logits).backward()
    loss(theirs(tokens).logits).backward()
    # Their gradients, in a folder like their weights: the same reader then says which is whose.
    gradients = {key: torch.zeros_like(tensor) for key, tensor in theirs.state_dict().items()}
    gradients |= {key: p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    (tmp_path / "gradients").mkdir()
    shutil.copy(tmp_path / "released" / "config.json", tmp_path / "gradients")
    save_file(gradients, tmp_path / "gradients" / "model.safetensors")
    wanted = hf_format.read_weights(tmp_path / "gradients", args)
    for key, parameter in ours.named_parameters():
        assert wanted[key].norm() > 0, key
        assert (parameter.grad - wanted[key]).norm() <= 1e-3 * wanted[key].norm(), key

    start = tokens[:1, :20]
    written = theirs.generate(start, max_new_tokens=64, do_sample=False)[0, 20:].tolist()
    sample = Sample(start[0].tolist())
    generate(ours, [sample], Sampling(max_new_tokens=64, temperature=0.0))
    assert sample.tokens == written

    # And back: what they load of our export is what they saved.
    out = export(ours, tmp_path)
    again = their_load(out)
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, expected)
    assert again.generate(start, max_new_tokens=64, do_sample=False)[0, 20:].tolist() == written


def test_transformers_names_in_memory_are_read_too(tmp_path):
    theirs = their_model(HYBRID)
    theirs.save_pretrained(tmp_path / "released")
    theirs.save_pretrained(tmp_path / "packed", save_original_format=False)
    keys = tensors_of(tmp_path / "packed").keys()
    assert "model.layers.0.self_attn.conv1d.weight" in keys and "model.layers.1.mlp.experts.gate_up_proj" in keys
    released, packed = (hf_format.read_weights(tmp_path / name, HYBRID) for name in ("released", "packed"))
    assert released.keys() == packed.keys() == Decoder(HYBRID).state_dict().keys()
    for name, tensor in released.items():
        assert torch.equal(packed[name], tensor), name


# ---- the released model ----


def released_table():
    """The released checkpoint's keys and shapes, written down from its table."""
    table = {
        "model.embed_tokens.weight": (163840, 2304),
        "model.norm.weight": (2304,),
        "lm_head.weight": (163840, 2304),
    }
    for layer in range(27):
        own = {"input_layernorm.weight": (2304,), "post_attention_layernorm.weight": (2304,)}
        if layer + 1 in (4, 8, 12, 16, 20, 24, 27):
            own |= {
                "self_attn.q_proj.weight": (6144, 2304),
                "self_attn.kv_a_proj_with_mqa.weight": (576, 2304),
                "self_attn.kv_a_layernorm.weight": (512,),
                "self_attn.kv_b_proj.weight": (8192, 512),
                "self_attn.o_proj.weight": (2304, 4096),
            }
        else:
            own |= {f"self_attn.{x}_proj.weight": (4096, 2304) for x in "qkv"}
            own |= {f"self_attn.{x}_conv1d.weight": (4096, 1, 4) for x in "qkv"}
            own |= {f"self_attn.{x}_a_proj.weight": (128, 2304) for x in "fg"}
            own |= {f"self_attn.{x}_b_proj.weight": (4096, 128) for x in "fg"}
            own |= {
                "self_attn.A_log": (1, 1, 32, 1),
                "self_attn.dt_bias": (4096,),
                "self_attn.b_proj.weight": (32, 2304),
                "self_attn.o_norm.weight": (128,),
                "self_attn.o_proj.weight": (2304, 4096),
            }
        if layer == 0:
            own |= {"mlp.gate_proj.weight": (9216, 2304), "mlp.up_proj.weight": (9216, 2304)}
            own |= {"mlp.down_proj.weight": (2304, 9216)}
        else:
            own |= {
                "block_sparse_moe.gate.weight": (256, 2304),
                "block_sparse_moe.gate.e_score_correction_bias": (256,),
                "block_sparse_moe.shared_experts.gate_proj.weight": (1024, 2304),
                "block_sparse_moe.shared_experts.up_proj.weight": (1024, 2304),
                "block_sparse_moe.shared_experts.down_proj.weight": (2304, 1024),
            }
            for e in range(256):
                own |= {f"block_sparse_moe.experts.{e}.{w}.weight": (1024, 2304) for w in ("w1", "w3")}
                own[f"block_sparse_moe.experts.{e}.w2.weight"] = (2304, 1024)
        table |= {f"model.layers.{layer}.{key}": shape for key, shape in own.items()}
    return table


RELEASED_CONFIG = {
    "model_type": "kimi_linear",
    "architectures": ["KimiLinearForCausalLM"],
    "hidden_size": 2304,
    "vocab_size": 163840,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-5,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.446,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_router_activation_func": "sigmoid",
    "moe_renormalize": True,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
}


def test_the_48b_flavor_has_the_released_keys_shapes_and_config():
    args = FLAVORS["kimi_linear_48b_a3b"]
    slots = hf_format.layout(hf_format.shapes_of(args))
    assert {key: slot.shape for key, slot in slots.items()} == released_table()
    kept = {key.rpartition(".")[2] for key, slot in slots.items() if hf_format.keeps_fp32(slot.name)}
    assert kept == {"A_log", "dt_bias", "e_score_correction_bias"}
    config = hf_format.config_of(args, hf_format.token_ids(args.vocab_size), torch.bfloat16)
    assert {key: config[key] for key in RELEASED_CONFIG} == RELEASED_CONFIG
    assert config["dtype"] == "bfloat16"
    assert hf_format.config_differences(RELEASED_CONFIG, args) == []
    make, _ = import_transformers()
    assert hf_format.config_differences(json.loads(make().to_json_string(use_diff=False)), args) == [
        "kda_layers: [1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 18, 19, 20, 22, 23, 24, 26, 27] there, "
        f"{RELEASED_CONFIG['linear_attn_config']['kda_layers']} in the job",
        "full_attn_layers: [5, 9, 13, 17, 21, 25] there, [4, 8, 12, 16, 20, 24, 27] in the job",
    ]  # transformers' defaults differ from the released file in nothing else


def test_files_of_the_48b_flavor_are_bounded():
    mapping = hf.KimiLinearAdapter(FLAVORS["kimi_linear_48b_a3b"], None).fqn_to_index_mapping
    table = released_table()
    assert mapping.keys() == table.keys()
    sizes = [0] * max(mapping.values())
    for key, file in mapping.items():
        sizes[file - 1] += 4 * torch.Size(table[key]).numel()
    assert max(sizes) <= hf_format.MAX_SHARD_BYTES and min(sizes[:-1]) > hf_format.MAX_SHARD_BYTES * 0.6
    assert hf.KimiLinearAdapter(HYBRID, None).fqn_to_index_mapping is None


# ---- folders ----


def test_an_exported_folder_is_sharded_indexed_and_comes_back_bit_for_bit(hybrid, tmp_path):
    model, folder = hybrid
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    seen = {}
    for name in files:
        assert (folder / name).stat().st_size < 40_000 + 5_000  # and its header
        seen |= {key: name for key in load_file(folder / name)}
    assert index["weight_map"] == seen
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(folder).values())
    convert.import_folder(folder, HYBRID, tmp_path / "step-0")
    weights = read_weights(resolve_checkpoint(tmp_path / "step-0"), hf_format.shapes_of(HYBRID))
    state_dict = model.state_dict()
    assert weights.keys() == state_dict.keys()
    for name, tensor in state_dict.items():
        assert torch.equal(weights[name], tensor), name
    assert not list(tmp_path.glob("unfinished*")) and not list(folder.parent.glob("unfinished*"))


def test_sixteen_bits_leave_a_log_and_the_biases_in_fp32(hybrid, tmp_path):
    model, _ = hybrid
    out = export(model, tmp_path, dtype=torch.bfloat16)
    kept = ("A_log", "dt_bias", "e_score_correction_bias")
    for key, tensor in tensors_of(out).items():
        assert tensor.dtype == (torch.float32 if key.endswith(kept) else torch.bfloat16), key
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    weights = hf_format.read_weights(out, HYBRID, dtype=torch.float32)
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor if hf_format.keeps_fp32(name) else tensor.bfloat16().float()), name
    convert.import_folder(out, HYBRID, tmp_path / "step-0")
    imported = read_weights(resolve_checkpoint(tmp_path / "step-0"), hf_format.shapes_of(HYBRID))
    assert imported["layers.0.mixer.forget_gate.A_log"].dtype == torch.float32
    assert imported["norm.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(3,), (3, 1), (1, 1, 3, 1)])
def test_every_shape_of_a_log_is_read(hybrid, folder, shape):
    edit(folder, lambda t: t.update({k: v.reshape(shape) for k, v in t.items() if k.endswith("A_log")}))
    weights = hf_format.read_weights(folder, HYBRID)
    for i in (0, 1, 2, 4):
        name = f"layers.{i}.mixer.forget_gate.A_log"
        assert torch.equal(weights[name], hybrid[0].state_dict()[name])


def test_a_tied_head_is_written_out_and_must_be_the_embedding_to_be_read(tmp_path):
    args = replace(HYBRID, n_layers=1, layer_pattern=["mla"], tie_embeddings=True, num_experts=0)
    model = fresh_model(args)
    out = export(model, tmp_path)
    tokens = prompt(args, tokens=20)
    with torch.no_grad():
        theirs = their_load(out)(tokens).logits
        torch.testing.assert_close(model(tokens), theirs, rtol=0, atol=1e-4)
        torch.testing.assert_close(our_model(out, args)(tokens), theirs, rtol=0, atol=1e-4)
    edit(out, lambda t: t.pop("lm_head.weight"))
    our_model(out, args)
    edit(out, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(CheckpointMismatchError, match="the job ties them"):
        our_model(out, args)


def test_memory_is_bounded_by_a_file_and_a_parameter(tmp_path, monkeypatch):
    args = replace(HYBRID, n_layers=9, dim=64, ffn_width=64)
    model = fresh_model(args)
    save_checkpoint(model.state_dict(), checkpoint_id=tmp_path / "step-3", no_dist=True)
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    whole, largest = sum(sizes), max(sizes)
    del model
    found = []

    def look(*_):
        """Adds the bytes of all tensors there are, each memory once."""
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.device.type == "cpu"]
        found.append(sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values()))

    def save_and_look(*arguments, **kwargs):
        look()
        save_file(*arguments, **kwargs)

    gc.collect()
    look()
    before = found.pop()
    limit = whole // 10
    monkeypatch.setattr(convert, "save_file", save_and_look)
    convert.export_checkpoint(resolve_checkpoint(tmp_path / "step-3"), args, tmp_path / "out", max_shard_bytes=limit)
    assert len(found) > 10 and limit / 2 < max(found) - before <= limit + 2 * largest < whole / 4
    found.clear()
    seen = iter(range(10**6))
    convert.import_folder(
        tmp_path / "out", args, tmp_path / "step-0", progress=lambda *_: None if next(seen) % 15 else look()
    )
    assert len(found) > 5 and max(found) - before <= 3 * largest


# ---- what is refused ----


def refusal(call, *args, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        call(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_wrong_tensors_are_listed_together_and_nothing_is_written(folder, tmp_path):
    def spoil(tensors):
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.g_a_proj.bias"] = torch.zeros(3)
        tensors["model.layers.5.input_layernorm.weight"] = torch.zeros(32)
        tensors["model.layers.0.self_attn.q_conv1d.weight"] = torch.zeros(36, 4)
        tensors["model.layers.3.self_attn.kv_b_proj.weight"] = torch.zeros(10, 36)
        tensors["model.layers.0.self_attn.A_log"] = torch.zeros(1, 3, 1, 1)
        tensors["lm_head.weight"] = torch.zeros(61, 32, dtype=torch.int8)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(40, 32).to(torch.float8_e4m3fn)

    edit(folder, spoil)
    message = refusal(convert.import_folder, folder, HYBRID, tmp_path / "new" / "step-0")
    for part in (
        "2 tensor(s) missing: ",
        "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "model.norm.weight",
        "2 tensor(s) unexpected: ",
        "model.layers.0.self_attn.g_a_proj.bias",
        "model.layers.5.input_layernorm.weight",
        "3 tensor(s) of another shape: ",
        "model.layers.0.self_attn.q_conv1d.weight: [36, 4] there, [36, 1, 4] in the model",
        "model.layers.3.self_attn.kv_b_proj.weight: [10, 36] there, [36, 10] in the model",
        "model.layers.0.self_attn.A_log: [1, 3, 1, 1] there, [1, 1, 3, 1] in the model",
        "2 tensor(s) of a type that is not read: ",
        "lm_head.weight: int8",
        "model.layers.0.mlp.up_proj.weight: float8_e4m3fn",
    ):
        assert part in message
    assert not (tmp_path / "new").exists()
    adapter = hf.KimiLinearAdapter(HYBRID, None)
    assert refusal(adapter.get_hf_storage_reader, str(folder)) == message
    assert refusal(hf_format.read_weights, folder, HYBRID) == message


def test_both_forms_of_one_tensor_are_refused(folder):
    edit(folder, lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.zeros(6, 32, 14)}))
    assert "unexpected: model.layers.1.mlp.experts.down_proj" in refusal(hf_format.read_weights, folder, HYBRID)


CHANGES = {
    "dim": (64, "hidden_size: 32 there, 64 in the job"),
    "n_layers": (6, "num_hidden_layers: 5 there, 6 in the job"),
    "layer_pattern": (["kda", "mla", "kda", "kda"], "full_attn_layers: [4] there, [2] in the job"),
    "n_heads": (2, "linear_attn_config.num_heads: 3 there, 2 in the job"),
    "conv_width": (3, "linear_attn_config.short_conv_kernel_size: 4 there, 3 in the job"),
    "attn_heads": (4, "num_attention_heads: 2 there, 4 in the job"),
    "kv_lora_rank": (12, "kv_lora_rank: 10 there, 12 in the job"),
    "num_experts_per_token": (3, "num_experts_per_token: 2 there, 3 in the job"),
    "routed_scaling_factor": (1.0, "routed_scaling_factor: 2.446 there, 1.0 in the job"),
    "moe_renormalize": (False, "moe_renormalize: True there, False in the job"),
    "first_k_dense": (2, "layers of experts: [2, 3, 4, 5] there, [3, 4, 5] in the job"),
    "norm_eps": (1e-6, "rms_norm_eps: 1e-05 there, 1e-06 in the job"),
    "tie_embeddings": (True, "tie_word_embeddings: False there, True in the job"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_of_another_model_is_refused(folder, name):
    value, line = CHANGES[name]
    assert line in refusal(hf_format.open_folder, folder, replace(HYBRID, **{name: value}))


def test_all_differences_of_a_config_are_listed(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_act": "relu", "q_lora_rank": 8, "mla_use_nope": False, "num_expert_group": 2}
    config |= {"moe_router_activation_func": "softmax", "quantization_config": {"bits": 4}, "attention_bias": True}
    del config["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config))
    message = refusal(hf_format.open_folder, folder, HYBRID)
    for part in (
        "hidden_act: relu there, silu in the job",
        "q_lora_rank: 8 there, None in the job",
        "mla_use_nope: False there, True in the job",
        "num_expert_group: 2 there, 1 in the job",
        "moe_router_activation_func: softmax there, sigmoid in the job",
        "quantization_config: {'bits': 4} there, None in the job",
        "attention_bias: True there, False in the job",
        "rms_norm_eps: nothing there, 1e-05 in the job",
    ):
        assert part in message


def test_folders_that_are_none(folder, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="no such folder"):
        hf_format.open_folder(tmp_path / "none", HYBRID)
    (folder / "config.json").write_text("{")
    assert "cannot be read" in refusal(hf_format.open_folder, folder, HYBRID)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "model_type is 'llama', not 'kimi_linear'" in refusal(hf_format.open_folder, folder, HYBRID)
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(hf_format.open_folder, folder, HYBRID)


def test_files_that_are_missing_or_cut_short(folder):
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    os.truncate(first, first.stat().st_size - 10)
    with pytest.raises(UnfinishedCheckpointError, match=f"{first.name} is half written or damaged"):
        hf_format.open_folder(folder, HYBRID)
    second.unlink()
    with pytest.raises(UnfinishedCheckpointError, match=f"half written: {second.name} is missing"):
        hf_format.open_folder(folder, HYBRID)


def test_what_the_form_cannot_say_is_not_exported(hybrid, tmp_path):
    args = replace(
        HYBRID, layer_pattern=["kda", "gqa"], gate="bounded", output_gate="full", allow_neg_eigval=True, value_width=8
    )
    message = refusal(export, fresh_model(args), tmp_path)
    for part in (
        "layer_pattern has gqa layers",
        "gate is 'bounded', not 'softplus'",
        "output_gate is 'full', not 'low_rank'",
        "allow_neg_eigval is True, not False",
        "key_width 12 is not value_width 8",
    ):
        assert part in message
    assert not (tmp_path / "exported").exists()
    with pytest.raises(CheckpointError, match="gqa"):
        hf.KimiLinearAdapter(args, None).to_hf({})


def test_an_interrupted_export_never_looks_whole(hybrid, tmp_path, monkeypatch):
    model, _ = hybrid
    save_checkpoint(model.state_dict(), checkpoint_id=tmp_path / "step-3", no_dist=True)
    checkpoint = resolve_checkpoint(tmp_path / "step-3")
    calls = 0

    def save_two(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 2:
            raise KeyboardInterrupt
        return save_file(*args, **kwargs)

    monkeypatch.setattr(convert, "save_file", save_two)
    with pytest.raises(KeyboardInterrupt):
        convert.export_checkpoint(checkpoint, HYBRID, tmp_path / "out", max_shard_bytes=40_000)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]

    calls = 0
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if killed: nothing is cleared away
    with pytest.raises(KeyboardInterrupt):
        convert.export_checkpoint(checkpoint, HYBRID, tmp_path / "out", max_shard_bytes=40_000)
    (left,) = tmp_path.glob("unfinished-*")
    assert not (tmp_path / "out").exists() and len(list(left.glob("*.safetensors"))) == 2
    with pytest.raises(UnfinishedCheckpointError, match=r"model-00003-of-.* is missing"):
        resolve_checkpoint(left)
    assert not re.search(r"step-\d", unfinished_name(Path("step-0")).name)  # torchtitan searches for that


def test_an_interrupted_last_save_is_cleared_away_and_a_whole_one_takes_its_name(hybrid, tmp_path):
    model, folder = hybrid
    tensors = tensors_of(folder)

    def save(manager, state_dict, checkpoint_id, fails=False, **kwargs):
        Path(checkpoint_id, "sharded").mkdir(parents=True)
        Path(checkpoint_id, "sharded", "shard-1.safetensors").touch()
        if fails:
            raise KeyboardInterrupt
        assert state_dict["norm.weight"].dtype == torch.bfloat16
        converted = manager.sd_adapter.to_hf(state_dict)
        save_file({key: tensor.clone() for key, tensor in converted.items()}, Path(checkpoint_id, "model.safetensors"))

    manager = SimpleNamespace(sd_adapter=hf.KimiLinearAdapter(HYBRID, None), states={"model": model})
    cast = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    with pytest.raises(KeyboardInterrupt):
        hf._save_last_step(manager, save, cast, tmp_path / "step-2", fails=True)
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-2"] and latest_step(tmp_path) is None
    (tmp_path / "unfinished-0-a_b1").mkdir()  # of an import
    (tmp_path / "unfinished-thoughts").mkdir()  # somebody's own
    remove_half_written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["unfinished-thoughts"]

    (tmp_path / "step-2").mkdir()
    with pytest.raises(KeyboardInterrupt):
        hf._save_last_step(manager, save, cast, tmp_path / "step-2", fails=True)
    hf._save_last_step(manager, save, cast, tmp_path / "step-2")
    names = {"step-2", "set-aside-2", "unfinished-thoughts"}
    assert {path.name for path in tmp_path.iterdir()} == names
    assert {path.name for path in (tmp_path / "step-2").iterdir()} == {"config.json", "model.safetensors"}
    for key, tensor in tensors_of(tmp_path / "step-2").items():
        kept = key.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        assert torch.equal(tensor, tensors[key] if kept else tensors[key].bfloat16()), key


def test_the_tokenizer_comes_along(hybrid, tmp_path):
    """Its files are copied, and its special tokens' ids are those of the folder it came from."""
    model, _ = hybrid
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "README.md"):
        (assets / name).write_text(name)
    byte = SimpleNamespace(bos_id=5, eos_id=6)
    assert hf_format.token_ids(61, byte, assets) == (5, 6, None)
    (assets / "config.json").write_text('{"model_type": "kimi_linear", "eos_token_id": [3, 4], "pad_token_id": 0}')
    tokens = hf_format.token_ids(61, byte, assets)
    assert tokens == (None, 3, 0) and hf_format.token_ids(61) == (None, None, None)
    out = export(model, tmp_path, tokens=tokens, assets=assets)
    assert {path.name for path in out.iterdir() if "model" not in path.name} == {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    config = json.loads((out / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 3, 0]


# ---- torchtitan's adapter ----


def test_the_adapter_goes_both_ways_without_copies(hybrid):
    model, folder = hybrid
    adapter = hf.KimiLinearAdapter(HYBRID, None)
    state_dict = model.state_dict()
    converted = adapter.to_hf(state_dict)
    stored = tensors_of(folder)
    assert converted.keys() == stored.keys()
    storages = {tensor.untyped_storage().data_ptr() for tensor in state_dict.values()}
    for key, tensor in converted.items():
        assert torch.equal(tensor, stored[key]) and tensor.untyped_storage().data_ptr() in storages, key
    back = adapter.from_hf(converted)
    assert back.keys() == state_dict.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state_dict.items())
    del converted["lm_head.weight"]
    converted["lm_head.bias"] = torch.zeros(61)
    converted["model.norm.weight"] = torch.zeros(16)
    message = refusal(adapter.from_hf, converted)
    for part in ("lm_head.weight is missing", "lm_head.bias is unexpected", "model.norm.weight is [16], not [32]"):
        assert part in message


@pytest.mark.parametrize("original", [True, False])
def test_torchtitan_reads_either_form_through_the_adapter(tmp_path, original):
    their_model(HYBRID).save_pretrained(tmp_path, save_original_format=original)
    adapter = hf.KimiLinearAdapter(HYBRID, None)
    model = fresh_model(HYBRID)
    # As torchtitan's checkpoint manager does it.
    converted = adapter.to_hf(model.state_dict())
    load_checkpoint(converted, storage_reader=adapter.get_hf_storage_reader(str(tmp_path)), no_dist=True)
    loaded = adapter.from_hf(converted)
    for name, tensor in hf_format.read_weights(tmp_path, HYBRID).items():
        assert torch.equal(loaded[name], tensor), name


def layouts(name, tensor):
    """How FSDP, TP, HSDP and expert parallelism on a mesh of 2 x 2 split a tensor; uneven splits among them."""
    yield [Shard(0), Replicate()]
    yield [Replicate(), Shard(0)]
    yield [Replicate(), Replicate()]
    if tensor.ndim > 1 and "dt_bias" not in name:
        yield [Shard(0), Shard(1)]
        yield [Shard(1), Replicate()]
    if tensor.shape[0] % 4 == 0 or tensor.ndim == 3:
        yield [Shard(0), Shard(0)]


@pytest.mark.parametrize("number", range(6))
def test_every_sharding_comes_out_as_the_right_parts(hybrid, number):
    """The ranks' parts make up each tensor, and each part shows the model's own storage."""
    model, _ = hybrid
    adapter = hf.KimiLinearAdapter(HYBRID, None)
    expected = adapter.to_hf(model.state_dict())
    filled = {key: torch.zeros_like(tensor, dtype=torch.int64) for key, tensor in expected.items()}
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            sharded = {}
            for name, tensor in model.state_dict().items():
                choices = list(layouts(name, tensor))
                placements = choices[number % len(choices)]
                sharded[name] = distribute_tensor(tensor.clone(), mesh, placements, src_data_rank=None)
            pieces = adapter.to_hf(sharded)
            assert pieces.keys() == expected.keys()
            for key, piece in pieces.items():
                assert isinstance(piece, hf.Piece) and piece.shape == expected[key].shape
                (*chunks,) = piece.__create_chunk_list__()
                items = piece.__create_write_items__(key, piece)
                assert [item.tensor_data.chunk for item in items] == chunks
                for chunk in chunks:
                    place = tuple(slice(a, a + b) for a, b in zip(chunk.offsets, chunk.sizes))
                    part = piece.__get_tensor_shard__(items[0].index)
                    assert torch.equal(part, expected[key][place]), (key, rank)
                    filled[key][place] += 1
                    origin = piece.origin
                    assert part.untyped_storage().data_ptr() == origin.to_local().untyped_storage().data_ptr()
            back = adapter.from_hf(pieces)
            assert back.keys() == sharded.keys()
            assert all(isinstance(back[name], DTensor) and back[name] is sharded[name] for name in back)
        finally:
            dist.destroy_process_group()
    for key, count in filled.items():
        assert count.unique().numel() == 1 and count.flatten()[0] in (1, 2, 4), key  # copies by replication


# ---- jobs ----

TINY_HYBRID = {
    "model.flavor": "kimi_linear_debug",
    "architecture.kv_lora_rank": 16,
    "architecture.qk_nope_head_dim": 16,
    "architecture.qk_rope_head_dim": 8,
    "architecture.v_head_dim": 16,
    "architecture.num_experts": 4,
    "architecture.expert_width": 32,
    "architecture.load_balance_coeff": 0.0,
    "training.steps": 2,
    "lr_scheduler.warmup_steps": 1,
    "validation.enable": False,
    "generation.enable": False,
    "checkpoint.last_save_model_only": True,
    "checkpoint.last_save_in_hf": True,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job file whose run of two steps has ended with an export of 16-bit weights, step-2."""
    folder = tmp_path_factory.mktemp("trained")
    toml = jobs.write_job(folder, TINY_HYBRID | {"checkpoint.export_dtype": "bfloat16"})
    run = forked.run_job(toml)
    assert run.returncode == 0, jobs.log_of(run)
    return toml


def test_a_job_ends_with_a_folder_that_transformers_loads(trained):
    checkpoint = trained.parent / "run" / "checkpoint"
    folder = checkpoint / "step-2"
    assert [path.name for path in checkpoint.iterdir()] == ["step-2"]
    assert {path.name for path in folder.iterdir()} == {
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    }
    config = json.loads((folder / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [256, 257, 258]
    assert config["dtype"] == "bfloat16"
    args = job_args(trained)
    a_log = tensors_of(folder)["model.layers.0.self_attn.A_log"]
    assert a_log.dtype == torch.float32 and not torch.equal(a_log, a_log.bfloat16().float())
    theirs = their_load(folder)
    ours = our_model(folder, args).float()
    tokens = prompt(args, tokens=70)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


def job_args(toml, *settings):
    from titan_kda.job_config import model_args_of

    return model_args_of(load_job([f"--job.config_file={toml}", *settings], reads_data=False))


def test_the_stock_trainer_loads_a_folder_and_saves_one_under_fsdp_and_expert_parallelism(trained, tmp_path):
    """torchrun -m torchtitan.train on two ranks; with a learning rate of 0 what it saves is what it loaded."""
    source = trained.parent / "run" / "checkpoint" / "step-2"
    settings = TINY_HYBRID | {
        "training.steps": 1,
        "optimizer.lr": 0.0,
        "parallelism.data_parallel_shard_degree": 2,
        "parallelism.expert_parallel_degree": 2,
        "checkpoint.initial_load_in_hf": True,
        "checkpoint.initial_load_path": str(source),
    }
    run = jobs.run_job(jobs.write_job(tmp_path, settings), processes=2, module="torchtitan.train")
    assert run.returncode == 0, jobs.log_of(run)
    saved = tmp_path / "run" / "checkpoint" / "step-1"
    assert sorted(p.name for p in saved.iterdir()) == sorted(p.name for p in source.iterdir())
    before, after = tensors_of(source), tensors_of(saved)
    assert before.keys() == after.keys()
    for key, tensor in after.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[key].float()), key
    config = json.loads((saved / "config.json").read_text())
    assert config == json.loads((source / "config.json").read_text()) | {"dtype": "float32"}


def test_a_checkpoint_of_fsdp_tensor_and_expert_parallelism_at_once_is_exported_as_its_model(tmp_path, capsys):
    """Four ranks each draw their parts of one model, and at a rate of 0 keep it: what comes out is it, bit for bit."""
    settings = TINY_HYBRID | {
        "training.steps": 1,
        "training.local_batch_size": 2,
        "optimizer.lr": 0.0,
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.expert_parallel_degree": 2,
        "parallelism.expert_tensor_parallel_degree": 2,
        "checkpoint.last_save_in_hf": False,
    }
    toml = jobs.write_job(tmp_path, settings)
    run = forked.run_job(toml, processes=4)
    assert run.returncode == 0, jobs.log_of(run)[-4000:]
    for line in ("Applied FSDP", "Applied tensor parallelism", "expert parallel 2, tensor parallel 2"):
        assert line in run.stdout, line
    assert len(list((tmp_path / "run" / "checkpoint" / "step-1").glob("*.distcp"))) == 4
    assert convert.main(["export", "--job", str(toml), "--out", str(tmp_path / "out")]) == 0, capsys.readouterr().err
    exported = tensors_of(tmp_path / "out")
    with torch.random.fork_rng():
        torch.manual_seed(jobs.TINY["debug"]["seed"])
        args = job_args(toml)
        model = Decoder(args)
        model.init_weights()
    expected = hf.KimiLinearAdapter(args, None).to_hf(model.state_dict())
    assert exported.keys() == expected.keys()
    for key, tensor in exported.items():
        assert torch.equal(tensor, expected[key]), key
    experts = [exported[f"model.layers.1.block_sparse_moe.experts.{e}.w2.weight"] for e in range(4)]
    assert not any(torch.equal(a, b) for a in experts for b in experts if a is not b)


def test_the_command_exports_and_imports_and_samples(trained, tmp_path, capsys):
    source = trained.parent / "run" / "checkpoint" / "step-2"

    def command(main, *args):
        status = main([*map(str, args)])
        return status, capsys.readouterr()

    seed = tmp_path / "run" / "checkpoint" / "step-0"
    status, shown = command(convert.main, "import", "--job", trained, "--folder", source, "--out", seed)
    assert status == 0 and "100%" in shown.err, shown.err
    out = tmp_path / "out"
    status, shown = command(
        convert.main,
        *("export", "--job", trained, "--checkpoint", seed, "--out", out, "--max-shard-gb", 1e-4, "--dtype", "float32"),
    )
    assert status == 0 and "100%" in shown.err, shown.err
    assert len(list(out.glob("*.safetensors"))) > 2
    before, after = tensors_of(source), tensors_of(out)
    assert before.keys() == after.keys() and all(torch.equal(after[k], v.float()) for k, v in before.items())
    texts = []
    for checkpoint in (seed, out, source):
        arguments = ("--prompt", "def ", "--temperature", 0, "--max-new-tokens", 12, "--dtype", "float32")
        status, shown = command(sample_main, "--job", trained, "--checkpoint", checkpoint, *arguments)
        assert status == 0, shown.err
        texts.append(shown.out)
    assert texts[0].startswith("def ") and len(set(texts)) == 1

    status, shown = command(convert.main, "export", "--job", trained, "--checkpoint", seed, "--out", out)
    assert status == 2 and "is there already" in shown.err
    other = ("--architecture.dim", 32)
    status, shown = command(convert.main, "import", "--job", trained, "--folder", source, "--out", "x", *other)
    assert status == 2 and shown.err.startswith("titan_kda.convert: error: ") and shown.err.count("\n") == 1
    assert "hidden_size: 64 there, 32 in the job" in shown.err
    for arguments in (("export", "--job", trained), ("copy",), ("import", "--job", trained, "--folder", "x", "--y")):
        status, shown = command(convert.main, *arguments)
        assert status == 2 and shown.err.count("\n") == 1, shown.err


def test_a_job_that_could_not_load_or_save_is_refused_at_its_start(trained, tmp_path):
    def start(**settings):
        values = TINY_HYBRID | {name.replace("__", "."): value for name, value in settings.items()}
        with pytest.raises(JobError) as caught:
            load_job([f"--job.config_file={jobs.write_job(tmp_path, values)}"])
        return str(caught.value)

    source = {
        "checkpoint__initial_load_in_hf": True,
        "checkpoint__initial_load_path": str(trained.parent / "run" / "checkpoint" / "step-2"),
    }
    message = start(architecture__gate="bounded")
    assert message.startswith("checkpoint.last_save_in_hf: ") and "gate is 'bounded'" in message
    message = start(**source, architecture__dim=32)
    assert message.startswith("checkpoint.initial_load_in_hf: ")
    assert "hidden_size: 64 there, 32 in the job" in message
    assert "initial_load_model_only" in start(**source, checkpoint__initial_load_model_only=False)
    assert "quantized" in start(**source, checkpoint__initial_load_in_hf_quantized=True)
    assert "has no config.json" in start(**source | {"checkpoint__initial_load_path": str(tmp_path)})
    assert not (tmp_path / "run").exists()
