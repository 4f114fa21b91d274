"""recurrent_kda and recurrent_kda_step against the FP64 reference, and the rules of their contract.

Without a GPU the Triton kernels run in Triton's interpreter on small shapes; the tests marked ``gpu`` are the same
rules at the sizes and in the settings that only a GPU has.
"""

import itertools
import os
import subprocess
import sys

import pytest
import torch
from yardstick import DTYPES, check, max_error, unit

from titan_kda.kernels import (
    bounded_gate_cumsum,
    l2norm,
    recurrent_kda,
    recurrent_kda_step,
    softplus_gate_cumsum,
)
from titan_kda.kernels.configs import RecurrentConfig, recurrent_config
from titan_kda.kernels.recurrent import launch_recurrent_kda
from titan_kda.kernels.reference import naive_recurrent_kda, naive_recurrent_kda_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LOG2_E = 1.4426950408889634
IMPLS = ("triton", "reference")


def recurrence_inputs(batch, tokens, heads, key_width, value_width, row="fp32", sequences=None, seed=0, device=DEVICE):
    """Unit keys and queries, decays from none to strong, and an initial state, on the CPU's generator."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    dtype = DTYPES[row]
    sequences = batch if sequences is None else sequences
    inputs = dict(
        q=unit(normal(batch, tokens, heads, key_width)).to(dtype),
        k=unit(normal(batch, tokens, heads, key_width)).to(dtype),
        v=normal(batch, tokens, heads, value_width).to(dtype),
        gate=-LOG2_E * torch.exp(normal(batch, tokens, heads, key_width) * 1.5 - 1.5),
        beta=torch.sigmoid(normal(batch, tokens, heads)).to(dtype),
        initial_state=normal(sequences, heads, key_width, value_width),
    )
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def in_fp64(inputs, **settings):
    names = ("q", "k", "v", "gate", "beta")
    state = inputs.get("initial_state")
    output, state = naive_recurrent_kda(
        *(inputs[name].double() for name in names),
        None if state is None else state.double(),
        output_final_state=True,
        **settings,
    )
    assert state is not None
    return output, state


def offsets(lengths, device=DEVICE):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def step_inputs(sequences, heads, key_width, value_width, row="fp32", slots=None, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    dtype = DTYPES[row]
    inputs = dict(
        q=normal(sequences, heads, key_width).to(dtype),
        k=normal(sequences, heads, key_width).to(dtype),
        v=normal(sequences, heads, value_width).to(dtype),
        raw_gate=normal(sequences, heads, key_width).to(dtype),
        beta_logits=normal(sequences, heads).to(dtype),
        A_log=torch.log(1 + 15 * torch.rand(heads, generator=generator)),
        dt_bias=normal(heads, key_width),
        state=normal(slots or sequences, heads, key_width, value_width),
    )
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def step_in_fp64(inputs, **settings):
    rows = {name: x.double() for name, x in inputs.items()}  # a new state, updated in place
    return naive_recurrent_kda_step(*rows.values(), **settings), rows["state"]


def raises(error, *words):
    """The message names the operator, the argument and what is wrong."""
    return pytest.raises(error, match="(?s)" + ".*".join(words))


# ---- recurrent_kda: values ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("key_width, value_width, tokens", [(16, 16, 5), (12, 20, 3), (33, 5, 2), (64, 16, 1)])
def test_dense_is_within_the_yardstick(key_width, value_width, tokens, row, impl):
    inputs = recurrence_inputs(2, tokens, 2, key_width, value_width, row)
    before = {name: x.clone() for name, x in inputs.items()}
    output, state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    want, want_state = in_fp64(inputs)
    assert output.dtype == inputs["q"].dtype and state.dtype == torch.float32
    check("output", output, want, row, "o_any")
    check("final state", state, want_state, row, "state")
    assert all(torch.equal(inputs[name], before[name]) for name in inputs), "an input was written to"


def test_mixed_dtypes_and_no_state():
    inputs = recurrence_inputs(1, 4, 2, 16, 8)
    inputs.update(q=inputs["q"].half(), k=inputs["k"].bfloat16(), beta=inputs["beta"].double(), initial_state=None)
    output, state = recurrent_kda(**inputs, impl="triton")
    assert state is None and output.dtype == torch.float16
    check("output", output, in_fp64(inputs)[0], "fp16", "o_any")


PACKS = {
    "first": [0, 3, 1],
    "last": [2, 0],
    "between": [1, 0, 0, 4],
    "all": [0, 0, 0],
    "ones": [1, 1, 1],
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pack", PACKS)
def test_packed_with_empty_slots_and_a_tail_of_nan(pack, impl):
    lengths = PACKS[pack]
    live, capacity = sum(lengths), sum(lengths) + 2
    inputs = recurrence_inputs(1, capacity, 2, 16, 8, sequences=len(lengths))
    for name in ("q", "k", "v", "gate", "beta"):
        inputs[name][:, live:] = float("nan")
    cu_seqlens = offsets(lengths)
    output, state = recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True, impl=impl)
    want, want_state = in_fp64(inputs, cu_seqlens=cu_seqlens)
    check("output", output[:, :live], want[:, :live], "fp32", "o_any")
    check("final state", state, want_state, "fp32", "state")
    for n, length in enumerate(lengths):
        if length == 0:
            assert torch.equal(state[n], inputs["initial_state"][n]), "an empty slot's state passes through bit for bit"
    assert state.untyped_storage().data_ptr() != inputs["initial_state"].untyped_storage().data_ptr()
    inputs["initial_state"] = None
    _, state = recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True, impl=impl)
    assert torch.isfinite(state).all()
    assert all(not state[n].any() for n, length in enumerate(lengths) if length == 0)


def test_a_sequence_has_the_same_bits_alone_in_a_batch_and_in_a_pack():
    inputs = recurrence_inputs(3, 4, 2, 16, 24)
    output, state = recurrent_kda(**inputs, output_final_state=True, impl="triton")
    alone, alone_state = recurrent_kda(
        **{name: x[1:2] for name, x in inputs.items()}, output_final_state=True, impl="triton"
    )
    flat = {name: x if name == "initial_state" else x.flatten(0, 1)[None] for name, x in inputs.items()}
    packed, packed_state = recurrent_kda(**flat, cu_seqlens=offsets([4, 4, 4]), output_final_state=True, impl="triton")
    assert torch.equal(alone[0], output[1]) and torch.equal(alone_state[0], state[1])
    assert torch.equal(packed[0], output.flatten(0, 1)) and torch.equal(packed_state, state)


TILES = [RecurrentConfig(*tile) for tile in ((16, 1), (32, 1), (32, 2), (64, 2), (64, 4))]


def assert_tiles_agree(key_width, value_width, tokens, row):
    """The scan's tile follows the batch size and T, so it must not show in any bit."""
    tiles = [tile for tile in TILES if key_width <= 128 or tile.block_v <= 16 * tile.num_warps]
    inputs = recurrence_inputs(2, tokens, 3, key_width, value_width, row)
    output, state = launch_recurrent_kda(*inputs.values(), None, True, tiles[0])
    want, want_state = in_fp64(inputs)
    check("output", output, want, row, "o_any")
    check("state", state, want_state, row, "state")
    for tile in tiles[1:]:
        other, other_state = launch_recurrent_kda(*inputs.values(), None, True, tile)
        assert torch.equal(other, output) and torch.equal(other_state, state), tile


