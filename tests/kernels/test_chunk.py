"""chunk_kda against FP64 on the very tensors it was given, and the rules of its contract."""

import functools

import pytest
import torch
import torch.utils.checkpoint
from kda_inputs import LOG2_E, chunks, core_inputs, differences, offsets, per_token, results, to_chunk
from torch._dynamo.testing import CompileCounterWithBackend
from yardstick import DTYPES, check, max_error, rms_error

from titan_kda.kernels import chunk_kda, l2norm, naive_chunk_kda, naive_recurrent_kda, recurrent_kda

IMPLS = ["reference"]  # the Triton path has test_chunk_triton.py
NAN = float("nan")
OP = torch.ops.titan_kda.chunk_kda.default
BACKWARD_OP = torch.ops.titan_kda.chunk_kda_backward.default
PACKS = {
    "first": [0, 3, 70],
    "last": [65, 2, 0],
    "between": [5, 0, 0, 64, 1],
    "all": [0, 0, 0],
    "one token each": [1] * 9,
    "longer later": [2, 130, 64, 1],
}


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grads_like(inputs, seed=1):
    """Gradients for the output, in q's type, and for the final state."""
    output_shape, state_shape = inputs["v"].shape, inputs["initial_state"].shape
    return normal(*output_shape, seed=seed, dtype=inputs["q"].dtype), normal(*state_shape, seed=seed + 1)


def in_fp64(inputs, cu_seqlens, grad_output, grad_state):
    """Results and gradients in FP64, the gate's as gradients of each token's own gate.

    Those come from the recurrence on the cumulative gate's differences: it has no cancelling pairs.
    """
    wide = {name: x.double() for name, x in inputs.items()}
    grads = [None if grad is None else grad.double() for grad in (grad_output, grad_state)]
    output, state, found = results(naive_chunk_kda, wide, cu_seqlens, *grads)
    wide["gate"] = differences(wide.pop("cumulative_gate"), cu_seqlens)
    found["cumulative_gate"] = results(naive_recurrent_kda, wide, cu_seqlens, *grads)[2]["gate"]
    return output, state, found


def assert_within_yardstick(inputs, cu_seqlens=None, row="fp32_chunk", o="o_any", grads=None, **options):
    function = functools.partial(chunk_kda, **options)
    grads = grads_like(inputs) if grads is None else grads
    output, state, found = results(function, inputs, cu_seqlens, *grads)
    want, want_state, want_found = in_fp64(inputs, cu_seqlens, *grads)
    assert output.dtype == inputs["q"].dtype and state.dtype == torch.float32
    assert all(found[name].dtype == inputs[name].dtype for name in inputs)
    check("output", output, want, row, o)
    check("final state", state, want_state, row, "state")
    found["cumulative_gate"] = per_token(found["cumulative_gate"].double(), cu_seqlens)
    for name in inputs:
        kind = "gate_grad" if name in ("cumulative_gate", "beta") else "grad"
        check(f"d({name})", found[name], want_found[name], row, kind)


