"""The sampling command, on checkpoints that tiny jobs have written."""

import errno
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time

import forked
import jobs
import pytest
import torch
from safetensors.torch import save_file

from titan_kda.checkpoint import read_weights, resolve_checkpoint
from titan_kda.data import ByteTokenizer
from titan_kda.job_config import model_args_of
from titan_kda.model import Decoder
from titan_kda.sample import TextStream, main
from titan_kda.train import load_job

SHORT = {
    "training.steps": 4,
    "checkpoint.interval": 2,
    "lr_scheduler.warmup_steps": 1,
    "validation.enable": False,
    "generation.enable": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job file whose run, in one process, has the checkpoints step-2 and step-4."""
    folder = tmp_path_factory.mktemp("trained")
    toml = jobs.write_job(folder, SHORT)
    run = forked.run_job(toml)
    assert run.returncode == 0, jobs.log_of(run)
    return toml


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The same by two processes, under tensor parallelism."""
    folder = tmp_path_factory.mktemp("sharded")
    toml = jobs.write_job(folder, SHORT | {"parallelism.tensor_parallel_degree": 2})
    run = jobs.run_job(toml, processes=2)
    assert run.returncode == 0, jobs.log_of(run)
    return toml


@pytest.fixture
def sample(trained, capsys, monkeypatch):
    """sample(*args) -> (exit status, stdout, stderr) of the command on the trained job, in this process."""

    def call(*args, job=trained, stdin=None):
        with monkeypatch.context() as patch:
            if not any("." in str(arg).partition("=")[0] for arg in args):
                patch.setattr("tyro.cli", lambda _, *, default, **kwargs: default)  # nothing for it to parse, slowly
            if stdin is not None:
                patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
            status = main(["--job", str(job), *map(str, args)])
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return call


def rows(output):
    return [json.loads(line) for line in output.splitlines()]


def weights(job, step=4):
    """A run's weights."""
    with torch.device("meta"):
        model = Decoder(model_args_of(load_job(["--job.config_file", str(job)], reads_data=False)))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    return read_weights(resolve_checkpoint(job.parent / "run" / "checkpoint" / f"step-{step}"), shapes)


# ---- what it writes ----


def test_text_goes_to_stdout_and_all_else_to_stderr(sample):
    status, out, err = sample("--prompt", "def ", "--max-new-tokens", 9, "--temperature", 0)
    assert status == 0 and out.startswith("def ") and out.endswith("\n")
    (row,) = rows(sample("--prompt", "def ", "--max-new-tokens", 9, "--temperature", 0, "--json")[1])
    assert out == f"def {row['text']}\n" and len(row["tokens"]) == 9
    lines = err.splitlines()
    assert "step-4, step 4: " in lines[0] and "parameters" in lines[0]
    assert lines[1].startswith("prefill: 5 tokens in ") and lines[2].startswith("decode: 8 tokens in ")
    assert len(lines) == 3


def test_json_lines(sample):
    status, out, _ = sample(
        "--prompt=a b", "--prompt", "import os\n", "--num-samples=2", "--json", "--max-new-tokens=7", "--seed=3"
    )
    written = sorted(rows(out), key=lambda row: row["sample"])  # in the order in which they end
    assert status == 0 and [row["sample"] for row in written] == [0, 1, 2, 3]
    assert [row["prompt"] for row in written] == ["a b", "a b", "import os\n", "import os\n"]
    for row in written:
        assert set(row) == {"prompt", "text", "tokens", "finished", "seed", "sample"} and row["seed"] == 3
        assert row["text"] == ByteTokenizer().decode(row["tokens"])
        assert (row["finished"] == "length" and len(row["tokens"]) == 7) or row["finished"] == "eos"
    assert len({tuple(row["tokens"]) for row in written}) == 4


def test_several_texts_are_told_apart(sample):
    _, out, _ = sample("--prompt=x", "--prompt=yy", "--max-new-tokens=5", "--temperature=0", "--ignore-eos")
    _, as_json, _ = sample(
        "--prompt=x", "--prompt=yy", "--max-new-tokens=5", "--temperature=0", "--ignore-eos", "--json"
    )
    x, y = rows(as_json)
    assert out == f"---- sample 1 of 2 ----\nx{x['text']}\n---- sample 2 of 2 ----\nyy{y['text']}\n"


def test_prompts_from_files_and_standard_input(sample, tmp_path):
    (tmp_path / "a.txt").write_text("first\nprompt", encoding="utf-8")
    options = ("--max-new-tokens=2", "--json", "--temperature=0")

    def prompts(*args, stdin=None):
        status, out, err = sample(*args, *options, stdin=stdin)
        assert status == 0, err
        return [row["prompt"] for row in sorted(rows(out), key=lambda row: row["sample"])]

    assert prompts(stdin="über\n".encode()) == ["über\n"]
    assert prompts(stdin=b"") == [""]
    assert prompts("--prompt-file", tmp_path / "a.txt") == ["first\nprompt"]
    given = ("--prompt-file", tmp_path / "a.txt", "--prompt", "b", "--prompt-file", "-")
    assert prompts(*given, stdin=b"c") == ["b", "first\nprompt", "c"]
    assert prompts("--prompt", "b", stdin=b"c") == ["b"]  # standard input is read where nothing else is given


@pytest.mark.parametrize("prompt", ["", "naïve 你好 🎉", "a\n\tb\0c", "x" * 300, "\udcff\udc80"])
def test_any_prompt(sample, prompt):
    """No text at all, more than ASCII, control characters, more than a chunk, and bytes that are no text."""
    status, out, err = sample("--prompt", prompt, "--max-new-tokens=3", "--temperature=0", "--json")
    assert status == 0, err
    (row,) = rows(out)
    assert row["prompt"] == prompt.replace("\udcff", "?").replace("\udc80", "?")
    tokens = len(prompt.encode("utf-8", errors="surrogateescape")) + 1
    assert f"prefill: {tokens} tokens" in err


# ---- what it generates ----


def test_seeds_and_neighbours(sample):
    def texts(*args):
        return [row["tokens"] for row in sorted(rows(sample(*args)[1]), key=lambda row: row["sample"])]

    drawn = ("--json", "--max-new-tokens=12", "--temperature=1", "--top-p=1", "--ignore-eos")
    first = texts("--prompt=ab", "--num-samples=2", "--seed=1", *drawn)
    assert texts("--prompt=ab", "--num-samples=2", "--seed=1", *drawn) == first and first[0] != first[1]
    assert texts("--prompt=ab", "--num-samples=2", "--seed=2", *drawn) != first
    assert texts("--prompt=ab", "--prompt=" + "z" * 90, "--seed=1", *drawn)[0] == first[0]
    assert texts("--prompt=ab", "--num-samples=2", "--seed=1", "--slots=1", *drawn) == first
    greedy = ("--json", "--max-new-tokens=12", "--temperature=0", "--ignore-eos")
    same = texts("--prompt=ab", "--num-samples=3", *greedy)
    assert same[0] == same[1] == same[2] == texts("--prompt=ab", "--seed=8", *greedy)[0]
    assert texts("--prompt=ab", "--kda.prefill_backend=chunk", *greedy) == same[:1]
    assert texts("--prompt=ab", "--json", "--max-new-tokens=12", "--top-k=1", "--ignore-eos") == same[:1]


def test_a_stop_string_ends_the_text_before_it(sample):
    options = ("--prompt=ab", "--json", "--max-new-tokens=60", "--temperature=1", "--top-p=1", "--ignore-eos")
    (whole,) = rows(sample(*options)[1])
    text = whole["text"]
    ascii_pairs = [i for i in range(10, 50) if text[i : i + 2].isascii() and text[i] != text[i + 1]]
    at = text.find(text[ascii_pairs[0] : ascii_pairs[0] + 2])  # two bytes, so two tokens
    stop = text[at : at + 2]
    (row,) = rows(sample(*options, "--stop", stop)[1])
    assert row["finished"] == "stop" and row["text"] == text[:at]
    assert row["tokens"] == whole["tokens"][: len(row["tokens"])]
    (row,) = rows(sample(*options, "--stop", "\0no such\0", "--stop", stop, "--stop", stop + "#")[1])
    assert row["finished"] == "stop" and row["text"] == text[:at]
    (row,) = rows(sample(*options, "--stop", text[-1] + "\0\0")[1])  # its start is held back, and comes in the end
    assert row == whole
    plain = sample("--prompt=ab", *options[2:], "--stop", stop)[1]
    assert plain == f"ab{text[:at]}\n"


@pytest.mark.parametrize(
    "text, stops, shown",
    [
        ("abcabd", ["abd"], "abc"),
        ("aaab", ["aab"], "a"),
        ("abcdef", ["ef", "cd"], "ab"),
        ("abcdef", ["cdx", "d"], "abc"),
        ("ab", ["abc"], "ab"),
        ("xab", ["b", "ab"], "x"),
        ("añb", ["ñb"], "a"),
        ("añ", ["ñb"], "añ"),
        ("\n\n\n", ["\n\n"], ""),
    ],
)
def test_stop_strings_spread_over_tokens(text, stops, shown):
    stream = TextStream(ByteTokenizer(), [], stops)
    pieces = []
    for token in text.encode():
        piece, stopped = stream.push(token)
        pieces.append(piece)
        assert not any(stop in "".join(pieces) for stop in stops)
        if stopped:
            break
    else:
        pieces.append(stream.flush())
    assert "".join(pieces) == stream.text == shown
    assert stopped == any(stop in text for stop in stops)


def test_text_ends_at_eos_unless_told_otherwise(sample, tmp_path, trained):
    tensors = weights(trained)
    tensors["output.weight"].zero_()  # every token is as likely as any other
    save_file(tensors, str(tmp_path / "zero.safetensors"))
    options = ("--checkpoint", tmp_path / "zero.safetensors", "--prompt=a", "--num-samples=16", "--json")
    options += ("--max-new-tokens=100", "--temperature=1", "--top-p=1")
    ended, longer = (
        {row["sample"]: row for row in rows(sample(*options, *more)[1])} for more in ((), ("--ignore-eos",))
    )
    assert {row["finished"] for row in longer.values()} == {"length"}
    assert {row["finished"] for row in ended.values()} == {"length", "eos"}
    for i, row in ended.items():
        assert 257 not in row["tokens"] and row["text"] == ByteTokenizer().decode(row["tokens"])
        end = [257] if row["finished"] == "eos" else []
        assert longer[i]["tokens"][: len(row["tokens"] + end)] == row["tokens"] + end
        assert len(longer[i]["tokens"]) == 100 and max(longer[i]["tokens"]) <= 258


# ---- checkpoints ----


def test_steps_runs_and_safetensors(sample, trained, tmp_path, monkeypatch):
    run = trained.parent / "run"
    options = ("--prompt=def ", "--max-new-tokens=12", "--temperature=1", "--ignore-eos")

    def text(*args):
        status, out, err = sample(*options, *args)
        assert status == 0, err
        return out

    newest = text()
    assert text("--checkpoint", run) == text("--checkpoint", run / "checkpoint") == newest
    assert text("--checkpoint", run / "checkpoint" / "step-4") == newest
    assert text("--checkpoint", run / "checkpoint" / "step-2") != newest
    save_file(weights(trained), str(tmp_path / "model.safetensors"))
    assert text("--checkpoint", tmp_path / "model.safetensors") == newest
    assert text("--checkpoint", tmp_path) == newest
    monkeypatch.chdir(trained.parent)
    assert text("--checkpoint", "run/checkpoint/step-4") == newest
    exported = {name: tensor.to(torch.bfloat16) for name, tensor in weights(trained).items()}
    save_file(exported, str(tmp_path / "model.safetensors"))  # A_log and dt_bias too
    text("--checkpoint", tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(sample, dtype):
    status, out, err = sample("--prompt=" + "ab" * 50, "--max-new-tokens=4", "--dtype", dtype, "--device=cpu")
    assert status == 0 and len(out) > 100, err


def test_a_checkpoint_of_any_layout(sample, sharded):
    """Written by two processes under tensor parallelism; the job's layout does not matter here."""
    status, out, err = sample("--prompt=def ", "--max-new-tokens=12", "--temperature=0", job=sharded)
    assert status == 0, err
    tensors = weights(sharded)
    with torch.device("meta"):
        model = Decoder(model_args_of(load_job(["--job.config_file", str(sharded)], reads_data=False)))
    model.load_state_dict(tensors, assign=True)
    tokens = ByteTokenizer().encode("def ", add_bos=True)
    for _ in range(12):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]))[0, -1, :259].argmax()))
    assert out == f"{ByteTokenizer().decode(tokens)}\n"


