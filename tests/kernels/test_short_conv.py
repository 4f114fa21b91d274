"""The short convolution and its decode step against FP64, and the rules of their contract.

Without a GPU the Triton kernels run in Triton's interpreter on small shapes; the tests marked ``gpu`` are the same
rules at the sizes and in the settings that only a GPU has.
"""

import itertools
import math

import pytest
import torch
import torch._dynamo.testing
from yardstick import DTYPES, check

from titan_kda.kernels import causal_conv1d, causal_conv1d_step, short_conv
from titan_kda.kernels.reference import naive_causal_conv1d, naive_causal_conv1d_step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")
STATES = list(itertools.product((False, True), (False, True)))  # an initial state, a final state


def conv_inputs(batch, tokens, channels, width, row="fp32", sequences=None, seed=0):
    """x, weight, initial state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, tokens, channels), (channels, width), (sequences or batch, width - 1, channels))
    return [torch.randn(*shape, generator=generator).to(DEVICE, DTYPES[row]) for shape in shapes]


def normal_like(x, seed):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x.device, x.dtype)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def run(function, x, weight, state, grad, grad_final, **settings):
    """Outputs (without a final state if grad_final is None) and gradients of what is given."""
    leaves = [t.detach().requires_grad_() for t in (x, weight, state) if t is not None]
    output, final = function(
        *leaves[:2],
        initial_state=leaves[2] if state is not None else None,
        output_final_state=grad_final is not None,
        **settings,
    )
    assert (final is None) == (grad_final is None)
    pairs = [(output, grad)] if final is None else [(output, grad), (final, grad_final)]
    pairs = [(y, g) for y, g in pairs if y.requires_grad]
    grads = torch.autograd.grad(
        [y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, materialize_grads=True
    )
    return [output.detach()] + ([] if final is None else [final.detach()]), grads


def check_against_fp64(x, weight, state, row, live=None, grad=None, final=True, **settings):
    """Rows past ``live`` belong to no sequence: FP64 never sees them."""
    live = x.shape[1] if live is None else live
    grad = normal_like(x, 1) if grad is None else grad
    packed = settings.get("cu_seqlens")
    sequences = x.shape[0] if packed is None else len(packed) - 1
    grad_final = normal_like(x.new_empty(sequences, weight.shape[1] - 1, x.shape[2]), 2) if final else None
    outputs, grads = run(causal_conv1d, x, weight, state, grad, grad_final, **settings)
    settings.pop("impl", None)

    def exact(t):
        return None if t is None else t.double()

    wants, want_grads = run(
        naive_causal_conv1d,
        x[:, :live].double(),
        weight.double(),
        exact(state),
        grad[:, :live].double(),
        exact(grad_final),
        **settings,
    )
    assert outputs[0].dtype == x.dtype and outputs[0].shape == x.shape
    check("output", outputs[0][:, :live], wants[0], row, "o")
    if final:
        assert outputs[1].dtype == x.dtype
        assert torch.equal(outputs[1].double(), wants[1]), "the final state is rows of the inputs, bit for bit"
    assert all(got.dtype == x.dtype for got in grads)
    check("dx", grads[0][:, :live], want_grads[0], row, "grad")
    check("dweight", grads[1], want_grads[1], row, "grad")
    if state is not None:
        check("d initial_state", grads[2], want_grads[2], row, "grad")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("initial, final", STATES)
@pytest.mark.parametrize("batch, tokens, channels, width", [(2, 37, 12, 4), (1, 20, 40, 3), (1, 9, 4, 1), (3, 2, 5, 4)])
def test_dense_is_the_fp64_function(impl, initial, final, batch, tokens, channels, width):
    x, weight, state = conv_inputs(batch, tokens, channels, width)
    check_against_fp64(x, weight, state if initial else None, "fp32", final=final, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [1, 2, 5, 8])
def test_no_activation_and_other_widths(impl, width):
    check_against_fp64(*conv_inputs(1, 21, 6, width), "fp32", activation=None, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_fp16(impl):
    check_against_fp64(*conv_inputs(1, 20, 12, 4, "fp16"), "fp16", impl=impl)


def test_bf16():
    check_against_fp64(*conv_inputs(1, 20, 12, 4, "bf16"), "bf16")


PACKS = {
    "first slots empty": [0, 0, 5, 17, 2],
    "last slots empty": [33, 3, 0, 0],
    "between, shorter than the filter": [18, 0, 1, 2, 0, 3, 16],
    "all empty": [0, 0, 0],
    "one": [32],
    "short": [1] * 7,
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("initial, final", [(False, False), (True, True)])
@pytest.mark.parametrize("pack", PACKS)
def test_packed_with_a_tail_of_nan(impl, initial, final, pack):
    lengths = PACKS[pack]
    live = sum(lengths)
    x, weight, state = conv_inputs(1, live + 3, 8, 4, sequences=len(lengths))
    x[:, live:] = math.nan
    grad = normal_like(x, 1)
    grad[:, live:] = math.nan
    settings = dict(cu_seqlens=offsets(lengths), impl=impl)
    check_against_fp64(x, weight, state if initial else None, "fp32", live, grad, final, **settings)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_empty_slot_passes_its_state_and_gradient_through_bit_for_bit(impl):
    x, weight, state = conv_inputs(1, 5, 4, 4, sequences=3)
    state[0, 0, 0] = -0.0
    grad_final = normal_like(state, 3)
    settings = dict(cu_seqlens=offsets([0, 5, 0]), impl=impl)
    outputs, grads = run(causal_conv1d, x, weight, state, normal_like(x, 1), grad_final, **settings)
    for n in (0, 2):
        assert torch.equal(outputs[1][n].view(torch.int32), state[n].view(torch.int32))
        assert torch.equal(grads[2][n], grad_final[n])
    assert outputs[1].untyped_storage().data_ptr() != state.untyped_storage().data_ptr()


@pytest.mark.parametrize("impl", IMPLS)
def test_a_gradient_of_either_output_alone(impl):
    x, weight, state = conv_inputs(1, 6, 4, 4)
    for pick in (0, 1):
        grads = []
        for function, dtype, which in (
            (causal_conv1d, x.dtype, dict(impl=impl)),
            (naive_causal_conv1d, torch.double, {}),
        ):
            leaves = [t.detach().to(dtype).requires_grad_() for t in (x, weight, state)]
            outputs = function(*leaves[:2], initial_state=leaves[2], output_final_state=True, **which)
            grads.append(
                torch.autograd.grad(outputs[pick].square().sum(), leaves, allow_unused=True, materialize_grads=True)
            )
        for got, want in zip(*grads):
            check("gradient", got, want, "fp32", "grad")


def test_a_sequence_in_a_pack_has_the_bits_it_has_alone():
    lengths = [3, 19, 0, 17]
    x, weight, state = conv_inputs(1, sum(lengths), 8, 4, sequences=4)
    grad, grad_final = normal_like(x, 1), normal_like(state, 2)
    outputs, grads = run(causal_conv1d, x, weight, state, grad, grad_final, cu_seqlens=offsets(lengths), impl="triton")
    for n, (start, length) in enumerate(zip(itertools.accumulate([0, *lengths]), lengths)):
        rows, own = slice(start, start + length), slice(n, n + 1)
        alone, alone_grads = run(
            causal_conv1d, x[:, rows], weight, state[own], grad[:, rows], grad_final[own], impl="triton"
        )
        assert torch.equal(outputs[0][:, rows], alone[0]) and torch.equal(outputs[1][own], alone[1])
        assert torch.equal(grads[0][:, rows], alone_grads[0]) and torch.equal(grads[2][own], alone_grads[2])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("cut", [1, 2, 16, 19])
def test_two_calls_with_the_state_handed_over_equal_one(impl, cut):
    x, weight, state = conv_inputs(1, 20, 8, 4)
    whole, final = causal_conv1d(x, weight, initial_state=state, output_final_state=True, impl=impl)
    first, middle = causal_conv1d(x[:, :cut], weight, initial_state=state, output_final_state=True, impl=impl)
    second, last = causal_conv1d(x[:, cut:], weight, initial_state=middle, output_final_state=True, impl=impl)
    joined = torch.cat([first, second], 1)
    check("output", joined, whole, "fp32", "o")
    assert torch.equal(last, final)
    assert impl == "reference" or torch.equal(joined, whole)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("sign", [1, -1, 0])
def test_causality_is_exact(sign, impl):
    """Tokens that overflow the filter's sum and are no part of the loss change no bit before them; 0: both signs."""
    x, weight, _ = conv_inputs(1, 30, 8, 4)
    weight += 3 * weight.sign()
    grad = normal_like(x, 1)
    grad[:, 17:] = 0
    later = torch.full_like(x[:, 17:], torch.finfo(x.dtype).max)
    later *= sign or normal_like(later, 2).sign()

    def outputs_and_grad(x):
        leaf = x.clone().requires_grad_()
        y, _ = causal_conv1d(leaf, weight, impl=impl)
        return y.detach()[:, :17], torch.autograd.grad(y, leaf, grad)[0][:, :17]

    want = outputs_and_grad(x)
    x[:, 17:] = later
    assert all(map(torch.equal, outputs_and_grad(x), want))


