"""Test set-up: where there is no GPU, Triton kernels run in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before titan_kda.kernels is imported: @triton.jit reads it

# Small tensors in several processes: threads that wait for each other cost more than they give.
torch.set_num_threads(1)


# The files that take longest, longest first: two workers that take files in turns (--dist loadfile) then end together.
LONGEST = (
    "test_parallel", "test_moe", "test_hf", "test_chunk_triton", "test_resume", "test_package", "test_hybrid",
    "test_recompute", "test_sample", "test_short_conv", "test_recurrent", "test_gate", "test_job_config",
)  # fmt: skip


def pytest_configure(config):
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
