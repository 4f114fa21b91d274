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


def test_a_table_of_different_models(script, tmp_path, capsys, monkeypatch):
    """Curves of other texts and models are not compared; one that has no room does not stop the others."""
    compare = script("train_compare")
    assert compare.split_variant("full 4k --a.b=c --no-d") == ("full 4k", ["--a.b=c", "--no-d"])
    common = {"text": "a", "tokens_per_second": 1234.5, "mfu": 0.25, "peak_gib": 7.0, "first_step_seconds": 9.0}
    common |= {"rows": 2, "seq_len": 4096, "losses": [3.0, 2.0], "flavor": "one", "device": "a GPU"}

    def train(settings, *_):
        if "--big" in settings:
            raise torch.OutOfMemoryError("no room\nfor more")
        return common | ({"flavor": "another"} if settings else {})

    monkeypatch.setattr(compare, "train", train)
    out = tmp_path / "results.json"
    variants = ["--variant=a b", "--variant=c --big", "--variant=d --other"]
    assert compare.main([*variants, "--steps=2", "--warmup=1", f"--json={out}"]) == 0
    shown = capsys.readouterr().out
    assert "c: out of memory: no room\n" in shown
    assert shown.endswith(
        "| variant | rows x tokens | tokens/s | MFU | peak GiB | first step, s | last 2 steps' loss |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| a b | 2 x 4,096 | 1,234 | 25.0% | 7.0 | 9.0 | 2.5000 |\n"
        "| d | 2 x 4,096 | 1,234 | 25.0% | 7.0 | 9.0 | 2.5000 |\n"
    )
    assert [result["apart"] for result in json.loads(out.read_text()).values()] == [0, None]
    assert compare.main(["--variant=c --big", "--steps=2", "--warmup=1"]) == 1
    for names in (["--variant=--big"], ["--variant=a", "--variant=a --other"]):
        with pytest.raises(SystemExit):
            compare.main(names)
        assert "a name of its own" in capsys.readouterr().err


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
        "--variant",
        "long hybrid --model.flavor=kimi_linear_debug --training.local_batch_size=1 --training.seq_len=80"
        " --architecture.expert_width=32",
    ]
    assert compare.main([*arguments, *variants, "--training.seq_len=48"]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["ours", "again", "faster", "wide", "long hybrid"]
    assert found["ours"]["losses"] == found["again"]["losses"] and len(found["ours"]["losses"]) == 4
    assert found["faster"]["losses"][0] == found["ours"]["losses"][0]  # the same start and the same text
    assert found["again"]["apart"] == 0 < found["faster"]["apart"]
    assert all(result["tokens_per_second"] > 0 for result in found.values())
    assert found["long hybrid"]["apart"] is None and found["long hybrid"]["mfu"] > 0
    shown = capsys.readouterr().out
    assert "\n| variant | rows x tokens | tokens/s |" in shown and "\n| faster | 4 x 48 | " in shown
    assert "\n| long hybrid | 1 x 80 | " in shown
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


def test_decode_steps_by_context(script, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    benchmark, out, image = script("benchmark_generate"), tmp_path / "rows.json", tmp_path / "images" / "decode.png"
    if torch.cuda.is_available():
        pytest.skip("the benchmark itself runs there")
    flavors = ["--flavor=kimi_linear_debug:kda", "--flavor=kimi_linear_debug"]
    assert benchmark.main([*flavors, "--context=1", "--context=300", f"--json={out}", f"--plot={image}"]) == 0
    rows = json.loads(out.read_text())
    assert [(row["flavor"][17:], row["context"]) for row in rows] == [(":kda", 1), (":kda", 300), ("", 1), ("", 300)]
    assert all(row["step_us"] > 0 and not row["graph"] for row in rows)
    kda, _, short, long = (row["cache_bytes"] for row in rows)
    assert rows[1]["cache_bytes"] == kda  # of a fixed size
    assert long - short == 4 * (64 + 16) * 256  # one MLA layer's latents, in pieces of 256 tokens
    shown = capsys.readouterr().out
    assert "| kimi_linear_debug | 1 | 300 | " in shown and "kimi_linear_debug: generate() captures no graph" in shown
    assert image.read_bytes().startswith(b"\x89PNG")
    graphs = [dict(row, graph=True, step_us=row["step_us"] / 2) for row in rows]
    out.write_text(json.dumps(graphs))
    again = tmp_path / "again.png"
    assert benchmark.main([f"--read={out}", f"--plot={again}"]) == 0
    assert again.read_bytes().startswith(b"\x89PNG") and again.read_bytes() != image.read_bytes()
    for wrong, words in (
        (["--flavor=debugmodel", "--flavor=340M"], "need --context"),
        (["--plot=x.png"], "need --context"),
        ([f"--read={out}"], "--read needs --plot"),
        (["--context=0"], "argument --context: must be at least 1"),
        (["--batch=99999999999999999999"], "argument --batch: must be at least 1 and at most 2147483647"),
        (["--tokens=1"], "argument --tokens: must be at least 2"),
        (["--prompt-tokens=-4"], "argument --prompt-tokens: must be at least 1"),
        (["--context=1.5"], "argument --context: must be an integer, got '1.5'"),
        (["--context=1", "--skip=decode"], "leave out --prompt-tokens and --skip"),
        (["--context=1", "--plot=x.xyz"], "argument --plot: 'x.xyz' must end in one of ."),
        (["--context=1", f"--plot={tmp_path}"], f"argument --plot: '{tmp_path}' is a folder"),
        ([f"--json={out}/rows.json"], f"argument --json: '{out}/rows.json': {out} is no folder"),
        ([f"--json={'x' * 300}"], "File name too long"),
        ([f"--read={out}", f"--plot={again}", "--context=2", "--json=x"], "leave out --context, --json"),
        ([f"--read={again}", f"--plot={again}"], f"{again}: "),  # a picture
        ([f"--read={tmp_path}/none", f"--plot={again}"], "No such file"),
        (["--flavor=debug"], "no flavor is called 'debug'"),
        (["--flavor=debugmodel:kda,rnn"], "no mixer is called 'rnn'"),
        (["--flavor=debugmodel:"], "no mixer is called ''"),
        (["--flavor=debugmodel:kda,"], "no mixer is called ''"),
    ):
        with pytest.raises(SystemExit):
            benchmark.main(wrong)
        assert words in capsys.readouterr().err

    for rows in ("{}", "[]", "[3]", '[{"flavor": "a"}]', "nothing", json.dumps([graphs[0] | {"context": "x"}])):
        out.write_text(rows)
        with pytest.raises(SystemExit):
            benchmark.main([f"--read={out}", f"--plot={again}"])
        assert f"error: {out}" in capsys.readouterr().err


def test_curves_of_variants_are_drawn(script, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    plot, results, image = script("plot_loss"), tmp_path / "results.json", tmp_path / "images" / "curves.png"

    def main(*arguments):
        monkeypatch.setattr("sys.argv", ["plot_loss.py", *map(str, arguments)])
        plot.main()

    results.write_text(json.dumps({"a": {"losses": [3.0] * 30}, "b": {"losses": [2.0, 1, 3]}}))
    main(results, image)
    assert image.read_bytes().startswith(b"\x89PNG")
    for text in ("", "nothing", "{}", "[]", '{"a": 3}', '{"a": {"losses": []}}', '{"a": {"losses": [1, null]}}'):
        results.write_text(text)
        with pytest.raises(SystemExit):
            main(results, image)
        assert f"error: {results}" in capsys.readouterr().err
    results.write_bytes(b"\xff\xfe")
    for wrong, words in (
        ((results, image), f"error: {results}: "),
        ((tmp_path / "none", image), "no such file or folder"),
        ((tmp_path, image), "no losses in"),
        ((results, tmp_path / "x.xyz"), "must end in one of ."),
        ((results, tmp_path / "x"), "must end in one of ."),
        ((results, results / "x.png"), f"{results} is no folder"),
    ):
        with pytest.raises(SystemExit):
            main(*wrong)
        assert words in capsys.readouterr().err


def test_mistaken_variants(script, tmp_path, capsys):
    compare = script("train_compare")
    for wrong, words in (
        (["--variant=a 'b"], '--variant "a \'b": No closing quotation'),
        (["--variant=a --training.steps=3"], "--training.steps=3: a comparison has its own --steps"),
        (["--variant=a", "--job.dump-folder", "x"], "--job.dump-folder: a comparison has its own --folder"),
        (["--steps=1"], "argument --steps: must be at least 2"),
        (["--warmup=0"], "argument --warmup: must be at least 1"),
        (["--steps=5", "--warmup=5"], "--warmup must be below --steps, got 5 and 5"),
        ([f"--json={tmp_path}"], f"argument --json: '{tmp_path}' is a folder"),
    ):
        with pytest.raises(SystemExit):
            compare.main(wrong)
        assert words in capsys.readouterr().err
    toml = jobs.write_job(tmp_path)
    assert compare.main(["--variant=a", "--job", str(toml), f"--folder={toml}/x"]) == 2
    assert capsys.readouterr().err == f"train_compare: error: job.dump_folder '{toml}/x': {toml} is no folder\n"
    result = {"text": "", "tokens_per_second": 1, "mfu": 0, "peak_gib": 1, "first_step_seconds": 1, "rows": 1}
    result |= {"seq_len": 1, "losses": [1.0], "flavor": "", "device": ""}
    assert "| a \\| b | 1 x 1 |" in compare.table({"a | b": result})


def test_caches_lengthened_by_random_rows(script):
    """What a step then reads: every sequence has all its tokens, the prompt's first, none of them zero."""
    benchmark = script("benchmark_generate")
    model = benchmark.build("kimi_linear_debug", torch.device("cpu"), torch.float32, n_layers=4)
    with benchmark.inference(model):
        batch = benchmark._Growing(model, 2, torch.device("cpu"), benchmark.picker(benchmark.GREEDY))
        uniforms = benchmark.admit_some(batch, 2, 5)
        latents = batch.cache[3]
        before = latents.rows[:, :, :5].clone()
        benchmark.lengthen(batch.cache, 40)
        assert latents.lengths.tolist() == [45, 45] and latents.bound == 45
        assert torch.equal(latents.rows[:, :, :5], before)
        assert (latents.rows[:, :, :45] != 0).all() and (latents.rows[:, :, 45:] == 0).all()
        assert batch.step(uniforms).shape == (2,)
        assert latents.lengths.tolist() == [46, 46] and (latents.rows[:, :, 45] != 0).any()
