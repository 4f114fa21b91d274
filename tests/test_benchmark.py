"""The benchmark's command line, arithmetic, files and picture, on made-up times: they need no GPU."""

import importlib
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def run(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPTS / "benchmark.py", *arguments], capture_output=True, text=True, timeout=120
    )


def test_help_names_every_suite():
    done = run("--help")
    assert done.returncode == 0
    for suite in ("decode", "chunk", "elementwise", "output"):
        assert f"\n  {suite} " in done.stdout


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no_such_suite"], "invalid choice: 'no_such_suite'"),
        (["output", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["output", "--json", "/no/such/folder/x.json"], "no such folder: /no/such/folder"),
        *([] if torch.cuda.is_available() else [(["output"], "needs a CUDA device")]),
    ],
)
def test_argument_errors(arguments, words, scripts, capsys):
    benchmark = scripts("benchmark")
    scripts("benchmark_output")
    with pytest.raises(SystemExit) as stop:
        benchmark.main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_bytes_are_each_tensors_once(scripts):
    """The floors: what a row counts is what its buffers hold, per token and head."""
    output, chunk = scripts("benchmark_output"), scripts("benchmark_chunk")
    tokens = output.TOKENS * 64
    assert output.bytes_moved("gk", 1, 64, 64) / tokens == 256 + 512 + 128 + 512 + 256 + 256  # q gk a_qk h v o
    assert output.bytes_moved("g", 1, 64, 64) / tokens == 256 + 256 + 4 + 512 + 256 + 256  # q k g h v o
    assert output.bytes_moved("gk", 1, 64, 16) / tokens == 1920 - 192  # a query head for four value heads
    assert (
        len(chunk.ROWS) == 8 and len({chunk.row_name(*row, gate) for row in chunk.ROWS for gate in chunk.GATES}) == 16
    )


def lines(benchmark):
    def line(work, contender, us):
        return benchmark.Result("chunk", work, contender, us, us - 1, us + 2, 4e8, 100.0, 1e-3)

    return [
        line("core fwd B1, strong", "titan_kda, promised", 200.0),
        line("core fwd B1, strong", "fla", 500.0),
        line("core fwd B1, weak", "titan_kda, promised", 250.0),
        line("core fwd B1, weak", "fla (eager)", 500.0),
        line("core bwd B1, weak", "titan_kda, promised", 250.0),
        line("core fwd B1, weak", "  a candidate", 300.0),
    ]


def test_rates_and_ratios(scripts):
    benchmark = scripts("benchmark")
    first = lines(benchmark)[0]
    assert first.tb_per_s == pytest.approx(2.0) and first.of_floor == 0.5
    assert benchmark.ratios(lines(benchmark), "titan_kda, promised", "fla", "core fwd") == [2.5, 2.0]
    assert benchmark.ratios(lines(benchmark), "titan_kda, promised", "cudnn", "core fwd") == []


def test_rows_and_contenders_are_picked(scripts):
    benchmark = scripts("benchmark")
    bench = benchmark.Bench("chunk", 4e12, filters=["core fwd", "strong"], contenders=["fla", "cudnn"])
    assert bench.wanted("core fwd B1, strong") and not bench.wanted("core fwd B1, weak")
    assert bench.taken("fla, safe gate") and not bench.taken("titan_kda, promised")
    assert benchmark.Bench("chunk", 4e12).taken("titan_kda, promised")


def test_a_peers_failure_is_said_and_passed_over(scripts, monkeypatch, capsys):
    """Ours raises; theirs is left out, or timed without a graph where only the capture failed."""
    benchmark = scripts("benchmark")

    def fails(message):
        def call(*_):
            raise RuntimeError(message)

        return call

    def no_graphs(calls):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def one(name, make, peer=True):
        return benchmark.Contender(name, make, peer=peer)

    monkeypatch.setattr(benchmark, "l2_bytes", lambda: 1 << 20)
    monkeypatch.setattr(benchmark, "capture", no_graphs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timed = {}
    monkeypatch.setattr(benchmark, "time_in_turns", lambda runs, rounds: timed.update(runs) or {})
    good = one("good", lambda x: lambda: x + 1)
    contenders = [one("broken", fails("no kernel image")), one("cannot run", lambda x: fails("bad shape")), good]
    bench = benchmark.Bench("chunk", 4e12)
    bench.row("work", contenders, torch.full((2,), 1.0).mul, bytes_moved=1e6, reference=lambda x: x.double() + 1)
    said = capsys.readouterr().out
    assert "without broken: RuntimeError: no kernel image" in said
    assert "without cannot run: RuntimeError: bad shape" in said
    assert "good: no graph (RuntimeError: operation not permitted when stream is capturing)" in said
    assert list(timed) == ["good (eager)"]
    with pytest.raises(RuntimeError, match="no kernel image"):
        bench.row("work", [one("ours", fails("no kernel image"), False)], torch.ones(2).mul, bytes_moved=1e6)


def test_plot(scripts, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    benchmark, plot_benchmark = scripts("benchmark"), scripts("plot_benchmark")
    machine = {"device": "a GPU", "torch": "2", "triton": "3", "date": "today"}
    quantity = asdict(benchmark.Quantity("chunk", "memory", "fla", 12.0, "MB"))
    run = {"machine": machine, "results": list(map(asdict, lines(benchmark))), "quantities": [quantity]}
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps(run))
    image = tmp_path / "images" / "run.png"
    assert plot_benchmark.main([*map(str, files), str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG")
    files[1].write_text(json.dumps({**run, "machine": {**machine, "device": "another"}}))
    for arguments, words in (
        ([str(tmp_path / "none.json"), str(image)], "no such file"),
        ([*map(str, files), str(image)], "runs of one device, please, got a GPU, another"),
    ):
        with pytest.raises(SystemExit):
            plot_benchmark.main(arguments)
        assert words in capsys.readouterr().err
