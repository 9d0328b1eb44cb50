"""Replay of operator logs under a budget: the paper's evaluation, and what is possible at best (App. C)."""

PORTFOLIO = "portfolio"
"""In a heuristic's place: the best of many (`portfolio`). Here, so that its name costs no imports."""
