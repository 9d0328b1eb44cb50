"""How long it takes to copy to a file and back (`--host-budget` on a CPU)."""

from __future__ import annotations

import os
import tempfile
import time

from dtrrun.core.host import FILE

MEASURED = 32 << 20
PIECE = 1 << 20
"""Bytes."""


def file_costs(folder: str) -> tuple[float, float]:
    """Return ns for each byte, out and in; what a session assumes at first if there can be no such file."""
    data = bytearray(os.urandom(PIECE))
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            began = time.perf_counter_ns()
            for place in range(0, MEASURED, PIECE):
                os.pwrite(file.fileno(), data, place)
            written = time.perf_counter_ns()
            for place in range(0, MEASURED, PIECE):
                os.preadv(file.fileno(), [data], place)
            read = time.perf_counter_ns()
    except OSError:
        return FILE
    return (written - began) / MEASURED, (read - written) / MEASURED
