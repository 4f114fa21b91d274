"""The reference operators, which everything else is tested against: their definitions, their gradients, their packs."""

import functools
import math

import pytest
import torch
from kda_inputs import LOG2_E, NAMES, core_inputs, cumulative, offsets, results, to_chunk
from torch.autograd import gradcheck, gradgradcheck
from yardstick import max_error

from titan_kda.kernels import naive_chunk_kda, naive_recurrent_kda
from titan_kda.kernels.reference import (
    _UnitLowerSolve,
    naive_bounded_gate_cumsum,
    naive_causal_conv1d,
    naive_causal_conv1d_step,
    naive_l2norm,
    naive_recurrent_kda_step,
    naive_softplus_gate_cumsum,
)

NAN = float("nan")
FP64 = torch.float64
PACKS = {
    "first": [0, 3, 70],
    "last": [65, 2, 0],
    "between": [5, 0, 0, 64, 1],
    "all": [0, 0, 0],
    "short": [1, 2, 1, 3, 1, 1],
    "longer later": [2, 130, 64, 1],
}


def random(*shape, seed=0, dtype=FP64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def leaf(*shape, seed=0):
    return random(*shape, seed=seed).requires_grad_()


# ---- the recurrence ----


def by_definition(q, k, v, gate, beta, initial_state, cu_seqlens=None):
    """The recurrence as it is written down: one sequence, one head, one token at a time, with whole matrices."""
    batch, tokens, heads, key_width = q.shape
    if cu_seqlens is None:
        spans = [(b, 0, tokens) for b in range(batch)]
    else:
        spans = [(0, cu_seqlens[n], cu_seqlens[n + 1]) for n in range(len(cu_seqlens) - 1)]
    output, states = torch.zeros_like(v), initial_state.clone()
    for n, (b, start, end) in enumerate(spans):
        for h in range(heads):
            S = initial_state[n, h]
            for t in range(start, end):
                S = torch.diag(2 ** gate[b, t, h]) @ S
                d = beta[b, t, h] * (v[b, t, h] - S.T @ k[b, t, h])
                S = S + torch.outer(k[b, t, h], d)
                output[b, t, h] = S.T @ (q[b, t, h] / math.sqrt(key_width))
            states[n, h] = S
    return output, states


@pytest.mark.parametrize("lengths", [None, [3, 0, 4], [0, 1, 2, 1]])
def test_recurrence_is_the_definition(lengths):
    cu_seqlens = None if lengths is None else offsets(lengths)
    batch, sequences = (2, 2) if lengths is None else (1, len(lengths))
    inputs = core_inputs(batch, 7, 2, 5, 3, sequences=sequences, dtype=FP64)
    output, state = naive_recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    want, want_state = by_definition(**inputs, cu_seqlens=cu_seqlens)
    assert max_error(output, want) < 1e-14 and max_error(state, want_state) < 1e-14


def test_one_channel_by_hand():
    """K = V = 1: S = 8 halves to 4; residual 0.5 (3 - 2 * 4) = -2.5; S = 4 + 2 * -2.5 = -1; o = 3 * -1."""
    q, k, v, gate, beta = (torch.tensor(x, dtype=FP64).view(1, 1, 1, -1) for x in ([3.0], [2.0], [3.0], [-1.0], [0.5]))
    for naive in (naive_recurrent_kda, naive_chunk_kda):
        output, state = naive(
            q, k, v, gate, beta[..., 0], torch.full((1, 1, 1, 1), 8.0, dtype=FP64), output_final_state=True
        )
        assert output.item() == -3.0 and state.item() == -1.0


@pytest.mark.parametrize("naive", [naive_recurrent_kda, naive_chunk_kda])
@pytest.mark.parametrize("dtype", [torch.float32, FP64])
def test_computed_and_returned_in_the_inputs_type(naive, dtype):
    inputs = core_inputs(1, 70, 1, 8, 6, dtype=dtype)
    inputs = to_chunk(inputs) if naive is naive_chunk_kda else inputs
    wide = {name: x.double() for name, x in inputs.items()}
    grads = random(1, 70, 1, 6, dtype=dtype), random(1, 1, 8, 6, dtype=dtype)
    found = results(naive, inputs, None, *grads)
    want = results(naive, wide, None, *(x.double() for x in grads))
    pairs = [*zip(found[:2], want[:2]), *zip(found[2].values(), want[2].values())]
    assert all(x.dtype == dtype for x, _ in pairs)
    errors = [max_error(x, y) for x, y in pairs]
    assert max(errors) == 0 if dtype == FP64 else 0 < max(errors) < 1e-4  # FP32 arithmetic, not a rounded FP64


@pytest.mark.parametrize("channels", [slice(None), slice(0, 3)])
def test_a_gate_of_minus_infinity_resets(channels):
    """As if the state's rows had been zero there: a NaN from inf, or a decay that only nears zero, would show."""
    inputs = core_inputs(1, 6, 2, 5, 4, dtype=FP64)
    inputs["gate"][:, 3, :, channels] = -float("inf")
    output, state = naive_recurrent_kda(**inputs, output_final_state=True)
    _, before = naive_recurrent_kda(
        **{name: x[:, :3] if x.dim() < 4 or name != "initial_state" else x for name, x in inputs.items()},
        output_final_state=True,
    )
    before[:, :, channels] = 0
    rest = {name: x[:, 3:] for name, x in inputs.items() if name != "initial_state"}
    rest["gate"] = rest["gate"].clone()
    rest["gate"][:, 0, :, channels] = 0
    want, want_state = naive_recurrent_kda(**rest, initial_state=before, output_final_state=True)
    assert torch.equal(output[:, 3:], want) and torch.equal(state, want_state)


# ---- the chunk form is the same function ----


def assert_forms_agree(inputs, cu_seqlens, chunk_size=64):
    def chunk_form(gate, **rest):
        return naive_chunk_kda(cumulative_gate=cumulative(gate, cu_seqlens, chunk_size), chunk_size=chunk_size, **rest)

    grad_output, grad_state = random(*inputs["v"].shape, seed=1), random(*inputs["initial_state"].shape, seed=2)
    output, state, grads = results(chunk_form, inputs, cu_seqlens, grad_output, grad_state)
    want, want_state, want_grads = results(naive_recurrent_kda, inputs, cu_seqlens, grad_output, grad_state)
    errors = {"output": max_error(output, want), "state": max_error(state, want_state)}
    errors |= {name: max_error(grads[name], want_grads[name]) for name in NAMES}
    assert max(errors.values()) <= 1e-10, errors


@pytest.mark.parametrize("gate", ["mixed", 0.0, -5.0])
@pytest.mark.parametrize(
    "batch, tokens, heads, key_width, value_width",
    [(2, 1, 2, 8, 5), (1, 2, 1, 7, 7), (1, 63, 2, 12, 20), (2, 64, 1, 16, 8), (1, 65, 2, 60, 4), (1, 300, 1, 100, 36)],
)
def test_forms_agree_dense(batch, tokens, heads, key_width, value_width, gate):
    assert_forms_agree(core_inputs(batch, tokens, heads, key_width, value_width, dtype=FP64, gate=gate), None)


@pytest.mark.parametrize("pack", PACKS)
def test_forms_agree_packed(pack):
    cu_seqlens = offsets(PACKS[pack])
    assert_forms_agree(core_inputs(1, 200, 2, 12, 9, sequences=len(PACKS[pack]), dtype=FP64), cu_seqlens)


@pytest.mark.parametrize("chunk_size", [1, 2, 16, 128])
def test_forms_agree_at_other_chunk_sizes(chunk_size):
    inputs = core_inputs(1, 150, 1, 10, 6, sequences=3, dtype=FP64)
    assert_forms_agree(inputs, offsets([0, 133, 17]), chunk_size)


@pytest.mark.parametrize("naive", [naive_recurrent_kda, naive_chunk_kda])
@pytest.mark.parametrize("cu_seqlens", [None, offsets([2, 0, 3])])
def test_core_gradcheck(naive, cu_seqlens):
    options = dict(cu_seqlens=cu_seqlens, output_final_state=True)
    batch, sequences = (2, 2) if cu_seqlens is None else (1, 3)
    inputs = core_inputs(batch, 5, 1, 2, 1, sequences=sequences, dtype=FP64)
    if naive is naive_chunk_kda:
        inputs = to_chunk(inputs, cu_seqlens)
        options["chunk_size"] = 4
    leaves = [x.requires_grad_() for x in inputs.values()]

    def function(*tensors):
        return naive(**dict(zip(inputs, tensors)), **options)

    assert gradcheck(function, leaves)
    assert gradgradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("keys", ["random", "silu", "identical"])
def test_the_inverse(keys):
    """max |A (I + L) - I| in FP32: by repeated squaring, identical keys would pass through powers of 1e17."""
    k = core_inputs(1, 64, 1, 64, 1, keys="silu" if keys == "silu" else "random")["k"][0, :, 0]
    lower = (k @ k.T if keys != "identical" else torch.ones(64, 64)).tril(-1)  # beta = 1
    one = torch.eye(64, dtype=FP64)
    inverse = _UnitLowerSolve.apply(lower, one.float())
    assert (inverse.double() @ (one + lower.double()) - one).abs().max() <= 1e-5


# ---- packs ----


@pytest.mark.parametrize("naive", [naive_recurrent_kda, naive_chunk_kda])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_is_alone_and_nothing_past_the_end_is_read(naive, pack):
    lengths = PACKS[pack]
    live, tokens = sum(lengths), sum(lengths) + 9
    cu_seqlens = offsets(lengths)
    inputs = core_inputs(1, tokens, 2, 12, 9, sequences=len(lengths))
    grad_output = random(1, tokens, 2, 9, seed=1, dtype=torch.float32)
    grad_state = random(len(lengths), 2, 12, 9, seed=2, dtype=torch.float32)
    for x in (*(inputs[name] for name in NAMES[:5]), grad_output):
        x[:, live:] = NAN
    if naive is naive_chunk_kda:
        inputs = to_chunk(inputs, cu_seqlens)
    output, state, grads = results(naive, inputs, cu_seqlens, grad_output, grad_state)
    for name in list(inputs)[:5]:
        assert not grads[name][:, live:].any(), f"d({name}) past the last offset"
    assert not output[:, live:].any()
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        rows = slice(start, start + length)
        one = {name: x[:, rows] if name != "initial_state" else x[n : n + 1] for name, x in inputs.items()}
        if not length:
            assert torch.equal(state[n], inputs["initial_state"][n]), "an empty slot's state passes through"
            assert torch.equal(grads["initial_state"][n], grad_state[n]), "and so does its gradient"
            continue
        alone, alone_state, alone_grads = results(naive, one, None, grad_output[:, rows], grad_state[n : n + 1])
        assert torch.equal(output[:, rows], alone) and torch.equal(state[n], alone_state[0])
        for name in one:
            found = grads[name][n : n + 1] if name == "initial_state" else grads[name][:, rows]
            assert torch.equal(found, alone_grads[name]), name


@pytest.mark.parametrize("naive", [naive_recurrent_kda, naive_chunk_kda])
@pytest.mark.parametrize(
    "batch, tokens, cu_seqlens", [(2, 0, None), (0, 3, None), (1, 0, offsets([0])), (1, 4, offsets([]))]
)
def test_nothing_to_do(naive, batch, tokens, cu_seqlens):
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = list(core_inputs(batch, tokens, 2, 5, 4, sequences=sequences).values())
    leaves = [x.requires_grad_() for x in inputs]
    output, state = naive(*leaves, cu_seqlens=cu_seqlens, output_final_state=True)
    assert output.shape == (batch, tokens, 2, 4) and not output.any()
    assert (torch.equal(state, inputs[-1]) and state.data_ptr() != inputs[-1].data_ptr()) or not state.numel()
    (output.sum() + state.sum()).backward()
    assert torch.equal(inputs[-1].grad, torch.ones_like(inputs[-1]))


@pytest.mark.parametrize("naive", [naive_recurrent_kda, naive_chunk_kda])
def test_bad_arguments(naive):
    inputs = list(core_inputs(1, 6, 1, 4, 3, sequences=2).values())
    with pytest.raises(TypeError, match="all float32 or all float64"):
        naive(inputs[0].double(), *inputs[1:])
    with pytest.raises(TypeError, match="all float32 or all float64"):
        naive(*(x.bfloat16() for x in inputs))
    for bad, message in (([1, 2, 3], "start at 0"), ([0, 4, 3], "decrease.* 4 then 3"), ([0, 3, 7], "T = 6, got 7")):
        with pytest.raises(ValueError, match=message):
            naive(*inputs, cu_seqlens=torch.tensor(bad, dtype=torch.int32))
    with pytest.raises(TypeError, match="unexpected keyword"):
        naive(*inputs, scale=1.0)
    if naive is naive_chunk_kda:
        with pytest.raises(ValueError, match="power of two, got 48"):
            naive(*inputs[:5], chunk_size=48)


def test_autocast_does_not_reach_inside():
    inputs = to_chunk(core_inputs(1, 70, 1, 16, 8))
    grads = random(1, 70, 1, 8, dtype=torch.float32), random(1, 1, 16, 8, dtype=torch.float32)
    output, state, found = results(naive_chunk_kda, inputs, None, *grads)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output_2, state_2, found_2 = results(naive_chunk_kda, inputs, None, *grads)
    assert torch.equal(output, output_2) and torch.equal(state, state_2)
    assert all(torch.equal(found[name], found_2[name]) for name in found)


# ---- the gates ----

GATES = {"bounded": naive_bounded_gate_cumsum, "softplus": naive_softplus_gate_cumsum}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("chunk_size", [1, 4, 64])
@pytest.mark.parametrize("lengths", [None, [0, 3, 6, 0]])
def test_gate_is_its_formula(gate, chunk_size, lengths):
    cu_seqlens = None if lengths is None else offsets(lengths)
    raw, A_log, dt_bias = random(1, 9, 2, 3), random(2, seed=1), random(2, 3, seed=2)
    options = dict(chunk_size=chunk_size, cu_seqlens=cu_seqlens)
    if gate == "bounded":
        found = naive_bounded_gate_cumsum(raw, A_log, dt_bias, lower_bound=-3.0, **options)
        nats = -3.0 / (1 + torch.exp(-A_log.exp()[:, None] * (raw + dt_bias)))
    else:
        found = naive_softplus_gate_cumsum(raw, A_log, dt_bias, **options)
        nats = -A_log.exp()[:, None] * torch.log(1 + torch.exp(raw + dt_bias))
    assert max_error(found, cumulative(nats * LOG2_E, cu_seqlens, chunk_size)) < 1e-14


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("cu_seqlens", [None, offsets([0, 3, 5])])
def test_gate_gradcheck(gate, cu_seqlens):
    function = functools.partial(GATES[gate], chunk_size=4, cu_seqlens=cu_seqlens)
    assert gradcheck(function, (leaf(1, 9, 2, 3), leaf(2, seed=1), leaf(2, 3, seed=2)))


@pytest.mark.parametrize("gate", GATES)
def test_gate_reads_nothing_past_the_end(gate):
    raw, A_log, dt_bias = leaf(1, 9, 2, 3), leaf(2, seed=1), leaf(2, 3, seed=2)
    grad = random(1, 9, 2, 3, seed=3)
    want = torch.autograd.grad(
        GATES[gate](raw[:, :7], A_log, dt_bias, chunk_size=4), (raw, A_log, dt_bias), grad[:, :7]
    )
    with torch.no_grad():
        raw[:, 7:], grad[:, 7:] = NAN, NAN
    found = GATES[gate](raw, A_log, dt_bias, chunk_size=4, cu_seqlens=offsets([4, 3]))
    assert not found[:, 7:].any()
    for got, right in zip(torch.autograd.grad(found, (raw, A_log, dt_bias), grad), want):
        assert torch.equal(got, right)


@pytest.mark.parametrize("gate", GATES)
def test_gate_floor(gate):
    """-256, and no gradient there; the tokens just above it keep theirs."""
    raw, A_log, dt_bias = torch.full((1, 2, 1, 1), 5.0), torch.zeros(1), torch.zeros(1, 1)
    raw[0, 1] = -5.0
    if gate == "bounded":
        function = functools.partial(naive_bounded_gate_cumsum, lower_bound=-1000.0)
    else:
        function, A_log = naive_softplus_gate_cumsum, A_log + math.log(100.0)
    inputs = [x.requires_grad_() for x in (raw, A_log, dt_bias)]
    decay = function(*inputs, chunk_size=1)
    d_raw, d_A_log, d_dt_bias = torch.autograd.grad(decay.sum(), inputs)
    assert decay[0, 0].item() == -256.0 and -256.0 < decay[0, 1].item() < 0
    assert d_raw[0, 0].item() == 0.0 and d_raw[0, 1].item() < 0
    assert d_dt_bias.item() == d_raw[0, 1].item() and d_A_log.item() != 0


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("A_log", [-1e30, -200.0, 60.0, 88.72, 90.0, 1e30])
def test_every_finite_A_log_gives_finite_gates_and_no_nan(gate, A_log):
    raw = random(1, 12, 2, 4, dtype=torch.float32) * torch.tensor([1e-3, 1.0, 30.0, 1e4])
    inputs = [x.requires_grad_() for x in (raw, torch.full((2,), A_log), torch.zeros(2, 4))]
    decay = GATES[gate](*inputs, chunk_size=4)
    grads = torch.autograd.grad(decay, inputs, random(1, 12, 2, 4, seed=1, dtype=torch.float32) * 1e3)
    assert torch.isfinite(decay).all() and (decay <= 0).all()
    assert not any(grad.isnan().any() for grad in grads)


# ---- norm and convolution ----


def test_l2norm():
    x = random(3, 4, 5)
    assert max_error(naive_l2norm(x), x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)) < 1e-15
    assert not naive_l2norm(torch.zeros(2, 4)).any()
    assert gradcheck(naive_l2norm, (leaf(2, 3),))


