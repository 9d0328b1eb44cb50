"""How a training process spent its time, from its counters: the parts add up to the wall time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrrun.telemetry.fields import PARTS

COUNTED = ("wall", *PARTS)
"""The names of the counters, without `_ns`."""


def breakdown(nanoseconds: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds of `wall`, each part and `other`, from counters."""
    return with_rest({name: (nanoseconds.get(f"{name}_ns") or 0) / 1e9 for name in COUNTED})


def with_rest(counted: Mapping[str, float]) -> dict[str, float]:
    """Like `breakdown`, from seconds by the names in `COUNTED`."""
    parts = {part: counted[part] for part in PARTS}
    inside = sum(parts.values())
    wall = max(counted["wall"], inside)  # a killed process leaves a stale wall time
    return {"wall": wall, **parts, "other": wall - inside}