def test_checkpoints_that_cannot_be_used(sample, trained, tmp_path):
    def told(*args):
        status, out, err = sample("--prompt=x", *args)
        assert (status, out) == (2, "") and err.startswith("titan_kda.sample: error: ") and err.count("\n") == 1
        return err

    step = trained.parent / "run" / "checkpoint" / "step-4"
    assert "no such file or folder: nowhere" in told("--checkpoint", "nowhere")
    assert "no such file or folder: " in told("--job.dump_folder", tmp_path / "nowhere")
    assert "no checkpoint in" in told("--checkpoint", tmp_path)
    assert "--checkpoint must not be empty" in told("--checkpoint=")
    assert "is no checkpoint" in told("--checkpoint", trained)
    error = told("--architecture.dim", 32)
    assert "is of another model" in error and "tok_embeddings.weight: [264, 64] there, [264, 32] in the model" in error
    assert "is of another model" in told("--architecture.n_layers=3")
    half = tmp_path / "step-4"
    shutil.copytree(step, half)
    (half / ".metadata").unlink()
    assert "is half written" in told("--checkpoint", half)
    shutil.copy(step / ".metadata", half)
    data = next(half.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1000])
    assert "is half written" in told("--checkpoint", half)


def test_weights_that_are_not_finite(sample, trained, tmp_path):
    tensors = weights(trained)
    tensors["layers.0.mixer.q_proj.weight"][0, 0] = float("nan")
    save_file(tensors, str(tmp_path / "nan.safetensors"))
    status, out, err = sample("--prompt=x", "--json", "--checkpoint", tmp_path / "nan.safetensors")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("titan_kda.sample: error: the model's logits are not finite")


