"""The KDA layer, against its formula written out in FP64, and its behaviour in each phase."""

import copy
import io
import math

import pytest
import torch
import torch.nn.functional as F

from titan_kda.attention import Backends, ForgetGate, KimiDeltaAttention
from titan_kda.cache import KDACache
from titan_kda.initialize import Initializer
from titan_kda.model import SwiGLU
from titan_kda.packing import pack

DIM, HEADS, K, V = 24, 2, 12, 20


def make_layer(seed=0, **options):
    layer = KimiDeltaAttention(DIM, HEADS, K, V, **options)
    layer.init_weights(Initializer(seed), "layer", output_std=0.5)
    for name, parameter in layer.named_parameters():
        if "proj" in name:
            parameter.data *= 10  # so that gates and beta leave the middle of their ranges
    return layer


def written_out(layer, x):
    """The layer's formula for one sequence x [T, dim], token by token, in FP64."""
    w = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    x = x.detach().double()

    def conv(name, y):
        taps = w[f"{name}.weight"]
        padded = F.pad(y.T[None], (taps.shape[1] - 1, 0))
        return F.silu(F.conv1d(padded, taps[:, None], groups=taps.shape[0]))[0].T

    def heads(y):
        return y.reshape(len(x), HEADS, -1)

    def norm(y):
        return y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    q = norm(heads(conv("q_conv", x @ w["q_proj.weight"].T)))
    k = norm(heads(conv("k_conv", x @ w["k_proj.weight"].T)))
    v = heads(conv("v_conv", x @ w["v_proj.weight"].T))
    raw = heads(x @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T) + w["forget_gate.dt_bias"]
    a = w["forget_gate.A_log"].exp()[:, None]
    if layer.forget_gate.gate == "bounded":
        decay = torch.exp(layer.forget_gate.lower_bound * torch.sigmoid(a * raw))
    else:
        decay = torch.exp(-a * F.softplus(raw))
    beta = torch.sigmoid(x @ w["b_proj.weight"].T) * layer.beta_scale
    state = torch.zeros(HEADS, K, V, dtype=torch.float64)
    outputs = []
    for t in range(len(x)):
        state = state * decay[t, :, :, None]
        residual = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], residual)
        outputs.append(torch.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(K))
    o = torch.stack(outputs)
    o = o / (o.square().mean(-1, keepdim=True) + layer.o_norm.eps).sqrt() * w["o_norm.weight"]
    if "g_proj.weight" in w:
        gate = x @ w["g_proj.weight"].T
    else:
        gate = x @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    return (o.flatten(1) * torch.sigmoid(gate)) @ w["o_proj.weight"].T


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "softplus", "output_gate": "full"},
        {"allow_neg_eigval": True, "lower_bound": -2.0},
        {"conv_width": 2},
    ],
)
@pytest.mark.parametrize("backend", ["chunk", "recurrent"])
def test_layer_is_its_formula(options, backend):
    torch.manual_seed(1)
    layer = make_layer(**options)
    x = torch.randn(2, 70, DIM)
    with torch.no_grad():
        y = layer(x, backend=backend)
    want = torch.stack([written_out(layer, row) for row in x])
    assert (y - want).abs().max() <= 2e-4 * want.abs().max()


def test_gradients_are_those_of_the_formula():
    torch.manual_seed(2)
    layer = make_layer()
    x = torch.randn(1, 20, DIM, requires_grad=True)
    weight = torch.randn(20, DIM)
    (layer(x)[0] * weight).sum().backward()
    # A directional derivative of the written-out formula, by central differences in FP64, for each parameter.
    for name, parameter in layer.named_parameters():
        direction = torch.randn_like(parameter)
        saved, step, values = parameter.data.clone(), 1e-2, []
        for sign in (1, -1):
            parameter.data = saved.double() + sign * step * 1e-3 * direction.double()
            values.append((written_out(layer, x[0]) * weight).sum())
        parameter.data = saved
        want = (values[0] - values[1]) / (2 * step * 1e-3)
        got = (parameter.grad * direction).sum().double()
        scale = (parameter.grad.norm() * direction.norm()).item() / math.sqrt(parameter.numel())
        assert abs(got - want) <= 5e-3 * max(scale, abs(want)), name


