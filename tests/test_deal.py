"""Whatever numbers of data-parallel ranks a job goes on with, each token of a pass is read once."""

import copy
import pickle
import sys

import pytest
from datasets import Dataset
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

from titan_kda.deal import DealtDataloader, DealtTextDataset, cut, part_of
from titan_kda.job_config import JobError

PIECES = 61
SEQ_LEN = 7


class Numbers:
    """Turns piece ``i`` into numbers that stand in no other, from 1 to 20 of them."""

    eos_id = None

    def encode(self, text, add_bos, add_eos):
        return [100 * int(text) + position for position in range(1 + int(text) * 7 % 20)]


EVERYTHING = [Numbers().encode(str(i), True, True) for i in range(PIECES)]


@pytest.fixture(params=["dataset"])
def build(request, monkeypatch):
    """build(ranks, workers) -> a training loader for each of the ranks."""

    def load(path):
        whole = Dataset.from_dict({"text": [str(i) for i in range(PIECES)]})
        return whole.to_iterable_dataset(num_shards=4) if request.param == "stream" else whole

    numbers = DatasetConfig(path="-", loader=load, sample_processor=lambda sample: sample["text"])
    monkeypatch.setitem(DATASETS, "numbers", numbers)

    def call(ranks, workers=0):
        return [
            DealtDataloader(
                DealtTextDataset(
                    dataset_name="numbers",
                    dataset_path=None,
                    tokenizer=Numbers(),
                    seq_len=SEQ_LEN,
                    infinite=True,
                    dp_rank=rank,
                    dp_world_size=ranks,
                ),
                dp_rank=rank,
                dp_world_size=ranks,
                batch_size=2,
                num_workers=workers,
            )
            for rank in range(ranks)
        ]

    return call


def read(loaders, batches):
    """The tokens of so many batches of every rank, in order, a list a rank."""
    found = []
    for loader in loaders:
        iterator = iter(loader)
        tokens = []
        for _ in range(batches):
            inputs, labels = next(iterator)
            for row, label in zip(inputs["input"].tolist(), labels.tolist()):
                assert row[1:] == label[:-1]
                tokens += [*row, label[-1]]
        found.append(tokens)
    return found


def save(loaders):
    return {name: value for loader in loaders for name, value in loader.state_dict().items()}


def load(loaders, saved):
    ranks = sum(name.startswith("dp_rank_") for name in saved)
    for loader in loaders:
        loader.expect(ranks, "step-3")
        assert ranks == saved["world_size"]
        if ranks != len(loaders):
            assert loader.state_dict().keys() == saved.keys()  # what the checkpoint is asked for
        loader.load_state_dict(saved)


@pytest.mark.parametrize("chain", [(1, 2), (2, 1), (3, 5, 2), (2, 1, 1, 3), (1, 8), (4, 4, 2)])
def test_each_token_of_a_pass_is_read_once(build, chain):
    tokens = []
    saved = None
    for ranks in chain:
        loaders = build(ranks)
        if saved is not None:
            load(loaders, saved)
        for part in read(loaders, 2):
            tokens += part
        saved = save(loaders)
    assert len(tokens) == sum(chain) * 2 * 2 * (SEQ_LEN + 1)
    (last,) = build(1)
    load([last], saved)
    (rest,) = read([last], 100)
    unread = sum(map(len, EVERYTHING)) - len(tokens)
    assert 0 < unread < len(rest)
    assert sorted(tokens + rest[:unread]) == [token for piece in EVERYTHING for token in piece]
    # ... and then a whole pass in order, as if there had never been others.
    following = [token for piece in EVERYTHING for token in piece]
    assert rest[unread : unread + len(following)] == following[: len(rest) - unread]


