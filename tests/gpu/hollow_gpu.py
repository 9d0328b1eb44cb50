"""What tests/hollow tells, and does, beyond what a GPU does; `pytest.skip` on a real one."""

import ctypes

import pytest
import torch
from gpu_programs import HOLLOW


def _function(name, result, *arguments):
    if not HOLLOW:
        pytest.skip("needs python -m tests.hollow")
    torch.cuda.init()  # which loads it
    function = getattr(ctypes.CDLL(None), name)
    function.restype, function.argtypes = result, arguments
    return function


def peak(device=0):
    """Return the most bytes that the driver has shown for this process since the last call."""
    return _function("hollow_peak", ctypes.c_uint64, ctypes.c_int)(device)


def refuse(n):
    """Have the allocator refuse the n-th request from now on, once; -1: none.

    Returns how many there were since the last call.
    """
    return _function("hollow_refuse", ctypes.c_long, ctypes.c_long)(n)
