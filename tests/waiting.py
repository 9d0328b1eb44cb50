"""Waits for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait until this holds. Fail after so many seconds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)