# ---- values and gradients ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["bf16", "fp16", "fp32_chunk"])
@pytest.mark.parametrize(
    "batch, tokens, heads, key_width, value_width",
    [(2, 1, 2, 16, 8), (1, 16, 1, 60, 20), (1, 63, 3, 12, 16), (2, 65, 1, 100, 36), (1, 150, 2, 16, 24)],
)
def test_dense_is_within_the_yardstick(batch, tokens, heads, key_width, value_width, row, impl):
    for keys in ("random", "silu"):
        inputs = core_inputs(batch, tokens, heads, key_width, value_width, dtype=DTYPES[row], keys=keys)
        assert_within_yardstick(to_chunk(inputs), row=row, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["bf16", "fp32_chunk"])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_is_within_the_yardstick(pack, row, impl):
    cu_seqlens = offsets(PACKS[pack])
    inputs = core_inputs(1, sum(PACKS[pack]), 2, 12, 9, sequences=len(PACKS[pack]), dtype=DTYPES[row])
    assert_within_yardstick(to_chunk(inputs, cu_seqlens), cu_seqlens, row, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_mixed_dtypes(impl):
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))
    inputs.update(q=inputs["q"].half(), v=inputs["v"].bfloat16(), beta=inputs["beta"].double())
    assert_within_yardstick(inputs, row="bf16", impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate_lower_bound", [-1e-3, -5.0, -1e30])
def test_a_promised_bound_changes_nothing_but_speed(gate_lower_bound, impl):
    inputs = core_inputs(1, 70, 2, 16, 8, gate=max(gate_lower_bound, -5.0))
    assert_within_yardstick(to_chunk(inputs), gate_lower_bound=gate_lower_bound, impl=impl)


def jumping_gate(tokens, strong):
    """-0.01 nats, and -150 at the ``strong`` tokens."""
    gate = torch.full((1, tokens, 1, 1), -0.01 * LOG2_E)
    gate[:, strong] = -150 * LOG2_E
    return gate


STRONG = {
    str(nats): torch.full((1, 130, 1, 1), nats * LOG2_E) for nats in (0.0, -0.01, -1.0, -5.0, -12.0, -20.0, -50.0)
}
STRONG["a run"] = jumping_gate(130, slice(20, 33))
STRONG["at edges"] = jumping_gate(130, [15, 16, 63, 64, 100])
STRONG["by channel"] = torch.where(
    torch.rand(1, 130, 2, 16, generator=torch.Generator().manual_seed(5)) < 0.1, -150.0, -0.01
) * LOG2_E  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", STRONG)
def test_gradients_at_any_gate(gate, impl):
    """Terms that cancel on paper, left in, put the gate's gradient off by 8% at -12 nats and by 82 times it at -20."""
    inputs = core_inputs(1, 130, 2, 16, 8)
    inputs["gate"] = STRONG[gate].expand_as(inputs["gate"]).contiguous()
    assert_within_yardstick(to_chunk(inputs), impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_pairs_that_do_not_decay_give_the_gate_nothing(impl):
    """One token and no state: its own pair and its own write are all there is."""
    inputs = to_chunk(core_inputs(2, 1, 2, 16, 8))
    grads = grads_like(inputs)
    inputs["initial_state"] = torch.zeros_like(inputs["initial_state"])
    found = results(functools.partial(chunk_kda, impl=impl), inputs, None, *grads, wrt=("cumulative_gate", "k"))[2]
    assert not found["cumulative_gate"].any() and found["k"].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("scale", [1e-6, 1e4])
def test_initial_states_of_any_size(scale, impl):
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))
    inputs["initial_state"] *= scale
    assert_within_yardstick(inputs, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("row, limits", [("fp32", (1e-4, 1e-4)), ("fp16", (5e-3, 1e-2)), ("bf16", (3e-2, 1e-1))])
def test_identical_keys(row, limits, beta, impl):
    """The inverse has entries of +-1 (beta 1); by repeated squaring it would pass through powers of 1e17."""
    inputs = core_inputs(1, 64, 2, 16, 8, dtype=DTYPES[row], gate=0.0)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    inputs = to_chunk(inputs)
    output, state, found = results(functools.partial(chunk_kda, impl=impl), inputs, None, *grads_like(inputs))
    want, want_state = naive_chunk_kda(**{name: x.double() for name, x in inputs.items()}, output_final_state=True)
    limit = limits[beta == 2.0]
    assert rms_error(output, want) <= limit and rms_error(state, want_state) <= limit
    assert all(torch.isfinite(grad).all() for grad in found.values())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("which", ["output", "state"])
def test_gradient_of_one_result_alone(which, impl):
    cu_seqlens = offsets([0, 70, 3])
    inputs = to_chunk(core_inputs(1, 73, 2, 12, 8, sequences=3), cu_seqlens)
    grad_output, grad_state = grads_like(inputs)
    if which == "output":
        assert_within_yardstick(inputs, cu_seqlens, grads=(grad_output, None), impl=impl)
        output, _ = chunk_kda(*(x.requires_grad_() for x in inputs.values()), cu_seqlens=cu_seqlens, impl=impl)
        found = torch.autograd.grad(output, list(inputs.values()), grad_output)
        want = results(functools.partial(chunk_kda, impl=impl), inputs, cu_seqlens, grad_output)[2]
        assert all(torch.equal(a, b) for a, b in zip(found, want.values()))
    else:
        function = functools.partial(chunk_kda, impl=impl)
        _, _, found = results(function, inputs, cu_seqlens, None, grad_state)
        _, _, want = in_fp64(inputs, cu_seqlens, None, grad_state)
        assert not found["q"].any(), "the final state does not depend on q"
        for name in ("k", "v", "initial_state"):
            check(name, found[name], want[name], "fp32_chunk", "grad")
        check("beta", found["beta"], want["beta"], "fp32_chunk", "gate_grad")
        gate = per_token(found["cumulative_gate"].double(), cu_seqlens)
        check("gate", gate, want["cumulative_gate"], "fp32_chunk", "gate_grad")


# ---- exact properties ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta"])
def test_a_nan_is_not_hidden(name, impl):
    """It is its own token's output and, unless it is q's, all that comes after and the final state."""
    inputs = core_inputs(1, 110, 2, 16, 8)
    inputs[name][:, 40] = NAN
    output, state = chunk_kda(**to_chunk(inputs), output_final_state=True, impl=impl)
    assert output[:, 40].isnan().all()
    assert name == "q" or (output[:, 41:].isnan().all() and state.isnan().any(-2).all())


LATER = {"q": 1e4, "k": -3.0, "v": 1e8, "gate": -300.0, "beta": 5.0}
HUGE = {"q": 1e30, "k": -1e30, "v": 3e38, "gate": -1.0, "beta": 1e30}  # what they make overflows


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "token, later", [*((token, LATER) for token in (1, 15, 16, 17, 40, 63, 64, 100)), (40, HUGE), (64, HUGE)]
)
def test_causality_is_exact(token, later, impl):
    """No bit of an output before ``token``, nor of the gradients of a loss on those outputs, depends on its values."""
    function = functools.partial(chunk_kda, impl=impl)
    inputs = core_inputs(1, 110, 2, 16, 8)
    grad_output, _ = grads_like(inputs)
    grad_output[:, token:] = 0
    output, _, found = results(function, to_chunk(inputs), None, grad_output)
    for name, value in later.items():
        inputs[name][:, token:] = value * torch.rand_like(inputs[name][:, token:])
    output_2, _, found_2 = results(function, to_chunk(inputs), None, grad_output)
    assert not torch.equal(output[:, token:], output_2[:, token:])
    assert torch.equal(output[:, :token], output_2[:, :token])
    assert torch.equal(found["initial_state"], found_2["initial_state"])
    for name in ("q", "k", "v", "cumulative_gate", "beta"):
        assert torch.equal(found[name][:, :token], found_2[name][:, :token]), name


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pack", PACKS)
def test_packed_is_alone_and_nothing_past_the_end_is_read(pack, impl):
    function = functools.partial(chunk_kda, impl=impl)
    lengths = PACKS[pack]
    live = sum(lengths)
    cu_seqlens = offsets(lengths)
    inputs = to_chunk(core_inputs(1, live + 9, 2, 12, 9, sequences=len(lengths), dtype=torch.bfloat16), cu_seqlens)
    grad_output, grad_state = grads_like(inputs)
    for name, x in (*inputs.items(), ("grad", grad_output)):
        if name != "initial_state":
            x[:, live:] = NAN
    output, state, grads = results(function, inputs, cu_seqlens, grad_output, grad_state)
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        rows = slice(start, start + length)
        if not length:
            assert torch.equal(state[n], inputs["initial_state"][n]), "an empty slot's state passes through"
            assert torch.equal(grads["initial_state"][n], grad_state[n]), "and so does its gradient"
            continue
        one = {name: x[:, rows] if name != "initial_state" else x[n : n + 1] for name, x in inputs.items()}
        for alone_cu in (None, offsets([length])):
            alone = results(function, one, alone_cu, grad_output[:, rows], grad_state[n : n + 1])
            assert torch.equal(output[:, rows], alone[0]) and torch.equal(state[n], alone[1][0])
            for name in one:
                found = grads[name][n : n + 1] if name == "initial_state" else grads[name][:, rows]
                assert torch.equal(found, alone[2][name]), name