def convolution_by_definition(x, weight, state, activation):
    """One sequence [T, C], tap by tap."""
    past = torch.cat([state, x])
    width = weight.shape[1]
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for w in range(width):
            y[t] += weight[:, w] * past[t + w]
    return y * torch.sigmoid(y) if activation == "silu" else y, past[x.shape[0] :]


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("lengths", [None, [0, 1, 2, 0, 5], [0, 0], []])
def test_convolution_is_its_definition(lengths, width, activation):
    cu_seqlens = None if lengths is None else offsets(lengths)
    batch, lengths = (3, [8] * 3) if lengths is None else (1, lengths)
    x, weight, state = random(batch, 8, 5), random(5, width, seed=1), random(len(lengths), width - 1, 5, seed=2)
    options = dict(activation=activation, cu_seqlens=cu_seqlens, output_final_state=True)
    for initial_state in (state, None):
        output, final_state = naive_causal_conv1d(x, weight, initial_state=initial_state, **options)
        past = torch.zeros_like(state) if initial_state is None else state
        assert final_state.shape == state.shape
        for n, length in enumerate(lengths):
            b, start = (n, 0) if cu_seqlens is None else (0, int(cu_seqlens[n]))
            want, want_state = convolution_by_definition(x[b, start : start + length], weight, past[n], activation)
            assert torch.allclose(output[b, start : start + length], want, rtol=0, atol=1e-14)
            assert torch.equal(final_state[n], want_state)