@pytest.mark.parametrize("impl", IMPLS)
def test_the_largest_weights_give_finite_gradients(impl):
    x = torch.zeros(1, 5, 4, device=DEVICE, requires_grad=True)
    weight = torch.full((4, 4), torch.finfo(x.dtype).max, device=DEVICE, requires_grad=True)
    y, _ = causal_conv1d(x, weight, impl=impl)
    grads = torch.autograd.grad(y, (x, weight), torch.full_like(y, 1e-30))
    assert all(t.isfinite().all() for t in (y, *grads)) and (grads[0] > 0).all()


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_and_gradients_and_nothing_written(impl):
    x, weight, state = conv_inputs(2, 19, 24, 4)
    views = (x[..., 8:16], weight[::3], state.transpose(1, 2).contiguous().transpose(1, 2)[..., :8])
    assert not any(t.is_contiguous() for t in views)
    before = [t.clone() for t in views]
    grads = (
        normal_like(torch.empty(2, 8, 19), 1).to(DEVICE).transpose(1, 2),
        torch.tensor(1.5, device=DEVICE).expand(2, 19, 8),
        normal_like(x, 2)[..., ::3],
    )
    for grad in grads:
        check_against_fp64(*views, "fp32", grad=grad, impl=impl)
    assert all(torch.equal(t, u) for t, u in zip(views, before))


