"""Test set-up: where there is no GPU, Triton kernels run in Triton's interpreter, on CPU tensors."""

import functools
import os
import tempfile
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before titan_kda.kernels is imported: @triton.jit reads it

# Small tensors in several processes: threads that wait for each other cost more than they give.
torch.set_num_threads(1)


def patch_language_once():
    """Triton's interpreter replaces the language's functions at a launch, and again at each call inside of it.

    The second finds nothing to replace, after going through all names of the language: a third of an interpreted test.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch = interpreter._patch_lang

    def patch_what_is_not_yet(fn):
        if any(tl.core.is_builtin(lang.load) for lang in (tl, tl.core) if lang in modules(fn)):
            return patch(fn)
        return interpreter._LangPatchScope()  # with nothing to put back

    @functools.cache
    def modules(fn):
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    interpreter._patch_lang = patch_what_is_not_yet


# The files that take longest, longest first: two workers that take files in turns (--dist loadfile) then end together.
LONGEST = (
    "test_parallel", "test_hf", "test_chunk_triton", "test_resume", "test_sample", "test_gate", "test_moe",
    "test_job_config", "test_short_conv", "test_package", "test_recurrent", "test_hybrid", "test_generate",
)  # fmt: skip


def pytest_configure(config):
    if os.environ.get("TRITON_INTERPRET") == "1":
        patch_language_once()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # xdist would start the files with the most tests first


def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def whole_gpu():
    """For tests that take tens of gigabytes: one at a time, however many workers there are, and nothing kept after."""
    import fcntl

    with open(Path(tempfile.gettempdir()) / f"titan-kda-tests-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
        torch.cuda.empty_cache()
