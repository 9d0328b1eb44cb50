"""What the driver has shown and, on tests/hollow only, requests that are refused."""

import ctypes
import os
import threading
import time

import pytest
import torch
from gpu_programs import HOLLOW

from tests.bench.gpu.driver import first_device, of_processes


def _function(name, result, *arguments):
    if not HOLLOW:
        pytest.skip("needs python -m tests.hollow")
    torch.cuda.init()  # loads the library
    function = getattr(ctypes.CDLL(None), name)
    function.restype, function.argtypes = result, arguments
    return function


class Watch:
    """A thread that asks NVML for this process's memory as often as NVML answers."""

    def __init__(self):
        self.device, self.most = first_device(), 0
        if self.device is None or not self.look():
            pytest.skip("needs NVML, and a driver that lists this process")
        threading.Thread(target=self.run, daemon=True).start()

    def look(self):
        shown = of_processes(self.device, {os.getpid()}) or 0
        self.most = max(self.most, shown)
        return shown

    def run(self):
        while True:
            self.look()
            time.sleep(0.001)


watches = []


def peak(device=0):
    """Return the most bytes that the driver has shown for this process since the last call.

    On a real GPU, only for the first device; peaks of a few milliseconds may be missed.
    """
    if HOLLOW:
        return _function("hollow_peak", ctypes.c_uint64, ctypes.c_int)(device)
    torch.cuda.init()
    if not watches:
        watches.append(Watch())
    most, watches[0].most = max(watches[0].most, watches[0].look()), 0
    return most


def refuse(n):
    """Make the allocator refuse the n-th request from now on, once; -1: none.

    Return how many there were since the last call.
    """
    return _function("hollow_refuse", ctypes.c_long, ctypes.c_long)(n)