def test_rows_so_far_apart_that_32_bits_cannot_count_it(tmp_path):
    """Of a sparse file, where there is no GPU: an offset that wraps would end the process."""
    apart, far = 100_000_000, 360_000_000  # 22 and 6 of them pass 2^31
    size = 33 * apart
    memory = (
        torch.empty(size, dtype=torch.float16, device=DEVICE)
        if DEVICE.type == "cuda"
        else torch.from_file(str(tmp_path / "sparse"), shared=True, size=size, dtype=torch.float16)
    )
    x, weight, state = conv_inputs(1, 33, 3, 8, "fp16")
    grad, grad_final = normal_like(x, 1), normal_like(state, 2)
    places = itertools.count(0, 100)

    def spread(t, stride):
        view = memory.as_strided(t.shape, (0, stride, 1), next(places))
        return view.copy_(t)

    settings = dict(activation="silu", impl="triton")
    want = run(causal_conv1d, x, weight, state, grad, grad_final, **settings)
    views = spread(x, apart), weight, spread(state, far), spread(grad, apart), spread(grad_final, far)
    got = run(causal_conv1d, *views, **settings)
    assert all(torch.equal(one, other) for one, other in zip([*got[0], *got[1]], [*want[0], *want[1]], strict=True))
    output = causal_conv1d_step(x[:, 0], weight, state, impl="triton")
    assert torch.equal(causal_conv1d_step(x[:, 0], weight, views[2], impl="triton"), output)
    assert torch.equal(views[2], state)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("batch, channels", [(2, 0), (0, 3), (0, 0)])
def test_no_channels_or_no_batch(impl, batch, channels):
    x, weight, state = conv_inputs(batch, 5, channels, 4)
    args = (x, weight, state, normal_like(x, 1), normal_like(state, 2))
    (output, final), grads = run(causal_conv1d, *args, impl=impl)
    assert output.shape == (batch, 5, channels) and final.shape == (batch, 3, channels)
    assert [grad.shape for grad in grads] == [x.shape, weight.shape, state.shape] and not grads[1].any()
    assert causal_conv1d_step(x[:, 0], weight, state, impl=impl).shape == (batch, channels)


def test_pieces_of_the_backward():
    """No longer than a span, short ones left out, shared out so that programs fill whole turns."""
    dense = short_conv._BACKWARD
    assert short_conv._pieces(dense, 8192, 32) == 32  # of 256 tokens; with 32 blocks, 1,024 programs
    assert short_conv._pieces(dense, 8193, 32) == 64
    assert short_conv._pieces(dense, 100, 32) == 7
    for launch in (dense, short_conv._BACKWARD_PACKED, short_conv._BACKWARD_MANY_TAPS):
        for tokens, blocks in itertools.product((1, 100, 8192, 10**6), (1, 7, 600)):
            pieces = short_conv._pieces(launch, tokens, blocks)
            assert 1 <= pieces <= tokens / 16 + 1
            assert tokens <= pieces * launch.span * 1.7  # where the blocks do not divide a turn's programs


