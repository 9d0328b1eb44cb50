"""The runtime's figures, as the telemetry record wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dtrrun.runtime.heap import resident_peak
from dtrrun.telemetry.fields import COUNTERS

if TYPE_CHECKING:
    from dtrrun.runtime.session import Session

_INDEX = {name: place for place, name in enumerate(COUNTERS)}
TOP = 20


def counters(session: Session) -> dict[str, int]:
    """Every counter of `telemetry.fields` but `wall_ns` of the record's own clock."""
    ledger, replay, policy = session.ledger, session.replay, session.ledger.policy
    pinned = evictable = 0
    for record in list(ledger.records.values()):
        if record.resident:
            if record.op is None or record.locks:
                pinned += record.nbytes
            else:
                evictable += record.nbytes
    fingerprints = ledger.fingerprints
    return {
        "budget_bytes": -1 if ledger.budget_bytes is None else ledger.budget_bytes,
        "resident_bytes": ledger.resident_bytes,
        "peak_bytes": ledger.peak_bytes,
        "evictable_bytes": evictable,
        "pinned_bytes": pinned,
        "evicted_bytes": ledger.evicted_bytes,
        "live_storages": len(ledger.records),
        "evictions": ledger.evictions,
        "evicted_bytes_total": ledger.evicted_bytes_total,
        "rematerializations": replay.rematerializations,
        "rematerialized_bytes": replay.rematerialized_bytes,
        "operators": ledger.age,
        "steps": session.steps.count,
        "over_budget": ledger.over_budget,
        "verified": fingerprints.verified if fingerprints else 0,
        "verify_mismatches": sum(count for count, _ in fingerprints.mismatches.values())
        if fingerprints
        else 0,
        "score_evaluations": policy.score_evaluations,
        "least_budget_bytes": session.error["least_budget_bytes"] if session.error else 0,
        "process_peak_bytes": resident_peak(),
        **session.times(),
        **session.device.counters(),
    }


def totals(session: Session) -> dict[str, int]:
    """Times and counts of which each step has its share."""
    return session.times() | {
        "evictions": session.ledger.evictions,
        "rematerializations": session.replay.rematerializations,
    }


def tables(session: Session) -> dict[str, Any]:
    """The tables of the record (see `telemetry.record`)."""
    ledger = session.ledger
    names = {*session.replay.by_operator, *ledger.evicted_by}
    operators: list[dict[str, Any]] = [
        {
            "name": name,
            "rematerializations": count,
            "seconds": ns / 1e9,
            "bytes": nbytes,
            "evictions": ledger.evicted_by.get(name, 0),
        }
        for name in names
        for count, ns, nbytes in [session.replay.by_operator.get(name, (0, 0, 0))]
    ]
    operators.sort(key=lambda row: (-row["seconds"], -row["evictions"]))
    pinned: dict[str, list[int]] = {}
    for record in list(ledger.records.values()):
        if record.resident and record.op is None:
            tally = pinned.setdefault(record.pin or "constant", [0, 0])
            tally[0] += record.nbytes
            tally[1] += 1
    fingerprints = ledger.fingerprints
    return {
        "operators": operators[:TOP],
        "places": _places(session),
        "warnings": [{"text": text, "count": count} for text, count in session.warnings.items()],
        "pinned": [
            {"reason": reason, "bytes": nbytes, "storages": count}
            for reason, (nbytes, count) in sorted(pinned.items(), key=lambda item: -item[1][0])
        ],
        "step": session.steps.last,
        "latest_steps": list(session.steps.latest),
        "mismatches": [
            {"operator": name, "bytes": nbytes, "count": count}
            for name, (count, nbytes) in (fingerprints.mismatches.items() if fingerprints else ())
        ],
        "error": session.error,
        "log_error": session._recorder.error if session._recorder is not None else None,
        "device_uuid": session.device.uuid,
    }


def _places(session: Session) -> list[dict[str, Any]]:
    """Where the program had called what was run again, the costliest first."""
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
    """Bring the record up to date."""
    cells = writer.counters
    for name, value in counters(session).items():
        if name != "wall_ns":
            cells[_INDEX[name]] = value
    writer.publish(tables(session))
