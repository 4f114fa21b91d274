"""The scripts that train a job several ways and time generation, on tiny models: their arithmetic and their course."""

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import jobs
import pytest
import torch

from titan_kda import attention, parallelize
from titan_kda.model import FLAVORS

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def test_curves_apart(script):
    apart = script("train_compare").apart
    flat = [1.0] * 40
    assert apart(flat, flat) == 0 and apart(flat, [1.5] * 40) == pytest.approx(0.5)
    assert apart(flat, [1.5, 0.5] * 20) == pytest.approx(0)  # what an average of 20 steps does not see
    assert apart([1.0] * 3, [2.0] * 3) == pytest.approx(1)
    assert apart(flat, [1.0] * 20 + [2.0] * 20) == pytest.approx(0.5)


def test_a_job_trained_two_ways(script, tmp_path, capsys, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)  # which the script sets, undone here
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    compare, flavor = script("train_compare"), replace(FLAVORS["debugmodel"])
    toml = jobs.write_job(tmp_path, {"debug.seed": 5})
    out = tmp_path / "results.json"
    arguments = ["--job", str(toml), "--steps=4", "--warmup=2", f"--json={out}", f"--folder={tmp_path / 'run'}"]
    variants = [
        "--variant=ours",
        "--variant=again",
        "--variant",
        "faster --optimizer.lr=0.02",
        "--variant=wide --architecture.ffn_width=160",
    ]
    assert compare.main([*arguments, *variants, "--training.seq_len=48"]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["ours", "again", "faster", "wide"]
    assert found["ours"]["losses"] == found["again"]["losses"] and len(found["ours"]["losses"]) == 4
    assert found["faster"]["losses"][0] == found["ours"]["losses"][0]  # the same start and the same text
    assert found["again"]["apart"] == 0 < found["faster"]["apart"]
    assert all(result["tokens_per_second"] > 0 for result in found.values())
    shown = capsys.readouterr().out
    assert "| variant | tokens/s |" in shown and "\n| faster | " in shown
    assert FLAVORS["debugmodel"] == flavor  # into which torchtitan writes a job's settings
    if importlib.util.find_spec("fla") is None:
        with pytest.raises(SystemExit):
            compare.main([*arguments, "--variant=fla"])
        assert "needs fla-core" in capsys.readouterr().err
    assert compare.main([*arguments, "--variant=ours", "--kda.train_backend=recurrent"]) == 2


def test_flas_operator_takes_the_place_of_ours_and_gives_it_back(script):
    """The shapes that its fake promises are those that the layer asks for; running it takes a GPU and fla-core."""
    compare = script("train_compare")
    before = attention.chunk_kda, attention.l2norm, attention.ForgetGate.log2_decay
    layer = attention.KimiDeltaAttention(16, 2, 8, 12).to("meta")
    with compare.fla_in_the_layer():
        operator = compare.register_fla()
        assert operator in parallelize._SAVED_OPERATORS
        y = layer(torch.empty(1, 130, 16, device="meta"))
    assert y.shape == (1, 130, 16)
    y.sum().backward()
    assert {name for name, p in layer.named_parameters() if p.grad is None} == set()
    assert before == (attention.chunk_kda, attention.l2norm, attention.ForgetGate.log2_decay)
    assert operator not in parallelize._SAVED_OPERATORS


def test_generation_is_timed(script, tmp_path, capsys):
    out = tmp_path / "rows.json"
    options = ["--flavor=debugmodel", "--batch=2", "--tokens=3", "--prompt-tokens=70", f"--json={out}"]
    if torch.cuda.is_available():
        pytest.skip("the benchmark itself runs there")
    assert script("benchmark_generate").main(options) == 0
    rows = json.loads(out.read_text())
    assert [row["kind"] for row in rows] == ["decode"] * 2 + ["prefill"] * 2 + ["loop"] * 2
    assert all(row["tokens_per_second"] > 0 for row in rows[:2])
    assert "| prefill, tokens |" in capsys.readouterr().out


def test_bytes_of_a_decode_step(script):
    benchmark = script("benchmark_generate")
    model = benchmark.build("debugmodel", torch.device("cpu"), torch.float32, vocab_size=300, n_layers=1)
    read = sum(p.numel() for name, p in model.named_parameters() if name != "tok_embeddings.weight")
    one = 2 * (4 * 32 * 32 + 3 * 3 * 4 * 32)  # in and out: the state, and three inputs of each of three convolutions
    assert benchmark.step_bytes(model, 0) == 4 * read
    assert benchmark.step_bytes(model, 5) - benchmark.step_bytes(model, 0) == 5 * 4 * one
