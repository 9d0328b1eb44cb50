"""The parent process of a run: it starts the target, passes on signals, and reports how it ended."""