def test_tiles_change_no_bit():
    assert_tiles_agree(16, 40, 2, "fp32")


UNROLLED = [RecurrentConfig(*tile, unrolled=True) for tile in ((32, 2), (64, 4, 128))]


def assert_one_token_is_a_scans(inputs, config=None):
    """One token at a time without the loop, against one call with it: the same bits."""
    initial = inputs.pop("initial_state")
    output, state = launch_recurrent_kda(*inputs.values(), initial, None, True, RecurrentConfig(16, 1))
    handed = initial
    for t in range(output.shape[1]):
        one = [x[:, t : t + 1] for x in inputs.values()]
        got, handed = launch_recurrent_kda(*one, handed, None, True, config)
        assert torch.equal(got, output[:, t : t + 1]), t
    assert torch.equal(handed, state)


@pytest.mark.parametrize("config", UNROLLED)
def test_one_token_without_a_loop(config):
    assert_one_token_is_a_scans(recurrence_inputs(1, 2, 1, 40, 64), config)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cut", [1, 3])
@pytest.mark.parametrize("with_state", [True, False])
def test_a_state_handed_over_gives_the_bits_of_one_call(cut, with_state, impl):
    inputs = recurrence_inputs(2, 5, 2, 16, 8)
    if not with_state:
        inputs["initial_state"] = None
    output, state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    tokens = ("q", "k", "v", "gate", "beta")
    first, handed = recurrent_kda(
        *(inputs[name][:, :cut] for name in tokens), inputs["initial_state"], output_final_state=True, impl=impl
    )
    second, last = recurrent_kda(
        *(inputs[name][:, cut:] for name in tokens), handed, output_final_state=True, impl=impl
    )
    assert torch.equal(torch.cat([first, second], 1), output) and torch.equal(last, state)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gate_of_minus_infinity_forgets_everything(impl):
    inputs = recurrence_inputs(1, 5, 1, 16, 8)
    inputs["gate"][:, 2] = -float("inf")
    output, state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    later = {name: x[:, 2:] for name, x in inputs.items() if name != "initial_state"}
    fresh, fresh_state = recurrent_kda(**later, output_final_state=True, impl=impl)
    assert torch.equal(output[:, 2:], fresh) and torch.equal(state, fresh_state)
    check("output", output, in_fp64(inputs)[0], "fp32", "o_any")


def test_gates_from_none_to_complete():
    """Every gate from 0 down is legal: no decay, weak, strong, and past what FP32 can hold."""
    for gate in (0.0, -1e-3, -1.0, -30.0, -150.0, -1e4, -3e38):
        inputs = recurrence_inputs(1, 3, 1, 16, 8)
        inputs["gate"].fill_(gate)
        output, state = recurrent_kda(**inputs, output_final_state=True, impl="triton")
        want, want_state = in_fp64(inputs)
        check(f"output at {gate}", output, want, "fp32", "o_any")
        check(f"state at {gate}", state, want_state, "fp32", "state")


def test_later_tokens_change_no_bit_of_earlier_ones():
    inputs = recurrence_inputs(1, 4, 1, 16, 8)
    output, _ = recurrent_kda(**inputs, impl="triton")
    other = recurrence_inputs(1, 4, 1, 16, 8, seed=1)
    for name in ("q", "k", "v", "gate", "beta"):
        inputs[name][:, 3:] = other[name][:, 3:] * 100
    assert torch.equal(recurrent_kda(**inputs, impl="triton")[0][:, :3], output[:, :3])