@pytest.mark.parametrize("backend", ["chunk", "recurrent"])
def test_a_packed_stream_is_each_sequence_alone(backend):
    torch.manual_seed(3)
    layer = make_layer()
    lengths = [3, 0, 65, 1, 20]
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    x = torch.randn(1, sum(lengths) + 7, DIM)
    x[0, sum(lengths) :] = float("nan")  # padding is nobody's
    with torch.no_grad():
        y = layer(x, offsets, backend=backend)
        for start, length in zip(offsets.tolist(), lengths):
            if length:
                alone = layer(x[:, start : start + length], backend=backend)
                torch.testing.assert_close(y[:, start : start + length], alone, atol=1e-5, rtol=1e-4)
    # The rows of a batch may as well hold the stream.
    stream = x[:, :88].reshape(4, 22, DIM)
    with torch.no_grad():
        y_rows = layer(stream, torch.tensor([0, 3, 3, 68, 69, 88], dtype=torch.int32), backend=backend)
    torch.testing.assert_close(y_rows.reshape(1, 88, DIM), y[:, :88], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("pieces", [[1] * 9, [5, 4], [70, 64, 3, 1, 1], [2, 1, 66]])
@pytest.mark.parametrize("prefill", ["chunk", "recurrent"])
def test_pieces_with_a_cache_are_the_whole(pieces, prefill):
    torch.manual_seed(4)
    layer = make_layer(backends=Backends(prefill=prefill))
    total = sum(pieces)
    x = torch.randn(3, total, DIM)
    cache = layer.new_cache()
    with torch.no_grad():
        whole = layer(x, backend="recurrent")
        outputs = [layer(piece, cache=cache) for piece in x.split(pieces, 1)]
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=2e-5, rtol=1e-3)
    assert cache.state.shape == (3, HEADS, K, V) and cache.state.dtype == torch.float32
    assert cache.conv_q.shape == (3, 3, HEADS * K)


def test_the_kernels_make_the_same_layer():
    """Triton's path (on a CPU, in its interpreter) beside the reference: training on a pack, a prompt, decode."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [make_layer(backends=Backends(impl=impl)).to(device) for impl in ("triton", "reference")]
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(1, 7, DIM, generator=generator).to(device) for _ in range(2))
    offsets = torch.tensor([0, 2, 2, 7], dtype=torch.int32, device=device)
    found = []
    for layer in layers:
        y = layer(x, offsets)
        grads = torch.autograd.grad((y * weight).sum(), list(layer.parameters()))
        with torch.no_grad():
            cache = layer.new_cache()
            pieces = [layer(piece, cache=cache) for piece in x.split([5, 1, 1], 1)]
        found.append([y, *grads, *pieces, cache.state, cache.conv_v])
    for got, want in zip(*found):
        assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_padding_stays_out_of_the_gradients(monkeypatch):
    """Operators leave input gradients past the last offset as the memory was; no weight may see them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = make_layer(backends=Backends(impl="triton")).to(device)
    x = torch.randn(1, 9, DIM, generator=torch.Generator().manual_seed(8)).to(device)
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32, device=device)

    def grads(x):
        return torch.autograd.grad(layer(x, offsets)[:, :6].square().sum(), list(layer.parameters()))

    want = grads(x[:, :6])

    def poisoned(make):
        def call(*args, **kwargs):
            made = make(*args, **kwargs)
            return made.fill_(float("nan")) if made.is_floating_point() and not made.is_meta else made

        return call

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    for got, right in zip(grads(x), want):
        torch.testing.assert_close(got, right, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("output_gate", ["low_rank", "full"])
def test_packed_products_are_the_layers(output_gate, monkeypatch):
    """In decode, with a padded stream; what pack() does on a GPU is told to happen here."""
    layer = make_layer(output_gate=output_gate).eval()
    layer.pack()
    assert layer._packed is None  # on a CPU
    x = torch.randn(1, 2 * 9, DIM)
    offsets = torch.tensor([0, 9, 18], dtype=torch.int32)
    outputs = []
    for packed in (False, True):
        if packed:
            monkeypatch.setattr(torch.Tensor, "is_cuda", True)
            layer.pack()
            monkeypatch.undo()
            assert layer._packed is not None
        with torch.no_grad():
            cache = layer.new_cache()
            layer(x, offsets, cache)
            step = torch.cat([x[:, :2], torch.zeros(1, 1, DIM)], 1)
            outputs.append(layer(step, torch.arange(3, dtype=torch.int32), cache, max_tokens=1))
    torch.testing.assert_close(*outputs)
    layer.unpack()
    assert layer._packed is None and all("_packed" not in name for name in layer.state_dict())


def test_packing_leaves_what_it_cannot_take(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    plain = [torch.nn.Linear(4, n, bias=False) for n in (3, 5)]
    packed = pack(plain)
    monkeypatch.undo()
    x = torch.randn(2, 4)
    for mine, layer in zip(packed(x), plain):
        torch.testing.assert_close(mine, layer(x))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    assert pack([plain[0], torch.nn.Linear(4, 5)]) is None  # a bias
    assert pack([plain[0], torch.nn.Linear(4, 5, bias=False, dtype=torch.bfloat16)]) is None
    quantised = torch.nn.Linear(4, 5, bias=False)
    quantised.weight = torch.nn.Parameter(Quantised(torch.randn(5, 4)))
    assert pack([plain[0], quantised]) is None
    patched = torch.nn.Linear(4, 5, bias=False)
    patched.forward = lambda x: x
    assert pack([plain[0], patched]) is None
    plain[1].register_forward_hook(lambda *_: None)
    assert pack(plain) is None


class Quantised(torch.Tensor):
    """A weight whose numbers are not what its storage holds."""

    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return cls(args[0]) if function is torch.ops.aten.detach.default else NotImplemented


def test_a_packed_model_s_copies_and_gradients(monkeypatch):
    """Copies come unpacked, since nobody would unpack them; gradients reach the layers, not the packed weights."""
    model = torch.nn.ModuleList([make_layer(), SwiGLU(DIM, 20)])
    model[1].init_weights(Initializer(0), "ffn", 1.0)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    for module in model:
        module.pack()
    monkeypatch.undo()
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert all(module._packed is None for module in copied)
    x = torch.randn(2, 5, DIM)
    with torch.no_grad():
        packed = model[1](x)
        assert all(module._packed is not None for module in model)
        torch.testing.assert_close(packed, copied[1](x))
    (model[1](x) + model[0](x)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_phases():
    layer = make_layer()
    empty, full = KDACache(), KDACache(state=torch.zeros(1, HEADS, K, V))
    assert layer.phase(None, 5) == "train"
    layer.eval()
    assert layer.phase(None, 5) == "train"  # eval() does not turn gradients off, and must not lose them
    with torch.no_grad():
        assert layer.phase(None, 5) == "eval"
        assert layer.phase(empty, 1) == layer.phase(full, 2) == "prefill"
        assert layer.phase(full, 1) == "decode"


def test_eval_mode_with_gradients_takes_chunk_and_keeps_them():
    torch.manual_seed(5)
    layer = make_layer(backends=Backends(eval="recurrent")).eval()
    x = torch.randn(1, 10, DIM)
    layer(x).sum().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in layer.parameters())
    with pytest.raises(RuntimeError, match="chunk"):
        layer(x, backend="recurrent")
    with pytest.raises(RuntimeError, match="no_grad"):
        layer(x, cache=layer.new_cache())


def test_backends_choose_by_phase_and_length():
    backends = Backends(eval="auto", recurrent_max_tokens=64)
    assert backends.choose("train", 1) == "chunk"
    assert backends.choose("eval", 64) == "recurrent"
    assert backends.choose("eval", 65) == "chunk"
    assert backends.choose("prefill", 65) == "chunk"
    assert backends.choose("decode", 1) == "recurrent"
    assert Backends().choose("eval", 10**6) == "recurrent"
    for wrong in (
        {"train": "recurrent"},
        {"eval": "fast"},
        {"prefill": "Chunk"},
        {"impl": "cuda"},
        {"recurrent_max_tokens": -1},
        {"recurrent_max_tokens": 1.5},
    ):
        with pytest.raises(ValueError, match="must be"):
            Backends(**wrong)
    with pytest.raises(ValueError, match="chunk"):
        Backends(train="recurrent")


def test_a_wished_impl_is_not_swapped_silently(monkeypatch):
    monkeypatch.setattr("titan_kda.kernels._operator.interpreted", lambda: False)
    layer = make_layer(backends=Backends(impl="triton"))
    with pytest.raises(ValueError, match="impl='triton' needs CUDA tensors"):
        layer(torch.randn(1, 4, DIM))


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, lambda m: m.to(torch.bfloat16)])
def test_decay_parameters_stay_fp32_whatever_the_model_is_cast_to(cast):
    layer = make_layer()
    before = {name: p.detach().clone() for name, p in layer.forget_gate.named_parameters()}
    cast(layer)
    assert layer.q_proj.weight.dtype != torch.float32
    for name, parameter in layer.forget_gate.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])  # not even rounded on the way
    with torch.no_grad():
        y = layer(torch.randn(1, 5, DIM, dtype=layer.q_proj.weight.dtype))
    assert y.dtype == layer.q_proj.weight.dtype and torch.isfinite(y).all()


