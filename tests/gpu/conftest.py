"""For tests alone on an NVIDIA GPU, or on tests/hollow's: `gpu` makes CUDA's results repeatable."""

import ctypes
import gc
import os
import sys

from dtrrun.launch.environment import allocator_settings
from dtrrun.monitor.gpus import gpus

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
os.environ.update(allocator_settings(os.environ) if gpus(None).nvml else {})  # as the launcher does

import pytest
import torch
from gpu_programs import HOLLOW
from hollow_gpu import refuse

REASON = "needs an NVIDIA GPU and a PyTorch with CUDA, or python -m tests.hollow: none here"


@pytest.fixture(autouse=True)
def waits_for_what_it_uses():
    """On tests/hollow with --races: check that no work begins before its dependencies were waited for."""
    yield
    if "HOLLOW_RACES" in os.environ:
        found = ctypes.CDLL(None).hollow_races()
        assert found == 0, f"{found} races: see stderr"


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip(REASON)
    if HOLLOW:
        refuse(-1)  # so that requests are refused beneath what a session replaces in the allocator
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    sys.last_exc = sys.last_value = sys.last_traceback = None  # a failed test holds its tensors
    gc.unfreeze()  # `cheap_collections`: what an earlier test has left
    gc.collect()
    gc.freeze()
    torch._C._cuda_clearCublasWorkspaces()  # those of each thread and stream of earlier tests
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield
    torch.use_deterministic_algorithms(False)
