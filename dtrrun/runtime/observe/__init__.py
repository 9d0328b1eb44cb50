"""Observation of a running session: figures, steps, traces, logs and notices."""