@pytest.mark.parametrize("row", ["fp32", "bf16"])
def test_views_give_what_their_copies_give(row):
    plain = recurrence_inputs(2, 3, 2, 16, 8, row)
    fused = torch.cat([plain["q"], plain["k"], plain["v"]], -1)  # one projection, split: rows far apart
    views = dict(
        q=fused[..., :16],
        k=fused[..., 16:32],
        v=fused[..., 32:],
        gate=plain["gate"].permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        beta=plain["beta"].mT.contiguous().mT,
        initial_state=plain["initial_state"].mT.contiguous().mT,
    )
    assert not any(x.is_contiguous() for x in views.values())
    want, want_state = recurrent_kda(**plain, output_final_state=True, impl="triton")
    got, got_state = recurrent_kda(**views, output_final_state=True, impl="triton")
    check("output", got, want, "fp32" if row == "fp32" else "bf16", "o_any")
    check("state", got_state, want_state, "fp32", "state")
    expanded = dict(plain, q=plain["q"][:, :1].expand(-1, 3, -1, -1), beta=plain["beta"][:, :1].expand(-1, 3, -1))
    output, _ = recurrent_kda(**expanded, impl="triton")
    check("output, expanded", output, in_fp64(expanded)[0], row, "o_any")


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_and_no_sequences(impl):
    inputs = recurrence_inputs(2, 0, 2, 16, 8)
    output, state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    assert output.shape == (2, 0, 2, 8) and torch.equal(state, inputs["initial_state"])
    assert state.data_ptr() != inputs["initial_state"].data_ptr()
    inputs = recurrence_inputs(0, 3, 2, 16, 8)
    output, state = recurrent_kda(**inputs, output_final_state=True, impl=impl)
    assert output.shape == (0, 3, 2, 8) and state.shape == (0, 2, 16, 8)
    inputs = recurrence_inputs(1, 3, 2, 16, 8, sequences=0)
    output, state = recurrent_kda(**inputs, cu_seqlens=offsets([]), output_final_state=True, impl=impl)
    assert output.shape == (1, 3, 2, 8) and state.shape == (0, 2, 16, 8)


# ---- recurrent_kda: requests that cannot be met, and bad input ----


@pytest.mark.parametrize("impl", [None, "triton"])
@pytest.mark.parametrize("name", ["q", "k", "v", "gate", "beta", "initial_state"])
def test_a_gradient_request_names_chunk_kda(name, impl):
    inputs = recurrence_inputs(1, 2, 1, 16, 8)
    inputs[name].requires_grad_()
    with raises(RuntimeError, "recurrent_kda", "chunk_kda"):
        recurrent_kda(**inputs, impl=impl)
    with torch.no_grad():
        recurrent_kda(**inputs, impl=impl)


def test_the_named_reference_differentiates():
    inputs = recurrence_inputs(1, 4, 1, 8, 6)
    wanted = {name: x.double().requires_grad_() for name, x in inputs.items()}
    output, state = naive_recurrent_kda(*wanted.values(), output_final_state=True)
    (output.square().sum() + state.sum()).backward()
    for x in inputs.values():
        x.requires_grad_()
    output, state = recurrent_kda(**inputs, output_final_state=True, impl="reference")
    (output.square().sum() + state.sum()).backward()
    for name, x in inputs.items():
        check(f"d {name}", x.grad, wanted[name].grad, "fp32", "gate_grad" if name in ("gate", "beta") else "grad")


def test_autocast_does_not_reach_inside():
    inputs = recurrence_inputs(1, 3, 2, 16, 8)
    for impl in IMPLS:
        plain = recurrent_kda(**inputs, output_final_state=True, impl=impl)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
            cast = recurrent_kda(**inputs, output_final_state=True, impl=impl)
        assert all(torch.equal(a, b) for a, b in zip(plain, cast))


def test_bad_input_is_refused_by_name():
    good = recurrence_inputs(2, 3, 2, 16, 8)

    def call(**changes):
        return recurrent_kda(**{**good, **changes})

    with raises(TypeError, "recurrent_kda: q", "int32"):
        call(q=good["q"].int())
    with raises(TypeError, "recurrent_kda: v", "float64"):
        call(v=good["v"].double())
    with raises(TypeError, "recurrent_kda: gate", "bfloat16"):
        call(gate=good["gate"].bfloat16())
    with raises(TypeError, "recurrent_kda: beta"):
        call(beta=good["beta"].int())
    with raises(TypeError, "recurrent_kda: initial_state", "float16"):
        call(initial_state=good["initial_state"].half())
    with raises(ValueError, "recurrent_kda: q", r"\[B, T, H, K\]"):
        call(q=good["q"][0])
    with raises(ValueError, "recurrent_kda: k", r"\[2, 3, 2, 15\]"):
        call(k=good["k"][..., :15])
    with raises(ValueError, "recurrent_kda: v", r"\[2, 3, 1, 8\]"):
        call(v=good["v"][:, :, :1])
    with raises(ValueError, "recurrent_kda: gate", r"\[2, 2, 2, 16\]"):
        call(gate=good["gate"][:, :2])
    with raises(ValueError, "recurrent_kda: beta", r"\[2, 3, 2, 1\]"):
        call(beta=good["beta"][..., None])
    with raises(ValueError, "recurrent_kda: initial_state", r"\[1, 2, 16, 8\]"):
        call(initial_state=good["initial_state"][:1])
    with raises(ValueError, "recurrent_kda: B must be 1"):
        call(cu_seqlens=offsets([3, 3]))
    for name in ("k", "v", "gate", "beta", "initial_state"):
        with raises(ValueError, f"recurrent_kda: {name} must be on", "meta"):
            call(**{name: good[name].to("meta")})
    with raises(ValueError, "recurrent_kda: K", "257"):
        wide = recurrence_inputs(1, 1, 1, 257, 4)
        recurrent_kda(**wide)
    with raises(ValueError, "recurrent_kda: impl", "cuda"):
        call(impl="cuda")
    with pytest.raises(TypeError, match="chunk_size"):
        call(chunk_size=64)

    packed = recurrence_inputs(1, 4, 2, 16, 8, sequences=2)
    with raises(TypeError, "recurrent_kda: cu_seqlens", "int64"):
        recurrent_kda(**packed, cu_seqlens=offsets([2, 2]).long())
    with raises(ValueError, "recurrent_kda: cu_seqlens must be on", "meta"):
        recurrent_kda(**packed, cu_seqlens=offsets([2, 2]).to("meta"))
    with raises(ValueError, "recurrent_kda: cu_seqlens", "contiguous"):
        recurrent_kda(**packed, cu_seqlens=offsets([1, 1, 1, 1])[::2])
    with raises(ValueError, "recurrent_kda: initial_state"):
        recurrent_kda(**packed, cu_seqlens=offsets([2, 1, 1]))


