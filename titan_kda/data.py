"""Text for the jobs: a byte tokenizer, and datasets that need no network.

A dataset here is a fixed list of pieces. Files are read whole, cut at line ends into pieces of at most
``data.piece_bytes`` bytes, and the pieces are put in the order of a hash of (seed, file name, position): the same on
every machine, whatever its file system or PYTHONHASHSEED. Training on files in sorted order is far worse, because a
batch then holds one file alone. Whole files are held out for validation, chosen by another hash of their names.

The lists are handed to torchtitan as map-style ``datasets.Dataset``, so that its own loader packs them into sequences,
splits them among data-parallel ranks, and resumes by skipping to a position.
"""

import codecs
import hashlib
import json
import math
import os
import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from datasets import Dataset, Features, Value
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer, build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training, Validation
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataset
from torchtitan.tools.logging import logger

from .deal import DealtDataloader, DealtTextDataset
from .documents import DocumentCollator

TOKENIZERS = ("byte", "hf")
TEXT_SUFFIXES = (".txt", ".md", ".py", ".jsonl")
VOCAB_ROUNDING = 256
"""A model may round its vocabulary up to a multiple of this, for even shards and aligned matrix products."""

_OURS = ("python_stdlib", "python_stdlib_validation", "text_files", "text_files_validation")
_REPLACEMENT = "\ufffd"
_STDLIB_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Written by the build or by the system's administrator, so they differ from machine to machine.
_STDLIB_SKIPPED_FILES = re.compile(r"_sysconfigdata.*\.py|sitecustomize\.py|usercustomize\.py")


# ---- tokenizers ----


