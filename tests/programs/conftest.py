"""Garbage is collected only between programs, so that a program always does the same; see `settled`."""

import gc
from collections.abc import Iterator

import pytest

from tests.programs.running import Conditions, compare, settle


@pytest.fixture(autouse=True, scope="module")
def settled() -> Iterator[None]:
    """Keep what torch imports on first use out of the collections."""
    compare((("module", 0, "linear"), ("backward", 0, False), ("numpy", 0, "array")), Conditions())
    enabled = gc.isenabled()
    gc.disable()
    settle()
    yield
    if enabled:
        gc.enable()
    gc.unfreeze()
