"""The decoder: its documents, counts, flavors, and what a new mixer needs."""

import dataclasses
import json

import pytest
import torch
from torch import nn

from titan_kda import model as model_module
from titan_kda.attention import ForgetGate
from titan_kda.cache import KDACache
from titan_kda.data import ByteTokenizer
from titan_kda.documents import DocumentCollator, document_offsets
from titan_kda.model import FLAVORS, Decoder, ModelArgs

TINY = dict(dim=32, n_layers=2, n_heads=2, key_width=8, value_width=12, ffn_width=48)


def make(seed=0, **changes):
    model = Decoder(ModelArgs(**{**TINY, **changes}))
    with torch.no_grad():
        model.init_weights(seed=seed)
    return model


def test_document_offsets():
    eos = 9
    tokens = torch.tensor([[1, 9, 2, 3], [9, 9, 4, 9], [1, 2, 3, 4]])
    assert document_offsets(tokens, eos).tolist() == [0, 2, 4, 5, 6, 8, 12]
    assert document_offsets(tokens, eos).dtype == torch.int32
    assert tokens.tolist()[1] == [9, 9, 4, 9]
    assert document_offsets(torch.tensor([[9]]), eos).tolist() == [0, 1]


def test_a_batch_brings_its_documents_offsets():
    eos = ByteTokenizer().eos_id
    rows = [torch.tensor([1, eos, 2, 3]), torch.tensor([eos, 4, 5, eos])]
    inputs, labels = DocumentCollator(eos)([({"input": row}, row + 1) for row in rows])
    tokens = torch.stack(rows)
    assert torch.equal(inputs["input"], tokens) and torch.equal(labels, tokens + 1)
    assert inputs["cu_seqlens"].tolist() == [0, 2, 4, 5, 8] and inputs["cu_seqlens"].dtype == torch.int32
    model = make()
    extra = {"cu_seqlens": inputs["cu_seqlens"], "other": labels}
    masks = model.get_attention_masks(tokens, ByteTokenizer(), extra)
    assert masks.cu_seq_q is inputs["cu_seqlens"] and masks.max_q == 4
    assert list(extra) == ["other"]  # the rest is for forward()
    found = model.get_attention_masks(tokens, ByteTokenizer(), {})
    assert torch.equal(found.cu_seq_q, masks.cu_seq_q)


def test_documents_do_not_see_each_other():
    tokenizer = ByteTokenizer()
    first, second = (
        tokenizer.encode("import os", add_bos=True, add_eos=True),
        tokenizer.encode("def f(x):", add_bos=True),
    )
    other = [*tokenizer.encode("import re", add_bos=True, add_eos=True)]
    for attn_type, apart in (("varlen", False), ("sdpa", True)):
        model = make(attn_type=attn_type)
        logits = []
        for head in (first, other):
            row = torch.tensor([head + second])
            masks = model.get_attention_masks(row, tokenizer) if attn_type == "varlen" else None
            with torch.no_grad():
                logits.append(model(row, masks)[0, len(first) :])
        assert (not torch.equal(*logits)) is apart
    with pytest.raises(TypeError):  # torchtitan's validator asks every model, and catches this alone
        make(attn_type="sdpa").get_attention_masks(torch.zeros(1, 2, dtype=torch.int64), tokenizer)


def test_rows_are_separate_documents():
    tokenizer, model = ByteTokenizer(), make()
    rows = torch.tensor([tokenizer.encode("abcdef"), tokenizer.encode("ghijkl")])
    with torch.no_grad():
        both = model(rows, model.get_attention_masks(rows, tokenizer))
        alone = model(rows[1:], model.get_attention_masks(rows[1:], tokenizer))
    torch.testing.assert_close(both[1:], alone)


@pytest.mark.parametrize("tied", [False, True])
def test_counts(tied):
    args = ModelArgs(**TINY, tie_embeddings=tied)
    model = Decoder(args)
    nparams, flops = args.get_nparams_and_flops(model, 512)
    dim, heads, key, value, ffn, vocab = 32, 2, 8, 12, 48, args.vocab_size
    projections = dim * heads * (2 * key + value) + dim * heads + heads * value * dim
    low_rank = dim * key + key * heads * key + dim * value + value * heads * value
    convolutions = 4 * heads * (2 * key + value)
    layer = projections + low_rank + convolutions + heads + heads * key + value + 3 * dim * ffn + 2 * dim
    assert nparams == 2 * layer + dim + vocab * dim * (1 if tied else 2)
    core = heads * (2 * 64 * (3 * key + 2 * value) + 6 * key * value + 2 * 4 * (2 * key + value))
    assert flops == 6 * (2 * layer + dim + vocab * dim) + 3 * 2 * core
    # KDA's cost a token does not grow with the sequence.
    assert args.get_nparams_and_flops(model, 1 << 20) == (nparams, flops)