def test_ranks_that_are_dealt_to_share_evenly_and_then_read_their_own_part(build):
    loaders = build(1)
    (tokens,) = read(loaders, 3)
    saved = save(loaders)
    loaders = build(3)
    load(loaders, saved)
    spans = [loader.dataset._spans for loader in loaders]
    begun = spans[0][0][0]
    assert [stop - start for ((start, stop),) in spans] == [
        stop - start for start, stop in (part_of(PIECES - begun, rank, 3) for rank in range(3))
    ]
    for rank, (loader, ((start, stop),)) in enumerate(zip(loaders, spans)):
        buffer = [token for piece in EVERYTHING[:begun] for token in piece][len(tokens) :] if rank == 0 else []
        own = slice(*part_of(PIECES, rank, 3))
        want = [*buffer, *(token for piece in [*EVERYTHING[start:stop], *EVERYTHING[own]] for token in piece)]
        (got,) = read([loader], len(want) // 16)
        assert got == want[: len(got)] and len(got) > len(want) - 16


def test_a_pass_that_some_ranks_have_finished(build):
    """Ranks' parts differ in length: what is dealt is what each had still to read in the pass it was in."""
    loaders = build(2)
    counts = [sum(map(len, EVERYTHING[slice(*part_of(PIECES, rank, 2))])) // 16 for rank in range(2)]
    read(loaders[:1], counts[0] + 3)
    read(loaders[1:], 2)
    left = [PIECES // 2 + 1 - loaders[0].dataset._sample_idx, PIECES // 2 - loaders[1].dataset._sample_idx]
    assert left[0] > 20 and left[1] > 20
    (one,) = build(1)
    load([one], save(loaders))
    assert [stop - start for start, stop in one.dataset._spans] == left


def test_through_a_worker(build):
    loaders = build(1, workers=1)
    (tokens,) = read(loaders, 3)
    loaders, saved = build(2, workers=1), save(loaders)
    load(loaders, saved)
    plain = build(2)
    load(plain, saved)
    assert read(loaders, 4) == read(plain, 4)
    assert not set(tokens) & {token for part in read(plain, 4) for token in part}


@pytest.mark.parametrize("build", ["dataset", "stream"], indirect=True)
def test_a_state_is_of_its_moment(build):
    """Whatever is read before it is written down, as by a worker that reads ahead."""
    (loader,) = build(1)
    samples = iter(loader.dataset)
    for _ in range(5):
        next(samples)
        state = loader.dataset.state_dict()
        kept = copy.deepcopy(state)
        next(samples)
        next(samples)
        assert state == kept


def test_with_and_without_a_worker(build):
    """A loader's state has another form where a worker reads; the place in the text is the same."""
    (want,) = read(build(1), 5)
    for before, after in ((0, 1), (1, 0)):
        (one,) = build(1, workers=before)
        (tokens,) = read([one], 3)
        (other,) = build(1, workers=after)
        load([other], save([one]))
        assert tokens + read([other], 2)[0] == want
    message = r"^training.dataloader.num_workers is 2, and was 1 when the checkpoint was saved: go on with as many, or "
    with pytest.raises(JobError, match=message):
        load(build(1, workers=2), save(build(1, workers=1)))


@pytest.mark.parametrize("chain", [(1, 1), (1, 2), (2, 1, 1)])
@pytest.mark.parametrize("pieces", [6, 30, 90])
def test_a_text_that_was_changed_meanwhile_is_said(build, chain, pieces, monkeypatch):
    warnings = []
    monkeypatch.setattr("titan_kda.deal.logger.warning", warnings.append)
    saved = None
    for place, ranks in enumerate(chain):
        if place == len(chain) - 1:
            monkeypatch.setattr(sys.modules[__name__], "PIECES", pieces)
            warnings.clear()
        loaders = build(ranks)
        if saved is not None:
            load(loaders, saved)
        said = [text for text in warnings if "when the checkpoint was saved" in text]
        assert len(said) == (ranks if place == len(chain) - 1 else 0)
        assert all(f"'numbers' has {pieces} pieces, and had 61 when" in text for text in said)
        read(loaders, 2)
        saved = save(loaders)
    known = {token for i in range(pieces) for token in Numbers().encode(str(i), True, True)}
    for part in read(loaders, 60):
        assert set(part[2 * SEQ_LEN * len(chain) :]) <= known  # behind what did not fill a row: the text as it is now


@pytest.mark.parametrize("build", ["dataset", "stream"], indirect=True)
def test_a_text_of_another_kind_is_refused(build, request, monkeypatch):
    saved = save(build(1))
    stream = request.node.callspec.params["build"] == "stream"

    def load_other(path):
        whole = Dataset.from_dict({"text": ["1", "2"]})
        return whole if stream else whole.to_iterable_dataset(num_shards=2)

    other = DatasetConfig(path="-", loader=load_other, sample_processor=lambda sample: sample["text"])
    monkeypatch.setitem(DATASETS, "numbers", other)
    kinds = ("a stream", "a list of pieces") if stream else ("a list of pieces", "a stream")
    with pytest.raises(JobError, match=f"text was {kinds[0]}, and training.dataset = 'numbers' is {kinds[1]}: begin"):
        load(build(1), saved)


def test_a_checkpoint_that_does_not_count_its_pieces(build):
    """By an earlier version."""
    loaders = build(2)
    tokens = read(loaders, 2)
    saved = save(loaders)
    for name in ("dp_rank_0", "dp_rank_1"):
        state = pickle.loads(saved[name])
        assert state["dataset_state"].pop("pieces") == PIECES
        saved[name] = pickle.dumps(state)
    want = [part[len(begun) :] for part, begun in zip(read(build(2), 4), tokens)]
    again = build(2)
    load(again, saved)
    assert read(again, 2) == want
    (one,) = build(1)
    load([one], saved)
    assert not {token for part in tokens for token in part} & set(read([one], 2)[0])


def test_fewer_pieces_than_ranks(build, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PIECES", 2)
    with pytest.raises(ValueError, match=r"^numbers: 2 piece\(s\) for 3 data-parallel rank\(s\)$"):
        build(3)


@pytest.mark.parametrize("build", ["stream"], indirect=True)
def test_a_stream_is_split_but_not_dealt_anew(build):
    loaders = build(2)
    one, other = map(set, read(loaders, 3))
    assert one and other and not one & other
    saved = save(loaders)
    again = build(2)
    load(again, saved)
    assert all(first != second for first, second in zip(read(again, 1), read(build(2), 1)))
    message = (
        r"^step-3 was saved by 2 data-parallel rank\(s\), and this job has 1: training.dataset = 'numbers' is a "
        r"stream, which is not dealt anew: go on with 2, or begin the text again with "
        r'checkpoint.exclude_from_loading = \["dataloader"\]$'
    )
    with pytest.raises(JobError, match=message):
        load(build(1), saved)


def test_a_checkpoint_that_does_not_say(build):
    (loader,) = build(1)
    with pytest.raises(JobError, match=r"^step-3 does not say how far the training text was read: begin the text"):
        loader.expect(0, "step-3")


def test_parts_and_cuts():
    for length in (8, 61):
        for ranks in (1, 2, 3, 8):
            shards = Dataset.from_dict({"i": list(range(length))})
            parts = [list(range(*part_of(length, rank, ranks))) for rank in range(ranks)]
            assert parts == [shards.shard(ranks, rank)["i"][:] for rank in range(ranks)]
    spans = [(3, 7), (20, 21), (30, 35)]
    laid = [position for span in spans for position in range(*span)]
    for first in range(12):
        for last in range(12):
            found = cut(spans, first, last)
            assert [position for span in found for position in range(*span)] == laid[first:last]
            assert all(start < stop for start, stop in found)
