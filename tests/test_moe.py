"""The mixture of experts against its formula, its load balancing, and that every layout trains the same hybrid."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import forked
import jobs
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.config.job_config import Compile, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama4.infra.parallelize import apply_compile
from torchtitan.models.moe import moe as torchtitan_moe
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.tools import utils

from titan_kda.attention import ForgetGate
from titan_kda.data import ByteTokenizer
from titan_kda.initialize import Initializer
from titan_kda.model import FLAVORS, Decoder, ModelArgs
from titan_kda.moe import Experts, MixtureOfExperts, count_tokens
from titan_kda.parallelize import parallelize, parts_because
from titan_kda.register import build_kda_optimizers
from titan_kda.train import load_job

DIM, WIDTH, EXPERTS, TOP = 16, 24, 6, 2


def make_moe(seed=0, **options):
    moe = MixtureOfExperts(DIM, WIDTH, EXPERTS, TOP, **{"scaling": 2.5, **options})
    moe.init_weights(Initializer(seed), "moe", output_std=0.3)
    return moe


def written_out(moe, x, renormalize=True, scaling=2.5):
    """The formula token by token [T, dim] in FP64, and each token's experts."""
    w = {name: tensor.detach().double() for name, tensor in moe.state_dict().items()}
    x, rows, chosen = x.detach().double(), [], []
    for token in x:
        scores = torch.sigmoid(w["router.gate.weight"] @ token)
        best = (scores + w["expert_bias"]).topk(TOP).indices.tolist()
        total = sum(scores[e] for e in best) if renormalize else 1.0
        row = torch.zeros(DIM, dtype=torch.float64)
        for e in best:
            hidden = F.silu(w["experts.w1"][e] @ token) * (w["experts.w3"][e] @ token)
            row += scaling * scores[e] / total * (w["experts.w2"][e] @ hidden)
        if "shared_experts.w1.weight" in w:
            parts = {name: w[f"shared_experts.{name}.weight"] for name in ("w1", "w2", "w3")}
            row += parts["w2"] @ (F.silu(parts["w1"] @ token) * (parts["w3"] @ token))
        rows.append(row)
        chosen.append(best)
    return torch.stack(rows), chosen


@pytest.mark.parametrize(
    "options", [{}, {"renormalize": False, "scaling": 1.0}, {"num_shared": 0}, {"num_shared": 2}, {"seed": 3}]
)
def test_layer_is_its_formula(options):
    torch.manual_seed(1)
    moe, x = make_moe(**options), torch.randn(2, 20, DIM)
    moe.expert_bias.copy_(torch.randn(EXPERTS) * 0.3)  # it changes what is chosen, and no weight
    y = moe(x)
    formula = {name: options[name] for name in ("renormalize", "scaling") if name in options}
    want, chosen = written_out(moe, x.flatten(0, 1), **formula)
    assert (y.flatten(0, 1) - want).abs().max() <= 1e-5 * want.abs().max()
    assert moe.tokens_per_expert.tolist() == torch.tensor(chosen).flatten().bincount(minlength=EXPERTS).tolist()
    moe.expert_bias.zero_()
    assert written_out(moe, x.flatten(0, 1))[1] != chosen
    if "num_shared" in options:
        width = 0 if moe.shared_experts is None else moe.shared_experts.w1.out_features
        assert width == options["num_shared"] * WIDTH