@pytest.mark.parametrize("launch", ["_BACKWARD", "_BACKWARD_PACKED"])
@pytest.mark.parametrize("width", [4, 8])
def test_sequences_begin_and_end_anywhere_in_a_piece(width, launch, monkeypatch):
    """Pieces are of 16 tokens here: they have many sequences, a part of one, or one row of one."""
    monkeypatch.setattr(short_conv, "_backward_launch", lambda *_: getattr(short_conv, launch))
    for seed in range(2):
        lengths = torch.randint(0, 40, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
        lengths = [0 if n % 5 == 0 else 1 if n % 5 == 1 else n for n in lengths]
        x, weight, _ = conv_inputs(1, sum(lengths) + 3, 5, width)
        state = torch.randn(len(lengths), width - 1, 5, device=DEVICE)
        check_against_fp64(
            x, weight, state, "fp32", live=sum(lengths), cu_seqlens=offsets(lengths), activation="silu", impl="triton"
        )


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_or_no_sequences(impl):
    for tokens, packed in ((0, None), (0, offsets([0, 0])), (0, offsets([])), (3, offsets([]))):
        sequences = 1 if packed is None else len(packed) - 1
        x, weight, _ = conv_inputs(1, tokens, 4, 3)
        state = torch.randn(sequences, 2, 4, device=DEVICE)
        grad_final = torch.randn_like(state)
        for initial in (None, state):
            outputs, grads = run(
                causal_conv1d, x, weight, initial, normal_like(x, 1), grad_final, cu_seqlens=packed, impl=impl
            )
            assert outputs[0].shape == x.shape
            assert torch.equal(outputs[1], torch.zeros_like(state) if initial is None else state)
            assert not grads[1].any()
            assert initial is None or torch.equal(grads[2], grad_final)
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output, _ = causal_conv1d(x, weight, cu_seqlens=packed, impl=impl)
        _, dweight = torch.autograd.grad(output, (x, weight), torch.ones_like(output))
        assert packed is None or not dweight.any()


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_reach_inside(impl):
    x, weight, state = conv_inputs(1, 12, 4, 4)
    args = (x, weight, state, normal_like(x, 1), normal_like(state, 2))
    plain = run(causal_conv1d, *args, impl=impl)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = run(causal_conv1d, *args, impl=impl)
    assert all(map(torch.equal, itertools.chain(*plain), itertools.chain(*inside)))


def test_a_second_order_request_raises():
    x, weight, _ = conv_inputs(1, 5, 4, 3)
    output, _ = causal_conv1d(x.requires_grad_(), weight, impl="triton")
    (grad,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="causal_conv1d differentiates once"):
        grad.sum().backward()


BAD = {
    "dtype": (TypeError, "x must be", lambda x, w, s: ((x.double(), w), {})),
    "weight dtype": (TypeError, "weight must be", lambda x, w, s: ((x, w.half()), {})),
    "state dtype": (TypeError, "initial_state must be", lambda x, w, s: ((x, w), dict(initial_state=s.half()))),
    "rank": (ValueError, "x must be", lambda x, w, s: ((x[0], w), {})),
    "weight rank": (ValueError, "weight must be", lambda x, w, s: ((x, w[:, None]), {})),
    "channels": (ValueError, "weight must be", lambda x, w, s: ((x, w[:2]), {})),
    "taps": (ValueError, "at least one tap", lambda x, w, s: ((x, w[:, :0]), {})),
    "state width": (ValueError, "initial_state must be", lambda x, w, s: ((x, w), dict(initial_state=s[:, 1:]))),
    "state N": (
        ValueError,
        "initial_state",
        lambda x, w, s: ((x, w), dict(initial_state=s, cu_seqlens=offsets([1, 2]))),
    ),
    "activation": (ValueError, "activation must be", lambda x, w, s: ((x, w), dict(activation="relu"))),
    "batch": (ValueError, "B must be 1", lambda x, w, s: ((x.repeat(2, 1, 1), w), dict(cu_seqlens=offsets([3])))),
    "device": (ValueError, "weight must be on", lambda x, w, s: ((x, w.to("meta")), {})),
    "state's": (ValueError, "initial_state must be on", lambda x, w, s: ((x, w), dict(initial_state=s.to("meta")))),
    "offsets'": (
        ValueError,
        "cu_seqlens must be on",
        lambda x, w, s: ((x, w), dict(cu_seqlens=offsets([3]).to("meta"))),
    ),
    "impl": (ValueError, "impl", lambda x, w, s: ((x, w), dict(impl="cudnn"))),
    "wide filter": (ValueError, "at most 8 taps", lambda x, w, s: ((x, w.repeat(1, 9)), dict(impl="triton"))),
    "unknown keyword": (TypeError, "unexpected keyword", lambda x, w, s: ((x, w), dict(bias=None))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    error, message, change = BAD[case]
    args, settings = change(*conv_inputs(1, 3, 4, 3))
    with pytest.raises(error, match=f"causal_conv1d.*{message}"):
        causal_conv1d(*args, **settings)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(impl, packed):
    lengths = [5, 0, 7]
    x, weight, state = conv_inputs(1, 12, 4, 4, sequences=3 if packed else 1)
    cu_seqlens = offsets(lengths) if packed else None
    ops = torch.ops.titan_kda
    grads = (normal_like(x, 1), normal_like(state, 2))
    torch.library.opcheck(ops.causal_conv1d.default, (x, weight, "silu", cu_seqlens, state, True, impl))
    torch.library.opcheck(ops.causal_conv1d.default, (x, weight, None, cu_seqlens, None, False, impl))
    args = (*grads, x, weight, "silu", cu_seqlens, state, True, impl)
    torch.library.opcheck(ops.causal_conv1d_backward.default, args)
    pool, indices = conv_inputs(6, 1, 4, 4)[2], torch.tensor([4, -1, 0], dtype=torch.int32, device=DEVICE)
    args = (x[0, :3], weight, pool, "silu", indices if packed else None, impl)
    torch.library.opcheck(ops.causal_conv1d_step.default, args)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_equals_eager_and_sizes_do_not_recompile(impl):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE.type == "cuda" else "aot_eager")
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend=counter)
    for lengths in ([4, 5], [7, 4, 1], [2, 0, 9, 3], [5] * 6):
        x, weight, state = conv_inputs(1, sum(lengths), 4, 4, sequences=len(lengths))
        args = (x, weight, state, normal_like(x, 1), normal_like(state, 2))
        settings = dict(cu_seqlens=offsets(lengths), impl=impl)
        eager, again = run(causal_conv1d, *args, **settings), run(compiled, *args, **settings)
        assert all(map(torch.equal, itertools.chain(*eager), itertools.chain(*again)))
    assert counter.frame_count <= 2


# ---- the decode step ----


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_step_is_the_convolution_token_by_token(impl, activation, width):
    x, weight, state = conv_inputs(3, 9, 6, width)
    want, final = causal_conv1d(
        x, weight, activation=activation, initial_state=state, output_final_state=True, impl="reference"
    )
    for t in range(9):
        output = causal_conv1d_step(x[:, t], weight, state, activation=activation, impl=impl)
        check("output", output, want[:, t], "fp32", "o")
    assert torch.equal(state, final)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("row", ["fp32", "fp16"])
def test_step_by_slot_with_padding_rows(impl, row):
    x, weight, _ = conv_inputs(1, 5, 12, 4, row)
    x = x[0]
    pool = conv_inputs(9, 1, 12, 4, row)[2]
    pool[2] = math.nan  # nobody's
    x[1] = math.nan  # a padding row is not read
    indices = torch.tensor([7, -1, 0, 8, -100], dtype=torch.int32, device=DEVICE)
    want_pool = pool.double()
    live = indices >= 0
    want = naive_causal_conv1d_step(x[live].double(), weight.double(), want_pool, state_indices=indices[live])
    output = causal_conv1d_step(x, weight, pool, state_indices=indices, impl=impl)
    check("output", output[live], want, row, "o")
    assert torch.equal(output[~live], torch.zeros_like(output[~live]))
    assert torch.equal(pool.double().nan_to_num(5.0), want_pool.nan_to_num(5.0))


@pytest.mark.parametrize("impl", IMPLS)
def test_step_takes_views_and_writes_nothing_but_its_slots(impl):
    x, weight, pool = conv_inputs(4, 3, 24, 4)
    rows = x[:, 1, 8:16]
    taps = weight[::3]
    states = pool[:, :, 8:16]
    before = [t.clone() for t in (x, weight, pool)]
    want_states = states.double().clone()
    indices = torch.tensor([3, 9, 1, 9, 0, 9, -1, 9], dtype=torch.int32, device=DEVICE)[::2]
    want = naive_causal_conv1d_step(rows.double(), taps.double(), want_states, state_indices=indices)
    check("output", causal_conv1d_step(rows, taps, states, state_indices=indices, impl=impl), want, "fp32", "o")
    assert torch.equal(states.double(), want_states)
    assert torch.equal(x, before[0]) and torch.equal(weight, before[1])
    assert torch.equal(pool[:, :, :8], before[2][:, :, :8]) and torch.equal(pool[:, :, 16:], before[2][:, :, 16:])


def test_step_past_the_pool_touches_nothing():
    x, weight, pool = conv_inputs(4, 1, 8, 4)
    before = pool.clone()
    indices = torch.tensor([4, -1, 2, 1000], dtype=torch.int32, device=DEVICE)
    output = causal_conv1d_step(x[:, 0], weight, pool, state_indices=indices, impl="triton")
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]]) and not torch.equal(pool[2], before[2])
    assert not output[[0, 1, 3]].any()
    with pytest.raises(ValueError, match="state_indices must be below"):
        causal_conv1d_step(x[:, 0], weight, pool, state_indices=indices, impl="reference")


