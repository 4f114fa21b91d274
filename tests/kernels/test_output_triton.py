"""The output stage's Triton kernel against a row-by-row FP64 computation, in the interpreter and on a GPU."""

import pytest
import torch
from kda_inputs import LOG2_E
from output_inputs import by_rows, stage_inputs
from yardstick import DTYPES, check, rms_error

from titan_kda.kernels import chunk_fwd_o_vk, chunk_output

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
ROWS = ["fp32_chunk", "fp16", "bf16"] if ON_GPU else ["fp32_chunk", "fp16"]  # the interpreter's bf16 product is wrong
FORMS = ("none", "g", "gk")
CASES = {
    "dense": dict(tokens=70, batch=2, key_width=60),
    "grouped": dict(tokens=40, heads=4, query_heads=2),
    "packed": dict(tokens=84, lengths=[0, 65, 0, 3, 12, 0]),
    "small chunks": dict(tokens=50, size=16, value_width=70),
    "large chunks": dict(tokens=130, size=128, lengths=[129, 1]),
}


def there(inputs):
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def place(cu_seqlens):
    return None if cu_seqlens is None else cu_seqlens.to(DEVICE)


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_both_conventions_are_the_definition(case, form, row):
    """Token-major with either source of weights, and aiter's head-major convention, natural logs included."""
    for a_qk in (False, True):
        inputs, cu_seqlens = stage_inputs(**CASES[case], form=form, a_qk=a_qk, dtype=DTYPES[row])
        size = CASES[case].get("size", 64)
        want = by_rows(**inputs, cu_seqlens=cu_seqlens, size=size)
        live = slice(None) if cu_seqlens is None else slice(0, int(cu_seqlens[-1]))
        inputs, cu_seqlens = there(inputs), place(cu_seqlens)
        output = chunk_output(**inputs, cu_seqlens=cu_seqlens, chunk_size=size, impl="triton")
        assert output.dtype == inputs["q"].dtype
        check("o", output[:, live], want[:, live].to(DEVICE), row, "o_any")
        natural = {name: x / LOG2_E if name in ("g", "gk") else x for name, x in inputs.items()}
        g = natural.get("g")
        o = torch.full_like(inputs["v_new"].transpose(1, 2).contiguous(), float("nan")).transpose(1, 2)
        back = chunk_fwd_o_vk(
            inputs["q"],
            inputs.get("k"),
            inputs["v_new"].transpose(1, 2).contiguous(),
            o,
            inputs["h"].mT.contiguous(),
            None if g is None else g.transpose(1, 2).contiguous(),
            cu_seqlens=cu_seqlens,
            chunk_size=size,
            use_exp2=False,
            gk=natural.get("gk"),
            a_qk=inputs.get("a_qk"),
            impl="triton",
        )
        assert back is o
        check("o", o[:, live], want[:, live].to(DEVICE), row, "o_any")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_v", [32, 64, 128])
def test_blocks_and_the_norm(form, block_v):
    inputs, _ = stage_inputs(66, form=form, value_width=100)
    inputs["q"] *= torch.logspace(-3, 3, 66)[None, :, None, None]
    inputs["q"][:, 5] = 0
    want = by_rows(**inputs, scale=0.3, l2norm_q=True)
    output = chunk_output(**there(inputs), scale=0.3, l2norm_q=True, block_v=block_v, impl="triton")
    assert not output[:, 5].any() or form == "gk"  # with a_qk given, a zero row of q still has its weights
    assert rms_error(output, want.to(DEVICE)) < 1e-5


@pytest.mark.parametrize("form", ["g", "gk"])
def test_strong_decay(form):
    """-5 nats a token: a chunk's sum is below -300, and a split pair gate would overflow."""
    inputs, _ = stage_inputs(66, form=form, nats=-5.0)
    check("o", chunk_output(**there(inputs), impl="triton"), by_rows(**inputs).to(DEVICE), "fp32_chunk", "o_any")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_past_the_end_is_read(form):
    inputs, cu_seqlens = stage_inputs(30, lengths=[5, 0, 20], form=form)
    poisoned = {name: x.clone() for name, x in inputs.items()}
    for name in poisoned.keys() - {"h"}:
        poisoned[name][:, 25:] = float("nan")
    cu_seqlens = place(cu_seqlens)
    clean = chunk_output(**there(inputs), cu_seqlens=cu_seqlens, impl="triton")
    output = chunk_output(**there(poisoned), cu_seqlens=cu_seqlens, impl="triton")
    assert torch.equal(output[:, :25], clean[:, :25])


@pytest.mark.parametrize("lengths", [None, [5, 0, 20]])
def test_opcheck(lengths):
    inputs, cu_seqlens = stage_inputs(25, form="g", lengths=lengths)
    x = there(inputs)
    arguments = (x["q"], x["v_new"], x["h"], None, x["k"], x["g"], None, 0.3, place(cu_seqlens), 64, False, None)
    torch.library.opcheck(torch.ops.titan_kda.chunk_output.default, (*arguments, "triton"))
