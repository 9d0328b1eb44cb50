"""The runtime inside the training process: standard library and torch only."""

from __future__ import annotations

import atexit
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dtrrun.ledger.foreign import LostError
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.session import Session
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import as_bytes

if TYPE_CHECKING:
    from dtrrun.runtime.plain import Plain

__all__ = ["BudgetError", "LostError", "Session", "activate", "budget", "deactivate"]

_active: Session | Plain | None = None


def activate(settings: RuntimeSettings) -> None:
    """Start the session of a process that the launcher started; it ends with the process."""
    global _active
    from dtrrun.telemetry.record import Writer

    writer = None
    session = _session(settings)
    if settings.manual_seed is not None:
        seed_all(settings.manual_seed)
    if settings.record_dir is not None:
        from dataclasses import asdict

        writer = Writer(
            settings.record_dir,
            {
                "torch": torch.__version__,
                "device": session.ledger.device_type if isinstance(session, Session) else "cpu",
                "heuristic": settings.heuristic,
                "settings": asdict(settings),
            },
        )
    session.start(writer)
    _active = session
    atexit.register(finish, os.getpid())


def _session(settings: RuntimeSettings) -> Session | Plain:
    if not settings.plain:
        return Session(settings)
    from dtrrun.runtime.plain import Plain

    return Plain(settings)


def seed_all(seed: int) -> None:
    """So that two runs of a program that seeds nothing draw the same."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")  # torch has imported it, where it is installed
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def deactivate() -> None:
    """This process turned out to be a helper: leave it as if the runtime had never been there."""
    global _active
    session, _active = _active, None
    if session is not None:
        writer, session.writer = session.writer, None
        session.stop()
        if writer is not None:
            writer.discard()


def finish(pid: int) -> None:
    """The process `pid`, if this is still it, ends: close its record. What is evicted stays so."""
    if _active is not None and os.getpid() == pid and _active.writer is not None:
        writer, session = _active.writer, _active
        if isinstance(session, Session):
            session.device.ended(session.steps.count)
            session.measure_at_the_end()
        session._publish()
        session.writer = None
        writer.close()


@contextmanager
def budget(size: int | str | None, device: str | None = None, **options: Any) -> Iterator[Session]:
    """Keep the tensors of the enclosed code inside a budget.

    size: bytes, or text such as "200MB"; None counts only. device: "cpu" (default) or "cuda". options: as the
    command's (`heuristic`, `over_budget`, `verify`, ... see `RuntimeSettings`). Yields the `Session`, whose
    `report()` is a dict of figures. Raises ValueError for a bad size or option, and inside the block
    `BudgetError` where the budget can't hold an operator. Sessions do not nest.
    """
    if _active is not None and _active.running:
        raise RuntimeError("dtrrun: a session is already running in this process")
    session = Session(RuntimeSettings(budget_bytes=as_bytes(size), device=device or "cpu", **options))
    with _running(session):
        yield session


@contextmanager
def _running(session: Session) -> Iterator[None]:
    global _active
    _active = session
    session.start()
    try:
        yield
    finally:
        session.stop()
        _active = None
