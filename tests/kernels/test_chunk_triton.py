"""chunk_kda on Triton against FP64: small shapes wherever Triton runs, its interpreter included, the rest on a GPU.

The interpreter gets FP32 and FP16 alone: its bf16 matrix product is wrong.
"""

import functools

import pytest
import torch
import triton
import triton.language as tl
from kda_inputs import LOG2_E, core_inputs, cumulative, differences, offsets, per_token, results, to_chunk
from yardstick import DTYPES, YARDSTICK, check, rms_error

from titan_kda.kernels import chunk_kda, configs, l2norm, naive_chunk_kda, naive_recurrent_kda, recurrent_kda
from titan_kda.kernels.chunk.tiles import invert_unit_lower, merge_inverses

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
triton_chunk_kda = functools.partial(chunk_kda, impl="triton")
OP = torch.ops.titan_kda.chunk_kda.default
BACKWARD_OP = torch.ops.titan_kda.chunk_kda_backward.default
gpu = pytest.mark.gpu
CONTRACT_PACKS = {
    "one": [8192],
    "mixed": [1300, 547, 2048, 963, 271, 3063],
    "eight": [1024] * 8,
}


def make(batch, tokens, heads, key_width, value_width, row="fp32_chunk", cu_seqlens=None, bound=None, **options):
    """Inputs of the chunk form on DEVICE; with a bound, no token's gate is below it."""
    inputs = core_inputs(batch, tokens, heads, key_width, value_width, dtype=DTYPES[row], **options)
    if bound is not None:
        inputs["gate"].clamp_(min=bound * LOG2_E)
    inputs = to_chunk(inputs, cu_seqlens)
    return {name: x.to(DEVICE) for name, x in inputs.items()}


def on_device(x):
    return None if x is None else x.to(DEVICE)


