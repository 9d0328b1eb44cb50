"""Parts of a session that few ask for. Imported only where one does: the others start sooner for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtrrun.settings import RuntimeSettings

if TYPE_CHECKING:
    from dtrrun.runtime.careful import Careful
    from dtrrun.runtime.lookahead import Lookahead
    from dtrrun.runtime.training_state import Hold
    from dtrrun.runtime.verify import Fingerprints
    from dtrrun.runtime.where import Where


def fingerprints(settings: RuntimeSettings) -> Fingerprints | None:
    """`--verify`."""
    if not settings.verify:
        return None
    from dtrrun.runtime.verify import Fingerprints

    return Fingerprints()


def where(settings: RuntimeSettings, careful: Careful, replay: Any) -> Where | None:
    """`--where`."""
    if not settings.where:
        return None
    from dtrrun.runtime.where import Where

    return Where(careful, replay)


def lookahead(careful: Careful) -> Lookahead | None:
    """For heuristics with foresight."""
    if not careful.ledger.policy.heuristic.foresight:
        return None
    from dtrrun.runtime.lookahead import Lookahead

    return Lookahead(careful)


def training_state(settings: RuntimeSettings, *hold: Hold) -> list[Any]:
    """`dtrrun smoke`. hold: see `TrainingState`."""
    if not settings.state or settings.record_dir is None:
        return []
    from dtrrun.runtime.training_state import TrainingState

    return [TrainingState(settings.record_dir, *hold)]


def tracing(settings: RuntimeSettings, ledger: Any, replay: Any, where: Where | None = None) -> list[Any]:
    """`--trace`."""
    if not settings.trace_events or settings.record_dir is None:
        return []
    from dtrrun.runtime.tracing import Tracing

    return [Tracing(ledger, replay, settings.record_dir, where.module_of if where is not None else None)]
