"""What activation checkpointing computes again in the backward."""

from collections import Counter
from types import SimpleNamespace

import jobs
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torchtitan.models.moe import moe as torchtitan_moe

import titan_kda.kernels.chunk as chunk
from titan_kda.job_config import model_args_of
from titan_kda.model import Decoder
from titan_kda.moe import Experts
from titan_kda.parallelize import parallelize
from titan_kda.train import load_job

ONE_PROCESS = SimpleNamespace(
    tp_enabled=False, ep_enabled=False, fsdp_enabled=False, dp_replicate_enabled=False, pp_enabled=False
)


EXPERTS = {"num_experts": 4, "num_experts_per_token": 2, "expert_width": 16, "first_k_dense": 0}


def graph_safe_products(w1, w2, w3, rows, counts):
    """In the place of grouped products, which are a GPU's: all of the weights, and no count read by the host."""
    return rows * (w1.mean() + w2.mean() + w3.mean())


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize(
    "mode, times",
    [
        ({"activation_checkpoint.mode": "none"}, 2),
        ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}, 2),
        ({"activation_checkpoint.mode": "full"}, 3),
    ],
    ids=["none", "op", "full"],
)
def test_selective_checkpointing_keeps_the_core(tmp_path, monkeypatch, mode, times, experts):
    """The core runs once forward and once in its own backward; where it is not kept, once more in between."""
    settings = {"compile.enable": True, "compile.backend": "aot_eager", "architecture.n_layers": 1}
    if experts:
        settings |= {f"architecture.{name}": value for name, value in EXPERTS.items()}
        monkeypatch.setattr(Experts, "grouped", staticmethod(lambda device, dtype: True))
        monkeypatch.setattr(torchtitan_moe, "_run_experts_grouped_mm", graph_safe_products)
    config = load_job([f"--job.config_file={jobs.write_job(tmp_path, settings | mode)}"])
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0].shape)
        return reference(*args, **kwargs)

    reference = chunk._reference
    monkeypatch.setattr(chunk, "_reference", counted)
    model = Decoder(model_args_of(config))
    model.init_weights(seed=0)
    model = parallelize(model, ONE_PROCESS, config)
    model(torch.randint(0, 256, (2, 32))).float().sum().backward()
    assert len(calls) == times
    assert all(p.grad is not None for p in model.parameters())


def test_selective_checkpointing_keeps_the_choice_of_experts(tmp_path, monkeypatch):
    """A graph's backward has other kernels than its forward: what those chose again could be other experts."""
    settings = {"compile.enable": True, "architecture.n_layers": 1}
    settings |= {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}
    settings |= {f"architecture.{name}": value for name, value in EXPERTS.items()}
    config = load_job([f"--job.config_file={jobs.write_job(tmp_path, settings)}"])
    monkeypatch.setattr(Experts, "grouped", staticmethod(lambda device, dtype: True))
    monkeypatch.setattr(torchtitan_moe, "_run_experts_grouped_mm", graph_safe_products)
    passes = []

    def compiler(graph, inputs):
        passes.append(Counter(node.target for node in graph.graph.nodes))
        return make_boxed_func(graph)

    config.compile.backend = aot_autograd(
        fw_compiler=compiler, partition_fn=min_cut_rematerialization_partition, keep_inference_input_mutations=True
    )
    model = Decoder(model_args_of(config))
    model.init_weights(seed=0)
    model = parallelize(model, ONE_PROCESS, config)
    model(torch.randint(0, 256, (2, 32))).float().sum().backward()
    forward, backward = passes
    for operator in (torch.ops.aten.topk.default, torch.ops.aten.sort.stable, torch.ops.titan_kda.chunk_kda.default):
        assert forward[operator] == 1 and backward[operator] == 0, operator
    assert backward[torch.ops.aten.sigmoid.default] > 0  # other things are computed again
