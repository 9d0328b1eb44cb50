"""Makes Python run replays that the extension would run."""

from __future__ import annotations

import pytest

from dtrrun.runtime.execute import Executor


def use_python_replays(patch: pytest.MonkeyPatch) -> None:
    """Make Python replay recorded operators, in new sessions."""
    patch.setattr(Executor, "in_python", True)
