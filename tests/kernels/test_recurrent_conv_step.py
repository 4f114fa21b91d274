"""recurrent_kda_conv_step against the operators that it does the work of, and the rules of its contract.

Without a GPU the Triton kernel runs in Triton's interpreter on small shapes; the tests marked ``gpu`` are the same
rules at the sizes that only a GPU has.
"""

import pytest
import torch
from yardstick import DTYPES, check

from titan_kda.kernels import causal_conv1d_step, recurrent_kda_conv_step, recurrent_kda_step
from titan_kda.kernels.reference import naive_causal_conv1d_step, naive_recurrent_kda_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")
ROWS = ("q", "k", "v")
WRITTEN = ("q_cache", "k_cache", "v_cache", "state")
PARAMETERS = ("q_weight", "k_weight", "v_weight", "A_log", "dt_bias")


def conv_step_inputs(sequences, heads, key_width, value_width, row="fp32", slots=None, taps=4, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    dtype, slots = DTYPES[row], slots or sequences
    channels = dict(q=heads * key_width, k=heads * key_width, v=heads * value_width)
    inputs = {name: normal(sequences, channels[name]).to(dtype) for name in ROWS}
    inputs |= {f"{name}_weight": normal(channels[name], taps).to(dtype) for name in ROWS}
    inputs |= {f"{name}_cache": normal(slots, taps - 1, channels[name]).to(dtype) for name in ROWS}
    inputs |= dict(
        raw_gate=normal(sequences, heads, key_width).to(dtype),
        beta_logits=normal(sequences, heads).to(dtype),
        A_log=torch.log(1 + 15 * torch.rand(heads, generator=generator)),
        dt_bias=normal(heads, key_width),
        state=normal(slots, heads, key_width, value_width),
    )
    return {name: x.to(device) for name, x in inputs.items()}


def copied(inputs):
    return {name: x.clone() for name, x in inputs.items()}


def one_after_another(inputs, convolution, step, dtype=None, **settings):
    """The same by the separate operators; ``dtype``: what the convolved rows are rounded to in between."""
    heads = inputs["state"].shape[1]
    slots = {"state_indices": settings.get("state_indices")}
    rows = []
    for name in ROWS:
        y = convolution(inputs[name], inputs[f"{name}_weight"], inputs[f"{name}_cache"], **slots)
        rows.append(y.to(dtype or y.dtype).to(y.dtype).unflatten(1, (heads, -1)))
    rest = [inputs[name] for name in ("raw_gate", "beta_logits", "A_log", "dt_bias", "state")]
    return step(*rows, *rest, **settings)


def in_fp64(inputs, **settings):
    """The output, and the inputs with what was advanced."""
    wide = {name: x.double() for name, x in inputs.items()}
    dtype = inputs["q"].dtype
    return one_after_another(wide, naive_causal_conv1d_step, naive_recurrent_kda_step, dtype, **settings), wide


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
def test_is_within_the_yardstick(row, gate, impl):
    for key_width, value_width, taps in [(16, 16, 4), (12, 20, 2), (64, 5, 1), (16, 70, 3)]:
        inputs = conv_step_inputs(2, 2, key_width, value_width, row, taps=taps)
        settings = dict(gate=gate, lower_bound=-4.0, beta_scale=2.0)
        want, wide = in_fp64(inputs, **settings)
        before = copied(inputs)
        output = recurrent_kda_conv_step(**inputs, **settings, impl=impl)
        assert output.dtype == inputs["q"].dtype
        check("output", output, want, row, "o_any")
        check("state", inputs["state"], wide["state"], row, "state")
        assert all(torch.equal(inputs[name].double(), wide[name]) for name in WRITTEN[:3])
        assert all(torch.equal(x, before[name]) for name, x in inputs.items() if name not in WRITTEN)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["fp32", "bf16"])
