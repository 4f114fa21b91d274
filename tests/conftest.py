"""Test set-up: where there is no GPU, Triton kernels run in Triton's interpreter, on CPU tensors."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before titan_kda.kernels is imported: @triton.jit reads it

# Small tensors in several processes: threads that wait for each other cost more than they give.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