def grads_like(inputs, seed=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((inputs["v"].shape, inputs["q"].dtype), (inputs["initial_state"].shape, torch.float32))
    return [torch.randn(shape, generator=generator).to(dtype).to(DEVICE) for shape, dtype in shapes]


def in_fp64(inputs, cu_seqlens, grads):
    """Results and gradients in FP64; the gate's from the recurrence, which has no cancelling pairs."""
    wide = {name: x.double() for name, x in inputs.items()}
    wide["gate"] = differences(wide.pop("cumulative_gate"), cu_seqlens)
    return results(naive_recurrent_kda, wide, cu_seqlens, *(None if g is None else g.double() for g in grads))


def assert_within_yardstick(inputs, row, cu_seqlens=None, o="o_any", grads=None, skip=(), **options):
    """Both results and all six gradients."""
    cu_seqlens = on_device(cu_seqlens)
    grads = grads_like(inputs) if grads is None else grads
    function = functools.partial(triton_chunk_kda, **options)
    output, state, found = results(function, inputs, cu_seqlens, *grads)
    want, want_state, want_found = in_fp64(inputs, cu_seqlens, grads)
    live = slice(None) if cu_seqlens is None else slice(0, int(cu_seqlens[-1]))
    check("output", output[:, live], want[:, live], row, o)
    check("final state", state, want_state, row, "state")
    for name in inputs:
        if name in skip:
            continue
        have, right = found[name], want_found["gate" if name == "cumulative_gate" else name]
        assert have.dtype == inputs[name].dtype
        if name == "cumulative_gate":
            have = per_token(have.double(), cu_seqlens)
        if name != "initial_state":
            have, right = have[:, live], right[:, live]
        check(f"d({name})", have, right, row, "gate_grad" if name in ("cumulative_gate", "beta") else "grad")


# ---- wherever Triton runs ----


@pytest.mark.parametrize(
    "tokens, key_width, value_width, bound, row",
    [
        (1, 16, 8, None, "fp16"),
        (17, 60, 20, None, "fp32_chunk"),
        (65, 64, 64, None, "fp16"),
        (80, 16, 8, -5.0, "fp32_chunk"),
        (66, 100, 70, -1.0, "fp32_chunk"),
    ],
)
def test_small_shapes(tokens, key_width, value_width, bound, row):
    """Tails, widths that are no powers of two, with and without a promise."""
    inputs = make(1, tokens, 1, key_width, value_width, row, bound=bound)
    assert_within_yardstick(inputs, row, o="o" if key_width >= 64 else "o_any", gate_lower_bound=bound)


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_rows_of_any_size_under_a_promise(scale):
    """At the strongest gate promised, factors around an anchor that is not shifted leave FP32's normal numbers."""
    inputs = make(1, 20, 1, 16, 8, gate=-5.0)
    inputs["q"] *= scale
    # Through 20 tokens the initial state's gradient falls below FP32's normal numbers.
    grads = (grads_like(inputs)[0], None)
    assert_within_yardstick(inputs, "fp32_chunk", grads=grads, skip=("initial_state",), gate_lower_bound=-5.0)


@pytest.mark.parametrize("row, bound", [("fp32_chunk", -5.1), ("fp16", -5.0)])
def test_a_promise_that_cannot_be_used_changes_no_bit(row, bound):
    """Below -5, and for FP16, the diagonal takes the exact path."""
    inputs = make(1, 20, 1, 16, 8, row, gate=bound)
    want = triton_chunk_kda(**inputs, output_final_state=True)
    found = triton_chunk_kda(**inputs, output_final_state=True, gate_lower_bound=bound)
    assert all(torch.equal(x, y) for x, y in zip(found, want))


@pytest.mark.parametrize(
    "batch, tokens, cu_seqlens", [(2, 0, None), (0, 3, None), (1, 0, [0]), (1, 4, []), (1, 4, [0, 0])]
)
def test_nothing_to_do(batch, tokens, cu_seqlens):
    cu_seqlens = None if cu_seqlens is None else on_device(offsets(cu_seqlens))
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = make(batch, tokens, 2, 5, 4, sequences=sequences)
    initial = inputs["initial_state"]
    output, state, grads = results(triton_chunk_kda, inputs, cu_seqlens, *grads_like(inputs))
    assert output.shape == (batch, tokens, 2, 4) and torch.equal(state, initial)
    assert not state.numel() or state.data_ptr() != initial.data_ptr()
    assert torch.equal(grads["initial_state"], grads_like(inputs)[1])
    assert all(grads[name].shape == inputs[name].shape for name in inputs)
    inputs["initial_state"] = None
    _, state = triton_chunk_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    assert torch.equal(state, torch.zeros_like(initial))


@triton.jit
def _invert_kernel(lower_ptr, inverse_ptr, FULL: tl.constexpr):
    where = tl.arange(0, 32)[:, None] * 64 + tl.arange(0, 32)[None, :]
    corner = 32 * 64
    last = 32 * 64 + 32
    upper = invert_unit_lower(tl.load(lower_ptr + where), FULL)
    lower = invert_unit_lower(tl.load(lower_ptr + last + where), FULL)
    tl.store(inverse_ptr + where, upper)
    tl.store(inverse_ptr + last + where, lower)
    tl.store(inverse_ptr + corner + where, merge_inverses(upper, tl.load(lower_ptr + corner + where), lower, FULL))


@pytest.mark.parametrize("full, limit", [(True, 1e-5), (False, 2e-3)])
@pytest.mark.parametrize("keys", ["random", "silu", "alike", "identical"])
def test_the_inverse(keys, full, limit):
    """max |A (I + L) - I|, for beta from random to 1."""
    inputs = core_inputs(1, 64, 1, 64, 1, keys="silu" if keys == "silu" else "random", dtype=torch.float64)
    k = inputs["k"][0, :, 0]
    if keys in ("alike", "identical"):
        k = torch.nn.functional.normalize(k[:1] + (0.01 * k if keys == "alike" else 0 * k), dim=-1)
    for beta in (inputs["beta"][0], torch.ones(64, 1, dtype=torch.float64)):
        lower = (beta * (k @ k.T)).tril(-1).float().to(DEVICE)
        inverse = torch.zeros_like(lower)
        _invert_kernel[(1,)](lower, inverse, FULL=full)
        one = torch.eye(64, dtype=torch.float64, device=DEVICE)
        assert (inverse.double() @ (one + lower.double()) - one).abs().max() <= limit


@pytest.mark.parametrize(
    "nats, row",
    [(0.0, "fp32_chunk"), (-12.0, "fp32_chunk"), (-12.0, "fp16"), (-50.0, "fp32_chunk"), ("jumps", "fp16")],
)
def test_gradients_at_any_gate(nats, row):
    """Pairs of decay 2^0 left to cancel, or factors that FP16 cannot hold, would take the gate's gradient away."""
    inputs = make(1, 67, 1, 16, 16, row, gate=-0.01 if nats == "jumps" else nats)
    if nats == "jumps":
        gate = differences(inputs["cumulative_gate"])
        gate[:, [15, 16, 20, 21, 22, 40, 63, 64]] = -150 * LOG2_E
        inputs["cumulative_gate"] = cumulative(gate)
    # A state's gradient that is below FP32's normal numbers has no relative error.
    skip = ("initial_state",) if nats == -50.0 else ()
    assert_within_yardstick(inputs, row, skip=skip)


def test_one_token_gives_the_gate_nothing():
    inputs = make(2, 1, 1, 16, 8)
    grads = grads_like(inputs)
    inputs["initial_state"].zero_()
    found = results(triton_chunk_kda, inputs, None, *grads)[2]
    assert not found["cumulative_gate"].any() and found["k"].any()


@pytest.mark.parametrize("lengths", [[0, 3, 0, 64, 1], [1] * 3, [0, 0]])
def test_packed_is_alone_and_nothing_past_the_end_is_read(lengths):
    """Bit for bit, forward and backward; an empty slot passes its state and that state's gradient through."""
    live, cu_seqlens = sum(lengths), offsets(lengths)
    inputs = make(1, live + 5, 1, 12, 9, "fp16", cu_seqlens, sequences=len(lengths))
    grad_output, grad_state = grads_like(inputs)
    for name, x in (*inputs.items(), ("grad", grad_output)):
        if name != "initial_state":
            x[:, live:] = float("nan")
    cu_seqlens = on_device(cu_seqlens)
    output, state, grads = results(triton_chunk_kda, inputs, cu_seqlens, grad_output, grad_state)
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        if not length:
            assert torch.equal(state[n], inputs["initial_state"][n])
            assert torch.equal(grads["initial_state"][n], grad_state[n])
            continue
        rows = slice(start, start + length)
        one = {name: x[:, rows] if name != "initial_state" else x[n : n + 1] for name, x in inputs.items()}
        alone = results(triton_chunk_kda, one, None, grad_output[:, rows], grad_state[n : n + 1])
        assert torch.equal(output[:, rows], alone[0]) and torch.equal(state[n], alone[1][0])
        for name in one:
            found = grads[name][n : n + 1] if name == "initial_state" else grads[name][:, rows]
            assert torch.equal(found, alone[2][name]), name


LATER = {"q": 1e4, "k": -1.0, "v": 1e8, "gate": -5.0, "beta": 5.0}
HUGE = {"q": 1e30, "k": -1e30, "v": 1e30, "gate": -5.0, "beta": 1e30}
LARGEST = torch.finfo(torch.float32).max  # TF32 would round it to infinity
HUGE_HALF = {"q": 6e4, "k": -6e4, "v": 6e4, "gate": -5.0, "beta": 6e4}


@pytest.mark.parametrize(
    "token, bound, row, later",
    [
        (17, None, "fp32_chunk", LATER),
        (40, -5.0, "fp32_chunk", LATER),
        (37, None, "fp32_chunk", HUGE),  # sums overflow FP32: the rows that hold them must not reach earlier ones
        (37, None, "fp16", HUGE_HALF),
        (37, None, "fp32_chunk", dict.fromkeys("qkv", LARGEST)),
        (40, -5.0, "fp32_chunk", {"q": LARGEST, "v": -LARGEST, "beta": LARGEST}),
        pytest.param(17, None, "bf16", HUGE, marks=gpu),
        pytest.param(37, None, "bf16", HUGE, marks=gpu),
        pytest.param(37, None, "bf16", dict.fromkeys("qkv", 3.3e38), marks=gpu),
        pytest.param(40, -5.0, "bf16", {"q": 3.3e38, "v": -3.3e38, "beta": 3.3e38}, marks=gpu),
    ],
)
def test_causality_is_exact(token, bound, row, later):
    """No bit before ``token`` depends on its finite values: outputs, and gradients of a loss on them."""
    function = functools.partial(triton_chunk_kda, gate_lower_bound=bound)
    inputs = core_inputs(1, 70, 1, 16, 8, dtype=DTYPES[row])
    inputs["gate"].clamp_(min=-5.0)
    grad_output, _ = grads_like(inputs)
    grad_output[:, token:] = 0

    def run():
        return results(function, {k: v.to(DEVICE) for k, v in to_chunk(inputs).items()}, None, grad_output)

    output, _, found = run()
    for name, value in later.items():
        inputs[name][:, token:] = value * torch.rand_like(inputs[name][:, token:])
        inputs[name][:, token] = value
        inputs[name][:, token + 3] = -value if name != "gate" else value
    assert all(x.isfinite().all() for x in inputs.values())
    output_2, _, found_2 = run()
    assert not torch.equal(output[:, token:], output_2[:, token:])
    assert output[:, :token].isfinite().all() and torch.equal(output[:, :token], output_2[:, :token])
    assert torch.equal(found["initial_state"], found_2["initial_state"])
    for name in ("q", "k", "v", "cumulative_gate", "beta"):
        assert torch.equal(found[name][:, :token], found_2[name][:, :token]), name


@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("row", ["fp32_chunk", "fp16", pytest.param("bf16", marks=gpu)])
def test_a_nan_is_not_hidden(row, bound):
    """It is its own token's output and, unless it is q's, all that comes after and the final state."""
    for name in ("q", "k", "v", "gate", "beta"):
        inputs = core_inputs(1, 70, 1, 16, 8, dtype=DTYPES[row])
        inputs["gate"].clamp_(min=-5.0)
        inputs[name][:, 40] = torch.nan
        inputs = {key: x.to(DEVICE) for key, x in to_chunk(inputs).items()}
        output, state = triton_chunk_kda(**inputs, output_final_state=True, gate_lower_bound=bound)
        assert output[:, 40].isnan().all(), name
        assert name == "q" or (output[:, 41:].isnan().all() and state.isnan().any(-2).all()), name


LIKE_KEYS = [("fp32_chunk", (1e-4, 1e-4)), ("fp16", (5e-3, 1e-2))] + ([("bf16", (3e-2, 1e-1))] if ON_GPU else [])


@pytest.mark.parametrize("beta", [1.0, 2.0])
@pytest.mark.parametrize("row, limits", LIKE_KEYS)
def test_identical_keys(row, limits, beta):
    """The inverse has entries of +-1 (beta 1); by repeated squaring it would pass through powers of 1e17."""
    inputs = make(1, 64, 1, 64, 16, row, gate=0.0)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.full_like(inputs["beta"], beta)
    output, state, found = results(triton_chunk_kda, inputs, None, *grads_like(inputs))
    want, want_state = naive_chunk_kda(**{name: x.double() for name, x in inputs.items()}, output_final_state=True)
    limit = limits[beta == 2.0]
    assert rms_error(output, want) <= limit and rms_error(state, want_state) <= limit
    assert all(torch.isfinite(grad).all() for grad in found.values())


FUSED = dict(rtol=2e-2, atol=2e-3)  # 16-bit rows


@pytest.mark.parametrize("row", ["fp32_chunk", "bf16"] if ON_GPU else ["fp32_chunk"])
@pytest.mark.parametrize("bound, lengths", [(None, None), (-5.0, None), (None, [5, 0, 61])])
def test_fused_norm_is_the_norm(bound, lengths, row):
    cu_seqlens = None if lengths is None else offsets(lengths)
    inputs = make(1, 66, 1, 16, 8, row, cu_seqlens, bound=bound, sequences=None if lengths is None else 3)
    raw = inputs.pop("q") * 3
    options = dict(output_final_state=True, gate_lower_bound=bound, cu_seqlens=on_device(cu_seqlens))
    for scale in (1e-3, 1e3):
        q = raw * scale
        q[:, 3] = 0
        output, state = triton_chunk_kda(q, **inputs, fuse_q_l2norm=True, **options)
        want, want_state = triton_chunk_kda(l2norm(q, impl="reference"), **inputs, **options)
        assert torch.equal(state, want_state), "the final state does not depend on q"
        assert not output[:, 3].any() and not output.isnan().any()
        tolerance = FUSED if row == "bf16" else dict(rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(output, want, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32_chunk", "fp16", "bf16"])
@pytest.mark.parametrize("bound, lengths", [(None, None), (-5.0, None), (-5.0, [70, 0, 1, 230])])
def test_fused_norm_at_full_width(bound, lengths, row):
    """Rows of every size in one call, and the bits of the final state."""
    cu_seqlens = None if lengths is None else offsets(lengths)
    inputs = make(1, 301, 3, 128, 128, row, cu_seqlens, bound=bound, sequences=None if lengths is None else 4)
    sizes = 10 ** torch.linspace(-3, 3, 301, device=DEVICE).view(1, -1, 1, 1)
    q = (inputs.pop("q").float() * 3 * sizes).to(DTYPES[row])
    options = dict(output_final_state=True, gate_lower_bound=bound, cu_seqlens=on_device(cu_seqlens))
    output, state = triton_chunk_kda(q, **inputs, fuse_q_l2norm=True, **options)
    want, want_state = triton_chunk_kda(l2norm(q, impl="reference"), **inputs, **options)
    assert torch.equal(state, want_state)
    torch.testing.assert_close(output, want, **(dict(rtol=1e-4, atol=1e-5) if row == "fp32_chunk" else FUSED))


@pytest.mark.parametrize("which", ["output", "state"])
def test_gradient_of_one_result_alone(which):
    inputs = make(1, 66, 1, 16, 8)
    grad_output, grad_state = grads_like(inputs)
    grads = (grad_output, None) if which == "output" else (None, grad_state)
    assert_within_yardstick(inputs, "fp32_chunk", grads=grads)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    cu_seqlens = offsets([5, 0, 20]) if packed else None
    inputs = make(1, 25, 1, 12, 8, "fp16", cu_seqlens, sequences=3 if packed else 1)
    cu_seqlens = on_device(cu_seqlens)
    tensors = list(inputs.values())
    torch.library.opcheck(OP, (*tensors, cu_seqlens, True, False, None, "triton"))
    torch.library.opcheck(BACKWARD_OP, (*grads_like(inputs), *tensors, cu_seqlens, None, "triton"))


def test_views_in_and_nothing_written():
    """Slices of one projection, an expanded beta and an expanded gradient give what copies give."""
    fused = make(1, 20, 2, 16, 52)["v"]
    q, k, v = fused.split([16, 16, 20], -1)
    inputs = make(1, 20, 2, 16, 20)
    inputs |= dict(q=q, k=torch.nn.functional.normalize(k, dim=-1), v=v, beta=inputs["beta"][:, :1].expand(1, 20, 2))
    before = {name: x.clone() for name, x in inputs.items()}
    grad = torch.ones((), device=DEVICE).expand(1, 20, 2, 20)
    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    output, _ = triton_chunk_kda(*leaves)
    found = torch.autograd.grad(output, leaves, grad)
    want = results(triton_chunk_kda, {n: x.contiguous() for n, x in before.items()}, None, grad.contiguous())
    assert torch.equal(output, want[0]) and all(torch.equal(a, b) for a, b in zip(found, want[2].values()))
    assert all(torch.equal(inputs[name], before[name]) for name in inputs), "an input was written to"


def test_second_order_raises():
    tensors = [x.requires_grad_() for x in make(1, 3, 1, 16, 8).values()]
    output, _ = triton_chunk_kda(*tensors)
    (grad,) = torch.autograd.grad(output.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="chunk_kda differentiates once"):
        torch.autograd.grad(grad.sum(), tensors[1])


# ---- on a GPU ----

ROWS = ["bf16", "fp16", "fp32_chunk"]


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("bound", [None, -5.0])
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 63, 64, 65, 127, 128, 300, 1000])
def test_lengths(tokens, bound, row):
    inputs = make(1, tokens, 2, 128, 128, row, bound=bound)
    assert_within_yardstick(inputs, row, o="o", gate_lower_bound=bound)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("keys", ["random", "silu"])
@pytest.mark.parametrize("key_width, value_width", [(60, 100), (256, 64), (128, 300), (16, 128)])
def test_widths(key_width, value_width, keys, row):
    inputs = make(2, 130, 3, key_width, value_width, row, keys=keys, bound=-5.0)
    o = "o" if keys == "random" and key_width >= 64 else "o_any"
    assert_within_yardstick(inputs, row, o=o, gate_lower_bound=-5.0)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("nats", [0.0, -0.01, -1.0, -5.0, -7.0, -12.0, -20.0, -50.0])
def test_constant_gates(nats, row):
    inputs = make(1, 150, 2, 128, 128, row, gate=nats)
    inputs["q"] *= torch.logspace(-3, 3, 150, device=DEVICE)[:, None, None] if row != "fp16" else 1
    # Through 150 tokens the initial state's gradient falls below FP32's normal numbers: its loss is on the output
    # alone.
    grads = (grads_like(inputs)[0], None)
    assert_within_yardstick(inputs, row, grads=grads, gate_lower_bound=nats if -5 <= nats < 0 else None)


@gpu
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("pack", CONTRACT_PACKS)
def test_contract_packs(pack, row):
    lengths = CONTRACT_PACKS[pack]
    cu_seqlens = offsets(lengths)
    inputs = make(1, 8192, 2, 128, 128, row, cu_seqlens, sequences=len(lengths), bound=-5.0)
    cu_seqlens = on_device(cu_seqlens)
    want, want_state = naive_chunk_kda(
        **{name: x.double() for name, x in inputs.items()}, cu_seqlens=cu_seqlens, output_final_state=True
    )
    for bound in (None, -5.0):
        output, state = triton_chunk_kda(
            **inputs, cu_seqlens=cu_seqlens, output_final_state=True, gate_lower_bound=bound
        )  # fmt: skip
        check("output", output, want, row, "o")
        check("state", state, want_state, row, "state")


@gpu
@pytest.mark.parametrize("scale", [1e-6, 1e4])
@pytest.mark.parametrize("row", ["bf16", "fp32_chunk"])
def test_initial_states_of_any_size(scale, row):
    inputs = make(1, 200, 2, 128, 128, row)
    inputs["initial_state"] *= scale
    assert_within_yardstick(inputs, row)


@gpu
def test_many_sequences_and_heads():
    """More than 65,535 sequences times heads, one token each: a grid axis would not hold them."""
    lengths = [1] * 700
    cu_seqlens = on_device(offsets(lengths))
    inputs = make(1, 700, 96, 16, 16, "bf16", offsets(lengths), sequences=700)
    output, state = triton_chunk_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    wide = {name: x.double() for name, x in inputs.items()}
    wide["gate"] = wide.pop("cumulative_gate")  # chunks of one token
    as_batch = {name: x if name == "initial_state" else x.transpose(0, 1) for name, x in wide.items()}
    want, want_state = naive_recurrent_kda(**as_batch, output_final_state=True)
    check("output", output, want.transpose(0, 1), "bf16", "o_any")
    check("state", state, want_state, "bf16", "state")


@gpu
@pytest.mark.usefixtures("whole_gpu")
def test_more_than_2_31_elements():
    """The last sequence of a pack, past 2^31 elements of every tensor, has the bits that it has alone."""
    lengths, heads = [524_288, 64], 32
    tokens = sum(lengths)
    cu_seqlens = on_device(offsets(lengths))
    shape = (1, tokens, heads, 128)
    q, k, v, grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(4))
    k = torch.nn.functional.normalize(k, dim=-1)
    gate = torch.rand(shape, device=DEVICE).neg_().view(1, tokens // 64, 64, heads, 128).cumsum(2).view(shape)
    beta = torch.rand(shape[:3], device=DEVICE)
    assert q.numel() > 2**31

    def run(*inputs, grad, **options):
        leaves = [x.detach().requires_grad_() for x in inputs]
        output, state = triton_chunk_kda(*leaves, output_final_state=True, gate_lower_bound=-1.0, **options)
        return output.detach(), state.detach(), torch.autograd.grad(output, leaves, grad)

    last = slice(lengths[0], tokens)
    alone, alone_state, alone_grads = run(*(x[:, last] for x in (q, k, v, gate, beta)), grad=grad[:, last])
    output, state, grads = run(q, k, v, gate, beta, grad=grad, cu_seqlens=cu_seqlens)
    assert torch.equal(output[:, last], alone) and torch.equal(state[1:], alone_state)
    assert all(torch.equal(x[:, last], y) for x, y in zip(grads, alone_grads))
    assert torch.isfinite(state).all() and all(torch.isfinite(x.sum()) for x in (output, *grads))


@gpu
def test_error_does_not_grow_with_length():
    errors = []
    for tokens in (1024, 65_536):
        inputs = make(1, tokens, 1, 128, 128, "bf16", gate=-0.01)
        output, _ = triton_chunk_kda(**inputs)
        want, _ = naive_chunk_kda(**{name: x.double() for name, x in inputs.items()})
        errors.append(rms_error(output, want))
    assert errors[1] <= 1.2 * errors[0] and errors[1] <= YARDSTICK["bf16"]["o"]


@gpu
@pytest.mark.parametrize("row", ROWS)
def test_same_bits_every_time_and_in_any_grad_mode(row):
    inputs = make(2, 300, 8, 128, 128, row)
    first = results(triton_chunk_kda, inputs, None, *grads_like(inputs))
    for _ in range(5):
        again = results(triton_chunk_kda, inputs, None, *grads_like(inputs))
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
        assert all(torch.equal(first[2][name], again[2][name]) for name in inputs)
    with torch.no_grad():
        output, state = triton_chunk_kda(**inputs, output_final_state=True)
    assert torch.equal(output, first[0]) and torch.equal(state, first[1])


@gpu
@pytest.mark.parametrize("value_width", [128, 192])
def test_the_backward_scans_tile_changes_no_bit(value_width, monkeypatch):
    """It follows the batch size, and a sequence's bits may not."""
    cu_seqlens = offsets([70, 0, 300, 64])
    inputs = make(1, 434, 3, 128, value_width, "bf16", cu_seqlens, sequences=4)
    found = []
    for tile in ((64, 4), (128, 8)):
        monkeypatch.setattr(configs, "backward_scan_tile", lambda *_, tile=tile: tile)
        found.append(results(triton_chunk_kda, inputs, on_device(cu_seqlens), *grads_like(inputs))[2])
    assert all(torch.equal(found[0][name], found[1][name]) for name in inputs)


@gpu
@pytest.mark.parametrize("row", ["bf16", "fp32_chunk"])
def test_packed_is_alone_at_full_width(row):
    lengths = [130, 0, 1, 64, 200]
    cu_seqlens = offsets(lengths)
    inputs = make(1, sum(lengths), 4, 128, 128, row, cu_seqlens, sequences=5, bound=-5.0)
    function = functools.partial(triton_chunk_kda, gate_lower_bound=-5.0)
    grad_output, grad_state = grads_like(inputs)
    output, state, grads = results(function, inputs, on_device(cu_seqlens), grad_output, grad_state)
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        if length:
            rows = slice(start, start + length)
            one = {name: x[:, rows] if name != "initial_state" else x[n : n + 1] for name, x in inputs.items()}
            for alone_cu in (None, on_device(offsets([length]))):
                alone = results(function, one, alone_cu, grad_output[:, rows], grad_state[n : n + 1])
                assert torch.equal(output[:, rows], alone[0]) and torch.equal(state[n], alone[1][0])
                for name in one:
                    found = grads[name][n : n + 1] if name == "initial_state" else grads[name][:, rows]
                    assert torch.equal(found, alone[2][name]), name


@gpu
def test_no_synchronisation_and_graph_replay():
    """Captured once, replayed after offsets, states, data and gradients were changed in place: eager's bits."""

    def draw(lengths, seed):
        cu_seqlens = offsets(lengths)
        inputs = make(1, 300, 4, 128, 128, "bf16", cu_seqlens, sequences=3, seed=seed)
        return [*inputs.values(), on_device(cu_seqlens)], grads_like(inputs, seed)

    tensors, grads = draw([100, 150, 50], 0)

    def call():
        output, state = OP(*tensors, True, False, None, "triton")
        return [output, state, *BACKWARD_OP(*grads, *tensors, None, "triton")]

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
    for lengths, seed in (([100, 150, 50], 0), ([7, 0, 290], 1), ([0, 300, 0], 2)):
        fresh, fresh_grads = draw(lengths, seed)
        for old, new in zip([*tensors, *grads], [*fresh, *fresh_grads]):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        live = sum(lengths)
        for replayed, eager in zip(captured, call()):
            rows = slice(None) if replayed.shape[:1] == (3,) else (slice(None), slice(0, live))
            assert torch.equal(replayed[rows], eager[rows])


@gpu
def test_compiles_whole():
    """fullgraph, forward and backward, as eager gives; T and N go on changing without a third compilation."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")

    def call(q, k, v, cumulative_gate, beta, initial_state, cu_seqlens=None, output_final_state=True):
        output, state = triton_chunk_kda(
            q, k, v, cumulative_gate, beta, initial_state, cu_seqlens=cu_seqlens, output_final_state=output_final_state
        )  # fmt: skip
        return output * 2, state

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    for lengths in ([5, 0, 60], [33, 2, 1, 64], [70, 7], [1, 2, 3, 4, 5]):
        cu_seqlens = offsets(lengths)
        inputs = make(1, sum(lengths), 2, 64, 64, "bf16", cu_seqlens, sequences=len(lengths))
        cu_seqlens = on_device(cu_seqlens)
        want = results(call, inputs, cu_seqlens, *grads_like(inputs))
        found = results(compiled, inputs, cu_seqlens, *grads_like(inputs))
        assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
        assert all(torch.equal(found[2][name], want[2][name]) for name in inputs)
    assert counter.frame_count <= 2


@gpu
def test_against_the_recurrent_kernel():
    """chunk_kda on cumulative gates is recurrent_kda on per-token gates, and either hands its state to the other."""
    inputs = {name: x.to(DEVICE) for name, x in core_inputs(2, 200, 4, 128, 128, dtype=torch.bfloat16).items()}
    want, want_state = recurrent_kda(**inputs, output_final_state=True)
    output, state = triton_chunk_kda(**to_chunk(inputs), output_final_state=True)
    check("output", output, want, "bf16", "o")
    check("state", state, want_state, "bf16", "state")
    parts = [
        {n: x if n == "initial_state" else x[:, r] for n, x in inputs.items()} for r in (slice(150), slice(150, 200))
    ]
    first, handed = triton_chunk_kda(**to_chunk(parts[0]), output_final_state=True)
    second, state = recurrent_kda(**{**parts[1], "initial_state": handed}, output_final_state=True)
    check("output", torch.cat([first, second], 1), want, "bf16", "o")
    check("state", state, want_state, "bf16", "state")
    first, handed = recurrent_kda(**parts[0], output_final_state=True)
    second, state = triton_chunk_kda(**to_chunk({**parts[1], "initial_state": handed}), output_final_state=True)
    check("output", torch.cat([first, second], 1), want, "bf16", "o")
    check("state", state, want_state, "bf16", "state")


@gpu
@pytest.mark.parametrize("bound", [None, -5.0])
def test_a_long_pack_has_the_bits_of_its_sequences_alone(bound):
    """At a size where bf16 shows the last bit of FP32 arithmetic: one element in 65,536 rounds otherwise."""
    lengths = CONTRACT_PACKS["mixed"]
    cu_seqlens = offsets(lengths)
    inputs = make(1, sum(lengths), 4, 128, 128, "bf16", cu_seqlens, bound=bound, sequences=len(lengths))
    grad_output, grad_state = grads_like(inputs)
    function = functools.partial(triton_chunk_kda, gate_lower_bound=bound)
    output, state, found = results(function, inputs, on_device(cu_seqlens), grad_output, grad_state)
    for n, (start, length) in enumerate(zip(cu_seqlens.tolist(), lengths)):
        rows = slice(start, start + length)
        one = {name: x[:, rows] if name != "initial_state" else x[n : n + 1] for name, x in inputs.items()}
        alone = results(function, one, None, grad_output[:, rows], grad_state[n : n + 1])
        assert torch.equal(output[:, rows], alone[0]) and torch.equal(state[n], alone[1][0])
        for name in one:
            packed = found[name][n : n + 1] if name == "initial_state" else found[name][:, rows]
            assert torch.equal(packed, alone[2][name]), name