@pytest.mark.parametrize("values", [[1, 2, 4], [0, 3, 2], [0, 2, 5]])
def test_the_reference_refuses_bad_offsets(values):
    inputs = recurrence_inputs(1, 4, 1, 16, 8, sequences=2)
    with raises(ValueError, "cu_seqlens"):
        recurrent_kda(**inputs, cu_seqlens=torch.tensor(values, dtype=torch.int32, device=DEVICE), impl="reference")


# ---- recurrent_kda_step ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
def test_step_is_within_the_yardstick(row, gate, impl):
    for key_width, value_width in [(16, 16), (12, 20), (64, 5)]:
        inputs = step_inputs(3, 2, key_width, value_width, row)
        settings = dict(gate=gate, lower_bound=-4.0, beta_scale=2.0)
        want, want_state = step_in_fp64(inputs, **settings)
        before = {name: x.clone() for name, x in inputs.items()}
        output = recurrent_kda_step(**inputs, **settings, impl=impl)
        assert output.dtype == inputs["q"].dtype
        check("output", output, want, row, "o_any")
        check("state", inputs["state"], want_state, "fp32", "state")
        assert all(torch.equal(x, before[name]) for name, x in inputs.items() if name != "state")


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
@pytest.mark.parametrize("row", ["fp32", "bf16"])
def test_step_is_the_separate_operators_one_after_another(row, gate):
    inputs = step_inputs(2, 2, 16, 8, row)
    raw_gate, A_log, dt_bias = inputs["raw_gate"][:, None], inputs["A_log"], inputs["dt_bias"]
    if gate == "bounded":
        log2_decay = bounded_gate_cumsum(raw_gate, A_log, dt_bias, chunk_size=1)
    else:
        log2_decay = softplus_gate_cumsum(raw_gate, A_log, dt_bias, chunk_size=1)
    want, want_state = recurrent_kda(
        l2norm(inputs["q"])[:, None],
        l2norm(inputs["k"])[:, None],
        inputs["v"][:, None],
        log2_decay,
        torch.sigmoid(inputs["beta_logits"].float())[:, None],
        inputs["state"],
        output_final_state=True,
    )
    output = recurrent_kda_step(**inputs, gate=gate, impl="triton")
    check("output", output, want[:, 0], row, "o_any")
    check("state", inputs["state"], want_state, row, "state")


@pytest.mark.parametrize("impl", IMPLS)
def test_step_by_slot_with_padding_rows(impl):
    """Padding rows hold NaN: what they say must reach nothing, and slots that nobody names keep their bits."""
    inputs = step_inputs(5, 2, 16, 8, slots=6)
    indices = torch.tensor([4, -1, 0, -7, 2], dtype=torch.int32, device=DEVICE)
    for name in ("q", "k", "v", "raw_gate", "beta_logits"):
        inputs[name][1] = float("nan")
    inputs["state"][5] = float("nan")
    before = inputs["state"].clone()
    live, used = [0, 2, 4], [4, 0, 2]
    alone = {name: inputs[name][live] for name in ("q", "k", "v", "raw_gate", "beta_logits")}
    alone.update(A_log=inputs["A_log"], dt_bias=inputs["dt_bias"], state=before[used])  # in the operator's order
    want, want_state = step_in_fp64(alone)
    output = recurrent_kda_step(**inputs, state_indices=indices, impl=impl)
    check("output", output[live], want, "fp32", "o_any")
    check("state", inputs["state"][used], want_state, "fp32", "state")
    assert not output[[1, 3]].any() and torch.isfinite(output).all()
    untouched = [1, 3, 5]
    assert torch.equal(inputs["state"][untouched].nan_to_num(7.0), before[untouched].nan_to_num(7.0))


def test_step_index_past_the_slots_touches_nothing():
    if os.environ.get("TRITON_DEBUG") == "1":
        pytest.skip("a debug run asserts instead")
    inputs = step_inputs(2, 1, 16, 8, slots=2)
    pool = torch.cat([inputs["state"], torch.full_like(inputs["state"], 3.0)])  # what a stray write would hit
    inputs["state"] = pool[:2]
    indices = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE)
    before = pool.clone()
    output = recurrent_kda_step(**inputs, state_indices=indices, impl="triton")
    assert output[0].any() and not output[1].any()
    assert torch.equal(pool[[0, 2, 3]], before[[0, 2, 3]]) and not torch.equal(pool[1], before[1])


@pytest.mark.parametrize("impl", IMPLS)
def test_step_on_views_of_a_pool(impl):
    """A layer's states as slices of one pool for all layers, or with the widths swapped; rows from one projection."""
    plain = step_inputs(2, 2, 16, 8)
    fused = torch.cat([plain["q"], plain["k"], plain["raw_gate"], plain["v"]], -1)
    want, want_state = step_in_fp64(plain)
    for make in (
        lambda state: torch.stack([torch.zeros_like(state), state], 1)[:, 1],
        lambda state: state.mT.contiguous().mT,
    ):
        views = dict(
            plain,
            q=fused[..., :16],
            k=fused[..., 16:32],
            raw_gate=fused[..., 32:48],
            v=fused[..., 48:],
            A_log=torch.stack([plain["A_log"]] * 2, -1)[:, 0],
            dt_bias=plain["dt_bias"].mT.contiguous().mT,
            state=make(plain["state"]),
        )
        output = recurrent_kda_step(**views, impl=impl)
        check("output", output, want, "fp32", "o_any")
        check("state", views["state"], want_state, "fp32", "state")


