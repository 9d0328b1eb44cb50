"""The host's memory that versions may leave for (`core/host.h`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

FILE, PINNED = (1.0, 0.5), (0.05, 0.05)
"""ns for each byte, out and in, until they have been measured: of a file, and of pinned memory at 20 GB/s."""


NEVER, IF_CHEAPER, ALWAYS = range(3)
"""Values of `Ledger.results_leave`: whether what could be recomputed is copied instead. ALWAYS: for tests."""


class HostMemory(NamedTuple):
    """most_bytes: that copies may take together. ns_out, ns_in: for each byte, there and back."""

    most_bytes: int
    ns_out: float
    ns_in: float
    results_leave: int = IF_CHEAPER
    overlaps: bool = False
    """Whether copies run beside operators, and can be made ahead; on a GPU, they do."""


def expected_host(most_bytes: int, device_type: str, results_leave: int = IF_CHEAPER) -> HostMemory:
    """Return what is assumed of the host for a budget on this device: on a CPU, copies live in a file."""
    on_cpu = device_type == "cpu"
    return HostMemory(most_bytes, *(FILE if on_cpu else PINNED), results_leave, overlaps=not on_cpu)


def default_folder(environ: Mapping[str, str] = os.environ) -> str:
    """Return where a file goes if the user names no folder: TMPDIR, or else /var/tmp, which is on a disk."""
    if environ.get("TMPDIR"):
        return environ["TMPDIR"]
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()