class ByteTokenizer(BaseTokenizer):
    """UTF-8 bytes as tokens 0 to 255, then BOS 256, EOS 257 and PAD 258. Needs no files."""

    bos_id: int = 256
    pad_id: int = 258

    def __init__(self) -> None:
        super().__init__()
        self.eos_id = 257

    def encode(self, text: str, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        """Token ids of ``text``. Bytes that Python smuggled into a str (surrogateescape) come out as themselves.

        Raises:
            UnicodeEncodeError: other lone surrogates, which no bytes stand for.
        """
        ids = list(text.encode("utf-8", errors="surrogateescape"))
        if add_bos:
            ids.insert(0, self.bos_id)
        if add_eos:
            ids.append(257)
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are no UTF-8 become U+FFFD. Special ids are left out, or written as <bos>.

        Raises:
            ValueError: an id outside 0 to 258.
        """
        decoder = ByteStreamDecoder(skip_special_tokens)
        return decoder.push(ids) + decoder.flush()

    def get_vocab_size(self) -> int:
        return 259


class StreamDecoder(Protocol):
    """Turns tokens into text as they come."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; what may still change, as half a character, is held back."""
        ...

    def flush(self) -> str:
        """The text still held back, with U+FFFD for what never became whole."""
        ...


class ByteStreamDecoder:
    """A StreamDecoder for ByteTokenizer; the pieces it returns join to exactly ``decode`` of all ids."""

    special: ClassVar[dict[int, str]] = {256: "<bos>", 257: "<eos>", 258: "<pad>"}

    def __init__(self, skip_special_tokens: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._skip_special_tokens = skip_special_tokens

    def push(self, ids: Iterable[int]) -> str:
        text = []
        run = bytearray()
        for i in ids:
            i = int(i)
            if 0 <= i < 256:
                run.append(i)
            elif i not in self.special:
                raise ValueError(f"ByteTokenizer: token ids go from 0 to 258, got {i}")
            elif not self._skip_special_tokens:
                text.append(self._decoder.decode(bytes(run), final=True) + self.special[i])
                run.clear()
        text.append(self._decoder.decode(bytes(run)))
        return "".join(text)

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowStreamDecoder:
    """A StreamDecoder for any tokenizer with ``decode``, by decoding a short window again at each token.

    A token's text may depend on its neighbours (a leading space, a character spread over tokens), so the window
    starts at earlier tokens, and what they alone decode to is taken off.

    Args:
        tokenizer: its ``decode(ids)`` is called.
        context: the ids before the first one pushed, as the prompt's; none of their text is returned.
    """

    context_tokens = 8
    held_tokens = 16
    """After so many tokens that end in no whole character, U+FFFD is taken to be the text meant."""

    def __init__(self, tokenizer: BaseTokenizer, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = [int(i) for i in context[-self.context_tokens :]]
        self._known = len(self._window)  # ids of the window whose text has been returned

    def push(self, ids: Iterable[int]) -> str:
        return "".join(self._push_one(int(i)) for i in ids)

    def _push_one(self, token: int) -> str:
        self._window.append(token)
        text = self._pending()
        if text.endswith(_REPLACEMENT) and len(self._window) - self._known < self.held_tokens:
            return ""
        self._window = self._window[-self.context_tokens :]
        self._known = len(self._window)
        return text

    def flush(self) -> str:
        text = self._pending()
        self._known = len(self._window)
        return text

    def _pending(self) -> str:
        before = self._tokenizer.decode(self._window[: self._known])
        return self._tokenizer.decode(self._window)[len(before) :]


def stream_decoder(tokenizer: BaseTokenizer, context: Sequence[int] = ()) -> StreamDecoder:
    """A decoder for tokens as they are generated, after the prompt's tokens ``context``."""
    if isinstance(tokenizer, ByteTokenizer):
        return ByteStreamDecoder()
    return WindowStreamDecoder(tokenizer, context)


def build_tokenizer(job_config: JobConfig) -> BaseTokenizer:
    """The tokenizer that ``data.tokenizer`` names: "byte", or "hf" for the files in ``model.hf_assets_path``.

    Raises:
        ValueError: another name; a tokenizer's files that cannot be read.
        FileNotFoundError: no such folder, or no tokenizer in it.
    """
    name = _data_section(job_config).tokenizer
    if name not in TOKENIZERS:
        raise ValueError(f"data.tokenizer must be one of {', '.join(map(repr, TOKENIZERS))}, got {name!r}")
    if name == "byte":
        return ByteTokenizer()
    folder = Path(job_config.model.hf_assets_path)
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"data.tokenizer = 'hf': model.hf_assets_path is no folder: {folder}")
    if not any((folder / file).is_file() for file in ("tokenizer.json", "vocab.json", "vocab.txt")):
        raise FileNotFoundError(f"data.tokenizer = 'hf': no tokenizer.json in model.hf_assets_path: {folder}")
    try:
        return build_hf_tokenizer(job_config)
    except Exception as error:  # the tokenizers library knows no narrower one for a file that it cannot read
        raise ValueError(f"data.tokenizer = 'hf': cannot read the tokenizer in {folder}: {error}") from error


def check_vocab(tokenizer: BaseTokenizer, vocab_size: int) -> None:
    """Refuses a model whose vocabulary is not the tokenizer's, rounded up to at most a multiple of 256.

    Raises:
        ValueError: the model has too few rows (ids would run past its embedding) or far too many.
    """
    size = tokenizer.get_vocab_size()
    largest = math.ceil(size / VOCAB_ROUNDING) * VOCAB_ROUNDING
    if not size <= vocab_size <= largest:
        raise ValueError(
            f"the model's vocab_size is {vocab_size}, but the {type(tokenizer).__name__} has {size} tokens, "
            f"so that it must be from {size} to {largest}"
        )


# ---- pieces ----


@dataclass(frozen=True)
class TextSettings:
    """How files become pieces. The fields are those of the TOML section [data]; see ``from_job_config``.

    Args:
        piece_bytes: a piece's largest size in UTF-8 bytes.
        shuffle_seed: gives another order, and another choice of held-out files.
        validation_fraction: the part of the bytes held out for validation, from 0 up to but below 1.
        shards: data-parallel ranks; each needs a piece at least.
    """

    piece_bytes: int = 2048
    shuffle_seed: int = 0
    validation_fraction: float = 0.05
    shards: int = 1

    def __post_init__(self) -> None:
        for name, kinds in (("piece_bytes", int), ("shuffle_seed", int), ("validation_fraction", (int, float))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, kinds):
                wanted = "a number" if name == "validation_fraction" else "an integer"
                raise TypeError(f"data.{name} must be {wanted}, got {value!r}")
        if self.piece_bytes < 16:
            raise ValueError(f"data.piece_bytes must be at least 16, got {self.piece_bytes}")
        if not 0 <= self.validation_fraction < 1:
            raise ValueError(f"data.validation_fraction must be from 0 to below 1, got {self.validation_fraction}")

    @classmethod
    def from_job_config(cls, job_config: JobConfig, shards: int = 1) -> "TextSettings":
        section = _data_section(job_config)
        return cls(section.piece_bytes, section.shuffle_seed, section.validation_fraction, shards)


class SourceFile(NamedTuple):
    name: str  # relative to the folder, with "/" on every system
    documents: list[str]


class Piece(NamedTuple):
    file: str
    position: int
    text: str


def cut_at_lines(text: str, limit: int) -> list[str]:
    """Cuts ``text`` into as few runs of whole lines as fit in ``limit`` UTF-8 bytes; they join to ``text`` again.

    A line longer than ``limit`` is cut between characters.
    """
    pieces: list[str] = []
    lines: list[str] = []
    size = 0
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        line_size = len(line) if line.isascii() else len(line.encode())
        if size + line_size > limit and lines:
            pieces.append("".join(lines))
            lines, size = [], 0
        if line_size > limit:
            *full, line = _cut_long_line(line, limit)
            pieces += full
            line_size = len(line.encode())
        lines.append(line)
        size += line_size
    if lines:
        pieces.append("".join(lines))
    return pieces


def _cut_long_line(line: str, limit: int) -> Iterator[str]:
    data = line.encode()
    start = 0
    while start < len(data):
        end = min(start + limit, len(data))
        while end < len(data) and data[end] & 0xC0 == 0x80:  # a continuation byte: step back to its character's start
            end -= 1
        yield data[start:end].decode()
        start = end


def split_pieces(files: Sequence[SourceFile], settings: TextSettings) -> tuple[list[Piece], list[Piece]]:
    """The training pieces and the held-out ones of ``files``, each in their fixed order.

    Whole files are held out, in the order of a hash of their names, as long as they fit in the fraction. If none does
    (a folder of one file, say), the last pieces of one file are.
    """
    pieces: dict[str, list[Piece]] = {}
    for file in files:
        texts = [text for document in file.documents for text in cut_at_lines(document, settings.piece_bytes)]
        if texts:
            pieces[file.name] = [Piece(file.name, i, text) for i, text in enumerate(texts)]
    sizes = {name: sum(len(piece.text.encode()) for piece in pieces[name]) for name in pieces}
    room = settings.validation_fraction * sum(sizes.values())

    def order(kind: str, name: str, position: int = 0) -> bytes:
        key = f"{settings.shuffle_seed}/{kind}/{position}/{name}"
        return hashlib.sha256(key.encode("utf-8", errors="surrogateescape")).digest()

    names = sorted(pieces, key=partial(order, "held out"))
    held: list[Piece] = []
    held_names: set[str] = set()
    for name in names:
        if 0 < sizes[name] <= room:
            room -= sizes[name]
            held += pieces[name]
            held_names.add(name)
    train = [piece for name in names if name not in held_names for piece in pieces[name]]
    if not held and names and settings.validation_fraction > 0:
        last = pieces[names[0]]
        count = 0
        while room > 0 and count < len(last) - 1:  # at least one piece, and never the whole file
            count += 1
            room -= len(last[-count].text.encode())
        held = last[len(last) - count :]
        train = [piece for piece in train if piece.file != names[0] or piece.position < len(last) - count]
    for part in (train, held):
        part.sort(key=lambda piece: order("piece", piece.file, piece.position))
    return train, held


# ---- reading files ----


def read_python_stdlib() -> list[SourceFile]:
    """The source files of the running interpreter's standard library, without its tests and installed packages.

    Raises:
        ValueError: the interpreter has no sources on disk.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = []
    for path, name in _walk(folder, (".py",), _STDLIB_SKIPPED_FOLDERS):
        if _STDLIB_SKIPPED_FILES.fullmatch(path.name):
            continue
        try:
            files.append(SourceFile(name, [path.read_text(encoding="utf-8")]))
        except UnicodeDecodeError:
            continue
    if not files:
        raise ValueError(f"python_stdlib: this interpreter's standard library has no source files in {folder}")
    return files


def read_text_folder(folder: str | os.PathLike) -> list[SourceFile]:
    """The .txt, .md, .py and .jsonl files under ``folder``, hidden ones left out; each line of .jsonl is a document.

    Raises:
        FileNotFoundError: no such folder, or none of these files in it.
        ValueError: a line of a .jsonl file that is no JSON object with a string "text".
    """
    root = Path(os.path.expanduser(folder))
    if not os.path.isdir(root):
        raise FileNotFoundError(f"text_files: dataset_path is no folder: {root}")
    files = []
    undecodable = []
    for path, name in _walk(root, TEXT_SUFFIXES, set()):
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError:
            undecodable.append(name)
            continue
        files.append(SourceFile(name, _read_jsonl(path, text) if path.suffix == ".jsonl" else [text]))
    if undecodable:
        logger.warning(f"text_files: left out {len(undecodable)} file(s) that are no UTF-8, as {undecodable[0]}")
    if not any(any(file.documents) for file in files):
        raise FileNotFoundError(f"text_files: no text in {', '.join(TEXT_SUFFIXES)} files under dataset_path: {root}")
    return files


def _read_jsonl(path: Path, text: str) -> list[str]:
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"text_files: {path}, line {number}: no JSON: {error}") from None
        document = record.get("text") if isinstance(record, dict) else None
        if not isinstance(document, str):
            raise ValueError(f'text_files: {path}, line {number}: needs a JSON object with a string field "text"')
        documents.append(document.encode("utf-8", errors="replace").decode())  # JSON can escape a lone surrogate
    return documents


def _walk(folder: Path, suffixes: tuple[str, ...], skipped_folders: set[str]) -> Iterator[tuple[Path, str]]:
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped_folders and not name.startswith(".")]
        for name in names:
            path = Path(base, name)
            if path.suffix in suffixes and not name.startswith(".") and path.is_file():
                yield path, path.relative_to(folder).as_posix()


# ---- torchtitan's datasets ----


def register_datasets(settings: TextSettings | None = None, text_folder: str | None = None) -> None:
    """Adds this package's datasets to torchtitan's by name; called again, it sets how they are cut.

    Args:
        settings: how files become pieces; the defaults if None.
        text_folder: the folder of ``text_files_validation`` where no ``validation.dataset_path`` is given.
    """
    settings = settings or TextSettings()
    stdlib = sysconfig.get_path("stdlib")
    for held_out in (False, True):
        suffix = "_validation" if held_out else ""
        for name, path, loader in (
            ("python_stdlib", stdlib, _load_stdlib),
            ("text_files", text_folder or "" if held_out else "", _load_folder),
        ):
            loader = partial(loader, settings=settings, held_out=held_out)
            DATASETS[name + suffix] = DatasetConfig(path=path, loader=loader, sample_processor=_sample_text)


def _sample_text(sample: dict[str, Any]) -> str:
    return sample["text"]


def _load_stdlib(path: str, settings: TextSettings, held_out: bool) -> Dataset:
    if path != sysconfig.get_path("stdlib"):
        raise ValueError(f"python_stdlib takes no dataset_path, got {path}; for a folder of files use text_files")
    return _to_dataset("python_stdlib", read_python_stdlib(), settings, held_out)


def _load_folder(path: str, settings: TextSettings, held_out: bool) -> Dataset:
    if not path:
        raise ValueError(f"text_files needs a dataset_path, a folder of {', '.join(TEXT_SUFFIXES)} files")
    return _to_dataset("text_files", read_text_folder(path), settings, held_out)


def _to_dataset(name: str, files: list[SourceFile], settings: TextSettings, held_out: bool) -> Dataset:
    train, held = split_pieces(files, settings)
    pieces = held if held_out else train
    part = "held-out" if held_out else "training"
    if len(pieces) < settings.shards:
        raise ValueError(
            f"{name}: {len(pieces)} {part} piece(s) for {settings.shards} data-parallel rank(s), each of which needs "
            f"one: give more text, or change data.piece_bytes ({settings.piece_bytes}) or data.validation_fraction "
            f"({settings.validation_fraction})"
        )
    sizes = [sum(len(piece.text.encode()) for piece in side) for side in (pieces, train + held)]
    logger.info(
        f"{name}: {len(pieces)} {part} pieces, {sizes[0] / 1e6:.2f} MB from {len({p.file for p in pieces})} file(s) "
        f"({sizes[0] / sizes[1]:.1%} of the text)"
    )
    features = Features({"text": Value("large_string")})  # plain strings end at 2 GiB a column
    return Dataset.from_dict({"text": [piece.text for piece in pieces]}, features=features)


class FixedStartTextDataset(HuggingFaceTextDataset):
    """torchtitan's text dataset, from its first sample each time that it is iterated.

    Its parent goes on from where the last iteration stopped, so that each validation of a job would see other text,
    and a job started again other text than one never stopped.
    """

    def __iter__(self) -> Iterator[Any]:
        self._sample_idx = 0
        self._token_buffer = []
        return super().__iter__()


def build_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig
) -> ParallelAwareDataloader:
    """The training loader: torchtitan's own over the job's datasets, each batch with its documents' offsets."""
    _register_for_job(job_config, dp_world_size)
    ranks = dict(dp_rank=dp_rank, dp_world_size=dp_world_size)
    return _loader(DealtDataloader, DealtTextDataset, job_config.training, tokenizer, job_config, ranks, infinite=True)


def _loader(
    loader: type[ParallelAwareDataloader],
    dataset: type[HuggingFaceTextDataset],
    settings: Training | Validation,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    ranks: dict[str, int],
    infinite: bool,
) -> ParallelAwareDataloader:
    """A loader over the text that a section's settings name."""
    text = dataset(
        dataset_name=settings.dataset,
        dataset_path=settings.dataset_path,
        tokenizer=tokenizer,
        seq_len=settings.seq_len,
        infinite=infinite,
        **ranks,
    )
    kwargs = {**asdict(settings.dataloader), "batch_size": settings.local_batch_size}
    return loader(text, **ranks, **kwargs, **_collation(tokenizer, job_config))


def _collation(tokenizer: BaseTokenizer, job_config: JobConfig) -> dict[str, Any]:
    """The loader's ``collate_fn``, for a job whose documents are kept apart."""
    kda = getattr(job_config, "kda", None)
    if kda is None or not kda.reset_at_documents or tokenizer.eos_id is None:
        return {}
    return {"collate_fn": DocumentCollator(tokenizer.eos_id)}


def build_validation_dataloader(
    dp_world_size: int, dp_rank: int, tokenizer: BaseTokenizer, job_config: JobConfig, infinite: bool | None = None
) -> ParallelAwareDataloader:
    """The validation loader: every iteration starts from the first sample, so that each validation sees the same text.

    Args:
        infinite: start over at the end of the data; by default, as torchtitan's Validator does, if
            ``validation.steps`` is not -1.
    """
    _register_for_job(job_config, dp_world_size)
    validation = job_config.validation
    ranks = dict(dp_rank=dp_rank, dp_world_size=dp_world_size)
    infinite = validation.steps != -1 if infinite is None else infinite
    return _loader(
        ParallelAwareDataloader, FixedStartTextDataset, validation, tokenizer, job_config, ranks, infinite=infinite
    )


def check_data(job_config: JobConfig) -> None:
    """Finds mistakes in the job's data settings at once, without reading any data.

    Raises:
        ValueError, TypeError, FileNotFoundError: one line that names the TOML key.
    """
    build_tokenizer(job_config)
    _register_for_job(job_config, 1)
    sections: list[tuple[str, Training | Validation]] = [("training", job_config.training)]
    if job_config.validation.enable:
        sections.append(("validation", job_config.validation))
    for section, settings in sections:
        name = settings.dataset.lower()
        if name not in DATASETS:
            raise ValueError(
                f"{section}.dataset must be one of {', '.join(sorted(DATASETS))}, got {settings.dataset!r}"
            )
        if settings.dataloader.num_workers < 0:
            raise ValueError(
                f"{section}.dataloader.num_workers must be at least 0, got {settings.dataloader.num_workers}"
            )
        ahead = settings.dataloader.prefetch_factor
        if ahead is not None and ahead < 1:
            raise ValueError(f"{section}.dataloader.prefetch_factor must be at least 1, got {ahead}")
        if name in _OURS and settings.dataloader.num_workers > 1:
            raise ValueError(
                f"{section}.dataloader.num_workers must be 0 or 1, got {settings.dataloader.num_workers}: each worker "
                "would read the same text"
            )
        path = settings.dataset_path or DATASETS[name].path
        if name.startswith("python_stdlib") and settings.dataset_path:
            raise ValueError(
                f"{section}.dataset_path: python_stdlib takes none, got {path}; for a folder use text_files"
            )
        if name.startswith("text_files") and not path:
            raise ValueError(f"{section}.dataset = {name!r} needs {section}.dataset_path, a folder")
        if name.startswith("text_files") and not os.path.isdir(os.path.expanduser(path)):
            raise FileNotFoundError(f"{section}.dataset_path is no folder: {path}")
        if name.endswith("_validation") and name in _OURS and not _data_section(job_config).validation_fraction:
            raise ValueError(f"{section}.dataset = {name!r} needs data.validation_fraction above 0")


def _register_for_job(job_config: JobConfig, shards: int) -> None:
    training = job_config.training
    folder = training.dataset_path if training.dataset.lower() == "text_files" else None
    register_datasets(TextSettings.from_job_config(job_config, shards), folder)


def _data_section(job_config: JobConfig) -> Any:
    section = getattr(job_config, "data", None)
    if section is None:
        raise ValueError("the job has no [data] section: set job.custom_config_module = 'titan_kda.job_config'")
    return section