@pytest.mark.parametrize("impl", [None, *IMPLS])
def test_step_refuses_gradients_but_for_the_explicit_reference(impl):
    x, weight, pool = conv_inputs(2, 1, 8, 4)
    weight.requires_grad_()
    if impl == "reference":
        output = causal_conv1d_step(x[:, 0], weight, pool, impl=impl)
        (grad,) = torch.autograd.grad(output.sum(), weight)
        assert grad.any()
    else:
        with pytest.raises(RuntimeError, match=r"causal_conv1d_step is for inference.*causal_conv1d \(and chunk_kda\)"):
            causal_conv1d_step(x[:, 0], weight, pool, impl=impl)
    with torch.no_grad():
        causal_conv1d_step(x[:, 0], weight, pool, impl=impl)


STEP_BAD = {
    "rank": (ValueError, "x must be", lambda x, w, s: ((x[None], w, s), {})),
    "state dtype": (TypeError, "state must be", lambda x, w, s: ((x, w, s.half()), {})),
    "state width": (ValueError, "state must be", lambda x, w, s: ((x, w, s[:, 1:]), {})),
    "state channels": (ValueError, "state must be", lambda x, w, s: ((x, w, s[..., 1:]), {})),
    "slots": (ValueError, "a slot for each of 3", lambda x, w, s: ((x, w, s[:2]), {})),
    "expanded": (ValueError, "must not be an expanded", lambda x, w, s: ((x, w, s[:1].expand(3, -1, -1)), {})),
    "device": (ValueError, "state must be on", lambda x, w, s: ((x, w, s.to("meta")), {})),
    "indices dtype": (TypeError, "state_indices", lambda x, w, s: ((x, w, s), dict(state_indices=torch.arange(3)))),
    "indices shape": (ValueError, "state_indices", lambda x, w, s: ((x, w, s), dict(state_indices=offsets([1])))),
}


