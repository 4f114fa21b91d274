"""chunk_output and chunk_fwd_o_vk against the stage written out row by row in FP64, and the rules of their contract."""

import pytest
import torch
from kda_inputs import LOG2_E, core_inputs, cumulative
from output_inputs import NAN, by_rows, stage_inputs
from torch.autograd import gradcheck
from yardstick import DTYPES, check, max_error

from titan_kda.kernels import chunk_fwd_o_vk, chunk_output, naive_recurrent_kda
from titan_kda.kernels.reference import naive_chunk_output

IMPLS = ["reference"]  # the Triton path has test_output_triton.py
FORMS = ("none", "g", "gk")
OP = torch.ops.titan_kda.chunk_output.default
FWD_OP = torch.ops.titan_kda.chunk_fwd_o_vk.default


CASES = {
    "dense": dict(tokens=70, batch=2),
    "one token": dict(tokens=1),
    "grouped": dict(tokens=40, heads=4, query_heads=2),
    "one query head": dict(tokens=33, heads=3, query_heads=1),
    "packed": dict(tokens=80, lengths=[0, 65, 0, 3, 12]),
    "small chunks": dict(tokens=50, size=16),
    "packed small chunks": dict(tokens=50, size=32, lengths=[33, 1, 0]),
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_is_its_definition(case, form, impl):
    for a_qk in (False, True):
        for row in ("fp32", "bf16"):
            inputs, cu_seqlens = stage_inputs(**CASES[case], form=form, a_qk=a_qk, dtype=DTYPES[row])
            size = CASES[case].get("size", 64)
            output = chunk_output(**inputs, cu_seqlens=cu_seqlens, chunk_size=size, impl=impl)
            assert output.dtype == inputs["q"].dtype
            want = by_rows(**inputs, cu_seqlens=cu_seqlens, size=size)
            live = slice(None) if cu_seqlens is None else slice(0, int(cu_seqlens[-1]))
            check("o", output[:, live], want[:, live], row, "o_any")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_norm_scale_and_blocks(form, impl):
    inputs, _ = stage_inputs(20, form=form)
    inputs["q"] = inputs["q"] * 3
    inputs["q"][:, 5] = 0
    for block_v in (None, 32, 64, 128):
        output = chunk_output(**inputs, scale=0.7, l2norm_q=True, block_v=block_v, impl=impl)
        check("o", output, by_rows(**inputs, scale=0.7, l2norm_q=True), "fp32", "o_any")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("use_exp2", [True, False])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_vk_convention(case, form, use_exp2, impl):
    inputs, cu_seqlens = stage_inputs(**CASES[case], form=form)
    size = CASES[case].get("size", 64)
    unit = 1.0 if use_exp2 else 1 / LOG2_E
    o = torch.full_like(inputs["v_new"], NAN, dtype=torch.bfloat16)
    gates = {
        "g": None if form != "g" else (inputs["g"] * unit).transpose(1, 2).contiguous(),
        "gk": None if form != "gk" else inputs["gk"] * unit,
    }
    returned = chunk_fwd_o_vk(
        inputs["q"],
        inputs.get("k"),
        inputs["v_new"].transpose(1, 2).contiguous(),
        o,
        inputs["h"].mT.contiguous(),
        gates["g"],
        None,
        cu_seqlens,
        size,
        use_exp2,
        prefill_metadata=object(),
        gk=gates["gk"],
        a_qk=inputs.get("a_qk"),
        impl=impl,
    )
    assert returned is o
    live = slice(None) if cu_seqlens is None else slice(0, int(cu_seqlens[-1]))
    check("o", o[:, live], by_rows(**inputs, cu_seqlens=cu_seqlens, size=size)[:, live], "bf16", "o_any")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", ["g", "gk"])
def test_strong_decay(form, impl):
    """-10 nats a token, -640 a chunk: 2^(g_last - g_j) would be infinite, and the pair gate above the diagonal too."""
    inputs, _ = stage_inputs(130, form=form, nats=-5.0)
    inputs[form] = cumulative(torch.full_like(inputs[form], -10 * LOG2_E))
    output = chunk_output(**inputs, impl=impl)
    check("o", output, by_rows(**inputs), "fp32", "o_any")


@pytest.mark.parametrize("impl", IMPLS)
def test_is_the_last_stage_of_the_recurrence(impl):
    """h and v_new from the recurrence, a_qk by its definition: the output is the recurrence's."""
    inputs = core_inputs(1, 70, 2, 12, 8, dtype=torch.float64)
    q, k, v, gate, beta, state = inputs.values()
    want, _ = naive_recurrent_kda(**inputs)
    G = cumulative(gate)
    h, v_new, a_qk = [], torch.zeros_like(v), torch.zeros(1, 70, 2, 64, dtype=torch.float64)
    for t in range(70):
        if t % 64 == 0:
            h.append(state)
        decayed = state * (2 ** gate[:, t]).unsqueeze(-1)
        v_new[:, t] = beta[:, t].unsqueeze(-1) * (v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, t]))
        state = decayed + torch.einsum("bhk,bhv->bhkv", k[:, t], v_new[:, t])
        for j in range(t - t % 64, t + 1):
            a_qk[:, t, :, j % 64] = (q[:, t] * 2 ** (G[:, t] - G[:, j]) * k[:, j]).sum(-1)
    stage = dict(q=q, v_new=v_new, h=torch.stack(h, 1), a_qk=a_qk, gk=G)
    assert max_error(naive_chunk_output(**stage), want) < 1e-12
    output = chunk_output(**{name: x.float() for name, x in stage.items()}, impl=impl)
    check("o", output, want, "fp32", "o_any")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_past_the_end_is_read(form, impl):
    inputs, cu_seqlens = stage_inputs(80, lengths=[66, 0, 7], form=form)
    want = chunk_output(**inputs, cu_seqlens=cu_seqlens, impl=impl)
    for name in set(inputs) - {"h"}:
        inputs[name][:, 73:] = NAN
    before = {name: x.clone() for name, x in inputs.items()}
    output = chunk_output(**inputs, cu_seqlens=cu_seqlens, impl=impl)
    assert torch.equal(output[:, :73], want[:, :73])
    assert all(torch.equal(inputs[name].nan_to_num(), before[name].nan_to_num()) for name in inputs)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("token", [1, 16, 40, 63])
