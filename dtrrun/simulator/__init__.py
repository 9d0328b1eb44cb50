"""Replay of logs, static planners to compare with, and the constructions of the paper's theorems."""