@pytest.mark.parametrize("case", STEP_BAD)
def test_bad_step_input_is_named(case):
    error, message, change = STEP_BAD[case]
    x, weight, state = conv_inputs(3, 1, 4, 3)
    args, settings = change(x[:, 0], weight, state)
    with pytest.raises(error, match=f"causal_conv1d_step: .*{message}"):
        causal_conv1d_step(*args, **settings)


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_step_updates_its_pool(impl):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE.type == "cuda" else "aot_eager")
    compiled = torch.compile(causal_conv1d_step, fullgraph=True, backend=counter)
    for sequences in (2, 3, 5, 4):
        x, weight, pool = conv_inputs(6, 1, 4, 4)
        indices = torch.tensor([5, -1, 0, 3, 2], dtype=torch.int32, device=DEVICE)[:sequences].clone()
        pools = pool.clone(), pool.clone()
        want = causal_conv1d_step(x[:sequences, 0], weight, pools[0], state_indices=indices, impl=impl)
        got = compiled(x[:sequences, 0], weight, pools[1], state_indices=indices, impl=impl)
        assert torch.equal(got, want) and torch.equal(*pools)
    assert counter.frame_count <= 2


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("channels", [16, 60, 100, 128, 1024, 4096])
def test_gpu_shapes(channels, row):
    for tokens in (1, 2, 15, 16, 17, 63, 64, 65, 300):
        check_against_fp64(*conv_inputs(2, tokens, channels, 4, row), row)
        x, weight, _ = conv_inputs(2, tokens, channels, 4, row)
        check_against_fp64(x, weight, None, row, final=False)
    lengths = [0, 300, 1, 0, 17, 2, 129, 3, 0]
    live = sum(lengths)
    x, weight, state = conv_inputs(1, live + 9, channels, 4, row, sequences=len(lengths))
    x[:, live:] = math.nan
    grad = normal_like(x, 1)
    grad[:, live:] = math.nan
    check_against_fp64(x, weight, state, row, live, grad, cu_seqlens=offsets(lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_gpu_widths(width):
    for activation in ("silu", None):
        lengths = [0, 100, 1, 3, 0, 150]
        inputs = conv_inputs(1, sum(lengths), 128, width, "bf16", sequences=len(lengths))
        check_against_fp64(*inputs, "bf16", cu_seqlens=offsets(lengths), activation=activation)


@pytest.mark.gpu
def test_gpu_long_pieces_and_several_turns_of_them():
    """Pieces in one turn of the programs and in several, also where the blocks do not divide one."""
    for tokens, channels in ((8192, 4096), (4096, 4096), (70_000, 512), (8192, 100)):
        x, weight, state = conv_inputs(1, tokens, channels, 4, "bf16")
        check_against_fp64(x, weight, state, "bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32", "bf16"])
def test_gpu_a_row_has_the_same_bits_wherever_it_stands(row):
    """At a size where bf16 shows the last bit of FP32 arithmetic: one element in 65,536 rounds otherwise."""
    lengths = [1300, 547, 2048, 963, 271, 3063]
    x, weight, _ = conv_inputs(1, sum(lengths), 4096, 4, row)
    grad = normal_like(x, 1)
    leaf = x.clone().requires_grad_()
    packed, _ = causal_conv1d(leaf, weight, cu_seqlens=offsets(lengths))
    (packed_grad,) = torch.autograd.grad(packed, leaf, grad)
    ends = list(itertools.accumulate(lengths, initial=0))
    for start, end in itertools.pairwise(ends):
        alone_leaf = x[:, start:end].clone().requires_grad_()
        alone, _ = causal_conv1d(alone_leaf, weight)
        assert torch.equal(alone, packed[:, start:end])
        assert torch.equal(torch.autograd.grad(alone, alone_leaf, grad[:, start:end])[0], packed_grad[:, start:end])


@pytest.mark.gpu
def test_gpu_two_runs_are_equal_and_nothing_synchronises():
    lengths = [1000, 0, 3000, 96, 1]
    x, weight, state = conv_inputs(1, sum(lengths), 1024, 4, "bf16", sequences=len(lengths))
    args = (x, weight, state, normal_like(x, 1), normal_like(state, 2))
    cu_seqlens = offsets(lengths)
    first = run(causal_conv1d, *args, cu_seqlens=cu_seqlens)
    indices = torch.tensor([3, -1, 0], dtype=torch.int32, device=DEVICE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run(causal_conv1d, *args, cu_seqlens=cu_seqlens)
        causal_conv1d_step(x[0, :3], weight, state, state_indices=indices)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, itertools.chain(*first), itertools.chain(*second)))