@pytest.mark.parametrize("impl", IMPLS)
def test_many_short_sequences(impl):
    lengths = [1, 2, 3, 0] * 60
    cu_seqlens = offsets(lengths)
    inputs = to_chunk(core_inputs(1, sum(lengths), 1, 8, 4, sequences=len(lengths)), cu_seqlens)
    assert_within_yardstick(inputs, cu_seqlens, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_state_is_a_zero_state(impl):
    inputs = to_chunk(core_inputs(2, 70, 2, 12, 8))
    del inputs["initial_state"]
    state = torch.zeros(2, 2, 12, 8)
    found = chunk_kda(**inputs, output_final_state=True, impl=impl)
    want = chunk_kda(**inputs, initial_state=state, output_final_state=True, impl=impl)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    output, none = chunk_kda(**inputs, impl=impl)
    assert none is None and torch.equal(output, want[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cut", [64, 50])
def test_hand_over_of_the_state(cut, impl):
    """Two calls with the state handed over are one call; at a multiple of 64 the very same chunks."""
    inputs = core_inputs(1, 150, 2, 16, 8)
    want, want_state = chunk_kda(**to_chunk(inputs), output_final_state=True, impl=impl)
    state, pieces = inputs["initial_state"], []
    for rows in (slice(0, cut), slice(cut, 150)):
        piece = {name: x if name == "initial_state" else x[:, rows] for name, x in inputs.items()}
        output, state = chunk_kda(**to_chunk({**piece, "initial_state": state}), output_final_state=True, impl=impl)
        pieces.append(output)
    output = torch.cat(pieces, 1)
    if cut == 64:
        assert torch.equal(output, want) and torch.equal(state, want_state)
    check("output", output, want, "fp32_chunk", "o")
    check("state", state, want_state, "fp32_chunk", "state")


@pytest.mark.parametrize("impl", IMPLS)
def test_prefill_then_decode(impl):
    """chunk_kda on the prompt and recurrent_kda, a token at a time, on the rest: one recurrent scan."""
    inputs = core_inputs(1, 80, 2, 16, 8)
    want, want_state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    parts = [{n: x if n == "initial_state" else x[:, r] for n, x in inputs.items()} for r in (slice(70), slice(70, 80))]
    output, state = chunk_kda(**to_chunk(parts[0]), output_final_state=True, impl=impl)
    outputs = [output]
    for t in range(10):
        token = {name: x[:, t : t + 1] for name, x in parts[1].items() if name != "initial_state"}
        output, state = recurrent_kda(**token, initial_state=state, output_final_state=True, impl=impl)
        outputs.append(output)
    check("output", torch.cat(outputs, 1), want, "fp32_chunk", "o")
    check("state", state, want_state, "fp32_chunk", "state")


@pytest.mark.parametrize("impl", IMPLS)
def test_a_state_handed_from_recurrent_to_chunk(impl):
    """A prompt read in two pieces, the first by recurrent_kda: one recurrent scan."""
    inputs = core_inputs(1, 75, 2, 16, 8)
    want, want_state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    parts = [{n: x if n == "initial_state" else x[:, r] for n, x in inputs.items()} for r in (slice(5), slice(5, 75))]
    first, parts[1]["initial_state"] = recurrent_kda(**parts[0], output_final_state=True, impl=impl)
    second, state = chunk_kda(**to_chunk(parts[1]), output_final_state=True, impl=impl)
    check("output", torch.cat([first, second], 1), want, "fp32_chunk", "o")
    check("state", state, want_state, "fp32_chunk", "state")


@pytest.mark.parametrize("impl", IMPLS)
def test_views_in_and_nothing_written(impl):
    """Slices of one projection, transposed and expanded tensors, and an expanded gradient give what copies give."""
    function = functools.partial(chunk_kda, impl=impl)
    fused = normal(2, 70, 3, 52)
    q, k, v = fused.split([16, 16, 20], -1)
    k = torch.nn.functional.normalize(k, dim=-1)[:, :, :1].expand(2, 70, 3, 16)
    gate = -torch.rand(2, 3, 16, 70, generator=torch.Generator().manual_seed(1)).permute(0, 3, 1, 2).cumsum(3)
    views = dict(q=q, k=k, v=v, cumulative_gate=gate, beta=torch.tensor(0.5).expand(2, 70, 3))
    views["initial_state"] = normal(2, 3, 20, 16).mT
    before = {name: x.clone() for name, x in views.items()}
    grad_output = torch.tensor(1.0).expand(2, 70, 3, 20)
    leaves = {name: x.detach().requires_grad_() for name, x in views.items()}
    output, state = function(**leaves, output_final_state=True)
    found = torch.autograd.grad([output, state], list(leaves.values()), [grad_output, torch.ones(2, 3, 16, 20)])
    copies = {name: x.contiguous() for name, x in before.items()}
    want = results(function, copies, None, grad_output.contiguous(), torch.ones(2, 3, 16, 20))
    assert torch.equal(output, want[0]) and torch.equal(state, want[1])
    assert all(torch.equal(a, b) for a, b in zip(found, want[2].values()))
    assert all(torch.equal(views[name], before[name]) for name in views), "an input was written to"
    assert state.data_ptr() != views["initial_state"].data_ptr()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    "batch, tokens, cu_seqlens", [(2, 0, None), (0, 3, None), (1, 0, [0]), (1, 4, []), (1, 4, [0, 0])]
)
def test_nothing_to_do(batch, tokens, cu_seqlens, impl):
    cu_seqlens = None if cu_seqlens is None else offsets(cu_seqlens)
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = core_inputs(batch, tokens, 2, 5, 4, sequences=sequences)
    inputs["cumulative_gate"] = inputs.pop("gate")
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    output, state = chunk_kda(**leaves, cu_seqlens=cu_seqlens, output_final_state=True, impl=impl)
    assert output.shape == (batch, tokens, 2, 4)
    assert torch.equal(state, inputs["initial_state"])
    assert not state.numel() or state.data_ptr() != inputs["initial_state"].data_ptr()
    (0 * output.sum() + state.sum()).backward()
    assert torch.equal(inputs["initial_state"].grad, torch.ones_like(state))
    assert all(x.grad is not None for x in inputs.values()), "a parameter left out of the graph stalls DDP"


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_reach_inside(impl):
    function = functools.partial(chunk_kda, impl=impl)
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))
    want = results(function, inputs, None, *grads_like(inputs))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(function, inputs, None, *grads_like(inputs))
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    assert all(torch.equal(found[2][name], want[2][name]) for name in inputs)


