"""How a training process spent its time, from its counters: the parts add up to the wall time.

On a GPU, the counters of time are the host's, which launches operators and goes on. What they take on the
GPU is the sum of their costs (`device_operators_ns`, `device_rematerialization_ns`). If that fills most
of the wall time, it determines how long a step takes (*device-bound*), and the host's work hides behind
it. Otherwise the host does (*host-bound*), and the GPU waits for it. While the GPU's allocator returns memory
to the driver and maps it again (`allocator_ns`), the host works inside an operator, and the GPU has no work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrrun.telemetry.fields import PARTS

COUNTED = ("wall", *PARTS)
"""The names of the counters, without `_ns`."""
OWN = ("scoring", "search", "bookkeeping")
"""dtrrun's own work on the host."""
DEVICE_BOUND = 0.7
"""The part of the wall time that the GPU is busy in a device-bound program, at least. The costs are the least
that operators have taken, and between them the GPU idles for a while."""


def bound_by(nanoseconds: Mapping[str, Any]) -> str | None:
    """Return what determines how long a step takes: "device" or "host"; None on the CPU."""
    busy = _busy_ns(nanoseconds)
    if not busy:
        return None
    return "device" if busy >= DEVICE_BOUND * (nanoseconds.get("wall_ns") or 0) else "host"


def effective(nanoseconds: Mapping[str, Any]) -> dict[str, Any]:
    """Return counters whose times are those of what determines how long a step takes.

    If that is the GPU, operators take their time there, and what else is counted at most the time in which
    the GPU runs no operator: first copies to the host and back, then the allocator, then dtrrun's other work.
    """
    found = dict(nanoseconds)
    stalled = found.get("allocator_ns") or 0
    if bound_by(found) != "device":
        found["allocator_ns"] = min(stalled, found.get("operators_ns") or 0)
        found["operators_ns"] = (found.get("operators_ns") or 0) - found["allocator_ns"]
        return found
    busy = _busy_ns(found)
    found["wall_ns"] = max(found.get("wall_ns") or 0, busy)
    for part in ("operators", "rematerialization"):
        found[f"{part}_ns"] = found[f"device_{part}_ns"]
    idle = found["wall_ns"] - busy
    for part, ns in (("host", found.get("host_ns") or 0), ("allocator", stalled)):
        found[f"{part}_ns"] = min(ns, idle)
        idle -= found[f"{part}_ns"]
    ours = [f"{part}_ns" for part in OWN]
    hosts = sum(found.get(name) or 0 for name in ours)
    if hosts > idle:
        for name in ours:
            found[name] = (found.get(name) or 0) * idle // hosts
    return found


def _busy_ns(nanoseconds: Mapping[str, Any]) -> int:
    """Return how long the GPU was busy with operators; 0 on the CPU."""
    busy: int = sum(nanoseconds.get(f"device_{part}_ns") or 0 for part in PARTS[:2])
    return busy


def breakdown(nanoseconds: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds of `wall`, each part and `other`, from counters."""
    found = effective(nanoseconds)
    return with_rest({name: (found.get(f"{name}_ns") or 0) / 1e9 for name in COUNTED})


def with_rest(counted: Mapping[str, float]) -> dict[str, float]:
    """Like `breakdown`, from seconds by the names in `COUNTED`."""
    parts = {part: counted[part] for part in PARTS}
    inside = sum(parts.values())
    wall = max(counted["wall"], inside)  # a killed process leaves a stale wall time
    return {"wall": wall, **parts, "other": wall - inside}