class _Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_malicious_checkpoint_runs_nothing(sample, trained, tmp_path):
    evil = tmp_path / "step-4"
    shutil.copytree(trained.parent / "run" / "checkpoint" / "step-4", evil)
    (evil / ".metadata").write_bytes(pickle.dumps(_Touch(tmp_path / "ran")))
    status, out, err = sample("--prompt=x", "--checkpoint", evil)
    assert (status, out) == (2, "") and err.count("\n") == 1 and "which no checkpoint needs: not loaded" in err
    assert not (tmp_path / "ran").exists()
    pickle.loads((evil / ".metadata").read_bytes()).close()
    assert (tmp_path / "ran").exists()  # so it would have


# ---- mistakes ----


@pytest.mark.parametrize(
    "args, message",
    [
        (["--prompt=x", "--top-p=0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["--prompt=x", "--top-p=2"], "--top-p must be above 0 and at most 1, got 2.0"),
        (["--prompt=x", "--top-p=high"], "argument --top-p: invalid float value: 'high'"),
        (["--prompt=x", "--top-k=-1"], "--top-k must be at least 0, got -1"),
        (["--prompt=x", "--temperature=-1"], "--temperature must be at least 0 and finite, got -1.0"),
        (["--prompt=x", "--temperature=nan"], "--temperature must be at least 0 and finite, got nan"),
        (["--prompt=x", "--max-new-tokens=0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt=x", "--num-samples=0"], "--num-samples must be at least 1, got 0"),
        (["--prompt=x", "--stop="], "--stop must not be empty"),
        (["--prompt=x", "--slots=0"], "--slots must be at least 1, got 0"),
        (["--prompt=x", "--device=abacus"], "--device abacus: "),
        (["--prompt=x", "--device=meta"], "--device meta: "),
        (["--prompt=x", "--dtype=int8"], "argument --dtype: invalid choice: 'int8'"),
        (["--prompt"], "argument --prompt: expected one argument"),
        (["--promt=x"], "unknown option --promt=x"),
        (["--prompt", "x", "y"], "unexpected argument 'y'"),
        (["--prompt=x", "--kda.eval_backend=fast"], "[kda] or [architecture]: eval_backend must be one of"),
        (["--prompt=x", "--data.tokenizer=hf", "--model.hf_assets_path=none"], "model.hf_assets_path is no folder"),
        (["--prompt=x", "--architecture.vocab_size=100"], "vocab_size is 100, but the ByteTokenizer has 259 tokens"),
        (["--prompt-file=nowhere"], "--prompt-file nowhere: No such file or directory"),
        (["--prompt-file=."], "--prompt-file .: Is a directory"),
        (["--prompt=\ud800"], "prompt: '\\ud800' is no text"),
    ],
)
def test_mistakes_are_one_line(sample, args, message):
    status, out, err = sample(*args)
    assert (status, out) == (2, "")
    assert err.startswith("titan_kda.sample: error: ") and message in err and err.count("\n") == 1


def test_a_graph_that_cannot_be_captured(sample):
    status, out, err = sample("--prompt=x", "--cuda-graph", "--device=cpu")
    assert (status, out) == (2, "") and err.endswith("titan_kda.sample: error: --cuda-graph: the device is no GPU\n")
    assert sample("--prompt=x", "--no-cuda-graph", "--device=cpu", "--max-new-tokens=2")[0] == 0


def test_no_prompt_and_no_job(sample, monkeypatch, tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for stdin in (Terminal(), None):  # None: standard input is closed
        monkeypatch.setattr(sys, "stdin", stdin)
        assert sample()[2].startswith("titan_kda.sample: error: no prompt: give --prompt or --prompt-file")
    assert "standard input is closed" in sample("--prompt-file=-")[2]
    assert "standard input is no UTF-8: invalid start byte at byte 2" in sample(stdin=b"ab\xff")[2]
    (tmp_path / "latin").write_bytes(b"\xfc")
    assert "latin is no UTF-8: invalid start byte at byte 0" in sample("--prompt-file", tmp_path / "latin")[2]
    assert "no job file 'nothing'" in sample("--prompt=x", job="nothing")[2]


def test_a_setting_that_no_job_has(sample):
    status, out, told = sample("--prompt=x", "--trainng.steps", "3")
    assert (status, out) == (2, "")
    assert told == "titan_kda.sample: error: unknown setting --trainng.steps; did you mean --training.steps?\n"


def test_a_full_disk_is_one_line(trained, monkeypatch, capsys):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    dropped = []
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr("titan_kda.sample._drop_output", lambda: dropped.append(True))  # it would drop pytest's
    assert main(["--job", str(trained), "--prompt=x"]) == 2 and dropped
    assert capsys.readouterr().err.splitlines()[-1].startswith("titan_kda.sample: error: [Errno 28] No space left")


# ---- as a command ----


def start(trained, *args, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "titan_kda.sample", "--job", trained, *args],
        cwd=trained.parent,
        env=jobs.environment(PYTHONUTF8="0", LC_ALL="C.UTF-8"),
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        **options,
    )


def test_an_interrupt_keeps_what_was_generated(trained):
    process = start(trained, "--prompt=def ", "--ignore-eos", "--max-new-tokens=1000000", stdout=subprocess.PIPE)
    try:
        first = b""
        while len(first) < 100:  # it comes as it is generated
            first += os.read(process.stdout.fileno(), 4096)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    text, err = (first + rest).decode(), err.decode()
    assert text.startswith("def ") and text.endswith("\n") and len(text) > 50
    assert "Traceback" not in err and "decode: " in err.splitlines()[-1]


def test_a_reader_that_goes_away_and_a_prompt_of_bytes(trained):
    """Bytes that are no text are passed on to the model, and shown as a question mark."""
    process = start(trained, b"--prompt=\xff\xfe", "--ignore-eos", "--max-new-tokens=1000000", stdout=subprocess.PIPE)
    try:
        assert process.stdout.read(2) == b"??"
        process.stdout.close()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        err = process.stderr.read().decode()
    finally:
        process.kill()
    assert process.returncode == 141 and "Traceback" not in err and "Exception ignored" not in err
