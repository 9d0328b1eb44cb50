"""How the operators of a test's session are handled: as usual, or with care."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dtrrun
from dtrrun.runtime.session import Session


@contextmanager
def budget(
    size: int | str | None, device: str = "auto", *, careful: bool, **options: Any
) -> Iterator[Session]:
    """As `dtrrun.budget`. careful: there is a reason to handle all operators with care (`Reasons`)."""
    with dtrrun.budget(size, device, **options) as session:
        if careful:
            session.callbacks.reasons.add("a test")
        yield session
