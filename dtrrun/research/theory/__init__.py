"""The paper's two theorems as programs for any engine (Sec. 3, App. A and B)."""

from __future__ import annotations

from .adversary import Adversary, adversary, revealed, static_plan
from .engine import Engine
from .linear import linear
from .measure import THEORIES, TheoryCell, TheoryRow, binomial_optimum, run_theory, theory_cells
from .recorded import Recorded, linear_schedule
from .replayed import Replayed

__all__ = [
    "THEORIES",
    "Adversary",
    "Engine",
    "Recorded",
    "Replayed",
    "TheoryCell",
    "TheoryRow",
    "adversary",
    "binomial_optimum",
    "linear",
    "linear_schedule",
    "revealed",
    "run_theory",
    "static_plan",
    "theory_cells",
]