def capture(step):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    return graph, captured


@pytest.mark.gpu
def test_gpu_graph_replay_after_offsets_states_and_data_change_in_place():
    inputs = [t.requires_grad_() for t in conv_inputs(1, 400, 256, 4, "bf16", sequences=3)]
    cu_seqlens = offsets([100, 200, 100])
    grad, grad_final = normal_like(inputs[0], 1), normal_like(inputs[2], 2)

    def step():
        x, weight, state = inputs
        outputs = causal_conv1d(x, weight, cu_seqlens=cu_seqlens, initial_state=state, output_final_state=True)
        return *(t.detach() for t in outputs), *torch.autograd.grad(outputs, inputs, (grad, grad_final))

    graph, captured = capture(step)
    with torch.no_grad():
        for t, u in zip(inputs, conv_inputs(1, 400, 256, 4, "bf16", sequences=3, seed=7)):
            t.copy_(u)
        cu_seqlens.copy_(offsets([0, 17, 350]))
    for t in captured:
        t.fill_(math.nan)
    graph.replay()
    for i, (got, want) in enumerate(zip(captured, step())):
        assert torch.equal(got[:, :367], want[:, :367]) if i in (0, 2) else torch.equal(got, want)


@pytest.mark.gpu
def test_gpu_step_graph_replay_after_slots_and_states_change_in_place():
    x, weight, pool = conv_inputs(64, 1, 4096, 4, "bf16")
    x = x[:, 0].contiguous()
    indices = torch.arange(64, dtype=torch.int32, device=DEVICE)
    graph, captured = capture(lambda: causal_conv1d_step(x, weight, pool, state_indices=indices))
    new_x, _, new_pool = conv_inputs(64, 1, 4096, 4, "bf16", seed=5)
    x.copy_(new_x[:, 0])
    indices.copy_(torch.arange(63, -1, -1, device=DEVICE)).masked_fill_(indices == 7, -1)
    pool.copy_(new_pool)
    want_pool = pool.double()
    want = naive_causal_conv1d_step(x.double(), weight.double(), want_pool, state_indices=indices)
    graph.replay()
    check("output", captured, want, "bf16", "o")
    assert torch.equal(pool.double(), want_pool)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