def test_causality_is_exact(form, token, impl):
    inputs, _ = stage_inputs(64, form=form)
    output = chunk_output(**inputs, impl=impl)
    for name in set(inputs) - {"h"}:
        inputs[name][:, token:] = -100.0 if name in ("g", "gk") else 1e5
    assert torch.equal(chunk_output(**inputs, impl=impl)[:, :token], output[:, :token])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("lengths", [None, [], [0, 0]])
def test_nothing_to_do(lengths, impl):
    inputs, cu_seqlens = stage_inputs(0 if lengths is None else 5, lengths=lengths)
    assert chunk_output(**inputs, cu_seqlens=cu_seqlens, impl=impl).shape == inputs["v_new"].shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, [5, 0, 2]])
def test_gradcheck(form, lengths):
    inputs, cu_seqlens = stage_inputs(
        8, lengths=lengths, form=form, key_width=3, value_width=2, size=4, dtype=torch.float64, query_heads=1
    )
    leaves = [x.nan_to_num().requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return naive_chunk_output(
            **dict(zip(inputs, tensors)), cu_seqlens=cu_seqlens, chunk_size=4, l2norm_q=lengths is None
        )

    assert gradcheck(function, leaves)


def test_gradients_only_where_asked_for():
    inputs, _ = stage_inputs(20, form="g")
    inputs["v_new"].requires_grad_()
    with pytest.raises(RuntimeError, match="chunk_output has no backward: chunk_kda trains"):
        chunk_output(**inputs)
    with torch.no_grad():
        want = chunk_output(**inputs)
    output = chunk_output(**inputs, impl="reference")
    assert torch.equal(output, want)
    output.sum().backward()
    assert inputs["v_new"].grad.any()
    o = torch.empty_like(inputs["v_new"])
    with pytest.raises(RuntimeError, match="chunk_fwd_o_vk has no backward"):
        chunk_fwd_o_vk(inputs["q"], inputs["k"], inputs["v_new"].transpose(1, 2), o, inputs["h"].mT)


# ---- the registered operators ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [None, [5, 0, 60]])
def test_opcheck(form, lengths, impl):
    inputs, cu_seqlens = stage_inputs(70, lengths=lengths, form=form, dtype=torch.bfloat16)
    q, k, v_new, h, g, gk, a_qk = (inputs.get(name) for name in ("q", "k", "v_new", "h", "g", "gk", "a_qk"))
    if a_qk is not None:
        a_qk = a_qk.nan_to_num()
    torch.library.opcheck(OP, (q, v_new, h, a_qk, k, g, gk, 0.5, cu_seqlens, 64, True, None, impl))
    v, g = v_new.transpose(1, 2), None if g is None else g.transpose(1, 2)
    o = torch.zeros_like(v_new)
    torch.library.opcheck(FWD_OP, (q, k, v, o, h.mT, g, gk, a_qk, 0.5, cu_seqlens, 64, True, None, impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_compiles_whole(impl):
    torch._dynamo.reset()

    def call(q, k, v_new, h, g):
        o = torch.zeros_like(v_new)
        chunk_fwd_o_vk(q, k, v_new.transpose(1, 2), o, h.mT, g.transpose(1, 2), impl=impl)
        return o, chunk_output(q, v_new, h, k=k, g=g, impl=impl) + 1

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens in (70, 130, 20):
        inputs, _ = stage_inputs(tokens, form="g")
        for found, want in zip(compiled(**inputs), call(**inputs)):
            assert torch.equal(found, want)


# ---- errors ----


def test_errors():
    inputs, _ = stage_inputs(20, heads=4, query_heads=2, form="g")
    full, _ = stage_inputs(20, form="gk")
    packed, cu_seqlens = stage_inputs(20, lengths=[3, 17])

    def error(kind, words):
        return pytest.raises(kind, match="(?s)chunk_output: .*" + words)

    def call(base=inputs, **changed):
        return chunk_output(**{**base, **changed})

    call()
    with error(ValueError, r"q must be \[B, T, Hg, K\], got 3"):
        call(q=inputs["q"][0])
    with error(ValueError, r"h must be .*\[1, 1, 4, 12, 20\], got \[1, 2, 4, 12, 20\]"):
        call(h=inputs["h"].repeat(1, 2, 1, 1, 1))
    with error(ValueError, r"h must be .*\[1, 1, 4, 12, 20\], got \[1, 1, 4, 20, 12\]"):
        call(h=inputs["h"].mT)
    with error(ValueError, r"k must be .*\[1, 20, 2, 12\], got \[1, 20, 4, 12\]"):
        call(k=inputs["k"].repeat(1, 1, 2, 1))
    with error(ValueError, r"g must be .*\[1, 20, 4\], got \[1, 4, 20\]"):
        call(g=inputs["g"].mT)
    with error(ValueError, r"a_qk must be .*\[1, 20, 2, 64\], got \[1, 20, 2, 32\]"):
        call(full, a_qk=full["a_qk"][..., :32])
    with error(ValueError, "H must be a multiple of q's head count 3, got 4"):
        call(q=torch.zeros(1, 20, 3, 12), k=torch.zeros(1, 20, 3, 12))
    with error(ValueError, "g and gk exclude each other"):
        call(full, g=torch.zeros(1, 20, 2))
    with error(ValueError, "gk needs a_qk"):
        call(full, a_qk=None)
    with error(ValueError, "k is needed to form a_qk"):
        call(k=None)
    with error(ValueError, "chunk_size must be one of .*, got 48"):
        call(chunk_size=48)
    with error(ValueError, "block_v must be None or one of .*, got 16"):
        call(block_v=16)
    with error(ValueError, "v_new must be on cpu .*got meta"):
        call(v_new=inputs["v_new"].to("meta"))
    with error(ValueError, "B must be 1 with cu_seqlens"):
        call(stage_inputs(20, batch=2)[0], cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="h must hold 2 chunks for these sequences, got 1"):
        chunk_output(**{**packed, "h": packed["h"][:1]}, cu_seqlens=cu_seqlens, impl="reference")
    with error(TypeError, "v_new must be bfloat16, float16, float32, got float64"):
        call(v_new=inputs["v_new"].double())
    with error(TypeError, "g must be float32, got bfloat16"):
        call(g=inputs["g"].bfloat16())
    with error(TypeError, "scale must be a float or None, got str"):
        call(scale="1")
    with error(ValueError, "impl must be"):
        call(impl="cuda")
    with pytest.raises(TypeError, match="unexpected keyword"):
        call(use_exp2=True)


def test_vk_errors():
    inputs, _ = stage_inputs(20)
    q, k, v, h = inputs["q"], inputs["k"], inputs["v_new"].transpose(1, 2), inputs["h"].mT
    o = torch.empty_like(inputs["v_new"])

    def error(kind, words):
        return pytest.raises(kind, match="(?s)chunk_fwd_o_vk: .*" + words)

    with error(NotImplementedError, "num_decodes must be 0 .*got 3"):
        chunk_fwd_o_vk(q, k, v, o, h, num_decodes=3)
    with error(NotImplementedError, "num_decode_tokens must be 0 .*got 2"):
        chunk_fwd_o_vk(q, k, v, o, h, num_decode_tokens=2)
    with error(ValueError, r"v must be \[B, H, T, V\]"):
        chunk_fwd_o_vk(q, k, inputs["v_new"], o, h)
    with error(ValueError, r"h must be \[B, chunks, H, V, K\] = \[1, 1, 2, 20, 12\], got \[1, 1, 2, 12, 20\]"):
        chunk_fwd_o_vk(q, k, v, o, inputs["h"])
    with error(ValueError, r"o must be \[B, T, H, V\] = \[1, 20, 2, 20\], got \[1, 19, 2, 20\]"):
        chunk_fwd_o_vk(q, k, v, o[:, 1:], h)
    with error(ValueError, "o is written to and must not be an expanded tensor"):
        chunk_fwd_o_vk(q, k, v, o[:, :1].expand_as(o), h)
    with error(ValueError, r"g must be \[B, H, T\] = \[1, 2, 20\], got \[1, 20, 2\]"):
        chunk_fwd_o_vk(q, k, v, o, h, torch.zeros(1, 20, 2))
    with error(ValueError, "k is needed to form a_qk"):
        chunk_fwd_o_vk(q, None, v, o, h)
    with error(TypeError, "o must be .*got float64"):
        chunk_fwd_o_vk(q, k, v, o.double(), h)
