"""Where the time of a training process went, from its counters: the parts add up to the wall time.

All but one part are measured. What PyTorch takes to hand operators to us is estimated, and lies within what
was measured as something else: most of it within the time outside of operators, the rest within theirs. It is
taken from there and counted as bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrrun.telemetry.fields import PARTS

COUNTED = ("wall", *PARTS, "dispatch")
"""The names of the counters, less `_ns`."""
OPERATORS_OWN = 0.5
"""What of an operator's measured time is the program's at least."""


def breakdown(nanoseconds: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of `wall`, each part and `other`, from counters; and of `dispatch`, a part of bookkeeping."""
    return shared_out({name: (nanoseconds.get(f"{name}_ns") or 0) / 1e9 for name in COUNTED})


def shared_out(counted: Mapping[str, float]) -> dict[str, float]:
    """The same from seconds of what `COUNTED` names."""
    parts = {part: counted[part] for part in PARTS}
    inside = sum(parts.values())
    wall = max(counted["wall"], inside)  # a process that was killed has not brought its wall time up to date
    other = wall - inside
    from_other = min(counted["dispatch"], other)
    from_operators = min(counted["dispatch"] - from_other, parts["operators"] * (1 - OPERATORS_OWN))
    dispatch = from_other + from_operators
    parts["operators"] -= from_operators
    parts["bookkeeping"] += dispatch
    return {"wall": wall, **parts, "other": other - from_other, "dispatch": dispatch}