@pytest.mark.parametrize("cu_seqlens", [None, offsets([0, 2, 5])])
def test_convolution_gradcheck(cu_seqlens):
    batch, sequences = (2, 2) if cu_seqlens is None else (1, 3)

    def function(x, weight, state):
        return naive_causal_conv1d(
            x, weight, initial_state=state, cu_seqlens=cu_seqlens, output_final_state=True, activation="silu"
        )

    assert gradcheck(function, (leaf(batch, 8, 3), leaf(3, 4, seed=1), leaf(sequences, 3, 3, seed=2)))


def test_convolution_reads_nothing_past_the_end():
    x, weight = leaf(1, 9, 3), leaf(3, 4, seed=1)
    grad = random(1, 9, 3, seed=2)
    want = torch.autograd.grad(naive_causal_conv1d(x[:, :7], weight)[0], (x, weight), grad[:, :7])
    with torch.no_grad():
        x[:, 7:], grad[:, 7:] = NAN, NAN
    output, _ = naive_causal_conv1d(x, weight, cu_seqlens=offsets([7]))
    assert not output[:, 7:].any()
    for got, right in zip(torch.autograd.grad(output, (x, weight), grad), want):
        assert torch.equal(got, right)


def test_convolution_step_is_the_convolution():
    x, weight, state = random(2, 5, 3), random(3, 4, seed=1), random(2, 3, 3, seed=2)
    want, want_state = naive_causal_conv1d(x, weight, initial_state=state, output_final_state=True)
    pool = random(4, 3, 3, seed=3)
    slots = torch.tensor([3, 1], dtype=torch.int32)
    pool[slots.long()] = state
    others = pool[[0, 2]].clone()
    for t in range(5):
        y = naive_causal_conv1d_step(x[:, t], weight, pool, state_indices=slots)
        assert max_error(y, want[:, t]) < 1e-14
    assert torch.equal(pool[slots.long()], want_state) and torch.equal(pool[[0, 2]], others)