def test_three_tokens_by_slot_are_the_separate_operators_bit_for_bit(row, impl):
    """With padding rows of NaN, and a slot that nobody names."""
    fused = conv_step_inputs(4, 2, 16, 8, row, slots=5)
    indices = torch.tensor([4, -1, 0, 2], dtype=torch.int32, device=DEVICE)
    for name in (*ROWS, "raw_gate", "beta_logits"):
        fused[name][1] = float("nan")
    fused["state"][3] = float("nan")
    separate = copied(fused)
    for token in range(3):
        settings = dict(state_indices=indices, beta_scale=2.0, impl=impl)

        def convolution(x, weight, cache, state_indices):
            return causal_conv1d_step(x, weight, cache, state_indices=state_indices, impl=impl)

        want = one_after_another(separate, convolution, recurrent_kda_step, **settings)
        output = recurrent_kda_conv_step(**fused, **settings)
        assert torch.equal(output, want) and not output[1].any() and torch.isfinite(output).all()
        for name in WRITTEN:
            assert torch.equal(fused[name].nan_to_num(7.0), separate[name].nan_to_num(7.0)), (token, name)


@pytest.mark.parametrize("impl", IMPLS)
def test_views_give_what_their_copies_give(impl):
    """Rows from one projection, caches and states as slices of pools for all layers."""
    plain = conv_step_inputs(2, 2, 16, 8)
    views = copied(plain)
    joined = torch.cat([plain[name] for name in ROWS], 1)
    views["q"], views["k"], views["v"] = joined.split([32, 32, 16], 1)
    for name in WRITTEN:
        views[name] = torch.stack([torch.zeros_like(plain[name]), plain[name]], 1)[:, 1]
    views["q_weight"] = plain["q_weight"].mT.contiguous().mT
    want = recurrent_kda_conv_step(**plain, impl=impl)
    assert torch.equal(recurrent_kda_conv_step(**views, impl=impl), want)
    assert all(torch.equal(views[name], plain[name]) for name in WRITTEN)


def test_of_no_heads():
    none = conv_step_inputs(2, 0, 16, 8)
    for impl in IMPLS:
        assert recurrent_kda_conv_step(**none, impl=impl).shape == (2, 0, 8)


def test_of_no_sequences():
    inputs = conv_step_inputs(1, 2, 16, 8)
    none = {name: x if name in (*WRITTEN, *PARAMETERS) else x[:0] for name, x in inputs.items()}
    for impl in IMPLS:
        assert recurrent_kda_conv_step(**none, impl=impl).shape == (0, 2, 8)


def test_refuses_gradients_but_for_the_explicit_reference():
    inputs = conv_step_inputs(2, 2, 16, 8)
    inputs["q_weight"].requires_grad_()
    for impl in (None, "triton"):
        with pytest.raises(RuntimeError, match=r"(?s)recurrent_kda_conv_step.*chunk_kda"):
            recurrent_kda_conv_step(**inputs, impl=impl)
    recurrent_kda_conv_step(**inputs, impl="reference").sum().backward()
    assert inputs["q_weight"].grad.any()


def test_refuses_bad_input_by_name():
    good = conv_step_inputs(2, 2, 16, 8)
    before = copied(good)
    for name in good:
        wrong = good[name].double() if name != "beta_logits" else good[name].int()
        with pytest.raises(TypeError, match=f"recurrent_kda_conv_step: {name} "):
            recurrent_kda_conv_step(**good | {name: wrong})
        short = good[name][:-1] if name.endswith("weight") else good[name][..., :-1]
        named = "v" if name == "state" else name  # the widths are the state's
        with pytest.raises(ValueError, match=f"recurrent_kda_conv_step: {named} "):
            recurrent_kda_conv_step(**good | {name: short})
        if name != "q":
            with pytest.raises(ValueError, match=r"recurrent_kda_conv_step: .* must be on"):
                recurrent_kda_conv_step(**good | {name: good[name].to("meta")})
    with pytest.raises(ValueError, match=r"recurrent_kda_conv_step: .*as many taps each"):
        fewer = dict(k_weight=good["k_weight"][:, 1:], k_cache=good["k_cache"][:, 1:])
        recurrent_kda_conv_step(**good | fewer)
    with pytest.raises(ValueError, match="recurrent_kda_conv_step: v_cache "):
        recurrent_kda_conv_step(**good | {"v_cache": good["v_cache"][:1]})
    for name in WRITTEN:
        expanded = good[name][:1].expand_as(good[name])
        with pytest.raises(ValueError, match=f"recurrent_kda_conv_step: {name} is written to"):
            recurrent_kda_conv_step(**good | {name: expanded})
    assert all(torch.equal(good[name], before[name]) for name in good)


