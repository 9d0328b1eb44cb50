"""The part of a budget left for tensors: all of it on the CPU; on a GPU the driver counts more than tensors.

The simulator only knows tensors. The runtime's other memory on a GPU (`runtime.cuda.budget`) is predicted
here for a session without incidents: minimum guard and minimum slack.
"""

from __future__ import annotations

LEAST_GUARD = 64 << 20
GUARD_SHARE = 50
SLACK = 22 << 20
"""In bytes. A budget of less than a few times this is too small for a GPU anyway."""


def room_in(budget: int, overhead: int | None) -> int:
    """Return the bytes left for tensors. overhead: bytes of context and libraries; None on the CPU."""
    if overhead is None:
        return budget
    return max(budget - overhead - max(LEAST_GUARD, budget // GUARD_SHARE) - SLACK, 1)


def budget_for(tensors: int, overhead: int | None) -> int:
    """Return the least budget with room for this many bytes of tensors."""
    if overhead is None:
        return tensors
    rest = tensors + overhead + SLACK
    return max(rest + LEAST_GUARD, (rest - 1) * GUARD_SHARE // (GUARD_SHARE - 1) + 1)
