"""Plans for eight ranks, run by torchtitan's fake backend: shapes and hooks, in one process, no communication."""

import jobs
import pytest

LAYOUTS = {
    "HSDP 2 x 4": (2, 4, 1, "Applied HSDP"),
    "FSDP 2 with TP 4": (1, 2, 4, "Applied FSDP"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_job_of_eight_ranks(tmp_path, layout):
    replicate, shard, tp, applied = LAYOUTS[layout]
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
    env = jobs.environment(NGPU="8", WORLD_SIZE="8", RANK="0", LOCAL_RANK="0")
    toml = jobs.write_job(tmp_path, settings)
    run = jobs.run_job(toml, "--comm.mode=fake_backend", module="torchtitan.train", env=env)
    log = jobs.log_of(run)
    assert run.returncode == 0, log[-4000:]
    assert sorted(jobs.losses(log)) == [1, 2]
    assert applied in log and ("Applied tensor parallelism" in log) == (tp > 1)