def test_gpu_step_shapes(row):
    for sequences, channels, width in ((1, 60, 4), (5, 4096, 4), (300, 4096, 4), (70_000, 16, 3), (3, 100, 8)):
        x, weight, pool = conv_inputs(sequences, 1, channels, width, row)
        want_pool = pool.double()
        indices = torch.randperm(sequences, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)).int()
        want = naive_causal_conv1d_step(x[:, 0].double(), weight.double(), want_pool, state_indices=indices)
        check("output", causal_conv1d_step(x[:, 0], weight, pool, state_indices=indices), want, row, "o")
        assert torch.equal(pool.double(), want_pool)


@pytest.mark.gpu
def test_gpu_more_sequences_than_a_grid_axis():
    count = 70_000
    x, weight, state = conv_inputs(1, count, 64, 4, "bf16", sequences=count)
    one_token_each = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    args = (weight, state, normal_like(x, 1), normal_like(state, 2))
    packed, packed_grads = run(causal_conv1d, x, *args, cu_seqlens=one_token_each)
    dense = (x.reshape(count, 1, 64), *args[:2], args[2].reshape(count, 1, 64), args[3])
    outputs, grads = run(causal_conv1d, *dense)
    assert torch.equal(packed[0].flatten(), outputs[0].flatten()) and torch.equal(packed[1], outputs[1])
    assert torch.equal(packed_grads[0].flatten(), grads[0].flatten()) and torch.equal(packed_grads[2], grads[2])
    window = torch.cat([state, x[0][:, None]], 1).double()  # [N, W, C]
    want = torch.nn.functional.silu((window * weight.double().mT).sum(1))
    check("output", packed[0][0], want, "bf16", "o")
    assert torch.equal(packed[1].double(), window[:, 1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_gpu_more_than_2_31_elements():
    channels, tokens = 4096, 524_288 + 100
    x = torch.randn(1, tokens, channels, dtype=torch.bfloat16, device=DEVICE)
    assert x.numel() > 2**31
    _, weight, _ = conv_inputs(1, 1, channels, 4, "bf16")
    grad = torch.randn(1, 1, channels, dtype=torch.bfloat16, device=DEVICE).expand(1, tokens, -1)
    (output,), grads = run(causal_conv1d, x, weight, None, grad, None)
    for rows, pad in ((slice(0, 200), 0), (slice(tokens - 200, tokens), 3)):
        own = slice(rows.start - pad, rows.stop)
        (want,), want_grads = run(
            naive_causal_conv1d, x[:, own].double(), weight.double(), None, grad[:, own].double(), None
        )
        check("output", output[:, rows], want[:, pad:], "bf16", "o")
        upto = 200 - 3 if rows.start == 0 else 200  # the last rows of a piece wait for those after it
        check("dx", grads[0][:, rows][:, :upto], want_grads[0][:, pad : pad + upto], "bf16", "grad")
    pool = x[0, : tokens // 4 * 3].reshape(-1, 3, channels)  # 1.6e9 elements of state, past 2^31 bytes
    last = torch.tensor([pool.shape[0] - 1], dtype=torch.int32, device=DEVICE)
    want_pool = pool[-1:].double()
    want = naive_causal_conv1d_step(x[:1, 0].double(), weight.double(), want_pool)
    check("step", causal_conv1d_step(x[:1, 0], weight, pool, state_indices=last), want, "bf16", "o")
    assert torch.equal(pool[-1:].double(), want_pool)
