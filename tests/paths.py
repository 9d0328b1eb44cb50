"""Which path the operators of a test's session take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dtrrun
from dtrrun.runtime.session import Session


@contextmanager
def budget(size: int | str | None, device: str = "auto", *, slow: bool, **options: Any) -> Iterator[Session]:
    """As `dtrrun.budget`. slow: all operators take the slow path; otherwise most take the fast path."""
    with dtrrun.budget(size, device, **options) as session:
        if slow:
            session.slow_path.reasons.add("a test")
        yield session
