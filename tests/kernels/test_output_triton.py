"""The output stage's Triton kernel against a row-by-row FP64 computation, in the interpreter and on a GPU."""

import pytest
import torch
import torch._dynamo.testing
from kda_inputs import LOG2_E, cumulative
from output_inputs import by_rows, stage_inputs
from yardstick import DTYPES, check, rms_error

from titan_kda.kernels import chunk_fwd_o_vk, chunk_output
from titan_kda.kernels.configs import OutputConfig
from titan_kda.kernels.output import launch_chunk_output
from titan_kda.kernels.reference import naive_chunk_output

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
    for a_qk in (False, True) if form != "gk" and case == "dense" else (form == "gk",):
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


# ---- wherever Triton runs: launches that configs.py does not choose for these shapes ----


LAUNCHES = {
    "in turns": (OutputConfig(64, 4, stages=2), "fp16", 100, [79]),
    "in turns, packed": (OutputConfig(32, 4, stages=2, programs=3), "fp16", 100, [0, 70, 9, 0]),
    "in steps": (OutputConfig(64, 8, step_k=64), "fp32_chunk", 130, [0, 70, 9, 0]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_launches(launch, form):
    """Blocks that programs take in turns, and q in steps of its columns, with the norm's sum over all of them."""
    config, row, key_width, lengths = LAUNCHES[launch]
    packed = len(lengths) > 1
    inputs, cu_seqlens = stage_inputs(
        90 if packed else 79, form=form, key_width=key_width, value_width=70, dtype=DTYPES[row],
        lengths=lengths if packed else None,
    )  # fmt: skip
    inputs["q"] = inputs["q"] * 3
    want = by_rows(**inputs, scale=0.5, cu_seqlens=cu_seqlens, l2norm_q=True)[:, :79].to(DEVICE)
    x = there(inputs)
    o = torch.full_like(x["v_new"], float("nan"))
    launch_chunk_output(
        x["q"], x.get("k"), x["v_new"], x["h"], x.get("a_qk"), x.get("g"), x.get("gk"), o, 0.5, place(cu_seqlens), 64,
        True, None, head_major=False, log2=True, config=config,
    )  # fmt: skip
    check("o", o[:, :79], want, row, "o_any")
    assert o[:, 79:].isnan().all(), "rows past the last offset were written to"


# ---- on a GPU ----

gpu = pytest.mark.gpu
OP = torch.ops.titan_kda.chunk_output.default
FWD_OP = torch.ops.titan_kda.chunk_fwd_o_vk.default
ORDER = ("q", "v_new", "h", "a_qk", "k", "g", "gk")


def full_width(tokens=300, row="bf16", key_width=128, value_width=128, **options):
    """Inputs on the device, and the stage in FP64 on them."""
    heads = options.pop("heads", 4)
    inputs, cu_seqlens = stage_inputs(
        tokens, heads=heads, key_width=key_width, value_width=value_width, dtype=DTYPES[row], **options
    )
    inputs, cu_seqlens = there(inputs), place(cu_seqlens)
    return inputs, cu_seqlens, in_fp64(inputs, cu_seqlens, chunk_size=options.get("size", 64))


def in_fp64(inputs, cu_seqlens=None, **options):
    return naive_chunk_output(**{name: x.double() for name, x in inputs.items()}, cu_seqlens=cu_seqlens, **options)


def vk_arguments(inputs, unit=1.0):
    """Of chunk_fwd_o_vk, up to g; and its keywords. ``unit`` 1 / LOG2_E turns the gates into natural logs."""
    g, gk = inputs.get("g"), inputs.get("gk")
    o = torch.full_like(inputs["v_new"], float("nan"))
    v, h = inputs["v_new"].transpose(1, 2).contiguous(), inputs["h"].mT.contiguous()
    positional = [inputs["q"], inputs.get("k"), v, o, h, None if g is None else (g * unit).transpose(1, 2).contiguous()]
    return positional, dict(gk=None if gk is None else gk * unit, a_qk=inputs.get("a_qk"), impl="triton")


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_v", [32, 64, 128])
def test_full_width(block_v, form, row):
    """K = V = 128, grouped query heads, a short last chunk, two sequences; and the same bits every time."""
    inputs, _, want = full_width(row=row, form=form, batch=2, query_heads=2)
    output = chunk_output(**inputs, block_v=block_v, impl="triton")
    check("o", output, want, row, "o")
    for _ in range(3):
        assert torch.equal(output, chunk_output(**inputs, block_v=block_v, impl="triton"))


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("form", FORMS)
def test_packed_and_head_major_at_full_width(form, row):
    inputs, cu_seqlens, want = full_width(400, row, form=form, lengths=[130, 0, 1, 64, 200])
    check("o", chunk_output(**inputs, cu_seqlens=cu_seqlens)[:, :395], want[:, :395], row, "o")
    for unit in (1.0, 1 / LOG2_E):
        positional, named = vk_arguments(inputs, unit)
        o = chunk_fwd_o_vk(*positional, cu_seqlens=cu_seqlens, use_exp2=unit == 1.0, **named)
        assert o is positional[3]
        check("o", o[:, :395], want[:, :395], row, "o")
        assert o[:, 395:].isnan().all(), "rows past the last offset were written to"


@gpu
@pytest.mark.parametrize("row", ["bf16", "fp32_chunk"])
@pytest.mark.parametrize("key_width, value_width, size", [(60, 100, 64), (256, 64, 64), (16, 300, 64), (128, 128, 128)])
def test_widths(key_width, value_width, size, row):
    for form in ("g", "gk"):
        inputs, _, _ = full_width(130, row, key_width, value_width, heads=2, size=size, form=form)
        output = chunk_output(**inputs, chunk_size=size, l2norm_q=True, block_v=128 if size == 128 else None)
        check("o", output, in_fp64(inputs, chunk_size=size, l2norm_q=True), row, "o_any")


@gpu
@pytest.mark.parametrize("row", ["bf16", "fp32_chunk"])
@pytest.mark.parametrize("form", ["g", "gk"])
def test_strong_decay_at_full_width(form, row):
    """-5 nats a token: 2^(g_last - g_j) alone would be infinite in FP32."""
    inputs, _, _ = full_width(form=form, batch=2, query_heads=2, row=row)
    steps = torch.full_like(inputs[form], -5 * LOG2_E)
    inputs[form] = cumulative(steps)
    assert inputs[form].min() < -300 * LOG2_E
    check("o", chunk_output(**inputs, block_v=128), in_fp64(inputs), row, "o_any")


@gpu
def test_many_sequences_and_heads():
    """More than 65,535 chunks times heads: a grid axis would not hold them."""
    x = dict(q=torch.randn(1, 700, 96, 16), k=torch.randn(1, 700, 96, 16), v_new=torch.randn(1, 700, 96, 16))
    x["h"] = torch.randn(700, 96, 16, 16)
    x = {name: tensor.bfloat16().cuda() for name, tensor in x.items()}
    cu_seqlens = torch.arange(701, dtype=torch.int32, device="cuda")
    q, k, v, h = (tensor.double() for tensor in x.values())
    want = (torch.einsum("bthk,thkv->bthv", q, h) + (q * k).sum(-1, keepdim=True) * v) / 4
    check("o", chunk_output(**x, cu_seqlens=cu_seqlens), want, "bf16", "o_any")


@gpu
@pytest.mark.usefixtures("whole_gpu")
def test_states_of_more_than_2_31_elements():
    tokens, heads = 262_208, 32
    q, k = (torch.randn(1, tokens, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v_new = torch.randn(1, tokens, heads, 128, device="cuda", dtype=torch.bfloat16)
    h = torch.randn(1, tokens // 64, heads, 128, 128, device="cuda", dtype=torch.bfloat16)
    assert h.numel() > 2**31
    output = chunk_output(q, v_new, h, k=k)
    tail = [x[:, -128:] for x in (q, v_new)]
    assert torch.equal(output[:, -128:], chunk_output(*tail, h[:, -2:], k=k[:, -128:]))
    check(
        "o", output[:, -64:], in_fp64(dict(q=q[:, -64:], v_new=v_new[:, -64:], h=h[:, -1:], k=k[:, -64:])), "bf16", "o"
    )


@gpu
@pytest.mark.parametrize("form", ["g", "gk"])
def test_no_synchronisation_and_graph_replay(form):
    """Captured once, replayed after offsets, states and data were changed in place: eager's bits."""

    def draw(lengths, seed):
        inputs, cu_seqlens, _ = full_width(400, form=form, lengths=lengths, seed=seed)
        h = torch.zeros(12, *inputs["h"].shape[1:], dtype=torch.bfloat16, device="cuda")  # room for any such offsets
        h[: len(inputs["h"])] = inputs["h"]
        return [inputs.get(name) if name != "h" else h for name in ORDER] + [cu_seqlens]

    tensors = draw([130, 0, 1, 64, 200], 0)
    o = torch.empty_like(tensors[1])

    def call():
        *stage, cu_seqlens = tensors
        output = OP(*stage[:7], 0.5, cu_seqlens, 64, True, None, "triton")
        q, v_new, h, a_qk, k, g, gk = stage
        v, g = v_new.transpose(1, 2), None if g is None else g.transpose(1, 2)
        FWD_OP(q, k, v, o, h.mT, g, gk, a_qk, 0.5, cu_seqlens, 64, True, None, "triton")
        return output

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for lengths, seed in (([130, 0, 1, 64, 200], 0), ([7, 0, 290, 3, 3], 1), ([0, 300, 0, 0, 0], 2)):
        for old, new in zip(tensors, draw(lengths, seed)):
            if old is not None:
                old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        live = slice(0, sum(lengths))
        replayed = captured[:, live].clone(), o[:, live].clone()
        assert torch.equal(replayed[0], call()[:, live]) and torch.equal(replayed[1], o[:, live])
        assert replayed[0].any()


@gpu
@pytest.mark.parametrize("form", FORMS)
def test_opcheck_at_full_width(form):
    inputs, cu_seqlens, _ = full_width(395, form=form, lengths=[130, 0, 1, 64, 200])  # no rows left over
    if "a_qk" in inputs:
        inputs["a_qk"] = inputs["a_qk"].nan_to_num()
    q, v_new, h, a_qk, k, g, gk = (inputs.get(name) for name in ORDER)
    torch.library.opcheck(OP, (q, v_new, h, a_qk, k, g, gk, 0.5, cu_seqlens, 64, False, None, "triton"))
    v, g = v_new.transpose(1, 2), None if g is None else g.transpose(1, 2)
    o = torch.zeros_like(v_new)
    torch.library.opcheck(FWD_OP, (q, k, v, o, h.mT, g, gk, a_qk, 0.5, cu_seqlens, 64, True, None, "triton"))


@gpu
def test_compiles_whole():
    """fullgraph, both conventions; T goes on changing without a third compilation."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def call(q, k, v_new, h, g):
        o = torch.zeros_like(v_new)
        chunk_fwd_o_vk(q, k, v_new.transpose(1, 2), o, h.mT, g.transpose(1, 2))
        return o * 2, chunk_output(q, v_new, h, k=k, g=g) + 1

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for tokens in (70, 130, 300, 200):
        inputs, _, _ = full_width(tokens, form="g", batch=2, query_heads=2)
        for found, want in zip(compiled(**inputs), call(**inputs)):
            assert torch.equal(found, want)
    assert counter.frame_count <= 2


@gpu
@pytest.mark.parametrize("form", ["g", "gk"])
def test_against_fla(form):
    """Given the same states and values, within an RMS ratio of 1e-3 of the kernel that others use."""
    pytest.importorskip("fla.ops", reason="needs fla-core (the bench extra)")
    from fla.ops.common.chunk_o import chunk_fwd_o
    from fla.ops.gla.chunk import chunk_gla_fwd_o_gk

    inputs, _, _ = full_width(form=form, batch=2)
    q, v_new, h = inputs["q"], inputs["v_new"], inputs["h"]
    scale = 1 / 16  # exact in bf16: their gk form takes weights already scaled
    if form == "g":
        theirs = chunk_fwd_o(q, inputs["k"], v_new, h, g=inputs["g"], scale=scale)
    else:
        inputs["a_qk"] = inputs["a_qk"].nan_to_num()
        theirs = chunk_gla_fwd_o_gk(q, v_new, inputs["gk"], inputs["a_qk"] * scale, h, scale)
    assert rms_error(chunk_output(**inputs, scale=scale), theirs) < 1e-3