def test_checkpointed_and_on_meta_tensors():
    """Activation checkpointing recomputes the same bits; a meta tensor, as a model's shapes are planned on, passes."""
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))

    def checkpointed(**inputs):
        return torch.utils.checkpoint.checkpoint(chunk_kda, use_reentrant=False, **inputs)

    want = results(chunk_kda, inputs, None, *grads_like(inputs))[2]
    found = results(checkpointed, inputs, None, *grads_like(inputs))[2]
    assert all(torch.equal(found[name], want[name]) for name in inputs)
    output, _ = chunk_kda(**{name: x.to("meta") for name, x in inputs.items()})
    assert output.shape == inputs["v"].shape and output.device.type == "meta"


@pytest.mark.parametrize("impl", IMPLS)
def test_grad_mode_changes_no_bit(impl):
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))
    inputs["q"].requires_grad_()
    output, state = chunk_kda(**inputs, output_final_state=True, impl=impl)
    with torch.no_grad():
        output_2, state_2 = chunk_kda(**inputs, output_final_state=True, impl=impl)
    assert output.requires_grad and not output_2.requires_grad
    assert torch.equal(output, output_2) and torch.equal(state, state_2)


# ---- the registered operators ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed, impl):
    cu_seqlens = offsets([5, 0, 60]) if packed else None
    inputs = to_chunk(core_inputs(1, 70, 2, 12, 8, sequences=3 if packed else 1, dtype=torch.bfloat16), cu_seqlens)
    tensors = list(inputs.values())
    grad_output, grad_state = grads_like(inputs)
    torch.library.opcheck(OP, (*tensors, cu_seqlens, True, False, None, impl))
    torch.library.opcheck(OP, (*tensors[:5], None, cu_seqlens, False, True, -5.0, impl))
    torch.library.opcheck(BACKWARD_OP, (grad_output, grad_state, *tensors, cu_seqlens, None, impl))
    torch.library.opcheck(BACKWARD_OP, (grad_output, None, *tensors[:5], None, cu_seqlens, None, impl))
    torch.library.opcheck(BACKWARD_OP, (None, grad_state, *tensors, cu_seqlens, None, impl))


