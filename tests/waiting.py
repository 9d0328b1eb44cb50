"""Waits for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until this holds. Fail after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def state_of(pid: int | str) -> str:
    """Return the letter of a process's state, as in Linux's `/proc`."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def is_running(pid: int | str) -> bool:
    """Return whether a process has not ended, though nobody may have asked for its exit status yet."""
    try:
        return state_of(pid) != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
