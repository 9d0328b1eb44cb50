"""Chooses the budget to recommend."""

from __future__ import annotations

from collections.abc import Mapping

FLAT = 0.02
"""A curve that rises by no more than this has no knee, so its least budget is recommended."""


def knee(curve: Mapping[int, float]) -> int:
    """Return the budget at the knee of the curve of slowdown over bytes.

    Both axes are scaled to 0 … 1; the knee is the point farthest below the straight line between the least
    and the largest budget (Satopää et al. 2011, "Finding a 'Kneedle' in a Haystack").
    """
    low, high = min(curve), max(curve)
    rise = curve[low] - curve[high]
    if rise <= FLAT:
        return low

    def depth(budget: int) -> float:
        share = (budget - low) / (high - low)
        return (1 - share) - (curve[budget] - curve[high]) / rise

    return max(sorted(curve), key=lambda budget: round(depth(budget), 6))


def within(curve: Mapping[int, float], max_slowdown: float) -> int | None:
    """Return the least budget whose slowdown is at most `max_slowdown`; None if there is none."""
    return min((budget for budget, slowdown in curve.items() if slowdown <= max_slowdown), default=None)