def packed_call(q, k, v, cumulative_gate, beta, initial_state, cu_seqlens=None, output_final_state=True, *, impl):
    output, state = chunk_kda(
        q,
        k,
        v,
        cumulative_gate,
        beta,
        initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
        impl=impl,
    )
    return output * 2, state


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole_with_dynamic_shapes(packed, impl):
    """fullgraph, gradients equal to eager's, and no third compilation as T and N go on changing."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    eager = functools.partial(packed_call, impl=impl)
    compiled = torch.compile(eager, fullgraph=True, backend=counter)
    for lengths in ([5, 0, 60], [33, 2, 1, 64], [70, 7], [1, 2, 3, 4, 5]):
        cu_seqlens = offsets(lengths) if packed else None
        batch, tokens = (1, sum(lengths)) if packed else (len(lengths), lengths[0] + 1)
        inputs = core_inputs(batch, tokens, 2, 12, 8, sequences=len(lengths))
        inputs = to_chunk(inputs, cu_seqlens)
        want = results(eager, inputs, cu_seqlens, *grads_like(inputs))
        found = results(compiled, inputs, cu_seqlens, *grads_like(inputs))
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
        assert all(torch.equal(found[2][name], want[2][name]) for name in inputs)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_autocast_and_unused_results(impl):
    """No state, no final state, only some gradients; under autocast, which stays outside."""
    inputs = to_chunk(core_inputs(1, 70, 2, 12, 8, dtype=torch.bfloat16))
    tensors = list(inputs.values())[:5]
    for x in tensors[:3]:
        x.requires_grad_()

    def call(*tensors):
        return chunk_kda(*tensors, impl=impl)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    want, _ = call(*tensors)
    assert state is None and torch.equal(output, want)
    found = torch.autograd.grad(output.float().square().sum(), tensors[:3])
    assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(want.float().square().sum(), tensors[:3])))


def test_second_order():
    """The operator refuses; the reference, called eagerly, differentiates twice."""
    inputs = core_inputs(1, 5, 1, 3, 2)
    tensors = [x.requires_grad_() for x in to_chunk(inputs).values()]
    output, _ = OP(*tensors, None, False, False, None, "reference")
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="chunk_kda differentiates once"):
        torch.autograd.grad(grad.sum(), tensors[1])
    output, _ = chunk_kda(*tensors, impl="reference")
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    (found,) = torch.autograd.grad(grad.sum(), tensors[1])
    wide = [x.detach().double().requires_grad_() for x in tensors]
    (grad,) = torch.autograd.grad(naive_chunk_kda(*wide)[0].square().sum(), wide[0], create_graph=True)
    assert max_error(found, torch.autograd.grad(grad.sum(), wide[1])[0]) < 1e-5


# ---- fuse_q_l2norm ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["bf16", "fp32"])
@pytest.mark.parametrize("options", [{}, {"gate_lower_bound": -5.0}, {"cu_seqlens": offsets([5, 0, 60])}])
def test_fused_norm_is_the_norm(options, row, impl):
    packed = "cu_seqlens" in options
    inputs = core_inputs(1, 70, 2, 16, 8, sequences=3 if packed else 1, dtype=DTYPES[row])
    inputs = to_chunk(inputs, options.get("cu_seqlens"))
    raw = inputs.pop("q") * 3
    for scale in (1e-3, 1.0, 1e3):
        q = raw * scale
        q[:, 3] = 0
        output, state = chunk_kda(q, **inputs, output_final_state=True, fuse_q_l2norm=True, impl=impl, **options)
        want, want_state = chunk_kda(l2norm(q, impl=impl), **inputs, output_final_state=True, impl=impl, **options)
        assert torch.equal(state, want_state), "the final state does not depend on q"
        assert not output[:, 3].any() and not output.isnan().any()
        tolerance = dict(rtol=2e-2, atol=2e-3) if row == "bf16" else dict(rtol=1e-5, atol=1e-6)
        live = slice(0, 65 if packed else None)
        torch.testing.assert_close(output[:, live], want[:, live], **tolerance)


@pytest.mark.parametrize("impl", IMPLS)
def test_fused_norm_is_for_eager_inference(impl):
    inputs = to_chunk(core_inputs(1, 70, 2, 16, 8))
    q = inputs.pop("q")
    with pytest.raises(RuntimeError, match=r"fuse_q_l2norm.*requires grad"):
        chunk_kda(q, **{**inputs, "v": inputs["v"].clone().requires_grad_()}, fuse_q_l2norm=True, impl=impl)

    def call(q):
        return chunk_kda(torch.cos(q), **inputs, fuse_q_l2norm=True, impl=impl)[0] + 1

    graphs = []

    def backend(module, example_inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    torch._dynamo.reset()
    with torch.no_grad():
        want = call(q.requires_grad_())
        with pytest.raises(Exception, match="fuse_q_l2norm is eager-only"):
            torch.compile(call, fullgraph=True, backend=backend)(q)
        graphs.clear()
        assert torch.equal(torch.compile(call, backend=backend)(q), want)
    assert len(graphs) == 2 and all(len(graph) == 1 for graph in graphs), "the cosine and the sum, nothing of the call"


# ---- errors ----


def error(kind, *words):
    return pytest.raises(kind, match="(?s)chunk_kda: .*" + ".*".join(words))


def test_bad_shapes():
    good = to_chunk(core_inputs(2, 6, 2, 4, 3))

    def call(**changed):
        return chunk_kda(**{**good, **changed})

    call()
    with error(ValueError, "q must be", "B, T, H, K", "3 dimension"):
        call(q=good["q"][0])
    with error(ValueError, "k must be", "2, 6, 2, 4", "got", "2, 6, 2, 5"):
        call(k=torch.zeros(2, 6, 2, 5))
    with error(ValueError, "v must be", "2, 6, 2, 3", "got", "2, 5, 2, 3"):
        call(v=good["v"][:, :5])
    with error(ValueError, "v must be", "got", "2, 6, 1, 3"):
        call(v=good["v"][:, :, :1])
    with error(ValueError, "cumulative_gate must be", "got", "2, 6, 2\\]"):
        call(cumulative_gate=good["cumulative_gate"][..., 0])
    with error(ValueError, "beta must be", "2, 6, 2", "got", "2, 6, 2, 1"):
        call(beta=good["beta"].unsqueeze(-1))
    with error(ValueError, "initial_state must be", "2, 2, 4, 3", "got", "1, 2, 4, 3"):
        call(initial_state=good["initial_state"][:1])
    with error(ValueError, "initial_state must be", "2, 2, 4, 3", "got", "2, 2, 3, 4"):
        call(initial_state=good["initial_state"].mT)
    wide = torch.zeros(1, 1, 1, 257)
    with error(ValueError, "K must be from 1 to 256, got 257"):
        chunk_kda(wide, wide, wide, wide, wide[..., 0])
    for name in ("k", "v", "cumulative_gate", "beta", "initial_state"):
        with error(ValueError, f"{name} must be on cpu", "got meta"):
            call(**{name: good[name].to("meta")})


def test_bad_packs():
    good = to_chunk(core_inputs(1, 6, 2, 4, 3))
    del good["initial_state"]

    def call(cu_seqlens, **changed):
        return chunk_kda(**{**good, **changed}, cu_seqlens=cu_seqlens)

    with error(ValueError, "B must be 1", "got B = 2"):
        chunk_kda(**to_chunk(core_inputs(2, 6, 2, 4, 3)), cu_seqlens=offsets([3, 3]))
    with error(TypeError, "cu_seqlens must be int32", "got int64"):
        call(torch.tensor([0, 6]))
    with error(TypeError, "cu_seqlens must be a tensor", "got list"):
        call([0, 6])
    with error(ValueError, "cu_seqlens must be", "N . 1", "2 dimension"):
        call(offsets([6]).unsqueeze(0))
    with error(ValueError, "cu_seqlens must be on cpu", "got meta"):
        call(offsets([6]).to("meta"))
    with error(ValueError, "cu_seqlens must be contiguous"):
        call(offsets([1, 2, 3])[::2])
    with error(ValueError, "cu_seqlens must hold at least the offset 0"):
        call(offsets([])[:0])
    with error(ValueError, "initial_state must be", "2, 2, 4, 3"):
        call(offsets([3, 3]), initial_state=torch.zeros(1, 2, 4, 3))
    for bad, words in (([1, 6], "start at 0, got 1"), ([0, 4, 3], "decrease, got 4 then 3"), ([0, 7], "T = 6, got 7")):
        with pytest.raises(ValueError, match=words):
            chunk_kda(**good, cu_seqlens=torch.tensor(bad, dtype=torch.int32), impl="reference")


def test_bad_dtypes_and_options():
    good = to_chunk(core_inputs(2, 6, 2, 4, 3))

    def call(**changed):
        return chunk_kda(**{**good, **changed})

    for name in ("q", "k", "v"):
        with error(TypeError, f"{name} must be bfloat16, float16, float32, got float64"):
            call(**{name: good[name].double()})
    with error(TypeError, "cumulative_gate must be float32, got bfloat16"):
        call(cumulative_gate=good["cumulative_gate"].bfloat16())
    with error(TypeError, "initial_state must be float32, got bfloat16"):
        call(initial_state=good["initial_state"].bfloat16())
    with error(TypeError, "beta must be a floating tensor", "int64"):
        call(beta=good["beta"].long())
    with error(TypeError, "q must be a tensor, got float"):
        call(q=1.0)
    for bad in (0.0, 1.0, -float("inf"), NAN):
        with error(ValueError, "gate_lower_bound must be negative and finite, got"):
            call(gate_lower_bound=bad)
    with error(TypeError, "gate_lower_bound must be a float, got str"):
        call(gate_lower_bound="-5")
    with error(ValueError, "impl must be None, 'triton' or 'reference', got 'cuda'"):
        call(impl="cuda")
    with pytest.raises(TypeError, match="unexpected keyword argument 'scale'"):
        call(scale=1.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'gate'"):
        chunk_kda(good["q"], good["k"], good["v"], gate=good["cumulative_gate"], beta=good["beta"])


def test_chunk_helper_covers_every_token_once():
    """The tests' own cut into chunks, on which the gate's sums rest."""
    seen = torch.zeros(1, 140, dtype=torch.int32)
    for b, rows in chunks(seen.shape, offsets([3, 0, 65, 64])):
        assert rows.stop - rows.start <= 64
        seen[b, rows] += 1
    assert seen[:, :132].eq(1).all() and not seen[:, 132:].any()
