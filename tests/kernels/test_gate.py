"""The two gates against FP64, and the rules of their contract.

Without a GPU the Triton kernels run in Triton's interpreter on small shapes; the tests marked ``gpu`` are the same
rules at the sizes and in the settings that only a GPU has.
"""

import itertools
import math

import pytest
import torch
import torch._dynamo.testing
from yardstick import DTYPES, check

from titan_kda.kernels import bounded_gate_cumsum, softplus_gate_cumsum
from titan_kda.kernels.reference import naive_bounded_gate_cumsum, naive_softplus_gate_cumsum

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")
GATES = {
    "bounded": (bounded_gate_cumsum, naive_bounded_gate_cumsum),
    "softplus": (softplus_gate_cumsum, naive_softplus_gate_cumsum),
}
NAMES = ("d raw_gate", "d A_log", "d dt_bias")


def gate_inputs(batch, tokens, heads, key_width, row="fp32", seed=0):
    generator = torch.Generator().manual_seed(seed)
    raw_gate = 2 * torch.randn(batch, tokens, heads, key_width, generator=generator)
    A_log = torch.log(1 + 15 * torch.rand(heads, generator=generator))
    dt_bias = torch.randn(heads, key_width, generator=generator)
    return raw_gate.to(DEVICE, DTYPES[row]), A_log.to(DEVICE), dt_bias.to(DEVICE)


def gradient_like(output, seed=1):
    return torch.randn(output.shape, generator=torch.Generator().manual_seed(seed)).to(output.device, output.dtype)


def offsets(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=DEVICE)


