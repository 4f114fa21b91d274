"""Plans for eight ranks, run by torchtitan's fake backend: shapes and hooks, in one process, no communication."""

from types import SimpleNamespace

import forked
import jobs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.loss import cross_entropy_loss

from titan_kda.model import Decoder, ModelArgs
from titan_kda.parallelize import build_loss, parallelize
from titan_kda.train import load_job

LAYOUTS = {
    "HSDP 2 x 4": (2, 4, 1, "Applied HSDP", "titan_kda.train"),
    "FSDP 2 with TP 4": (1, 2, 4, "Applied FSDP", "torchtitan.train"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_of_eight_ranks(tmp_path, layout):
    replicate, shard, tp, applied, module = LAYOUTS[layout]
    settings = {
        "training.steps": 2,
        "training.mixed_precision_param": "bfloat16",
        "validation.enable": False,
        "generation.enable": False,
        "checkpoint.enable": False,
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
        "parallelism.data_parallel_replicate_degree": replicate,
        "parallelism.data_parallel_shard_degree": shard,
        "parallelism.tensor_parallel_degree": tp,
    }
    env = dict(NGPU="8", WORLD_SIZE="8", RANK="0", LOCAL_RANK="0")
    toml = jobs.write_job(tmp_path, settings)
    if module == "titan_kda.train":
        run = forked.run_job(toml, "--comm.mode=fake_backend", **env)
    else:
        run = jobs.run_job(toml, "--comm.mode=fake_backend", module=module, env=jobs.environment(**env))
    log = jobs.log_of(run)
    assert run.returncode == 0, log[-4000:]
    assert sorted(jobs.losses(log)) == [1, 2]
    assert applied in log and ("Applied tensor parallelism" in log) == (tp > 1)


def test_ddp_of_eight_ranks(tmp_path):
    """The loss multiplies a rank's gradients by the ranks, whose average DDP takes: on the fake backend of its own."""
    args = ModelArgs(dim=32, n_layers=1, n_heads=2, key_width=8, value_width=8, ffn_width=48)
    tokens = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    config = load_job([f"--job.config_file={jobs.write_job(tmp_path)}"])
    gradients = []
    dist.init_process_group("fake", rank=0, world_size=8)
    try:
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("dp_replicate",))
        dims = SimpleNamespace(
            **{f"{name}_enabled": name == "dp_replicate" for name in ("tp", "ep", "fsdp", "dp_replicate")},
            get_mesh=lambda name: mesh,
            world_size=8,
            dp_replicate=8,
        )
        for ranks in (1, 8):
            model = Decoder(args)
            model.init_weights(seed=0)
            if ranks == 8:
                parallelize(model, dims, config)
            loss_fn = build_loss(config, dims) if ranks == 8 else cross_entropy_loss
            loss_fn(model(tokens), tokens).backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    finally:
        dist.destroy_process_group()
    alone, spread = gradients
    assert alone.keys() == spread.keys() and all(gradient.any() for gradient in alone.values())
    for name, gradient in alone.items():
        assert torch.equal(spread[name], gradient), name
