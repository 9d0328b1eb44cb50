"""Parts of a session that are rarely needed, imported only on demand to start faster."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dtrrun.core.heuristics import AUTO
from dtrrun.settings import RuntimeSettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from dtrrun.core.ledger import Ledger
    from dtrrun.runtime.access import Access
    from dtrrun.runtime.adapting import Adapting, Advise
    from dtrrun.runtime.compiled.compiler import Compiler
    from dtrrun.runtime.compiled.eagerly import Eagerly
    from dtrrun.runtime.dispatch.callbacks import Callbacks
    from dtrrun.runtime.observe.at_peak import AtPeak
    from dtrrun.runtime.observe.callers import Callers
    from dtrrun.runtime.observe.learning import Learning
    from dtrrun.runtime.observe.lookahead import Lookahead
    from dtrrun.runtime.observe.ranks import Ranks
    from dtrrun.runtime.observe.recorder import Recorder
    from dtrrun.runtime.observe.remembered import Peak
    from dtrrun.runtime.observe.training_state import Hold
    from dtrrun.runtime.observe.verify import Fingerprints
    from dtrrun.runtime.observe.where import Where
    from dtrrun.runtime.session import Session


def fingerprints(settings: RuntimeSettings, refused: Callable[[BaseException], None]) -> Fingerprints | None:
    """`--verify`."""
    if not settings.verify:
        return None
    from dtrrun.runtime.observe.verify import Fingerprints

    return Fingerprints(refused)


def recorder(settings: RuntimeSettings) -> Recorder | None:
    """`dtrrun record`."""
    if settings.log is None or os.environ.get("RANK", "0") != str(settings.log_rank):
        return None
    from dtrrun.runtime.observe.recorder import Recorder

    return Recorder(settings.log, settings.log_first, settings.log_last, settings.cost)


def callers(settings: RuntimeSettings, callbacks: Callbacks, native: ModuleType) -> Callers | None:
    """For `--where` and `--peak`."""
    if not (settings.where or settings.peak):
        return None
    from dtrrun.runtime.observe.callers import Callers

    return Callers(callbacks, native)


def where(settings: RuntimeSettings, callers: Callers | None, ledger: Ledger) -> Where | None:
    """`--where`."""
    if not settings.where or callers is None:
        return None
    from dtrrun.runtime.observe.where import Where

    return Where(callers, ledger)


def at_peak(settings: RuntimeSettings, session: Session, callers: Callers | None) -> AtPeak | None:
    """`--peak`."""
    if not settings.peak or callers is None:
        return None
    from dtrrun.runtime.observe.at_peak import AtPeak

    return AtPeak(session, callers, settings.peak_bytes)


def adapting(settings: RuntimeSettings, session: Session, advise: Advise) -> Adapting | None:
    """`--over-budget raise`."""
    if settings.over_budget != "raise":
        return None
    from dtrrun.runtime.adapting import Adapting

    return Adapting(session, advise)


def compiler(
    settings: RuntimeSettings, native: ModuleType, access: Access, warn: Callable[[str], None]
) -> Compiler | Eagerly:
    """`--compile`."""
    if settings.compile == "eager":
        from dtrrun.runtime.compiled.eagerly import Eagerly

        return Eagerly()
    from dtrrun.runtime.compiled.compiler import Compiler

    return Compiler(native, access.lock, lambda tensor: access.reach(tensor, True, False)(), warn)


def lookahead(callbacks: Callbacks) -> Lookahead | None:
    """For heuristics with foresight."""
    if not callbacks.ledger.policy.heuristic.foresight:
        return None
    from dtrrun.runtime.observe.lookahead import Lookahead

    return Lookahead(callbacks)


def ranks(session: Session, settings: RuntimeSettings, rule: Learning | None) -> Ranks | None:
    """A program with several ranks, inside a budget. With modelled costs, they are in step anyway."""
    from dtrrun.telemetry.record import world

    found = world()
    if found is None or settings.record_dir is None or settings.budget_bytes is None:
        return None
    if settings.cost == "model":
        return None
    from dtrrun.runtime.observe.ranks import Ranks

    return Ranks(settings.record_dir, found, _leads(), session.callbacks.signatures, rule)


def _leads() -> bool:
    """Return whether other ranks on this machine follow this one, or there are none."""
    from dtrrun.telemetry.record import world

    return world() is None or os.environ.get("LOCAL_RANK", os.environ["RANK"]) == "0"


def learning(session: Session, settings: RuntimeSettings) -> Learning | None:
    """`--heuristic auto`, inside a budget.

    With modelled costs, two runs must evict alike, so nothing may depend on how long a search takes.
    """
    if (
        settings.heuristic != AUTO
        or settings.budget_bytes is None
        or settings.cost == "model"
        or settings.log
    ):
        return None
    from dtrrun.runtime.observe.learning import Learning
    from dtrrun.runtime.observe.remembered import Remembered

    remembered = None
    if settings.remember and settings.record_dir is not None:
        remembered = Remembered(settings.budget_bytes, session.device.type, session.warn)
    follows = settings.record_dir is not None and not _leads()
    return Learning(session, remembered, settings.record_dir, follows=follows)


def peak(settings: RuntimeSettings, device: str) -> Peak | None:
    """What earlier runs of a command have needed without a budget."""
    if not settings.remember or settings.record_dir is None:
        return None
    from dtrrun.runtime.observe.remembered import Peak

    return Peak(device)


def training_state(settings: RuntimeSettings, *hold: Hold) -> list[Any]:
    """`dtrrun smoke`. hold: see `TrainingState`."""
    if not settings.state or settings.record_dir is None:
        return []
    from dtrrun.runtime.observe.training_state import TrainingState

    return [TrainingState(settings.record_dir, *hold)]


def tracing(settings: RuntimeSettings, ledger: Ledger, where: Where | None = None) -> list[Any]:
    """`--trace`."""
    if not settings.trace_events or settings.record_dir is None:
        return []
    from dtrrun.runtime.observe.tracing import Tracing

    return [Tracing(ledger, settings.record_dir, where.module_of if where is not None else None)]
