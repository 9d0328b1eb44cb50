"""Lets Python run again what the extension would."""

from __future__ import annotations

import pytest

from dtrrun.runtime.execute import Executor


def use_python_replays(patch: pytest.MonkeyPatch) -> None:
    """From now on, recorded operators are run again by Python: those of new sessions."""
    patch.setattr(Executor, "in_python", True)
