"""The runtime inside the training process. It imports only the standard library and torch."""

from __future__ import annotations

import atexit
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dtrrun.core.foreign import LostError
from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime.errors import BudgetError
from dtrrun.runtime.session import Session
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import as_bytes

if TYPE_CHECKING:
    from dtrrun.runtime.absent.process import Absent
    from dtrrun.runtime.plain import Plain

__all__ = [
    "BudgetError",
    "CannotBuild",
    "LostError",
    "Session",
    "activate",
    "budget",
    "current",
    "deactivate",
]

FREE_THREADED = "free-threaded Python is not supported: use one with a global interpreter lock"

OF_THE_COMMAND = ": that of the command dtrrun (to use the script's own blocks, run it with python)"
_active: Session | Plain | Absent | None = None


def unsupported() -> str | None:
    """Return why no session can run in this interpreter; None if one can.

    The ledger and the native graph nodes rely on the GIL, between threads and within one operator.
    """
    return FREE_THREADED if sysconfig.get_config_var("Py_GIL_DISABLED") else None


def activate(settings: RuntimeSettings) -> None:
    """Start the session of a process started by the launcher. It ends with the process."""
    global _active
    from dtrrun.telemetry.record import Writer

    writer = None
    session = _session(settings)
    if settings.manual_seed is not None:
        seed_all(settings.manual_seed)
        if settings.device != "cpu" and (torch.version.cuda or torch.version.hip):
            # On a GPU, convolutions and others add in an arbitrary order by default.
            torch.use_deterministic_algorithms(True, warn_only=True)
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


def _session(settings: RuntimeSettings) -> Session | Plain | Absent:
    if settings.gpu is not None:
        from dtrrun.runtime.absent.process import Absent

        return Absent(settings)
    if not settings.plain:
        return Session(settings)
    from dtrrun.runtime.plain import Plain

    return Plain(settings)


def seed_all(seed: int) -> None:
    """Seed all generators, so that a program that sets no seed draws the same numbers in every run."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")  # imported by torch, if it is installed
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))


def deactivate() -> None:
    """This process turned out to be a helper: undo everything the runtime has done."""
    global _active
    session, _active = _active, None
    if session is not None:
        writer, session.writer = session.writer, None
        session.stop()
        if writer is not None:
            writer.discard()


def finish(pid: int) -> None:
    """Close the record of the process `pid`, unless this is a fork of it. Evicted tensors stay evicted."""
    from dtrrun.telemetry.record import ENDED, TOO_SMALL

    if _active is not None and os.getpid() == pid and _active.writer is not None:
        writer, session = _active.writer, _active
        if isinstance(session, Session):
            session.device.ended(session.steps.count)
            session.stop_learning()
            session.keep_peak()
            session.ending = True
        else:
            session.ended()
        session._publish()
        session.writer = None
        # Python keeps the exception that ends a program.
        too_small = isinstance(getattr(sys, "last_value", None), BudgetError)
        if too_small and isinstance(session, Session):
            session.nodes.too_small()
        writer.close(TOO_SMALL if too_small else ENDED)


@contextmanager
def budget(size: int | str | None, device: str = "auto", **options: Any) -> Iterator[Session]:
    """Keep the tensors of the enclosed code inside a budget.

    `size` is in bytes, or text such as "200MB"; with None, memory is only counted. `device` is "auto" (the
    GPU if this PyTorch can use one, else the CPU), "cpu", "cuda" or "cuda:N". On a GPU, the budget covers all
    memory that the driver shows for the process. `options` are those of the command (`heuristic`,
    `over_budget`, `verify`, ...), and text in them is read as on the command line. Yields the `Session`,
    whose `report()` returns a dict of figures.

    At the end, everything that was evicted is brought back. If an error ends the block, only what fits into
    the budget is; the rest comes back when it is read, until another block begins.

    Raises ValueError if the size, the device or an option is invalid, and TypeError if an option is unknown.
    Raises RuntimeError if another session is running (sessions do not nest), if this Python is free-threaded,
    or if the native extension can be neither found nor built. Inside the block, raises `BudgetError` if an
    operator does not fit.
    """
    if why := unsupported():
        raise RuntimeError(f"dtrrun: {why}")
    if _active is not None and _active.running and not (isinstance(_active, Session) and _active.left):
        by = "" if _active.writer is None else OF_THE_COMMAND
        raise RuntimeError(f"dtrrun: a session is already running in this process{by}")
    session = Session(RuntimeSettings.of(budget_bytes=as_bytes(size), device=device, **options))
    with _running(session):
        yield session


def current() -> Session | None:
    """Return the session that is running in this process: the command's, or that of the block.

    None if there is none: the program runs without dtrrun, or without a session of it (`dtrrun smoke` runs it
    so for comparison).
    """
    if isinstance(_active, Session) and _active.running and not _active.left:
        return _active
    return None


@contextmanager
def _running(session: Session) -> Iterator[None]:
    global _active
    left, _active = _active, session
    given_up = left.give_way(session.settings.budget_bytes) if isinstance(left, Session) and left.left else []
    session.start()
    session.take_over(given_up)
    del left, given_up
    try:
        yield
    except BaseException:
        session.leave()
        raise
    else:
        session.stop()
    finally:
        if not session.running:
            _active = None