def test_core_operations_at_the_usual_width():
    from titan_kda.attention import KimiDeltaAttention

    with torch.device("meta"):
        layer = KimiDeltaAttention(1024, 1, 128, 128)
    assert layer.core_flops_per_token() - 2 * 4 * 384 == 180_224


@pytest.mark.parametrize("flavor", FLAVORS)
def test_flavors_build_on_the_meta_device(flavor):
    args = FLAVORS[flavor]
    json.dumps(dataclasses.asdict(args))  # torchtitan logs it
    with torch.device("meta"):
        model = Decoder(args)
    nparams, flops = args.get_nparams_and_flops(model, 4096)
    low, high, active = {
        "debugmodel": (1e6, 5e6, 1),
        "340M": (320e6, 420e6, 1),
        "1.3B": (1.25e9, 1.45e9, 1),
        "kimi_linear_debug": (1e6, 5e6, 0.4),
        "kimi_linear_1b_a300m": (1e9, 1.2e9, 0.2),
        "kimi_linear_1b_a300m_full": (1e9, 1.2e9, 0.2),
        "kimi_linear_48b_a3b": (48e9, 50e9, 0.05),
    }[flavor]
    assert low < nparams < high
    assert flops > 5 * active * (nparams - args.vocab_size * args.dim)
    if "debug" not in flavor:
        assert args.key_width == args.value_width == 128


def test_every_parameter_is_filled_after_to_empty():
    with torch.device("meta"):
        model = Decoder(ModelArgs(**TINY))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with torch.no_grad():
        model.init_weights(seed=0)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert not list(model.buffers())
    again = make(seed=0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
    assert not torch.equal(make(seed=1).output.weight, again.output.weight)
    assert not torch.equal(model.layers["0"].mixer.q_proj.weight, model.layers["1"].mixer.q_proj.weight)


def test_tied_head_is_the_embedding():
    model = make(tie_embeddings=True)
    assert "output.weight" not in model.state_dict()
    tokens = torch.tensor([[1, 2, 3]])
    hidden = []
    model.norm.register_forward_hook(lambda module, args, output: hidden.append(output))
    with torch.no_grad():
        logits = model(tokens)
    torch.testing.assert_close(logits, hidden[0] @ model.tok_embeddings.weight.T)
    model.to_empty(device="cpu")  # must not untie
    with torch.no_grad():
        model.init_weights(seed=3)
        model(tokens)
    assert model.output._embedding[0] is model.tok_embeddings


def test_no_weight_decay_on_decay_parameters(caplog):
    from types import SimpleNamespace

    from torchtitan.config.job_config import Optimizer

    from titan_kda.register import build_kda_optimizers

    for in_backward in (False, True):
        model = make()
        config = Optimizer(weight_decay=0.1, implementation="foreach", early_step_in_backward=in_backward)
        container = build_kda_optimizers([model], config, SimpleNamespace(ep_enabled=False, pp_enabled=False))
        decay_of = {p: g["weight_decay"] for o in container.optimizers for g in o.param_groups for p in g["params"]}
        assert decay_of.keys() == set(model.parameters())
        special = {p for m in model.modules() if isinstance(m, ForgetGate) for p in m.parameters()}
        assert len(special) == 4
        assert {decay_of[p] for p in special} == {0.0}
        assert {decay_of[p] for p in decay_of.keys() - special} == {0.1}
        assert ("training.max_norm has no effect" in caplog.text) == in_backward  # torchtitan clips what is left


def test_a_new_mixer_needs_one_line(monkeypatch):
    class Mean(nn.Module):
        """The running mean of what came before: causal, with a cache of a sum and a count."""

        num_heads = 1

        def gather(self):
            return ()

        def new_cache(self):
            return KDACache()

        def core_flops_per_token(self, seq_len):
            return 2 * 32

        def init_weights(self, init, name, output_std):
            pass

        def forward(self, x, cu_seqlens, cache, max_tokens, *, decay):
            assert decay == ()
            return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]

    monkeypatch.setitem(model_module.MIXERS, "mean", lambda args: Mean())
    args = ModelArgs(**{**TINY, "n_layers": 5}, layer_pattern=["kda", "kda", "mean"])
    assert [args.mixer_of(i) for i in range(5)] == ["kda", "kda", "mean", "kda", "kda"]
    model = Decoder(args)
    with torch.no_grad():
        model.init_weights(seed=0)
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    assert isinstance(model.layers["2"].mixer, Mean)
    with pytest.raises(ValueError, match="no mixer is called 'median'"):
        Decoder(ModelArgs(**TINY, layer_pattern=["median"]))
