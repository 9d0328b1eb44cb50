"""Lets Python's core do in a native session what the extension does."""

from __future__ import annotations

import pytest

from dtrrun.core.evict import Eviction


def use_python_core(patch: pytest.MonkeyPatch) -> None:
    """From now on, evictions and rematerializations are those of Python: of new sessions."""
    patch.setattr(Eviction, "in_python", True)