@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_step_takes_every_finite_A_log_and_logit(gate):
    for A_log, logit in itertools.product((-1e30, -100.0, 0.0, 80.0, 100.0, 1e30), (-1e30, -80.0, 0.0, 20.0, 1e4)):
        inputs = step_inputs(1, 1, 16, 8)
        inputs["A_log"].fill_(A_log)
        inputs["raw_gate"].fill_(logit)
        inputs["dt_bias"].zero_()
        want, want_state = step_in_fp64(inputs, gate=gate)
        output = recurrent_kda_step(**inputs, gate=gate, impl="triton")
        assert max_error(output, want) < 1e-5, (A_log, logit)
        assert max_error(inputs["state"], want_state) < 1e-5, (A_log, logit)


def test_step_of_no_sequences():
    inputs = step_inputs(1, 2, 16, 8)
    none = {name: x if name in ("A_log", "dt_bias", "state") else x[:0] for name, x in inputs.items()}
    for impl in IMPLS:
        assert recurrent_kda_step(**none, impl=impl).shape == (0, 2, 8)


def test_step_refuses_gradients_but_for_the_explicit_reference():
    inputs = step_inputs(2, 2, 16, 8)
    inputs["A_log"].requires_grad_()  # as a module's parameter is
    for impl in (None, "triton"):
        with raises(RuntimeError, "recurrent_kda_step", "chunk_kda"):
            recurrent_kda_step(**inputs, impl=impl)
    with torch.no_grad():
        recurrent_kda_step(**inputs)
    wide = {name: x.detach().double() for name, x in inputs.items()}
    wanted = [wide[name].requires_grad_() for name in wide if name != "state"]
    naive_recurrent_kda_step(**wide).square().sum().backward()
    leaves = [inputs[name].requires_grad_() for name in inputs if name != "state"]
    found = torch.autograd.grad(recurrent_kda_step(**inputs, impl="reference").square().sum(), leaves)
    for got, want in zip(found, wanted):
        check("gradient", got, want.grad, "fp32", "gate_grad")


def test_step_without_indices_takes_the_first_slots():
    for impl in IMPLS:
        inputs = step_inputs(2, 2, 16, 8, slots=4)
        pool = inputs["state"]
        alone = {name: x[:2].clone() if name == "state" else x for name, x in inputs.items()}
        assert torch.equal(recurrent_kda_step(**inputs, impl=impl), recurrent_kda_step(**alone, impl=impl))
        assert torch.equal(pool[:2], alone["state"])
        assert torch.equal(pool[2:], step_inputs(2, 2, 16, 8, slots=4)["state"][2:])


def test_step_refuses_bad_input_by_name():
    good = step_inputs(2, 2, 16, 8)
    indices = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)

    def call(**changes):
        return recurrent_kda_step(**{**good, **changes})

    before = good["state"].clone()
    with raises(TypeError, "recurrent_kda_step: raw_gate", "float64"):
        call(raw_gate=good["raw_gate"].double())
    with raises(TypeError, "recurrent_kda_step: A_log", "bfloat16"):
        call(A_log=good["A_log"].bfloat16())
    with raises(TypeError, "recurrent_kda_step: state", "float16"):
        call(state=good["state"].half())
    with raises(TypeError, "recurrent_kda_step: beta_logits"):
        call(beta_logits=good["beta_logits"].int())
    with raises(TypeError, "recurrent_kda_step: state_indices", "int64"):
        call(state_indices=indices.long())
    with raises(TypeError, "recurrent_kda_step: lower_bound"):
        call(lower_bound="-5")
    with raises(TypeError, "recurrent_kda_step: beta_scale"):
        call(beta_scale=None)
    with raises(ValueError, "recurrent_kda_step: k", r"\[2, 2, 15\]"):
        call(k=good["k"][..., :15])
    with raises(ValueError, "recurrent_kda_step: v"):
        call(v=good["v"][:1])
    with raises(ValueError, "recurrent_kda_step: dt_bias", r"\[2\]"):
        call(dt_bias=good["dt_bias"][:, 0])
    with raises(ValueError, "recurrent_kda_step: A_log", r"\[1\]"):
        call(A_log=good["A_log"][:1])
    with raises(ValueError, "recurrent_kda_step: state", r"\[2, 2, 8, 16\]"):
        call(state=good["state"].mT)
    with raises(ValueError, "recurrent_kda_step: state", "slot"):
        call(state=good["state"][:1])
    with raises(ValueError, "recurrent_kda_step: state", "expanded"):
        call(state=good["state"][:1].expand(2, -1, -1, -1))
    with raises(ValueError, "recurrent_kda_step: state_indices", r"\[1\]"):
        call(state_indices=indices[:1])
    for name in ("k", "v", "raw_gate", "beta_logits", "A_log", "dt_bias", "state"):
        with raises(ValueError, f"recurrent_kda_step: {name} must be on", "meta"):
            call(**{name: good[name].to("meta")})
    with raises(ValueError, "recurrent_kda_step: state_indices must be on", "meta"):
        call(state_indices=indices.to("meta"))
    with raises(ValueError, "recurrent_kda_step: gate", "sigmoid"):
        call(gate="sigmoid")
    for bad in (0.0, 1.0, -float("inf"), float("nan")):
        with raises(ValueError, "recurrent_kda_step: lower_bound"):
            call(lower_bound=bad)
    with raises(ValueError, "recurrent_kda_step: beta_scale"):
        call(beta_scale=float("inf"))
    with pytest.raises(TypeError, match="initial_state"):
        call(initial_state=good["state"])
    assert torch.equal(good["state"], before)


# ---- torch.library and torch.compile ----


@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck(impl):
    inputs = recurrence_inputs(1, 3, 2, 16, 8, sequences=2)
    rows = tuple(inputs[name] for name in ("q", "k", "v", "gate", "beta"))
    packed = (*rows, inputs["initial_state"], offsets([2, 1]))
    torch.library.opcheck(torch.ops.titan_kda.recurrent_kda.default, (*packed, True, impl))
    torch.library.opcheck(torch.ops.titan_kda.recurrent_kda.default, (*rows, None, None, False, impl))
    step = tuple(step_inputs(2, 2, 16, 8, slots=3).values())
    indices = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    for chosen in (None, indices):
        arguments = (*step, chosen, "bounded", -5.0, 1.0, impl)
        torch.library.opcheck(torch.ops.titan_kda.recurrent_kda_step.default, arguments)


