"""The runtime's figures, in the form of the telemetry record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtrrun.runtime.dispatch.interposer import Interposer
from dtrrun.runtime.heap import resident_peak
from dtrrun.telemetry.fields import COUNTERS

if TYPE_CHECKING:
    from dtrrun.runtime.session import Session

_INDEX = {name: place for place, name in enumerate(COUNTERS)}
TOP = 20


def counters(session: Session) -> dict[str, int]:
    """Return every counter of `telemetry.fields` except `wall_ns`, which the record itself measures.

    Bytes are those of the first device (`devices` has the others').
    """
    with session.ledger.on(0):
        return _counters(session)


def _counters(session: Session) -> dict[str, int]:
    ledger, eviction = session.ledger, session.dtr.eviction
    rematerializer = session.dtr.rematerializer
    pinned = evictable = 0
    for version in list(ledger.versions.values()):
        if version.resident and not version.device:
            if version.operation is None or version.locks:
                pinned += version.nbytes
            else:
                evictable += version.nbytes
    fingerprints = session.fingerprints
    return {
        "resident_bytes": ledger.resident_bytes,
        "peak_bytes": ledger.peak_bytes,
        "evictable_bytes": evictable,
        "pinned_bytes": pinned,
        "evicted_bytes": ledger.evicted_bytes,
        "live_storages": ledger.live_storages,
        "evictions": eviction.evictions,
        "evicted_bytes_total": eviction.evicted_bytes_total,
        "rematerializations": rematerializer.rematerializations,
        "rematerialized_bytes": rematerializer.rematerialized_bytes,
        "operators": ledger.age,
        "steps": session.steps.count,
        "over_budget": eviction.over_budget,
        "exceeded_bytes": ledger.exceeded_bytes if eviction.over_budget else 0,
        "verified": fingerprints.verified if fingerprints else 0,
        "verify_mismatches": sum(count for count, _ in fingerprints.mismatches.values())
        if fingerprints
        else 0,
        "score_evaluations": session.dtr.policy.score_evaluations,
        "least_budget_bytes": session.error["least_budget_bytes"] if session.error else 0,
        "process_peak_bytes": resident_peak(),
        **session.times(),
        **(session.ended_with or limited(session)),
        **session.host.counters(),
    }


def limited(session: Session) -> dict[str, int]:
    """Return the budget, and what the device shows of what is limited."""
    budget_bytes = session.ledger.budget_bytes
    return {"budget_bytes": -1 if budget_bytes is None else budget_bytes, **session.device.counters()}


def totals(session: Session) -> dict[str, int]:
    """Return the running totals of times and counts, from which each step's share is computed."""
    return session.times() | {
        "evictions": session.dtr.eviction.evictions,
        "rematerializations": session.dtr.rematerializer.rematerializations,
    }


def tables(session: Session, *, lately: bool = False) -> dict[str, Any]:
    """Return the tables of the record (see `telemetry.record`).

    lately: reasons for what can't be evicted need only be those of not long ago.
    """
    by_operator = session.dtr.rematerializer.by_operator
    evicted_by = session.dtr.eviction.evicted_by
    names = {*by_operator, *evicted_by}
    operators: list[dict[str, Any]] = [
        {
            "name": name,
            "rematerializations": count,
            "seconds": ns / 1e9,
            "bytes": nbytes,
            "evictions": evicted_by.get(name, 0),
        }
        for name in names
        for count, ns, nbytes in [by_operator.get(name, (0, 0, 0))]
    ]
    operators.sort(key=lambda row: (-row["seconds"], -row["evictions"], row["name"]))
    fingerprints = session.fingerprints
    return {
        "operators": operators[:TOP],
        "places": _places(session),
        "holds": session.at_peak,
        "warnings": warnings(session),
        "pinned": [row.table() for row in session.pinned(lately=lately)],
        "step": session.steps.last,
        "step_slowdown": session.steps.slowdown(),
        "latest_steps": list(session.steps.latest),
        "mismatches": [
            {"operator": name, "bytes": nbytes, "count": count}
            for name, (count, nbytes) in (fingerprints.mismatches.items() if fingerprints else ())
        ],
        "error": session.error,
        "log_error": session._recorder.error if session._recorder is not None else None,
        "device_uuid": session.device.uuid,
        "other_devices": session.device.others(),
        "native": _native(session.interposer),
        "compiled": {name: getattr(session.compiler, name) for name in ("graphs", "kernels", "opaque")},
        "rule": session.rule,
        "group": session.group,
        "budget_changes": [] if session.adapting is None else list(session.adapting.changes),
    }


def warnings(session: Session) -> list[dict[str, Any]]:
    return [{"text": text, "count": count} for text, count in session.warnings.items()]


def _native(interposer: Interposer) -> dict[str, Any]:
    """Return how many operators there were, and which of them fell back to Python."""
    calls = sorted(interposer.python_calls.items(), key=lambda item: -item[1])
    in_python = sum(count for _, count in calls)
    return {
        "operators": sum(interposer.native_calls.values()) + in_python,
        "in_python": in_python,
        "read_by_address": interposer.read_by_address,
        "calls": [{"name": name, "count": count} for name, count in calls[:TOP]],
    }


def _places(session: Session) -> list[dict[str, Any]]:
    """Return where the program called the replayed operators, costliest first."""
    if session._where is None:
        return []
    rows: list[dict[str, Any]] = [
        {
            "module": module,
            "line": line,
            "name": name,
            "rematerializations": count,
            "seconds": ns / 1e9,
            "bytes": nbytes,
        }
        for (module, line, name), (count, ns, nbytes) in list(session._where.tallies.items())
    ]
    return sorted(rows, key=lambda row: -row["seconds"])[:TOP]


def write(session: Session, writer: Any) -> None:
    """Update the record."""
    cells = writer.counters
    for name, value in counters(session).items():
        if name != "wall_ns":
            cells[_INDEX[name]] = value
    writer.publish(tables(session, lately=True))