def run(function, inputs, grad=None, **settings):
    """The output and the three gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    output = function(*leaves, **settings)
    grads = torch.autograd.grad(output, leaves, gradient_like(output) if grad is None else grad.to(output.dtype))
    return output.detach(), grads


def check_against_fp64(gate, inputs, row, live=None, grad=None, **settings):
    """Rows past ``live`` belong to no sequence: FP64 never sees them."""
    function, naive = GATES[gate]
    live = inputs[0].shape[1] if live is None else live
    grad = gradient_like(inputs[0].float()) if grad is None else grad
    output, grads = run(function, inputs, grad, **settings)
    settings.pop("impl", None)
    exact = [inputs[0][:, :live].double(), *(x.double() for x in inputs[1:])]
    want, want_grads = run(naive, exact, grad[:, :live], **settings)
    assert output.dtype == torch.float32 and output.shape == inputs[0].shape
    check(f"{gate} gate", output[:, :live], want, "fp32", "o")
    assert all(got.dtype == x.dtype and got.shape == x.shape for got, x in zip(grads, inputs))
    check(NAMES[0], grads[0][:, :live], want_grads[0], row, "grad")
    # Sums over tokens of either sign: what they cancel down to is small beside their terms' rounding.
    check(NAMES[1], grads[1], want_grads[1], "fp32", "gate_grad")
    check(NAMES[2], grads[2], want_grads[2], "fp32", "gate_grad")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "batch, tokens, heads, key_width, chunk_size",
    [
        (2, 37, 2, 12, 4),
        (1, 130, 1, 16, 64),
        (1, 70, 1, 5, 1),
        (1, 150, 1, 4, 128),
        (1, 1, 2, 8, 64),
        (2, 35, 1, 60, 32),
    ],
)
def test_dense_is_the_fp64_function(impl, gate, batch, tokens, heads, key_width, chunk_size):
    inputs = gate_inputs(batch, tokens, heads, key_width)
    check_against_fp64(gate, inputs, "fp32", chunk_size=chunk_size, impl=impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
def test_fp16_logits(impl, gate):
    check_against_fp64(gate, gate_inputs(1, 37, 2, 12, "fp16"), "fp16", chunk_size=16, impl=impl)


@pytest.mark.parametrize("gate", GATES)
def test_bf16_logits(gate):
    check_against_fp64(gate, gate_inputs(1, 37, 2, 12, "bf16"), "bf16", chunk_size=16)


PACKS = {
    "first slot empty": [0, 0, 5, 17, 21],
    "last slots empty": [70, 3, 0, 0],
    "between": [33, 0, 1, 1, 0, 32],
    "all empty": [0, 0, 0],
    "one": [64],
    "short": [1] * 9,
}


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("pack", PACKS)
def test_packed_with_a_tail_of_nan(impl, gate, pack):
    lengths = PACKS[pack]
    live = sum(lengths)
    inputs = gate_inputs(1, live + 5, 2, 8)
    inputs[0][:, live:] = math.nan
    grad = gradient_like(inputs[0])
    grad[:, live:] = math.nan
    check_against_fp64(gate, inputs, "fp32", live, grad, chunk_size=16, cu_seqlens=offsets(lengths), impl=impl)


@pytest.mark.parametrize("gate, chunk_size", [("bounded", 8), ("softplus", 64), ("bounded", 1)])
def test_a_sequence_in_a_pack_has_the_bits_it_has_alone(gate, chunk_size):
    lengths = [3, 40, 0, 21]
    inputs = gate_inputs(1, sum(lengths), 1, 16)
    grad = gradient_like(inputs[0])
    settings = dict(chunk_size=chunk_size, impl="triton")
    function = GATES[gate][0]
    output, grads = run(function, inputs, grad, cu_seqlens=offsets(lengths), **settings)
    for start, length in zip(itertools.accumulate([0, *lengths]), lengths):
        piece = slice(start, start + length)
        alone, alone_grads = run(function, (inputs[0][:, piece], *inputs[1:]), grad[:, piece], **settings)
        assert torch.equal(output[:, piece], alone)
        assert torch.equal(grads[0][:, piece], alone_grads[0])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
def test_a_chunk_is_the_running_sum_of_its_tokens(impl, gate):
    inputs = gate_inputs(1, 40, 1, 8)
    function = GATES[gate][0]
    tokens = function(*inputs, chunk_size=1, impl=impl)
    chunks = function(*inputs, chunk_size=16, impl=impl)
    for start in range(0, 40, 16):
        check("sum", chunks[:, start : start + 16], tokens[:, start : start + 16].double().cumsum(1), "fp32", "o")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("A_log", [-3e38, -100.0, 0.0, 60.0, 88.0, 88.7, 89.0, 1e4, 3e38])
def test_every_finite_A_log_gives_finite_gates_and_no_nan(impl, gate, A_log):
    raw = torch.tensor([0.0, 1e-38, -1e-30, 1e-3, -1e-3, 1.0, -1.0, 90.0, -90.0, 1e4, -1e4])
    raw_gate = raw.repeat(2).reshape(1, 22, 1, 1).to(DEVICE)
    inputs = (raw_gate, torch.tensor([A_log], device=DEVICE), torch.zeros(1, 1, device=DEVICE))
    grad = torch.cat([torch.ones(11), -torch.ones(11)]).reshape(1, 22, 1, 1).to(DEVICE)
    output, grads = run(GATES[gate][0], inputs, grad, chunk_size=1, impl=impl)
    assert torch.isfinite(output).all() and (output >= -256).all() and (output <= 0).all()
    assert not any(torch.isnan(x).any() for x in grads), grads


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
def test_a_floored_token_is_minus_256_and_has_no_gradient(impl, gate):
    raw_gate = torch.tensor([-1.0, 0.0, 40.0, 300.0], device=DEVICE).reshape(1, 4, 1, 1)
    inputs = (raw_gate, torch.full((1,), 1.5, device=DEVICE), torch.zeros(1, 1, device=DEVICE))
    settings = dict(chunk_size=1, impl=impl)
    if gate == "bounded":
        settings["lower_bound"] = -1000.0
    output, grads = run(GATES[gate][0], inputs, torch.ones_like(raw_gate), **settings)
    floored = output.flatten() == -256
    assert floored.tolist() == ([False, True, True, True] if gate == "bounded" else [False, False, True, True])
    assert ((grads[0].flatten() == 0) == floored).all()
    check_against_fp64(gate, inputs, "fp32", grad=torch.ones_like(raw_gate), **settings)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("gate", GATES)
def test_strided_inputs_and_gradients_and_nothing_written(impl, gate):
    raw_gate, A_log, dt_bias = gate_inputs(2, 19, 6, 8)
    views = (
        raw_gate[:, :, ::3].transpose(1, 2).contiguous().transpose(1, 2),
        A_log[::3],
        dt_bias.t().contiguous().t()[::3],
    )
    assert not any(x.is_contiguous() for x in views)
    before = [x.clone() for x in views]
    grads = (
        gradient_like(torch.empty(2, 2, 19, 8)).to(DEVICE).transpose(1, 2),
        torch.tensor(1.5, device=DEVICE).expand(2, 19, 2, 8),
        gradient_like(torch.empty(2, 19, 2, 16)).to(DEVICE)[..., ::2],
    )
    for grad in grads:
        check_against_fp64(gate, views, "fp32", grad=grad, chunk_size=8, impl=impl)
    assert all(torch.equal(x, y) for x, y in zip(views, before))


@pytest.mark.parametrize("impl", IMPLS)
def test_no_tokens_or_no_sequences(impl):
    for tokens, packed in ((0, None), (0, offsets([])), (4, offsets([])), (0, offsets([0, 0]))):
        inputs = gate_inputs(1, tokens, 2, 4)
        output, grads = run(bounded_gate_cumsum, inputs, cu_seqlens=packed, impl=impl)
        assert output.shape == inputs[0].shape
        assert not grads[1].any() and not grads[2].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_reach_inside(impl):
    inputs = gate_inputs(1, 20, 2, 8)
    plain, plain_grads = run(softplus_gate_cumsum, inputs, chunk_size=8, impl=impl)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        output, grads = run(softplus_gate_cumsum, inputs, chunk_size=8, impl=impl)
    assert torch.equal(output, plain) and all(map(torch.equal, grads, plain_grads))


def test_a_second_order_request_raises():
    leaves = [x.requires_grad_() for x in gate_inputs(1, 5, 1, 4)]
    output = bounded_gate_cumsum(*leaves, impl="triton")
    (grad,) = torch.autograd.grad(output.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="bounded_gate_cumsum differentiates once"):
        grad.sum().backward()


BAD = {
    "dtype": (TypeError, "raw_gate must be", lambda r, A, b: ((r.double(), A, b), {})),
    "A_log dtype": (TypeError, "A_log must be", lambda r, A, b: ((r, A.half(), b), {})),
    "dt_bias dtype": (TypeError, "dt_bias must be", lambda r, A, b: ((r, A, b.bfloat16()), {})),
    "rank": (ValueError, "raw_gate must be", lambda r, A, b: ((r[0], A, b), {})),
    "A_log shape": (ValueError, "A_log must be", lambda r, A, b: ((r, A[:1], b), {})),
    "dt_bias shape": (ValueError, "dt_bias must be", lambda r, A, b: ((r, A, b.flatten()), {})),
    "key width": (ValueError, "K must be", lambda r, A, b: ((r.repeat(1, 1, 1, 65), A, b.repeat(1, 65)), {})),
    "chunk 3": (ValueError, "chunk_size", lambda r, A, b: ((r, A, b), dict(chunk_size=3))),
    "chunk 256": (ValueError, "chunk_size", lambda r, A, b: ((r, A, b), dict(chunk_size=256))),
    "chunk 0": (ValueError, "chunk_size", lambda r, A, b: ((r, A, b), dict(chunk_size=0))),
    "chunk type": (TypeError, "chunk_size", lambda r, A, b: ((r, A, b), dict(chunk_size=4.0))),
    "offsets dtype": (TypeError, "cu_seqlens", lambda r, A, b: ((r, A, b), dict(cu_seqlens=offsets([3]).long()))),
    "offsets rank": (ValueError, "cu_seqlens", lambda r, A, b: ((r, A, b), dict(cu_seqlens=offsets([3])[None]))),
    "batch": (ValueError, "B must be 1", lambda r, A, b: ((r.repeat(2, 1, 1, 1), A, b), dict(cu_seqlens=offsets([3])))),
    "impl": (ValueError, "impl", lambda r, A, b: ((r, A, b), dict(impl="cuda"))),
    "A_log's device": (ValueError, "A_log must be on", lambda r, A, b: ((r, A.to("meta"), b), {})),
    "dt_bias's device": (ValueError, "dt_bias must be on", lambda r, A, b: ((r, A, b.to("meta")), {})),
}


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(gate, case):
    error, message, change = BAD[case]
    args, settings = change(*gate_inputs(1, 3, 2, 4))
    with pytest.raises(error, match=f"{gate}_gate_cumsum: .*{message}"):
        GATES[gate][0](*args, **settings)


@pytest.mark.parametrize("bound", [0.0, 5.0, -math.inf, math.nan])
def test_bad_lower_bound(bound):
    with pytest.raises(ValueError, match="lower_bound must be negative and finite"):
        bounded_gate_cumsum(*gate_inputs(1, 3, 2, 4), lower_bound=bound)
    with pytest.raises(TypeError):
        softplus_gate_cumsum(*gate_inputs(1, 3, 2, 4), lower_bound=-5.0)  # it has none


@pytest.mark.parametrize("offsets_", [[1, 3], [0, 3, 2], [0, 9]])
def test_the_reference_refuses_bad_offsets(offsets_):
    cu_seqlens = torch.tensor(offsets_, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="cu_seqlens must"):
        bounded_gate_cumsum(*gate_inputs(1, 5, 1, 4), cu_seqlens=cu_seqlens, impl="reference")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(impl, packed):
    inputs = gate_inputs(1, 12, 2, 4)
    cu_seqlens = offsets([5, 0, 7]) if packed else None  # to the end: rows past it are nobody's
    ops = torch.ops.titan_kda
    grad = torch.randn_like(inputs[0])
    torch.library.opcheck(ops.bounded_gate_cumsum.default, (*inputs, 4, -5.0, cu_seqlens, impl))
    torch.library.opcheck(ops.softplus_gate_cumsum.default, (*inputs, 4, cu_seqlens, impl))
    torch.library.opcheck(ops.bounded_gate_cumsum_backward.default, (grad, *inputs, 4, -5.0, cu_seqlens, impl))
    torch.library.opcheck(ops.softplus_gate_cumsum_backward.default, (grad, *inputs, 4, cu_seqlens, impl))


@pytest.mark.parametrize("impl, gate", list(zip(IMPLS, GATES)))
def test_compiled_equals_eager_and_sizes_do_not_recompile(impl, gate):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE.type == "cuda" else "aot_eager")
    function = GATES[gate][0]
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for lengths in ([4, 5], [7, 4, 1], [2, 0, 9, 3], [5] * 6):
        inputs = gate_inputs(1, sum(lengths), 2, 8)
        settings = dict(chunk_size=4, cu_seqlens=offsets(lengths), impl=impl)
        output, grads = run(function, inputs, **settings)
        again, again_grads = run(compiled, inputs, **settings)
        assert torch.equal(again, output) and all(map(torch.equal, again_grads, grads))
    assert counter.frame_count <= 2


# ---- on a GPU ----

TOKENS = (1, 2, 15, 16, 17, 63, 64, 65, 300)


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("key_width", [16, 60, 64, 100, 128, 256])
def test_gpu_shapes(gate, key_width, row):
    for tokens in TOKENS:
        check_against_fp64(gate, gate_inputs(2, tokens, 3, key_width, row), row)
    lengths = [0, 300, 1, 0, 17, 64, 129, 0]
    inputs = gate_inputs(1, sum(lengths) + 9, 3, key_width, row)
    inputs[0][:, sum(lengths) :] = math.nan
    grad = gradient_like(inputs[0].float())
    grad[:, sum(lengths) :] = math.nan
    check_against_fp64(gate, inputs, row, sum(lengths), grad, cu_seqlens=offsets(lengths))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size", [1, 2, 4, 8, 16, 32, 64, 128])
def test_gpu_chunk_sizes(chunk_size):
    for gate in GATES:
        check_against_fp64(gate, gate_inputs(2, 300, 2, 64, "bf16"), "bf16", chunk_size=chunk_size)
        settings = dict(chunk_size=chunk_size, cu_seqlens=offsets([0, 131, 5, 64, 100]))
        check_against_fp64(gate, gate_inputs(1, 300, 2, 64, "bf16"), "bf16", **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_gpu_two_runs_are_equal_and_nothing_synchronises(gate):
    lengths = [1000, 0, 3000, 96, 1]
    inputs = gate_inputs(1, sum(lengths), 8, 128, "bf16")
    cu_seqlens = offsets(lengths)
    grad = gradient_like(inputs[0].float())
    first, first_grads = run(GATES[gate][0], inputs, grad, cu_seqlens=cu_seqlens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second, second_grads = run(GATES[gate][0], inputs, grad, cu_seqlens=cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second) and all(map(torch.equal, first_grads, second_grads))


@pytest.mark.gpu
@pytest.mark.parametrize("gate", GATES)
def test_gpu_graph_replay_after_offsets_and_data_change_in_place(gate):
    inputs = [x.requires_grad_() for x in gate_inputs(1, 400, 2, 128, "bf16")]
    cu_seqlens = offsets([100, 200, 100])
    grad = gradient_like(inputs[0].float())

    def step():
        output = GATES[gate][0](*inputs, cu_seqlens=cu_seqlens)
        return output.detach(), *torch.autograd.grad(output, inputs, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for x, y in zip(inputs, gate_inputs(1, 400, 2, 128, "bf16", seed=7)):
            x.copy_(y)
        cu_seqlens.copy_(offsets([0, 17, 350]))
    for x in captured:
        x.fill_(math.nan)
    graph.replay()
    for got, want in zip(captured, step()):
        live = slice(0, 367) if got.dim() == 4 else slice(None)
        assert torch.equal(got[:, live] if got.dim() == 4 else got, want[:, live] if got.dim() == 4 else want)


@pytest.mark.gpu
def test_gpu_more_sequences_than_a_grid_axis():
    count = 70_000
    inputs = gate_inputs(1, count, 2, 16, "bf16")
    one_token_each = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    output, grads = run(bounded_gate_cumsum, inputs, cu_seqlens=one_token_each)
    want, want_grads = run(bounded_gate_cumsum, inputs, chunk_size=1)
    assert torch.equal(output, want) and torch.equal(grads[0], want_grads[0])
    check("d A_log", grads[1], want_grads[1], "fp32", "grad")
    check("d dt_bias", grads[2], want_grads[2], "fp32", "grad")
    dense = (inputs[0].reshape(count, 1, 2, 16), *inputs[1:])
    assert torch.equal(bounded_gate_cumsum(*dense).flatten(), want.flatten())


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_gpu_more_than_2_31_elements():
    heads, key_width, tokens = 32, 128, 524_288 + 64
    raw_gate = torch.randn(1, tokens, heads, key_width, dtype=torch.bfloat16, device=DEVICE)
    assert raw_gate.numel() > 2**31
    _, A_log, dt_bias = gate_inputs(1, 1, heads, key_width)
    grad = torch.randn(1, 1, heads, key_width, device=DEVICE).expand(1, tokens, -1, -1)
    half = tokens // 128 * 64
    output, grads = run(softplus_gate_cumsum, (raw_gate, A_log, dt_bias), grad)
    sums = [torch.zeros_like(A_log, dtype=torch.float64), torch.zeros_like(dt_bias, dtype=torch.float64)]
    for piece in (slice(0, half), slice(half, tokens)):
        want, want_grads = run(softplus_gate_cumsum, (raw_gate[:, piece], A_log, dt_bias), grad[:, piece])
        assert torch.equal(output[:, piece], want) and torch.equal(grads[0][:, piece], want_grads[0])
        sums = [total + x.double() for total, x in zip(sums, want_grads[1:])]
    check("d A_log", grads[1], sums[0], "fp32", "grad")
    check("d dt_bias", grads[2], sums[1], "fp32", "grad")
