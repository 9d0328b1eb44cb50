"""`python -m tests.bench.gpu`: see bench.py."""

import signal
import sys

try:
    from tests.bench.gpu.bench import main
except ModuleNotFoundError as error:
    sys.exit(f"bench-gpu: {error}; `pip install -e .` in this Python's environment brings what dtrrun needs")

if __name__ == "__main__":
    # Like Ctrl-C: the child is ended, and results so far are kept.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
