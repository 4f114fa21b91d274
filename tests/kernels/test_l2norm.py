"""l2norm against FP64, and the rules of its contract; as in test_gate.py, small shapes without a GPU."""

import pytest
import torch
import torch._dynamo.testing
from yardstick import DTYPES, check

from titan_kda.kernels import l2norm
from titan_kda.kernels.reference import naive_l2norm

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMPLS = ("triton", "reference")


def normal(*shape, row="fp32", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPES[row])


def run(function, x, grad, **settings):
    leaf = x.detach().requires_grad_()
    y = function(leaf, **settings)
    (dx,) = torch.autograd.grad(y, leaf, grad)
    return y.detach(), dx


def check_against_fp64(x, grad, row, impl=None, **settings):
    y, dx = run(l2norm, x, grad, impl=impl, **settings)
    want, want_dx = run(naive_l2norm, x.double(), grad.double(), **settings)
    assert y.dtype == dx.dtype == x.dtype and y.shape == dx.shape == x.shape
    check("y", y, want, row, "o")
    check("dx", dx, want_dx, row, "grad")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(3, 5, 2, 12), (7, 60), (300,), (1, 2, 100), (2, 1, 3, 1, 4, 8), (9, 2), (1, 5000)])
def test_is_the_fp64_function_at_any_width(impl, shape):
    check_against_fp64(normal(*shape), normal(*shape, seed=1), "fp32", impl)


@pytest.mark.parametrize("impl", IMPLS)
def test_fp16(impl):
    check_against_fp64(normal(9, 60, row="fp16"), normal(9, 60, row="fp16", seed=1), "fp16", impl)


def test_bf16():
    check_against_fp64(normal(9, 60, row="bf16"), normal(9, 60, row="bf16", seed=1), "bf16")


@pytest.mark.parametrize("impl", IMPLS)
def test_eps_decides_for_short_rows_and_zero_rows_stay_zero(impl):
    x = normal(6, 16) * torch.tensor([1e-4, 1e-3, 1e-2, 1.0, 1e3, 0.0], device=DEVICE)[:, None]
    check_against_fp64(x, normal(6, 16, seed=1), "fp32", impl)
    check_against_fp64(x, normal(6, 16, seed=1), "fp32", impl, eps=0.5)
    y, dx = run(l2norm, x, torch.ones_like(x), impl=impl)
    assert not y[-1].any()
    check("a zero row's gradient", dx[-1], torch.full((16,), 1e3, device=DEVICE), "fp32", "grad")  # rsqrt(1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_strided_inputs_and_gradients_and_nothing_written(impl):
    fused = normal(2, 9, 2, 24)
    cases = [
        (fused[..., 8:16], normal(2, 2, 9, 8, seed=1).transpose(1, 2)),  # a slice of a fused projection
        (fused[..., ::3], torch.tensor(1.5, device=DEVICE).expand(2, 9, 2, 8)),
        (normal(24, 18).t(), normal(1, 24, seed=1).expand(18, 24)),
        (normal(2, 3, 2, 3, 2, 8).permute(4, 2, 0, 1, 3, 5), normal(2, 2, 2, 3, 3, 8)),  # more axes than merge
    ]
    for x, grad in cases:
        assert not x.is_contiguous()
        before = x.clone()
        check_against_fp64(x, grad, "fp32", impl)
        assert torch.equal(x, before)


@pytest.mark.parametrize("impl", IMPLS)
def test_nothing_to_do(impl):
    for shape in ((0, 8), (3, 0), (2, 0, 4)):
        y, dx = run(l2norm, normal(*shape), normal(*shape), impl=impl)
        assert y.shape == dx.shape == shape


@pytest.mark.parametrize("impl", IMPLS)
def test_autocast_does_not_reach_inside(impl):
    x, grad = normal(5, 16), normal(5, 16, seed=1)
    plain = run(l2norm, x, grad, impl=impl)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert all(map(torch.equal, run(l2norm, x, grad, impl=impl), plain))


