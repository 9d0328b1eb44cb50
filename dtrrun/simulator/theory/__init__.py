"""The paper's two theorems as programs that any engine can run (Sec. 3, App. A and B)."""

from __future__ import annotations

from .adversary import Adversary, adversary, revealed, static_plan
from .engine import Engine
from .linear import linear

__all__ = ["Adversary", "Engine", "adversary", "linear", "revealed", "static_plan"]
