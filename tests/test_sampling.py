"""Draws on the device: the kernel against sorting in FP64, and the distribution of both."""

import math

import pytest
import torch

from titan_kda.kernels._operator import interpreted
from titan_kda.sampling import sample_tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference", pytest.param("triton", marks=() if interpreted() else pytest.mark.gpu)]

ROWS = 64 if torch.cuda.is_available() else 3  # Triton's interpreter takes a second a row

HALF = torch.tensor([0.05, 0.5, 0.15, 0.3]).log()

SETTINGS = [
    dict(temperature=0.0),
    dict(temperature=5e-324, top_k=2),
    dict(),
    dict(temperature=0.3),
    dict(top_k=1),
    dict(top_k=7),
    dict(top_k=500),
    dict(top_p=0.9),
    dict(top_p=1e-30),
    dict(temperature=3.0, top_k=20, top_p=0.5),
    dict(temperature=1e-300, top_p=0.7),
    dict(temperature=1e300),
]


def draw(logits, uniforms, impl, **settings):
    return sample_tokens(logits.to(DEVICE), uniforms.to(DEVICE), impl=impl, **settings).cpu()


def uniforms(count, seed=0):
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


def some_logits(rows, vocab, seed=1, spread=3.0):
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "dtype, vocab", [(torch.float32, 1), (torch.float32, 100), (torch.bfloat16, 300), (torch.float16, 64)]
)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_the_kernel_is_the_reference(impl, settings, dtype, vocab):
    if interpreted() and dtype != torch.float32 and settings not in SETTINGS[-3:]:
        pytest.skip("slow in the interpreter")
    logits = some_logits(ROWS, vocab).to(dtype)
    u = uniforms(ROWS)
    want = draw(logits, u, "reference", **settings)
    assert torch.equal(draw(logits, u, impl, **settings), want)
    edge = torch.full((ROWS, 5), 99.0)
    wide = torch.cat([edge, logits.float(), edge], 1).to(dtype)
    if vocab == 1 or not interpreted():
        assert torch.equal(draw(wide[:, 5:-5], u, impl, **settings), want)  # rows that lie apart


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("impl", IMPLS[1:])
def test_equal_logits_go_by_their_order(impl, settings):
    """Logits of few values, many of them equal, some of them zeros of both signs: the earlier are the likelier."""
    logits = some_logits(ROWS, 90, spread=1.0).round()
    logits[:, ::7] *= -0.0
    u = uniforms(ROWS, seed=2)
    assert torch.equal(draw(logits, u, impl, **settings), draw(logits, u, "reference", **settings))


@pytest.mark.parametrize("impl", IMPLS[1:])
def test_a_vocabulary_of_several_blocks(impl, monkeypatch):
    monkeypatch.setattr("titan_kda.sampling._LARGEST_BLOCK", 32)
    for settings in SETTINGS[-4:]:
        logits, u = some_logits(1, 90).round(decimals=1), uniforms(1)
        want = draw(logits, u, "reference", **settings)
        assert torch.equal(draw(logits, u, impl, **settings), want), settings


@pytest.mark.parametrize(
    "settings, want",
    [
        (dict(), [0.05, 0.5, 0.15, 0.3]),
        (dict(temperature=0.5), [0.0025, 0.25, 0.0225, 0.09]),
        (dict(top_k=2), [0, 0.5, 0, 0.3]),
        (dict(top_k=9), [0.05, 0.5, 0.15, 0.3]),
        (dict(top_p=0.79), [0, 0.5, 0, 0.3]),
        (dict(top_p=0.81), [0, 0.5, 0.15, 0.3]),
        (dict(top_p=0.49), [0, 1, 0, 0]),
        (dict(top_p=1e-30), [0, 1, 0, 0]),
        (dict(top_k=3, top_p=0.8), [0, 0.5, 0, 0.3]),  # 0.5 and 0.3 of 0.95
        (dict(temperature=1e-300), [0, 1, 0, 0]),
        (dict(temperature=5e-324), [0, 1, 0, 0]),
        (dict(temperature=1e300), [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_draws_have_their_distribution(settings, want):
    want = torch.tensor(want, dtype=torch.float32)
    want /= want.sum()
    draws = 4000
    tokens = draw(HALF.expand(draws, 4), uniforms(draws, seed=3), "reference", **settings)
    got = torch.bincount(tokens, minlength=4) / draws
    assert torch.equal(got > 0, want > 0)
    assert (got - want).abs().max() < 5 * 0.5 / math.sqrt(draws)


@pytest.mark.parametrize("impl", IMPLS)
def test_the_ends_of_the_uniform_numbers(impl):
    u = torch.tensor([0.0, 1 - 2**-24])
    assert draw(HALF.expand(2, 4), u, impl).tolist() == [0, 3]
    assert draw(HALF.expand(2, 4), u, impl, top_k=2).tolist() == [1, 3]
    far = torch.tensor([-1e4, 0.0, 0.0, -1e4]).expand(2, 4)  # weights of zero are never drawn
    assert draw(far, u, impl).tolist() == [1, 2]


@pytest.mark.parametrize("impl", IMPLS)
def test_greedy_takes_the_first_of_equals_whatever_top_k(impl):
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [-0.0, -5.0, 0.0, -1.0]])
    for settings in (dict(temperature=0.0), dict(top_k=1), dict(temperature=0.0, top_k=3, top_p=0.1)):
        assert draw(logits, uniforms(2), impl, **settings).tolist() == [1, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("impl", IMPLS)
def test_logits_that_are_not_finite(impl, value):
    logits = some_logits(3, 40)
    logits[1, 17] = value
    for settings in (dict(temperature=0.0), dict(), dict(top_k=3, top_p=0.5)):
        tokens = draw(logits, uniforms(3), impl, **settings).tolist()
        assert tokens[1] == -1 and min(tokens[0], tokens[2]) >= 0


def test_nothing_to_draw():
    assert sample_tokens(torch.empty(0, 5), torch.empty(0)).shape == (0,)
    with pytest.raises(ValueError, match="impl"):
        sample_tokens(torch.zeros(1, 5), torch.zeros(1), impl="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_large_vocabulary_without_a_synchronisation(settings):
    """The two may part where a sum's rounding decides: of 512 draws among 50,000 tokens, at a few."""
    logits = some_logits(512, 50000, spread=2.0).cuda()
    u = uniforms(512).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        row = logits.to(dtype)
        sample_tokens(row, u, **settings)
        torch.cuda.set_sync_debug_mode("error")
        try:
            got = sample_tokens(row, u, **settings)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        want = sample_tokens(row, u, impl="reference", **settings)
        assert (got == want).float().mean() > 0.98