class CountingBackend:
    """Counts graphs; compiles them by inductor where a GPU is, by AOTAutograd alone elsewhere."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        name = "inductor" if DEVICE.type == "cuda" else "aot_eager"
        return torch._dynamo.lookup_backend(name)(graph, example_inputs)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_whole_with_dynamic_sizes(impl):
    torch._dynamo.reset()
    backend = CountingBackend()

    def scan(q, k, v, gate, beta, state, cu_seqlens):
        output, state = recurrent_kda(
            q, k, v, gate, beta, state, cu_seqlens=cu_seqlens, output_final_state=True, impl=impl
        )
        return output * 2, state + 1

    compiled = torch.compile(scan, fullgraph=True, backend=backend)
    for lengths in ([2, 3], [1, 4, 2], [0, 1, 1, 1, 4], [2] * 6):  # T = 5, 7, 7, 12 and N = 2, 3, 5, 6
        inputs = recurrence_inputs(1, sum(lengths), 2, 16, 8, sequences=len(lengths))
        arguments = (*inputs.values(), offsets(lengths))
        got, want = compiled(*arguments), scan(*arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, want))
    assert backend.graphs <= 2, f"{backend.graphs} graphs for four sizes"


@pytest.mark.parametrize("impl", IMPLS)
def test_step_compiled_whole_updates_the_state(impl):
    torch._dynamo.reset()
    backend = CountingBackend()

    def step(state, indices, **rows):
        return recurrent_kda_step(state=state, state_indices=indices, impl=impl, **rows) + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for sequences in (2, 3, 4, 6):
        inputs = step_inputs(sequences, 2, 16, 8, slots=7)
        state = inputs.pop("state")
        eager_state, compiled_state = state.clone(), state.clone()
        indices = torch.randperm(7, generator=torch.Generator().manual_seed(0))[:sequences].int().to(DEVICE)
        want, got = step(eager_state, indices, **inputs), compiled(compiled_state, indices, **inputs)
        assert torch.equal(got, want) and torch.equal(compiled_state, eager_state)
        assert not torch.equal(compiled_state, state)
    assert backend.graphs <= 2, f"{backend.graphs} graphs for four sizes"


def test_a_compiled_gradient_request_names_chunk_kda():
    torch._dynamo.reset()
    inputs = recurrence_inputs(1, 2, 1, 16, 8)
    inputs["k"].requires_grad_()
    compiled = torch.compile(lambda **inputs: recurrent_kda(**inputs)[0], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="chunk_kda"):
        compiled(**inputs)


# ---- at full size, on a GPU ----

WIDTHS = [(16, 16), (60, 100), (64, 128), (100, 60), (128, 128), (256, 64), (64, 256), (128, 16), (16, 60), (256, 256)]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 300]


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("key_width, value_width", WIDTHS)
def test_gpu_lengths_dense_and_packed(key_width, value_width, row):
    """All of a width's lengths as one pack with empty slots at both ends and between, then each length alone."""
    heads = 3
    lengths = [0, *LENGTHS[:4], 0, 0, *LENGTHS[4:], 0]
    live, capacity = sum(lengths), sum(lengths) + 37
    inputs = recurrence_inputs(1, capacity, heads, key_width, value_width, row, sequences=len(lengths))
    for name in ("q", "k", "v", "gate", "beta"):
        inputs[name][:, live:] = float("nan")
    cu_seqlens = offsets(lengths)
    output, state = recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    want, want_state = in_fp64(inputs, cu_seqlens=cu_seqlens)
    kind = "o" if key_width >= 64 else "o_any"
    check("output", output[:, :live], want[:, :live], row, kind)
    check("final state", state, want_state, row, "state")
    begin = 0
    for n, length in enumerate(lengths):
        alone = {
            name: x[n : n + 1] if name == "initial_state" else x[:, begin : begin + length]
            for name, x in inputs.items()
        }
        alone_output, alone_state = recurrent_kda(**alone, output_final_state=True)
        assert torch.equal(alone_output[0], output[0, begin : begin + length]), length
        assert torch.equal(alone_state[0], state[n]), length
        begin += length


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["bf16", "fp32"])
@pytest.mark.parametrize("gate", ["bounded", "softplus"])
def test_gpu_step_widths(row, gate):
    for key_width, value_width in WIDTHS:
        inputs = step_inputs(5, 3, key_width, value_width, row, slots=8)
        indices = torch.tensor([6, 1, -1, 7, 0], dtype=torch.int32, device=DEVICE)
        want, want_state = step_in_fp64(inputs, state_indices=indices, gate=gate)
        output = recurrent_kda_step(**inputs, state_indices=indices, gate=gate)
        check(f"output {key_width} {value_width}", output, want, row, "o_any")
        check(f"state {key_width} {value_width}", inputs["state"], want_state, "fp32", "state")


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["bf16", "fp32"])
@pytest.mark.parametrize(
    "key_width, value_width", [(16, 128), (30, 64), (64, 128), (100, 60), (128, 128), (128, 33), (256, 64)]
)
def test_gpu_tiles_change_no_bit(key_width, value_width, row):
    assert_tiles_agree(key_width, value_width, 20, row)