@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck(impl):
    inputs = tuple(conv_step_inputs(2, 2, 16, 8, slots=3).values())
    indices = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for chosen in (None, indices):
        arguments = (*inputs, chosen, "bounded", -5.0, 1.0, impl)
        torch.library.opcheck(torch.ops.titan_kda.recurrent_kda_conv_step.default, arguments)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_whole_advances_state_and_caches(impl):
    torch._dynamo.reset()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("inductor" if DEVICE.type == "cuda" else "aot_eager")(graph, example_inputs)

    def step(indices, **inputs):
        return recurrent_kda_conv_step(state_indices=indices, impl=impl, **inputs) + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for sequences in (2, 3, 5):
        eager = conv_step_inputs(sequences, 2, 16, 8, slots=6)
        traced = copied(eager)
        indices = torch.randperm(6, generator=torch.Generator().manual_seed(0))[:sequences].int().to(DEVICE)
        assert torch.equal(compiled(indices, **traced), step(indices, **eager))
        assert all(torch.equal(traced[name], eager[name]) for name in WRITTEN)
    assert len(graphs) <= 2, f"{len(graphs)} graphs for three sizes"


# ---- at full size, on a GPU ----

WIDTHS = [(16, 16), (60, 100), (64, 128), (128, 128), (256, 64), (128, 256), (256, 256)]


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("key_width, value_width", WIDTHS)
def test_gpu_widths(key_width, value_width, row):
    for gate in ("bounded", "softplus"):
        inputs = conv_step_inputs(5, 3, key_width, value_width, row, slots=8)
        indices = torch.tensor([6, 1, -1, 7, 0], dtype=torch.int32, device=DEVICE)
        want, wide = in_fp64(inputs, state_indices=indices, gate=gate)
        output = recurrent_kda_conv_step(**inputs, state_indices=indices, gate=gate)
        check("output", output, want, row, "o_any")
        check("state", inputs["state"], wide["state"], row, "state")
        assert all(torch.equal(inputs[name].double(), wide[name]) for name in WRITTEN[:3])


@pytest.mark.gpu
def test_gpu_many_steps_are_the_separate_operators_bit_for_bit():
    """Every thread must have read a cache before any writes it: a race would show in some of many rows and steps."""
    fused = conv_step_inputs(70, 32, 128, 128, "bf16")
    separate = copied(fused)
    for seed in range(8):
        for name in ROWS:
            fused[name].normal_(generator=torch.Generator(DEVICE).manual_seed(seed))
            separate[name].copy_(fused[name])
        output = recurrent_kda_conv_step(**fused)
        assert torch.equal(output, one_after_another(separate, causal_conv1d_step, recurrent_kda_step))
        assert all(torch.equal(fused[name], separate[name]) for name in WRITTEN)


@pytest.mark.gpu
def test_gpu_a_sequence_has_the_same_bits_alone_and_in_a_large_batch():
    inputs = conv_step_inputs(70, 32, 128, 128, "bf16")
    alone = {name: x if name in PARAMETERS else x[69:].clone() for name, x in inputs.items()}
    assert torch.equal(recurrent_kda_conv_step(**alone)[0], recurrent_kda_conv_step(**inputs)[69])


@pytest.mark.gpu
def test_gpu_graph_replay_after_changes_in_place():
    inputs = conv_step_inputs(4, 4, 128, 128, "bf16", slots=6)
    indices = torch.tensor([3, -1, 0, 5], dtype=torch.int32, device=DEVICE)
    recurrent_kda_conv_step(**inputs, state_indices=indices)  # warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = recurrent_kda_conv_step(**inputs, state_indices=indices)
    for seed, slots in ((1, [5, 4, 3, 2]), (2, [-1, -1, 1, 0])):
        for name, x in conv_step_inputs(4, 4, 128, 128, "bf16", slots=6, seed=seed).items():
            inputs[name].copy_(x)
        indices.copy_(torch.tensor(slots, dtype=torch.int32))
        eager = copied(inputs)
        graph.replay()
        assert torch.equal(output, recurrent_kda_conv_step(**eager, state_indices=indices))
        assert all(torch.equal(inputs[name], eager[name]) for name in WRITTEN)
