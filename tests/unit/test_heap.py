"""The peak of the process's memory. The heap itself is tested in tests/conformance/test_native_heap.py."""

import torch

import dtrrun
from dtrrun.runtime.heap import resident_peak

MB = 1 << 20


def resident_set() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4096


def test_the_peak_of_the_resident_set_is_that_of_the_process():
    block = torch.ones(100 * MB, dtype=torch.uint8)
    # Linux counts memory per processor, and adds up only what exceeds some pages on each.
    reached = resident_set() - 10 * MB
    del block
    assert reached <= resident_peak() < reached + 1000 * MB
    with dtrrun.budget(None) as session:
        assert session.report()["process_peak_bytes"] >= reached
