"""Replay of operator logs under a budget: the paper's evaluation, and what is possible at best (App. C)."""