# ---- the decode step ----


def step_inputs(sequences, slots):
    tensors = dict(
        q=(sequences, 2, 5),
        k=(sequences, 2, 5),
        v=(sequences, 2, 3),
        raw_gate=(sequences, 2, 5),
        beta_logits=(sequences, 2),
        A_log=(2,),
        dt_bias=(2, 5),
        state=(slots, 2, 5, 3),
    )
    return {name: random(*shape, seed=seed) for seed, (name, shape) in enumerate(tensors.items())}


@pytest.mark.parametrize("gate", GATES)
def test_step_is_its_parts_and_skips_padding(gate):
    inputs = step_inputs(4, 6)
    state = inputs["state"].clone()
    rows, slots = [0, 2, 3], [5, 0, 2]
    bound = dict(lower_bound=-2.0) if gate == "bounded" else {}
    log2_decay = GATES[gate](inputs["raw_gate"].unsqueeze(1), inputs["A_log"], inputs["dt_bias"], chunk_size=1, **bound)
    want, want_state = naive_recurrent_kda(
        naive_l2norm(inputs["q"])[rows].unsqueeze(1),
        naive_l2norm(inputs["k"])[rows].unsqueeze(1),
        inputs["v"][rows].unsqueeze(1),
        log2_decay[rows],
        2.0 * inputs["beta_logits"][rows].sigmoid().unsqueeze(1),
        state[slots],
        output_final_state=True,
    )
    output = naive_recurrent_kda_step(
        **inputs, gate=gate, **bound, beta_scale=2.0, state_indices=torch.tensor([5, -1, 0, 2], dtype=torch.int32)
    )
    assert max_error(output[rows], want.squeeze(1)) < 1e-14 and not output[1].any()
    assert max_error(inputs["state"][slots], want_state) < 1e-14
    assert torch.equal(inputs["state"][[1, 3, 4]], state[[1, 3, 4]])


