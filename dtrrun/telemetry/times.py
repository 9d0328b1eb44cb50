"""How a training process spent its time, from its counters: the parts add up to the wall time.

All but one part are measured. PyTorch's cost of passing operators to us is estimated, and is contained in
other measurements: most of it in the time outside operators, the rest in theirs. It is subtracted there and
counted as bookkeeping.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtrrun.telemetry.fields import PARTS

COUNTED = ("wall", *PARTS, "dispatch")
"""The names of the counters, without `_ns`."""
OPERATORS_OWN = 0.5
"""The least fraction of an operator's measured time that is the program's."""


def breakdown(nanoseconds: Mapping[str, Any]) -> dict[str, float]:
    """Return seconds of `wall`, each part and `other`, from counters; and of `dispatch`, a part of
    bookkeeping."""
    return shared_out({name: (nanoseconds.get(f"{name}_ns") or 0) / 1e9 for name in COUNTED})


def shared_out(counted: Mapping[str, float]) -> dict[str, float]:
    """Like `breakdown`, from seconds by the names in `COUNTED`."""
    parts = {part: counted[part] for part in PARTS}
    inside = sum(parts.values())
    wall = max(counted["wall"], inside)  # a killed process has an old wall time
    other = wall - inside
    from_other = min(counted["dispatch"], other)
    from_operators = min(counted["dispatch"] - from_other, parts["operators"] * (1 - OPERATORS_OWN))
    dispatch = from_other + from_operators
    parts["operators"] -= from_operators
    parts["bookkeeping"] += dispatch
    return {"wall": wall, **parts, "other": other - from_other, "dispatch": dispatch}