@pytest.mark.gpu
def test_gpu_hand_over_at_every_cut():
    """64 x 32 rows, so that a piece of one token takes another tile than a longer one."""
    inputs = recurrence_inputs(64, 70, 32, 128, 128, "bf16")
    tokens = ("q", "k", "v", "gate", "beta")
    for start in (inputs["initial_state"], None):
        output, state = recurrent_kda(*(inputs[name] for name in tokens), start, output_final_state=True)
        for cut in (1, 2, 17, 64, 65, 69):
            first, handed = recurrent_kda(*(inputs[name][:, :cut] for name in tokens), start, output_final_state=True)
            second, last = recurrent_kda(*(inputs[name][:, cut:] for name in tokens), handed, output_final_state=True)
            assert torch.equal(torch.cat([first, second], 1), output) and torch.equal(last, state), cut


@pytest.mark.gpu
def test_gpu_decode_after_prefill_is_one_scan():
    """Prefill by recurrent_kda, then fused steps on its state, against one FP64 scan over all of it."""
    prompt, steps, heads = 33, 12, 4
    generator = torch.Generator().manual_seed(0)
    q, k, v, raw = (
        torch.randn(2, prompt + steps, heads, 128, generator=generator).to(DEVICE, torch.bfloat16) for _ in range(4)
    )
    beta_logits = torch.randn(2, prompt + steps, heads, generator=generator).to(DEVICE, torch.bfloat16)
    A_log, dt_bias = torch.rand(heads, device=DEVICE), torch.randn(heads, 128, device=DEVICE)
    gate = bounded_gate_cumsum(raw, A_log, dt_bias, chunk_size=1)
    want, want_state = in_fp64(
        dict(q=unit(q.double()), k=unit(k.double()), v=v, gate=gate, beta=beta_logits.double().sigmoid())
    )
    rows = [x[:, :prompt] for x in (l2norm(q), l2norm(k), v, gate, beta_logits.float().sigmoid())]
    output, state = recurrent_kda(*rows, output_final_state=True)
    outputs = [output]
    for t in range(prompt, prompt + steps):
        rows = [x[:, t] for x in (q, k, v, raw, beta_logits)]
        outputs.append(recurrent_kda_step(*rows, A_log, dt_bias, state).unsqueeze(1))
    check("output", torch.cat(outputs, 1), want, "bf16", "o")
    check("state", state, want_state, "bf16", "state")


@pytest.mark.gpu
def test_gpu_a_sequence_has_the_same_bits_alone_and_in_a_large_batch():
    inputs = recurrence_inputs(70, 5, 32, 128, 128, "bf16")
    output, state = recurrent_kda(**inputs, output_final_state=True)
    alone, alone_state = recurrent_kda(**{name: x[69:] for name, x in inputs.items()}, output_final_state=True)
    assert torch.equal(alone[0], output[69]) and torch.equal(alone_state[0], state[69])
    inputs = step_inputs(70, 32, 128, 128, "bf16")
    alone = {name: x if name in ("A_log", "dt_bias") else x[69:].clone() for name, x in inputs.items()}
    assert torch.equal(recurrent_kda_step(**alone)[0], recurrent_kda_step(**inputs)[69])
    assert torch.equal(alone["state"][0], inputs["state"][69])


@pytest.mark.gpu
def test_gpu_two_runs_give_the_same_bits():
    inputs = recurrence_inputs(4, 64, 32, 128, 128, "bf16")
    runs = [recurrent_kda(**inputs, output_final_state=True) for _ in range(3)]
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run))