def test_gradients_are_those_of_the_formula():
    torch.manual_seed(2)
    moe, x, weight = make_moe(), torch.randn(1, 15, DIM, requires_grad=True), torch.randn(15, DIM)
    (moe(x)[0] * weight).sum().backward()
    _, chosen = written_out(moe, x[0])
    mask = F.one_hot(torch.tensor(chosen), EXPERTS).sum(1)  # the choice itself has no gradient
    w = {name: parameter.detach().double().requires_grad_() for name, parameter in moe.named_parameters()}
    leaf = x[0].detach().double().requires_grad_()
    scores = torch.sigmoid(leaf @ w["router.gate.weight"].T) * mask
    scores = 2.5 * scores / scores.sum(1, keepdim=True)
    hidden = F.silu(torch.einsum("td,ehd->teh", leaf, w["experts.w1"]))
    hidden = hidden * torch.einsum("td,ehd->teh", leaf, w["experts.w3"])
    y = torch.einsum("te,teh,edh->td", scores, hidden, w["experts.w2"])
    shared = F.silu(leaf @ w["shared_experts.w1.weight"].T) * (leaf @ w["shared_experts.w3.weight"].T)
    ((y + shared @ w["shared_experts.w2.weight"].T) * weight).sum().backward()
    for name, parameter in moe.named_parameters():
        assert (parameter.grad - w[name].grad).norm() <= 1e-5 * w[name].grad.norm(), name
    assert (x.grad[0] - leaf.grad).norm() <= 1e-5 * leaf.grad.norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_filled_up_groups_change_nothing(monkeypatch, compiled):
    """The rows as grouped products ask for them, here multiplied an expert at a time; an expert without tokens too."""
    x, weight = torch.randn(2, 20, DIM), torch.randn(2, 20, DIM)

    def results(moe):
        moe.expert_bias[4] = -9.0
        leaf = x.clone().requires_grad_()
        y = moe(leaf)
        (y * weight).sum().backward()
        return [y, leaf.grad, *(parameter.grad for parameter in moe.parameters())]

    want = results(make_moe())
    counts = []

    def forward(self, rows, count, aligned):
        assert aligned and rows.shape[0] >= count.sum()
        assert rows.ne(0).any(-1).sum() == 2 * 20 * TOP  # the others fill up: no token stands in them
        rows = torch.cat([rows[: count.sum()], torch.full_like(rows[count.sum() :], torch.nan)])  # never read
        counts.append(count.tolist())
        out = GroupedExperts.forward(self, rows, count)
        return torch.cat([out[: count.sum()], torch.full_like(out[count.sum() :], torch.nan)])

    monkeypatch.setattr(Experts, "forward", forward)
    monkeypatch.setattr(Experts, "grouped", staticmethod(lambda device, dtype: True))
    moe = make_moe()
    if compiled:
        moe.dispatch, moe.combine = (
            torch.compile(part, backend="aot_eager", fullgraph=True) for part in (moe.dispatch, moe.combine)
        )
    found = results(moe)
    assert all(n % 8 == 0 for n in counts[0]) and counts[0][4] == 0
    for one, other in zip(found, want):
        assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_no_tokens(monkeypatch, shape):
    """Also where groups are filled up, whose rows are then all that there is."""
    for filled_up in (False, True):
        if filled_up:
            monkeypatch.setattr(Experts, "forward", lambda self, rows, count, aligned: rows * 1)
            monkeypatch.setattr(Experts, "grouped", staticmethod(lambda device, dtype: True))
        x = torch.randn(*shape, DIM, requires_grad=True)
        y = make_moe()(x)
        y.sum().backward()
        assert y.shape == x.shape == x.grad.shape


