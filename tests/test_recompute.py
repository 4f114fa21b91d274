"""What activation checkpointing computes again in the backward."""

from types import SimpleNamespace

import jobs
import pytest
import torch

import titan_kda.kernels.chunk as chunk
from titan_kda.job_config import model_args_of
from titan_kda.model import Decoder
from titan_kda.parallelize import parallelize
from titan_kda.train import load_job

ONE_PROCESS = SimpleNamespace(
    tp_enabled=False, ep_enabled=False, fsdp_enabled=False, dp_replicate_enabled=False, pp_enabled=False
)


@pytest.mark.parametrize(
    "mode, times",
    [
        ({"activation_checkpoint.mode": "none"}, 2),
        ({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}, 2),
        ({"activation_checkpoint.mode": "full"}, 3),
    ],
    ids=["none", "op", "full"],
)
def test_selective_checkpointing_keeps_the_core(tmp_path, monkeypatch, mode, times):
    """The core runs once forward and once in its own backward; where it is not kept, once more in between."""
    settings = {"compile.enable": True, "compile.backend": "aot_eager", "architecture.n_layers": 1}
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
