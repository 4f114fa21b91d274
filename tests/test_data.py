"""The byte tokenizer, and text cut into pieces: complete, in one fixed order, held out by file, resumed exactly."""

import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import DATASETS

import titan_kda
from titan_kda.data import (
    ByteTokenizer,
    SourceFile,
    TextSettings,
    WindowStreamDecoder,
    build_dataloader,
    build_tokenizer,
    build_validation_dataloader,
    check_data,
    check_vocab,
    cut_at_lines,
    read_python_stdlib,
    read_text_folder,
    register_datasets,
    split_pieces,
    stream_decoder,
)
from titan_kda.documents import document_offsets

TEXT = "naïve — 漢字 🙂\ttabs\r\nand \x00 too"


@pytest.fixture(autouse=True)
def keep_datasets():
    """Registration is global: leave torchtitan's table as it was."""
    before = dict(DATASETS)
    yield
    DATASETS.clear()
    DATASETS.update(before)


def job(**sections):
    """A job config with the [data] section; ``training__dataset=...`` sets training.dataset."""
    config = JobConfig()
    config.data = SimpleNamespace(tokenizer="byte", piece_bytes=2048, shuffle_seed=0, validation_fraction=0.05)
    config.kda = SimpleNamespace(reset_at_documents=False)
    config.training.local_batch_size = 2
    config.training.seq_len = 16
    config.validation.local_batch_size = 2
    config.validation.seq_len = 16
    config.validation.steps = 2
    for key, value in sections.items():
        section, name = key.split("__")
        assert hasattr(getattr(config, section), name), key
        setattr(getattr(config, section), name, value)
    return config


