"""Scores against plain forwards, the command, and lm-evaluation-harness's requests where it is installed."""

import json
import math
from types import SimpleNamespace

import forked
import jobs
import pytest
import torch

from titan_kda.data import ByteTokenizer
from titan_kda.evaluate import harness_model, main, score, text_tokens
from titan_kda.generate import NotFiniteError, Sample, Sampling, generate
from titan_kda.model import Decoder, ModelArgs

TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module", params=[["kda"], ["kda", "gqa"]], ids=str)
def model(request):
    shape = dict(vocab_size=264, dim=32, n_layers=2, n_heads=2, key_width=8, value_width=12, ffn_width=48)
    model = Decoder(ModelArgs(**shape, layer_pattern=request.param))
    with torch.no_grad():
        model.init_weights(seed=1)
        for layer in model.layers.values():
            getattr(layer.mixer, "o_proj" if hasattr(layer.mixer, "o_proj") else "wo").weight *= 50
    return model


def some_tokens(length):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@torch.no_grad()
def plainly(model, tokens, start, vocab_size):
    logits = model(torch.tensor([tokens[:-1]]))[0, :, :vocab_size].double()
    each = torch.log_softmax(logits, -1)[range(len(tokens) - 1), tokens[1:]]
    return float(each[start - 1 :].sum())


@pytest.mark.parametrize("piece", [7, 64, 100, 8192])
def test_scores_are_those_of_plain_forwards(model, piece):
    """Sequences that share a piece, and ones longer than it, read with a cache."""
    sequences = [
        (some_tokens(length), start) for length, start in ((2, 1), (9, 3), (65, 64), (70, 1), (129, 100), (5, 5))
    ]
    model.train()
    found = score(model, sequences, vocab_size=259, piece=piece)
    assert model.training
    for (tokens, start), got in zip(sequences, found):
        assert got.tokens == len(tokens) - start
        want = plainly(model, tokens, start, 259) if start < len(tokens) else 0.0
        assert got.log_likelihood == pytest.approx(want, abs=2e-3, rel=1e-5)


def test_what_the_model_itself_says_is_greedy(model):
    sample = Sample(some_tokens(20))
    generate(model, [sample], Sampling(8, temperature=0), vocab_size=259)
    whole = sample.prompt + sample.tokens
    other = [*whole[:-1], (whole[-1] + 1) % 256]
    own, changed = score(model, [(whole, 20), (other, 20)], vocab_size=259)
    assert own.greedy and not changed.greedy and own.log_likelihood > changed.log_likelihood


def test_mistakes(model):
    for start in (0, 4):
        with pytest.raises(ValueError, match="start must be from 1 to the number of tokens, 3"):
            score(model, [(some_tokens(3), start)])
    broken = Decoder(model.model_args)
    broken.load_state_dict(model.state_dict())
    with torch.no_grad():
        broken.output.weight[3, 0] = float("nan")
    with pytest.raises(NotFiniteError):
        score(broken, [(some_tokens(5), 1)])


def test_text_as_tokens():
    assert text_tokens(TOKENIZER, "ab") == ([256, 97, 98], 1) and text_tokens(TOKENIZER, "") == ([256], 1)


def test_the_harness_requests(model):
    pytest.importorskip("lm_eval")
    lm = harness_model(model, TOKENIZER, max_new_tokens=5)

    def requests(*arguments):
        return [SimpleNamespace(args=a) for a in arguments]

    (one, _), (spaced, _), (bare, _) = lm.loglikelihood(requests(("ab", " cd"), ("ab ", "cd"), ("", "ab")))
    tokens = TOKENIZER.encode("ab cd", add_bos=True)
    assert one == pytest.approx(plainly(model, tokens, 3, 259), abs=1e-3) and spaced == one
    assert lm.loglikelihood_rolling(requests(("ab",))) == [pytest.approx(bare)]
    free = lm.generate_until(requests(("ab", {}), ("ab", {"max_gen_toks": 9}), ("cd", {"do_sample": False})))
    assert free[1].startswith(free[0]) and len(free[1].encode()) > len(free[0].encode())
    stop = free[1][2:3]
    (cut,) = lm.generate_until(requests(("ab", {"until": [stop], "max_gen_toks": 9})))
    assert cut == free[1][: free[1].index(stop)]


# ---- the command ----


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    toml = jobs.write_job(
        folder, {"training.steps": 2, "checkpoint.interval": 2, "validation.enable": False, "generation.enable": False}
    )
    run = forked.run_job(toml)
    assert run.returncode == 0, jobs.log_of(run)
    return toml


def test_the_command(trained, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("def f():\n    return 1\n")
    (tmp_path / "b.txt").write_text("ü" * 100, encoding="utf-8")
    files = [str(tmp_path / name) for name in ("a.txt", "b.txt")]
    arguments = ["--job", str(trained), "--text", *files, "--prompt", "def ", "--max-new-tokens=5"]
    assert main([*arguments, "--json"]) == 0
    out = capsys.readouterr().out
    found = json.loads(out)
    a, b, both = (found["text"][name] for name in (*files, "all"))
    assert (a["tokens"], b["tokens"], b["bytes"]) == (22, 200, 200) and both["tokens"] == 222
    assert both["log_likelihood"] == pytest.approx(a["log_likelihood"] + b["log_likelihood"])
    assert a["perplexity"] == pytest.approx(math.exp(a["nats_per_token"]))
    assert a["bits_per_byte"] == pytest.approx(a["nats_per_token"] / math.log(2))  # a byte is a token
    assert found["generated"][0]["prompt"] == "def " and found["generated"][0]["finished"] in ("length", "eos")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert f"| {files[0]} | 22 | 22 | {a['nats_per_token']:.4f} |" in shown and "| all | 222 |" in shown


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to do: give --text, --prompt or --task"),
        (["--text", "nowhere"], "--text nowhere: No such file or directory"),
        (["--prompt=x", "--max-new-tokens=0"], "--max-new-tokens must be at least 1, got 0"),
        (["--prompt=x", "--limt=3"], "unknown option --limt=3"),
        (["--prompt=x", "--checkpoint=nowhere"], "no such file or folder: nowhere"),
    ],
)
def test_mistakes_are_one_line(trained, capsys, arguments, message):
    assert main(["--job", str(trained), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith("titan_kda.evaluate: error: ")
    assert message in shown.err and shown.err.count("\n") == 1