def test_a_second_order_request_raises():
    x = normal(3, 8).requires_grad_()
    (grad,) = torch.autograd.grad(l2norm(x, impl="triton").square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="l2norm differentiates once"):
        grad.sum().backward()


@pytest.mark.parametrize(
    "error, message, args, settings",
    [
        (TypeError, "x must be", (torch.ones(3, dtype=torch.double),), {}),
        (TypeError, "x must be a tensor", ([1.0],), {}),
        (ValueError, "x must be", (torch.tensor(1.0),), {}),
        (ValueError, "eps must be", (torch.ones(3), -1e-6), {}),
        (ValueError, "eps must be", (torch.ones(3), float("nan")), {}),
        (TypeError, "eps must be", (torch.ones(3), "small"), {}),
        (ValueError, "impl must be", (torch.ones(3),), dict(impl="cuda")),
        (TypeError, "unexpected keyword", (torch.ones(3),), dict(dim=0)),
    ],
)
def test_bad_input_is_named(error, message, args, settings):
    with pytest.raises(error, match=f"l2norm.*{message}"):
        l2norm(*args, **settings)


@pytest.mark.parametrize("impl", IMPLS)
def test_opcheck(impl):
    x, grad = normal(5, 2, 12), normal(5, 2, 12, seed=1)
    torch.library.opcheck(torch.ops.titan_kda.l2norm.default, (x, 1e-6, impl))
    torch.library.opcheck(torch.ops.titan_kda.l2norm_backward.default, (grad, x, 1e-6, impl))


@pytest.mark.parametrize("impl", IMPLS)
def test_compiled_equals_eager_and_sizes_do_not_recompile(impl):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor" if DEVICE.type == "cuda" else "aot_eager")
    compiled = torch.compile(l2norm, fullgraph=True, backend=counter)
    for tokens in (4, 7, 12, 9):
        x, grad = normal(1, tokens, 2, 8), normal(1, tokens, 2, 8, seed=1)
        assert all(map(torch.equal, run(compiled, x, grad, impl=impl), run(l2norm, x, grad, impl=impl)))
    assert counter.frame_count <= 2


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("row", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("width", [2, 16, 60, 64, 100, 128, 256, 1000, 4096, 10_000])
def test_gpu_shapes(width, row):
    for leading in ((1,), (2, 65, 3), (300,)):
        check_against_fp64(normal(*leading, width, row=row), normal(*leading, width, row=row, seed=1), row)
    fused = normal(2, 65, 3, 3 * width, row=row)
    grad = normal(2, 3, 65, width, row=row, seed=1).transpose(1, 2)
    check_against_fp64(fused[..., width : 2 * width], grad, row)


@pytest.mark.gpu
def test_gpu_graph_replay_after_data_change_in_place_and_nothing_synchronises():
    x, grad = normal(300, 8, 128, row="bf16").requires_grad_(), normal(300, 8, 128, row="bf16", seed=1)

    def step():
        y = l2norm(x)
        return y.detach(), *torch.autograd.grad(y, x, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(normal(300, 8, 128, row="bf16", seed=2))
    graph.replay()
    torch.cuda.set_sync_debug_mode("error")
    try:
        want = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, captured, want))


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_gpu")
def test_gpu_more_than_2_31_elements():
    rows = 2**24 + 100
    x = torch.randn(rows, 128, dtype=torch.bfloat16, device=DEVICE)
    assert x.numel() > 2**31
    grad = normal(1, 128, row="bf16").expand(rows, -1)
    y, dx = run(l2norm, x, grad)
    for piece in (slice(0, 300), slice(rows - 300, rows)):
        want, want_dx = run(naive_l2norm, x[piece].double(), grad[piece].double())
        check("y", y[piece], want, "bf16", "o")
        check("dx", dx[piece], want_dx, "bf16", "grad")
    del x, y, dx
    narrow = torch.randn(2**31 + 50, 1, dtype=torch.bfloat16, device=DEVICE)
    y = l2norm(narrow)
    for piece in (slice(0, 300), slice(narrow.shape[0] - 300, narrow.shape[0])):
        check("y", y[piece], naive_l2norm(narrow[piece].double()), "bf16", "o")