@pytest.mark.parametrize("gate", GATES)
def test_step_gradcheck(gate):
    inputs = step_inputs(3, 4)

    def function(*tensors):
        *rest, state = tensors
        state = state.clone()
        indices = torch.tensor([2, -1, 0], dtype=torch.int32)
        return naive_recurrent_kda_step(*rest, state, state_indices=indices, gate=gate), state

    assert gradcheck(function, [x.requires_grad_() for x in inputs.values()])


def test_convolution_step_gradcheck():
    def function(x, weight, state):
        state = state.clone()
        return naive_causal_conv1d_step(x, weight, state, state_indices=torch.tensor([2, -1, 0])), state

    assert gradcheck(function, (leaf(3, 3), leaf(3, 4, seed=1), leaf(4, 3, 3, seed=2)))


def test_step_errors():
    inputs = step_inputs(2, 3)
    with pytest.raises(ValueError, match="below the 3 slots, got 3"):
        naive_recurrent_kda_step(**inputs, state_indices=torch.tensor([3, 0], dtype=torch.int32))
    with pytest.raises(ValueError, match="'bounded' or 'softplus', got 'sigmoid'"):
        naive_recurrent_kda_step(**inputs, gate="sigmoid")
    with pytest.raises(ValueError, match="'silu' or None, got 'relu'"):
        naive_causal_conv1d_step(random(2, 3), random(3, 4), random(2, 3, 3), activation="relu")