@pytest.mark.gpu
def test_gpu_more_than_65535_sequences_times_heads():
    sequences, heads = 5000, 14  # 70,000
    inputs = recurrence_inputs(sequences, 1, heads, 16, 16, "bf16")
    output, state = recurrent_kda(**inputs, output_final_state=True)
    want, want_state = in_fp64(inputs)
    check("output", output, want, "bf16", "o_any")
    check("state", state, want_state, "bf16", "state")
    flat = {name: x if name == "initial_state" else x.transpose(0, 1) for name, x in inputs.items()}
    packed, packed_state = recurrent_kda(**flat, cu_seqlens=offsets([1] * sequences), output_final_state=True)
    assert torch.equal(packed[0], output[:, 0]) and torch.equal(packed_state, state)
    inputs = step_inputs(sequences, heads, 16, 16)
    want, want_state = step_in_fp64(inputs)
    output = recurrent_kda_step(**inputs)
    check("step output", output, want, "fp32", "o_any")
    check("step state", inputs["state"], want_state, "fp32", "state")


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_gpu_tensors_of_more_than_2_to_the_31_elements():
    # Tokens: 2^31 / (64 * 128) rows of 64 heads and then some, as sequences of one token with no state kept, so that
    # o = beta (k . q) v / sqrt(K) is known in closed form.
    tokens, heads, key_width = 2**18 + 33, 64, 128
    assert tokens * heads * key_width > 2**31
    q = torch.empty(1, tokens, heads, key_width, dtype=torch.bfloat16, device=DEVICE).normal_()
    k = torch.empty_like(q).normal_()
    gate = torch.zeros(1, 1, 1, 1, device=DEVICE).expand(1, tokens, heads, key_width)
    v = torch.randn(1, tokens, heads, 8, dtype=torch.bfloat16, device=DEVICE)
    beta = torch.rand(1, tokens, heads, device=DEVICE)
    cu_seqlens = torch.arange(tokens + 1, dtype=torch.int32, device=DEVICE)
    output, _ = recurrent_kda(q, k, v, gate, beta, cu_seqlens=cu_seqlens)
    for at in (0, tokens // 2, tokens - 40):
        rows = [x[0, at : at + 40].double() for x in (q, k, v, beta)]
        want = (rows[3] * (rows[0] * rows[1]).sum(-1)).unsqueeze(-1) * rows[2] / key_width**0.5
        check(f"output at {at}", output[0, at : at + 40], want, "bf16", "o_any")
    del q, k, gate, v, beta, output
    torch.cuda.empty_cache()

    # States: 4,100 of 32 heads.
    sequences, heads = 4100, 32
    assert sequences * heads * 128 * 128 > 2**31
    rows = recurrence_inputs(sequences, 1, heads, 128, 128, "bf16", sequences=0)
    rows["initial_state"] = torch.empty(sequences, heads, 128, 128, device=DEVICE).normal_()
    output, state = recurrent_kda(**rows, output_final_state=True)
    ends = [0, sequences // 2, sequences - 2, sequences - 1]
    want, want_state = in_fp64({name: x[ends] for name, x in rows.items()})
    check("output", output[ends], want, "bf16", "o")
    check("state", state[ends], want_state, "bf16", "state")

    few = step_inputs(3, heads, 128, 128, slots=3)
    indices = torch.tensor([sequences - 1, 7, sequences - 2], dtype=torch.int32, device=DEVICE)
    few["state"] = state[indices.long()]
    want, want_state = step_in_fp64(few)
    before = state[: sequences - 2].sum().item() - state[7].sum().item()
    few["state"] = state
    output = recurrent_kda_step(**few, state_indices=indices)
    check("step output", output, want, "fp32", "o")
    check("step state", state[indices.long()], want_state, "fp32", "state")
    assert state[: sequences - 2].sum().item() - state[7].sum().item() == pytest.approx(before, abs=1e-2)


@pytest.mark.gpu
def test_gpu_graph_replay_after_changes_in_place():
    """Captured once; then offsets, states and data change in place, and a replay gives an eager call's bits."""
    inputs = recurrence_inputs(1, 40, 4, 128, 128, "bf16", sequences=4)
    cu_seqlens = offsets([10, 0, 25, 1])
    step = step_inputs(4, 4, 128, 128, "bf16", slots=6)
    indices = torch.tensor([3, -1, 0, 5], dtype=torch.int32, device=DEVICE)
    recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    recurrent_kda_step(**step, state_indices=indices)  # both warm
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, state = recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
        step_output = recurrent_kda_step(**step, state_indices=indices)
    for seed, lengths, slots in ((1, [0, 40, 0, 0], [5, 4, 3, 2]), (2, [1, 2, 3, 4], [-1, -1, 1, 0])):
        for mine, new in (
            (inputs, recurrence_inputs(1, 40, 4, 128, 128, "bf16", sequences=4, seed=seed)),
            (step, step_inputs(4, 4, 128, 128, "bf16", slots=6, seed=seed)),
        ):
            for name, x in new.items():
                mine[name].copy_(x)
        cu_seqlens.copy_(offsets(lengths))
        indices.copy_(torch.tensor(slots, dtype=torch.int32))
        eager_step = {name: x.clone() for name, x in step.items()}
        graph.replay()
        want, want_state = recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
        want_step = recurrent_kda_step(**eager_step, state_indices=indices)
        live = sum(lengths)
        assert torch.equal(output[:, :live], want[:, :live]) and torch.equal(state, want_state)
        assert torch.equal(step_output, want_step) and torch.equal(step["state"], eager_step["state"])


@pytest.mark.gpu
def test_gpu_no_call_synchronises():
    inputs = recurrence_inputs(1, 40, 4, 64, 64, "bf16", sequences=4)
    cu_seqlens = offsets([10, 0, 25, 1])
    step = step_inputs(4, 4, 64, 64, "bf16")
    recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
    recurrent_kda_step(**step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        recurrent_kda(**inputs, cu_seqlens=cu_seqlens, output_final_state=True)
        recurrent_kda_step(**step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_launches_on_the_tensors_device():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    there = torch.device("cuda", 1)
    inputs = recurrence_inputs(1, 3, 2, 16, 8, device=there)
    output, _ = recurrent_kda(**inputs)
    check("output", output, in_fp64(inputs)[0], "fp32", "o_any")
    step = step_inputs(2, 2, 16, 8, device=there)
    want, _ = step_in_fp64(step)
    check("step output", recurrent_kda_step(**step), want, "fp32", "o_any")


ASSERTS = {
    "offsets": """
x = torch.rand(1, 4, 1, 16, device="cuda")
recurrent_kda(x, x, x, -x, x[..., 0], cu_seqlens=torch.tensor([0, 3, 2], dtype=torch.int32, device="cuda"))
""",
    "slots": """
x = torch.rand(2, 1, 16, device="cuda")
recurrent_kda_step(x, x, x, x, x[..., 0], x[0, :, 0], x[0], torch.zeros(2, 1, 16, 16, device="cuda"),
                   state_indices=torch.tensor([0, 2], dtype=torch.int32, device="cuda"))
""",
}


@pytest.mark.gpu
@pytest.mark.parametrize("what", ASSERTS)
def test_gpu_debug_runs_assert_on_the_device(what):
    """In processes of their own: a device assert takes the CUDA context with it. Without TRITON_DEBUG the call ends."""
    code = "import torch\nfrom titan_kda.kernels import recurrent_kda, recurrent_kda_step\n" + ASSERTS[what]
    code += "torch.cuda.synchronize()\nprint('ended')\n"
    for debug in ("0", "1"):
        environment = {**os.environ, "TRITON_DEBUG": debug}
        run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        if debug == "1":
            assert run.returncode != 0 and "ended" not in run.stdout, run.stderr[-2000:]
            assert "assert" in run.stderr.lower(), run.stderr[-2000:]
        else:
            assert run.returncode == 0 and "ended" in run.stdout, run.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["bf16", "fp32"])
@pytest.mark.parametrize("key_width,value_width", [(128, 128), (64, 64), (100, 200), (40, 72)])
@pytest.mark.parametrize("sequences", [4, 64])
def test_gpu_one_token_without_a_loop(sequences, key_width, value_width, row):
    """The tiles that the number of rows chooses."""
    rows = sequences * 32
    assert recurrent_config(key_width, value_width, rows, True, False).unrolled
    assert_one_token_is_a_scans(recurrence_inputs(sequences, 3, 32, key_width, value_width, row))