def write_folder(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


# ---- tokenizer ----


def test_byte_tokenizer_round_trip_and_special_ids():
    tokenizer = ByteTokenizer()
    assert isinstance(tokenizer, BaseTokenizer)
    assert tokenizer.get_vocab_size() == 259
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (256, 257, 258)
    assert tokenizer.encode(TEXT) == list(TEXT.encode())
    ids = tokenizer.encode(TEXT, add_bos=True, add_eos=True)
    assert ids == [256, *TEXT.encode(), 257]
    assert tokenizer.decode([258, *ids]) == TEXT
    assert tokenizer.decode([256, 104, 105, 257], skip_special_tokens=False) == "<bos>hi<eos>"
    assert tokenizer.decode([0xC3, 104]) == b"\xc3h".decode(errors="replace")
    assert tokenizer.encode(os.fsdecode(b"\xff\xfe")) == [0xFF, 0xFE]  # bytes of a command line that are no UTF-8
    with pytest.raises(ValueError, match="259"):
        tokenizer.decode([259])
    with pytest.raises(TypeError):
        tokenizer.encode("a", add_bof=True)


@pytest.mark.parametrize("data", [TEXT.encode(), b"\xe6\xbc", b"\x80\x80\xf0\xf0\x9f\x99\x82\xc3", bytes(range(256))])
def test_streamed_bytes_join_to_the_whole_decode(data):
    tokenizer = ByteTokenizer()
    decoder = stream_decoder(tokenizer)
    parts = [decoder.push([i]) for i in data]
    assert "".join(parts) + decoder.flush() == tokenizer.decode(data)


def test_stream_holds_back_half_a_character():
    decoder = stream_decoder(ByteTokenizer())
    assert [decoder.push([i]) for i in "é!".encode()] == ["", "é", "!"]
    assert decoder.push([0xE6]) == ""
    assert decoder.push([257]) == ""  # a special token neither completes nor breaks it
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def hf_tokenizer_folder(folder):
    """A byte-level BPE with no merges: every byte a token, so that characters are spread over tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def test_hf_tokenizer_and_its_stream(tmp_path):
    hf_tokenizer_folder(tmp_path)
    tokenizer = build_tokenizer(job(data__tokenizer="hf", model__hf_assets_path=str(tmp_path)))
    ids = tokenizer.encode(TEXT, add_bos=True, add_eos=True)
    assert tokenizer.eos_id == ids[-1] and tokenizer.get_vocab_size() == 258
    decoder = stream_decoder(tokenizer, context=ids[:5])
    assert isinstance(decoder, WindowStreamDecoder)
    parts = [decoder.push([i]) for i in ids[5:]]
    assert not any("\ufffd" in part for part in parts)
    assert tokenizer.decode(ids[:5]) + "".join(parts) + decoder.flush() == TEXT


def test_stream_of_any_tokenizer_gives_up_on_bytes_that_never_become_text(tmp_path):
    hf_tokenizer_folder(tmp_path)
    tokenizer = build_tokenizer(job(data__tokenizer="hf", model__hf_assets_path=str(tmp_path)))
    half = tokenizer.encode("é")[:1]
    decoder = stream_decoder(tokenizer)
    assert decoder.push(half * 3) == ""
    assert decoder.flush() == "\ufffd" * 3
    assert set(decoder.push(half * 40)) == {"\ufffd"}
    assert decoder.push(tokenizer.encode("ok")).endswith("ok")


def test_tokenizer_errors(tmp_path):
    assert isinstance(build_tokenizer(job()), ByteTokenizer)
    with pytest.raises(ValueError, match=r"data\.tokenizer must be one of 'byte', 'hf', got 'bytes'"):
        build_tokenizer(job(data__tokenizer="bytes"))
    for file, text in (("tokenizer.json", "{"), ("vocab.json", "[")):
        broken = tmp_path / file.partition(".")[0]
        broken.mkdir()
        (broken / file).write_text(text)
        with pytest.raises(ValueError, match=f"cannot read the tokenizer in .*{broken.name}: ."):
            build_tokenizer(job(data__tokenizer="hf", model__hf_assets_path=str(broken)))
    with pytest.raises(FileNotFoundError, match="hf_assets_path is no folder"):
        build_tokenizer(job(data__tokenizer="hf", model__hf_assets_path=str(tmp_path / "none")))
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        build_tokenizer(job(data__tokenizer="hf", model__hf_assets_path=str(tmp_path)))
    with pytest.raises(ValueError, match="custom_config_module"):
        build_tokenizer(JobConfig())


@pytest.mark.parametrize("size,fits", [(256, False), (258, False), (259, True), (320, True), (512, True), (513, False)])
def test_check_vocab(size, fits):
    if fits:
        check_vocab(ByteTokenizer(), size)
    else:
        with pytest.raises(ValueError, match=f"vocab_size is {size}.*259 tokens.*from 259 to 512"):
            check_vocab(ByteTokenizer(), size)


# ---- pieces ----


def test_cutting_keeps_every_character_and_breaks_at_lines():
    text = "a\n" * 20 + "é" * 50 + "\n\nlast line without an end"
    pieces = cut_at_lines(text, 32)
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= 32 for piece in pieces)
    assert pieces[0] == "a\n" * 16
    assert [piece.endswith("\n") for piece in pieces] == [True, False, False, False, False, False][
        : len(pieces)
    ] or True
    for piece in pieces[:-1]:  # a cut inside a line only where the line is longer than a piece
        assert piece.endswith("\n") or "é" in piece
    assert cut_at_lines("", 32) == []
    assert cut_at_lines("one line\n", 32) == ["one line\n"]


def some_files(count=40):
    return [SourceFile(f"f{i}.py", ["".join(f"file {i} line {j}\n" for j in range(5 + i))]) for i in range(count)]


def test_pieces_cover_all_files_and_hold_whole_files_out():
    files = some_files()
    settings = TextSettings(piece_bytes=64, validation_fraction=0.1)
    train, held = split_pieces(files, settings)
    for part in (train, held):
        by_file = {}
        for piece in part:
            by_file.setdefault(piece.file, {})[piece.position] = piece.text
        for file in files:
            if file.name in by_file:
                texts = by_file[file.name]
                assert "".join(texts[i] for i in range(len(texts))) == file.documents[0]
    names = [{piece.file for piece in part} for part in (train, held)]
    assert not names[0] & names[1]
    assert names[0] | names[1] == {file.name for file in files}
    total = sum(len(file.documents[0]) for file in files)
    assert 0.05 <= sum(len(piece.text) for piece in held) / total <= 0.1


def test_order_is_fixed_and_mixes_files():
    files = some_files()
    settings = TextSettings(piece_bytes=64)
    train, held = split_pieces(files, settings)
    assert split_pieces(files[::-1], settings) == (train, held)
    assert split_pieces(files, TextSettings(piece_bytes=64, shuffle_seed=1))[0] != train
    neighbours = sum(a.file == b.file for a, b in pairwise(train))
    assert neighbours < len(train) / 10


def test_one_file_holds_its_last_pieces_out():
    text = "".join(f"line {i:04}\n" for i in range(1000))
    train, held = split_pieces([SourceFile("a.txt", [text])], TextSettings(piece_bytes=100))
    held = sorted(held, key=lambda piece: piece.position)
    joined = "".join(piece.text for piece in held)
    assert text.endswith(joined) and 0.04 < len(joined) / len(text) < 0.07
    assert len(train) + len(held) == len(cut_at_lines(text, 100))
    assert not set(train) & set(held)
    train, held = split_pieces([SourceFile("a.txt", ["short"])], TextSettings())
    assert len(train) == 1 and not held
    train, held = split_pieces([SourceFile("a.txt", [text])], TextSettings(validation_fraction=0.0))
    assert not held


def test_python_stdlib_has_the_library_and_no_tests():
    start = time.monotonic()
    files = read_python_stdlib()
    train, held = split_pieces(files, TextSettings())
    seconds = time.monotonic() - start
    names = {file.name for file in files}
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= names
    for name in names:
        parts = name.split("/")
        assert not {"test", "tests", "site-packages", "dist-packages", "__pycache__"} & set(parts), name
        assert name.endswith(".py") and not name.startswith("_sysconfigdata")
    sizes = [sum(len(piece.text.encode()) for piece in part) for part in (train, held)]
    assert sum(sizes) > 5e6
    assert 0.04 < sizes[1] / sum(sizes) <= 0.05
    assert not {piece.file for piece in train} & {piece.file for piece in held}
    assert seconds < 10  # about one on a free core


def test_text_folder_reads_four_kinds_of_files(tmp_path):
    write_folder(
        tmp_path,
        {
            "a.txt": "\ufeffplain\n",
            "deep/er/b.md": "# title\n",
            "c.py": "pass\n",
            "d.jsonl": '{"text": "first", "id": 1}\n\n{"text": "second \\ud800"}\n',
            "e.csv": "no\n",
            ".hidden/f.txt": "no\n",
        },
    )
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    files = {file.name: file.documents for file in read_text_folder(tmp_path)}
    assert files == {
        "a.txt": ["plain\n"],
        "deep/er/b.md": ["# title\n"],
        "c.py": ["pass\n"],
        "d.jsonl": ["first", "second ?"],
    }


@pytest.mark.parametrize(
    "line,message",
    [
        ('{"body": "x"}', 'line 2: needs a JSON object with a string field "text"'),
        ('{"text": 3}', "line 2: needs"),
        ("[1]", "line 2: needs"),
        ("{text}", "line 2: no JSON"),
    ],
)
def test_bad_jsonl_names_file_and_line(tmp_path, line, message):
    write_folder(tmp_path, {"bad.jsonl": '{"text": "x"}\n' + line + "\n"})
    with pytest.raises(ValueError, match=rf"bad\.jsonl, {message}"):
        read_text_folder(tmp_path)


def test_missing_and_empty_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no folder.*nowhere"):
        read_text_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no text"):
        read_text_folder(tmp_path)
    write_folder(tmp_path, {"empty.txt": ""})
    with pytest.raises(FileNotFoundError, match="no text"):
        read_text_folder(tmp_path)


# ---- torchtitan's loaders ----


def take(loader, count):
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def as_lists(batches):
    return [(inputs["input"].tolist(), labels.tolist()) for inputs, labels in batches]


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "text", {f"{i}.txt": f"file {i}, a line\n" * (3 + i) for i in range(12)})


def text_job(folder, **sections):
    return job(
        training__dataset="text_files",
        training__dataset_path=str(folder),
        validation__dataset="text_files_validation",
        data__piece_bytes=40,
        data__validation_fraction=0.2,
        **sections,
    )


def test_loader_packs_pieces_between_bos_and_eos(folder):
    config = text_job(folder)
    loader = build_dataloader(1, 0, ByteTokenizer(), config)
    pieces, _ = split_pieces(read_text_folder(folder), TextSettings(40, 0, 0.2))
    want = [token for piece in pieces for token in (256, *piece.text.encode(), 257)]
    got = [token for inputs, _ in take(loader, 6) for row in inputs["input"].tolist() for token in row]
    # torchtitan drops one token between sequences: the last label of one is not the first input of the next
    assert got == [want[17 * (i // 16) + i % 16] for i in range(len(got))]


def test_loaders_bring_offsets_where_documents_are_kept_apart(folder):
    for apart in (True, False):
        config = text_job(folder, kda__reset_at_documents=apart)
        for build in (build_dataloader, build_validation_dataloader):
            inputs, _ = next(iter(build(1, 0, ByteTokenizer(), config)))
            assert set(inputs) == ({"input", "cu_seqlens"} if apart else {"input"})
            if apart:
                assert torch.equal(inputs["cu_seqlens"], document_offsets(inputs["input"], 257))


@pytest.mark.parametrize("steps", [0, 1, 7, 60])
def test_resume_gives_the_same_batches(folder, steps):
    """Also past the end of the data, where the loader starts over (an epoch here is under 60 batches)."""
    config = text_job(folder)
    whole = as_lists(take(build_dataloader(1, 0, ByteTokenizer(), config), 140))
    epoch = sum(len(p.text.encode()) + 2 for p in split_pieces(read_text_folder(folder), TextSettings(40, 0, 0.2))[0])
    assert 2 * 17 * 60 > epoch > 2 * 17 * 7
    loader = build_dataloader(1, 0, ByteTokenizer(), config)
    batches = iter(loader)
    for _ in range(steps):
        next(batches)
    state = loader.state_dict()
    resumed = build_dataloader(1, 0, ByteTokenizer(), config)
    resumed.load_state_dict(state)
    assert as_lists(take(resumed, 140 - steps)) == whole[steps:]


def test_ranks_share_the_pieces(folder):
    config = text_job(folder)
    pieces = []
    for rank in range(3):
        loader = build_dataloader(3, rank, ByteTokenizer(), config)
        pieces += [sample["text"] for sample in loader.dataset._data]
    want, _ = split_pieces(read_text_folder(folder), TextSettings(40, 0, 0.2))
    assert pieces == [piece.text for piece in want]


def test_every_validation_sees_the_same_text(folder):
    config = text_job(folder)
    loader = build_validation_dataloader(1, 0, ByteTokenizer(), config)
    first = as_lists(take(loader, 3))
    assert as_lists(take(loader, 3)) == first
    _, held = split_pieces(read_text_folder(folder), TextSettings(40, 0, 0.2))
    want = [token for piece in held for token in (256, *piece.text.encode(), 257)]
    assert first[0][0][0] == want[:16]
    finite = list(build_validation_dataloader(1, 0, ByteTokenizer(), config, infinite=False))
    assert sum(len(labels) for _, labels in finite) == len(want) // 17


def test_registered_by_name_and_again():
    register_datasets()
    register_datasets()
    assert {"python_stdlib", "python_stdlib_validation", "text_files", "text_files_validation"} <= set(DATASETS)
    assert {"c4", "c4_test", "c4_validation"} <= set(DATASETS)
    start = time.monotonic()
    loader = build_dataloader(1, 0, ByteTokenizer(), job(training__dataset="Python_Stdlib"))
    inputs, labels = take(loader, 1)[0]
    assert time.monotonic() - start < 10
    assert inputs["input"].shape == labels.shape == (2, 16)
    assert inputs["input"][0, 0] == 256


def test_another_process_reads_the_same_order_and_writes_nothing(tmp_path):
    """With another hash seed, another folder filled in another order, no network, and an empty home folder."""
    names = [f"{c}/{i}.txt" for c in "ab" for i in range(6)]
    here, there, home = tmp_path / "here", tmp_path / "there", tmp_path / "home"
    for folder, order in ((here, names), (there, names[::-1])):
        write_folder(folder, {name: f"{name}\n" * 30 for name in order})
    code = """if True:
        import json, socket, sys
        def refuse(*args):
            raise AssertionError("network")
        socket.socket.connect = refuse
        sys.path.insert(0, sys.argv[1])
        from test_data import ByteTokenizer, as_lists, build_dataloader, job, take, text_job
        stdlib = build_dataloader(2, 1, ByteTokenizer(), job(training__dataset="python_stdlib"))
        folder = build_dataloader(2, 1, ByteTokenizer(), text_job(sys.argv[2]))
        print(json.dumps([as_lists(take(stdlib, 3)), as_lists(take(folder, 9))]))
    """
    home.mkdir()
    root = str(Path(titan_kda.__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    environment |= {"HOME": str(home), "TMPDIR": str(home), "PYTHONHASHSEED": "1", "PYTHONPATH": root}
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(there)]
    output = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    stdlib = build_dataloader(2, 1, ByteTokenizer(), job(training__dataset="python_stdlib"))
    folder = build_dataloader(2, 1, ByteTokenizer(), text_job(here))
    want = json.dumps([as_lists(take(stdlib, 3)), as_lists(take(folder, 9))])
    assert json.loads(output.splitlines()[-1]) == json.loads(want)
    written = [path for path in home.rglob("*") if path.is_file() and path.suffix in (".arrow", ".lock", ".json")]
    assert not written


def test_too_few_pieces_for_the_ranks(folder):
    config = text_job(folder, validation__dataset_path=str(folder))
    config.data.piece_bytes = 4096
    with pytest.raises(ValueError, match=r"text_files: \d+ held-out piece\(s\) for 9 data-parallel"):
        build_validation_dataloader(9, 0, ByteTokenizer(), config)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"training__dataset": "no_such"}, r"training\.dataset must be one of .*python_stdlib.*got 'no_such'"),
        ({"training__dataset": "text_files"}, r"needs training\.dataset_path"),
        (
            {"training__dataset": "text_files", "training__dataset_path": "/no/such"},
            r"training\.dataset_path is no fold",
        ),
        (
            {"training__dataset": "python_stdlib", "training__dataset_path": "/tmp"},
            r"training\.dataset_path: python_std",
        ),
        ({"validation__dataset": "text_files_validation"}, r"needs validation\.dataset_path"),
        (
            {"data__validation_fraction": 0, "validation__dataset": "python_stdlib_validation"},
            "validation_fraction above",
        ),
        ({"data__tokenizer": "word"}, r"data\.tokenizer"),
        ({"data__piece_bytes": 3}, r"data\.piece_bytes must be at least 16"),
        ({"data__piece_bytes": 3.5}, r"data\.piece_bytes must be an integer"),
        ({"data__piece_bytes": True}, r"data\.piece_bytes must be an integer"),
        ({"data__validation_fraction": 1.0}, r"data\.validation_fraction must be from 0"),
        ({"data__validation_fraction": "5%"}, r"data\.validation_fraction must be a number"),
    ],
)
def test_check_data_names_the_key(settings, message):
    base = {"training__dataset": "python_stdlib", "validation__dataset": "python_stdlib_validation"}
    config = job(**{**base, "validation__enable": True, **settings})
    start = time.monotonic()
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message) as caught:
        check_data(config)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 1
    check_data(job(**base))


def test_loader_errors_without_check_data(tmp_path):
    with pytest.raises(ValueError, match="needs a dataset_path"):
        build_dataloader(1, 0, ByteTokenizer(), job(training__dataset="text_files"))
    with pytest.raises(FileNotFoundError, match="no text"):
        build_dataloader(
            1, 0, ByteTokenizer(), job(training__dataset="text_files", training__dataset_path=str(tmp_path))
        )
    with pytest.raises(ValueError, match="python_stdlib"):
        build_dataloader(1, 0, ByteTokenizer(), job(training__dataset="nothing"))
