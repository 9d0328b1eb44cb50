"""Replay of operator logs under a budget: the paper's evaluation, and lower bounds (App. C)."""

PORTFOLIO = "portfolio"
"""Name given in place of a heuristic: the best of many (`portfolio`).

Defined here so that the name needs no imports.
"""