def test_decay_parameters_are_fp32_under_another_default_dtype():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        gate = ForgetGate(2, 3)
    finally:
        torch.set_default_dtype(before)
    assert gate.A_log.dtype == gate.dt_bias.dtype == torch.float32


def test_core_is_fp32_under_autocast():
    torch.manual_seed(6)
    layer = make_layer()
    x = torch.randn(1, 40, DIM)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        chunk, recurrent = layer(x, backend="chunk"), layer(x, backend="recurrent")
    # The two forms round the same bf16 inputs, so they differ by FP32's error and one rounding of the output.
    assert (chunk - recurrent).abs().max() <= 0.02 * recurrent.abs().max()


def test_both_gates_start_from_the_same_decays():
    decays = {}
    for kind in ("bounded", "softplus"):
        gate = ForgetGate(64, 64, kind)
        gate.init_weights(Initializer(0), "gate")
        raw = torch.zeros(1, 1, 64, 64)
        decays[kind] = gate.log2_decay(raw, gate(), 1, None, None) * math.log(2)
    assert decays["bounded"].min() >= -1.61 and decays["bounded"].max() <= -9e-4
    torch.testing.assert_close(decays["bounded"], decays["softplus"], rtol=1e-3, atol=1e-6)


def test_unknown_options_are_refused():
    for wrong in ({"gate": "relu"}, {"output_gate": "none"}):
        with pytest.raises(ValueError, match="must be one of"):
            KimiDeltaAttention(DIM, HEADS, K, V, **wrong)
    with pytest.raises(TypeError):
        KimiDeltaAttention(DIM, HEADS, K, V, head_dim=3)
