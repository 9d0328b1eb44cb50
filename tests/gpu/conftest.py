"""For tests that need a real NVIDIA GPU, alone on it: `gpu` sets what makes CUDA's results repeatable."""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the launcher does

import pytest
import torch

REASON = "needs an NVIDIA GPU and a PyTorch with CUDA: none here"


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip(REASON)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.use_deterministic_algorithms(False)