def test_pairs_of_other_ranks_add_nothing():
    """As when tensor parallelism's ranks share the tokens out: the ranks' parts add up to the whole."""
    moe, x = make_moe(), torch.randn(20, DIM)
    weights, experts, _ = moe.router(x)
    leaf, whole, parts = x.clone().requires_grad_(), 0, 0
    for ranks in (1, 2):
        for rank in range(ranks):
            own = experts.chunk(ranks)[rank]
            order = own.flatten().argsort(stable=True) + rank * (experts.numel() // ranks)
            rows, _, places = moe.dispatch(leaf, experts, order, count_tokens(own, EXPERTS), False)
            part = moe.combine(rows * 3, weights, places, None)
            whole, parts = (part, parts) if ranks == 1 else (whole, parts + part)
    torch.testing.assert_close(whole, parts)
    (grad,) = torch.autograd.grad(whole.sum(), leaf, retain_graph=True)
    torch.testing.assert_close(grad, torch.autograd.grad(parts.sum(), leaf)[0])


def test_count_tokens():
    assert count_tokens(torch.tensor([[0, 3], [3, 4]]), 6).tolist() == [1, 0, 0, 2, 1, 0]


def test_an_expert_with_no_tokens_and_one_with_all():
    moe = make_moe()
    moe.expert_bias.copy_(torch.tensor([9.0, 9, 0, 0, 0, 0]))
    moe(torch.randn(1, 10, DIM)).sum().backward()
    assert moe.tokens_per_expert.tolist() == [10, 10, 0, 0, 0, 0]
    for weight in (moe.experts.w1, moe.experts.w2, moe.experts.w3):
        used = weight.grad.flatten(1).abs().sum(1).gt(0).tolist()
        assert used == [True, True, False, False, False, False]


def test_the_bias_stays_fp32():
    for cast in (lambda m: m.bfloat16(), lambda m: m.to(torch.float16)):
        moe = make_moe()
        moe.expert_bias.fill_(1.001)  # which no 16-bit number is
        cast(moe)
        assert moe.experts.w1.dtype == moe.router.gate.weight.dtype != torch.float32
        assert moe.expert_bias.dtype == torch.float32 and moe.expert_bias.eq(1.001).all()
        assert moe(torch.randn(1, 5, DIM, dtype=moe.experts.w1.dtype)).dtype == moe.experts.w1.dtype


def test_scores_are_fp32_in_a_16_bit_model():
    moe = make_moe().bfloat16()
    x = torch.randn(7, DIM).bfloat16()
    with torch.no_grad():
        want = x.float() @ moe.router.gate.weight.float().T
        assert torch.equal(moe.router.gate(x), want)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(moe.router.gate(x), want)


def test_autocast_reaches_the_experts():
    torch.manual_seed(4)
    moe, x = make_moe(), torch.randn(1, 30, DIM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = moe(x)
    assert y.dtype == torch.bfloat16
    want, _ = written_out(moe, x[0].bfloat16())  # the same experts: they are chosen by what was rounded
    assert (y[0] - want).square().mean().sqrt() <= 0.02 * want.square().mean().sqrt()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu(dtype):
    """bf16 by grouped products, FP32 by one product an expert; some experts have no tokens."""
    torch.manual_seed(5)
    moe, x, weight = make_moe(), torch.randn(1, 100, DIM), torch.randn(1, 100, DIM)
    moe.expert_bias[4] = -9.0
    there = make_moe().cuda().to(dtype)
    there.expert_bias.copy_(moe.expert_bias)
    moe.to(dtype).float()  # the same rounded weights
    x = x.to(dtype).float()
    leaves = [x.clone().requires_grad_(), x.cuda().to(dtype).requires_grad_()]
    (moe(leaves[0]) * weight).sum().backward()
    y = there(leaves[1])
    (y.float() * weight.cuda()).sum().backward()
    assert Experts.grouped(leaves[1].device, dtype) is (dtype == torch.bfloat16)
    assert torch.equal(there.tokens_per_expert.cpu(), moe.tokens_per_expert)
    bound = 0.02 if dtype == torch.bfloat16 else 1e-4
    pairs = [(leaves[1].grad, leaves[0].grad), (y, moe(x))]
    pairs += [(a.grad, b.grad) for a, b in zip(there.parameters(), moe.parameters())]
    for got, want in pairs:
        assert (got.float().cpu() - want).norm() <= bound * want.norm()


# ---- the load ----

TINY = dict(
    **dict(dim=32, n_layers=3, n_heads=2, key_width=8, value_width=12, ffn_width=48, layer_pattern=["kda", "mla"]),
    **dict(kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=12),
    **dict(num_experts=6, num_experts_per_token=2, expert_width=16, gate="softplus"),
)
ONE = SimpleNamespace(ep_enabled=False, pp_enabled=False, get_optional_mesh=lambda name: None)


def make(**changes):
    model = Decoder(ModelArgs(**{**TINY, **changes}))
    with torch.no_grad():
        model.init_weights(seed=0)
    return model


def test_a_step_moves_the_bias_towards_balance():
    model, tokens = make(load_balance_coeff=0.01), torch.arange(60).reshape(2, 30)
    optimizers = build_kda_optimizers([model], Optimizer(implementation="foreach"), ONE)
    model(tokens).square().mean().backward()
    counts = [model.layers[i].moe.tokens_per_expert.clone() for i in "12"]
    with torch.no_grad():  # validation, and text
        model(tokens)
    for i, count in zip("12", counts):
        assert torch.equal(model.layers[i].moe.tokens_per_expert, count) and count.sum() == 120
    optimizers.step()
    for i, count in zip("12", counts):
        moe = model.layers[i].moe
        sign = (count.mean() - count).sign()
        torch.testing.assert_close(moe.expert_bias, 0.01 * (sign - sign.mean()))
        assert moe.tokens_per_expert.eq(0).all() and moe.expert_bias.ne(0).any()
    state = {name: tensor for name, tensor in model.state_dict().items() if "expert" in name}
    assert "layers.1.moe.expert_bias" in state and not any("tokens_per_expert" in name for name in state)


def test_the_load_evens_out():
    torch.manual_seed(3)
    model = make(load_balance_coeff=0.02)
    model.layers["1"].moe.expert_bias[0] = 1.0  # above any score: every token goes there
    optimizers = build_kda_optimizers([model], Optimizer(lr=1e-6, implementation="foreach"), ONE)
    uneven = []
    for _ in range(60):
        model(torch.randint(0, 250, (2, 40))).mean().backward()
        counts = model.layers["1"].moe.tokens_per_expert
        uneven.append(float(counts.max() / counts.mean()))
        optimizers.step()
        optimizers.zero_grad()
    assert uneven[0] == 3 and sum(uneven[-10:]) / 10 < 1.5


def test_a_coefficient_of_zero_keeps_the_bias():
    model = make(load_balance_coeff=0.0)
    model.layers["1"].moe.expert_bias.fill_(0.25)
    optimizers = build_kda_optimizers([model], Optimizer(implementation="foreach"), ONE)
    model(torch.arange(20)[None]).mean().backward()
    optimizers.step()
    assert model.layers["1"].moe.expert_bias.eq(0.25).all()


def test_no_weight_decay_on_decay_parameters_of_a_hybrid():
    model = make()
    container = build_kda_optimizers([model], Optimizer(weight_decay=0.1, implementation="foreach"), ONE)
    decay_of = {p: g["weight_decay"] for o in container.optimizers for g in o.param_groups for p in g["params"]}
    assert decay_of.keys() == set(model.parameters())
    special = {p for m in model.modules() if isinstance(m, ForgetGate) for p in m.parameters()}
    assert len(special) == 4 and {p for p, decay in decay_of.items() if decay == 0} == special


# ---- one graph a layer ----


def products(w1, w2, w3, x, counts):
    """The grouped products in FP32 and on any device: each row by its own expert's weights."""
    expert = torch.searchsorted(counts.cumsum(0), torch.arange(len(x)), right=True).clamp(max=len(counts) - 1)
    gate, up = (torch.einsum("rd,rhd->rh", x, w[expert]) for w in (w1, w3))
    return torch.einsum("rh,rdh->rd", F.silu(gate) * up, w2[expert])


@pytest.fixture
def graph_safe_experts(monkeypatch):
    """As on a GPU in bf16: rows are filled up, and no count is read by the host."""
    torch._dynamo.reset()
    monkeypatch.setattr(torchtitan_moe, "_run_experts_grouped_mm", products)
    monkeypatch.setattr(Experts, "grouped", staticmethod(lambda device, dtype: True))
    with torch._dynamo.config.patch(recompile_limit=8):
        yield
    torch._dynamo.reset()


def compiled_job(folder, mode, **settings):
    """A job's configuration, checkpointing by ``mode``: "none", "op", "full" or each so many layers."""
    activation = dict(mode=mode if mode in ("none", "full") else "selective", preserve_rng_state=False)
    settings |= {f"activation_checkpoint.{name}": value for name, value in activation.items()}
    if activation["mode"] == "selective":
        settings["activation_checkpoint.selective_ac_option"] = mode
    return load_job([f"--job.config_file={jobs.write_job(folder, settings | {'compile.enable': True})}"])


@pytest.fixture
def dims_of():
    """What ``parallelize`` asks of ParallelDims, by layout: one process, or DDP or FSDP with ranks that do nothing."""

    def dims(layout):
        enabled = {f"{name}_enabled": False for name in ("tp", "ep", "pp", "fsdp", "dp_replicate")}
        if layout == "one":
            return SimpleNamespace(**enabled, get_optional_mesh=lambda name: None)
        if layout == "fsdp":
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        else:
            dist.init_process_group("fake", rank=0, world_size=8)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        enabled["fsdp_enabled" if layout == "fsdp" else "dp_replicate_enabled"] = True
        meshes = dict(get_mesh=lambda names: mesh, get_optional_mesh=lambda name: None)
        return SimpleNamespace(**enabled, **meshes, world_size=dist.get_world_size())

    yield dims
    if dist.is_initialized():
        dist.destroy_process_group()


def train_step(model, dims, tokens):
    """Two batches' loss and gradients, and of each layer with experts the counts and the bias that they leave."""
    loss = sum(F.cross_entropy(model(rows).flatten(0, 1), rows.flatten()) for rows in tokens)
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    experts = [layer.moe for layer in model.layers.values() if layer.moe_enabled]
    counts = [moe.tokens_per_expert.clone() for moe in experts]
    build_kda_optimizers([model], Optimizer(implementation="foreach"), dims).step()
    return loss.item(), grads, counts, [moe.expert_bias for moe in experts]


@pytest.mark.parametrize(
    "layout, mode",
    [("one", "none"), ("one", "op"), ("one", "2"), ("one", "full"), ("fsdp", "op"), ("fsdp", "full"), ("ddp", "op")],
)
def test_a_layer_with_experts_is_one_graph(tmp_path, graph_safe_experts, monkeypatch, dims_of, layout, mode):
    """With the loss and gradients of the model that is not compiled, and a bias of counts that are right: twice what
    they should be where torchtitan halves them, and there alone."""
    tokens = torch.randint(0, 250, (2, 1, 25), generator=torch.Generator().manual_seed(9))
    plain = make()
    with monkeypatch.context() as by_expert:
        by_expert.setattr(Experts, "grouped", staticmethod(lambda device, dtype: False))
        loss, grads, counts, biases = train_step(plain, dims_of("one"), tokens)
    halves = [count // 2 for count in counts]
    assert any(((h.mean() - h).sign() != (c.mean() - c).sign()).any() for h, c in zip(halves, counts))
    config = compiled_job(tmp_path, mode)
    config.compile.backend = graphs = CompileCounterWithBackend("aot_eager")
    dims = dims_of(layout)
    model = parallelize(make(), dims, config)
    found = train_step(model, dims, tokens)
    assert graphs.frame_count == 3  # a KDA layer, one with experts, and MLA's with experts
    assert found[0] == pytest.approx(loss, rel=1e-6)
    ranks = 8 if layout == "ddp" else 1  # on the fake backend an average is this rank's share
    for one, other in zip(found[1], grads, strict=True):
        assert (ranks * one - other).norm() <= 1e-5 * other.norm()
    for one, other in zip(found[2], counts, strict=True):
        assert torch.equal(one, other) or (mode in ("2", "full") and torch.equal(one, 2 * other))
    for one, other in zip(found[3], biases, strict=True):
        assert torch.equal(one, other) and other.any()
    assert get_model_state_dict(model).keys() == plain.state_dict().keys()


def test_graphs_of_many_kinds_and_lengths(tmp_path, graph_safe_experts, dims_of):
    """Three kinds of layer, trained and validated, at any length: four graphs each, and torch allows a code eight."""
    config = compiled_job(tmp_path, "none")
    config.compile.backend = graphs = CompileCounter()
    model = parallelize(make(layer_pattern=["mla", "gqa"]), dims_of("one"), config)
    for length in (24, 20, 17):
        tokens = torch.randint(0, 250, (1, length))
        model(tokens).mean().backward()
        with torch.no_grad():
            model(tokens)
    assert graphs.frame_count == 3 * 4


@pytest.mark.parametrize(
    "changed, reason",
    [
        ({}, None),
        ({"ep_enabled": True}, "expert parallelism"),
        ({"tp_enabled": True}, "tensor parallelism"),
        ({"mode": "memory_budget"}, "memory budget"),
        ({"precision": "float32"}, "count their tokens on the host in float32"),
        ({"device": "cpu"}, "count their tokens on the host in bfloat16"),
        ({"backend": "eager"}, "backend 'eager'"),
        ({"backend": "eager_noexcept"}, "backend 'eager_noexcept'"),
    ],
)
def test_when_a_layer_with_experts_is_compiled_in_parts(monkeypatch, changed, reason):
    dims = SimpleNamespace(**{"ep_enabled": False, "tp_enabled": False, **changed})
    config = SimpleNamespace(
        activation_checkpoint=SimpleNamespace(mode=changed.get("mode", "selective")),
        training=SimpleNamespace(mixed_precision_param=changed.get("precision", "bfloat16")),
        compile=SimpleNamespace(backend=changed.get("backend", "inductor")),
    )
    monkeypatch.setattr(utils, "device_type", changed.get("device", "cuda"))
    found = parts_because(dims, config)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("ep", [1, 4])
def test_expert_parallelism_compiles_in_parts(tmp_path, caplog, graph_safe_experts, monkeypatch, eight_ranks, ep):
    monkeypatch.setattr(torchtitan_moe, "_run_experts_grouped_mm", torchtitan_moe._run_experts_grouped_mm)
    config = compiled_job(tmp_path, "op")
    dims = ParallelDims(dp_replicate=1, dp_shard=8, cp=1, tp=1, pp=1, ep=ep, etp=1, world_size=8)
    with torch.device("meta"):
        model = Decoder(ModelArgs(**{**TINY, "num_experts": 8}))
    with caplog.at_level("INFO"), torch._dynamo.config.patch(capture_scalar_outputs=False):
        model = parallelize(model, dims, config)
    layer = model.layers["1"]
    assert isinstance(layer, OptimizedModule) is (ep == 1)
    assert isinstance(layer.moe.router, OptimizedModule) is isinstance(layer.mixer, OptimizedModule) is (ep > 1)
    assert isinstance(model.layers["0"], OptimizedModule)  # dense
    said = "experts in parts: expert parallelism" if ep > 1 else "experts in the same graph"
    assert said in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("mode, packed", [("none", False), ("op", False), ("op", True), ("full", False)])
def test_one_graph_on_a_gpu(tmp_path, dims_of, mode, packed):
    """bf16's grouped products in the graph: the gradients of the model that is not compiled, where all tokens go to the
    same experts, and about as many to each where scores decide; no step waits for the device."""
    torch._dynamo.reset()
    tokens = torch.randint(0, 250, (2, 256), generator=torch.Generator().manual_seed(0)).cuda()

    def built():
        model = Decoder(replace(FLAVORS["kimi_linear_debug"]))
        model.init_weights(seed=0)
        return model.cuda()

    def experts_of(model):
        return [layer.moe for layer in model.layers.values() if layer.moe_enabled]

    def step(model, bias):
        for moe in experts_of(model):
            moe.expert_bias.copy_(bias)
            moe.tokens_per_expert.zero_()
        model.zero_grad()
        masks = model.get_attention_masks(tokens, ByteTokenizer()) if packed else None
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens, masks)
        F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
        counts = torch.stack([moe.tokens_per_expert for moe in experts_of(model)])
        return [p.grad for p in model.parameters()], counts / (2 if mode == "full" and model is compiled else 1)

    config = compiled_job(tmp_path, mode, **{"training.mixed_precision_param": "bfloat16"})
    compiled = None
    plain, compiled = built(), parallelize(built(), dims_of("one"), config)
    torch._dynamo.utils.counters.clear()
    chosen = 2.0 * torch.arange(8, device="cuda")
    wanted, _ = step(plain, chosen)
    found, counts = step(compiled, chosen)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
    assert counts.tolist() == [[0] * 6 + [512] * 2] * 3
    for (name, _), one, other in zip(plain.named_parameters(), found, wanted, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm(), name
    free = torch.zeros_like(chosen)
    (_, wanted), (_, found) = step(plain, free), step(compiled, free)
    assert found.sum(1).tolist() == [1024] * 3 and (found - wanted).abs().sum() <= 0.05 * wanted.sum()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(compiled, free)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- layouts ----


def test_compiled_parts_are_filled_too():
    with torch.device("meta"):
        model = Decoder(ModelArgs(**TINY))
    apply_compile(model, Compile(enable=True), ep_enabled=False)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    with torch.no_grad():
        model.init_weights(seed=0)
    for (name, parameter), want in zip(model.named_parameters(), make().parameters()):
        assert torch.equal(parameter, want), name


@pytest.fixture
def eight_ranks():
    """A process group of eight ranks, of which this process is the first and the others do not exist."""
    assert not dist.is_initialized(), "an earlier test has left its process group"
    dist.init_process_group("fake", rank=0, world_size=8)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tp, ep", [(1, 8), (1, 4), (2, 4)])
def test_plan_of_the_released_model_on_eight_ranks(tmp_path, eight_ranks, tp, ep):
    """All 48 billion parameters on the meta device: each rank's shard is an eighth, experts split by expert."""
    settings = {"parallelism.expert_parallel_degree": ep, "parallelism.tensor_parallel_degree": tp}
    if tp > 1:
        settings["parallelism.expert_tensor_parallel_degree"] = tp
    cleared = {f"architecture.{name}": None for name in jobs.TINY["architecture"]}
    toml = jobs.write_job(tmp_path, settings | cleared | {"model.flavor": "kimi_linear_48b_a3b"})
    config = load_job(["--job.config_file", str(toml)], reads_data=False)
    args = FLAVORS["kimi_linear_48b_a3b"]
    with torch.device("meta"):
        model = Decoder(args)
    whole = sum(p.numel() for p in model.parameters())
    names = {name: p.shape for name, p in model.named_parameters()}
    dims = ParallelDims(
        **dict(dp_replicate=1, dp_shard=8 // tp, cp=1, tp=tp, pp=1, ep=ep, etp=tp if tp > 1 else 1, world_size=8)
    )
    model = parallelize(model, dims, config)
    local = {name: p.to_local() for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in model.named_parameters()} == names
    assert sum(p.numel() for p in local.values()) == pytest.approx(whole / 8, rel=0.001 if tp == 1 else 0.01)
    assert local["layers.1.moe.experts.w1"].shape == (256 // (8 // tp), 1024 // tp, 2304)
    assert local["layers.1.moe.experts.w2"].shape == (256 // (8 // tp), 2304, 1024 // tp)
    assert local["layers.3.mixer.wq.weight"].shape == (6144 // 8, 2304)
    assert local["layers.3.mixer.wkv_a.weight"].shape == (576 * tp // 8, 2304)  # whole on every tensor-parallel rank


def test_a_job_of_the_released_plan_runs_on_a_fake_backend(tmp_path):
    """torchtitan's dry run of eight ranks in one process: FSDP and expert parallelism, the widths cut down."""
    widths = dict(dim=32, n_layers=4, n_heads=4, key_width=8, value_width=8, vocab_size=264, ffn_width=32)
    widths |= dict(
        expert_width=16, num_experts=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    settings = {f"architecture.{name}": value for name, value in widths.items()}
    settings |= {"model.flavor": "kimi_linear_48b_a3b", "training.local_batch_size": 1, "training.steps": 2}
    settings |= {"validation.enable": False, "generation.enable": False, "checkpoint.enable": False}
    toml = jobs.write_job(tmp_path, settings)
    args = ("--comm.mode=fake_backend", "--parallelism.expert_parallel_degree=4")
    run = forked.run_job(toml, *args, NGPU="8", RANK="0", LOCAL_RANK="0", WORLD_SIZE="8")
    log = jobs.log_of(run)
    assert run.returncode == 0, log[-4000:]
    assert sorted(jobs.losses(log)) == [1, 2]
    assert "Spread the experts: expert parallel 4, tensor parallel 1" in log and "Applied FSDP" in log


HYBRID = {
    "model.flavor": "kimi_linear_debug",
    "architecture.dim": 32,
    "architecture.key_width": 8,
    "architecture.value_width": 8,
    "architecture.ffn_width": 64,
    "architecture.expert_width": 16,
    "architecture.kv_lora_rank": 16,
    "architecture.qk_nope_head_dim": 8,
    "architecture.qk_rope_head_dim": 4,
    "architecture.v_head_dim": 8,
    "architecture.layer_pattern": ["kda", "mla", "gqa"],
    "architecture.n_layers": 3,
    "architecture.kv_heads": 2,
    "architecture.load_balance_coeff": 0.01,
    "training.local_batch_size": 2,
    "training.steps": 3,
    "validation.freq": 3,
    "generation.freq": 3,
    "checkpoint.enable": False,
}
DDP = ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=1")
ALL = (
    "--parallelism.tensor_parallel_degree=2",
    "--parallelism.expert_parallel_degree=2",
    "--parallelism.expert_tensor_parallel_degree=2",
)


def train(folder, args, processes, **settings):
    shutil.rmtree(folder / "run", ignore_errors=True)
    run = forked.run_job(jobs.write_job(folder, HYBRID | settings), *args, processes=processes)
    log = jobs.log_of(run)
    assert run.returncode == 0, log[-4000:]
    losses, validation = jobs.losses(log), jobs.validation_losses(log)
    assert len(losses) == 3 and len(validation) == 2 and len(jobs.samples(folder / "run")[3]) == 2
    return [*losses.values(), *validation.values()]


def apart(one, other):
    return max(abs(a - b) for a, b in zip(one, other))


def test_every_layout_trains_the_same_hybrid(tmp_path):
    """Losses over three steps: a gradient that is lost or counted twice somewhere shows from the second on. ALL is
    FSDP, tensor and expert parallelism at once, checkpointed by operators, not compiled."""
    by_operators = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    assert apart(train(tmp_path, ALL, 4, **by_operators), train(tmp_path, DDP, 2)) <= 1e-4
