"""`python -m tests.bench.gpu`: see bench.py."""

import sys

try:
    from tests.bench.gpu.bench import main
except ModuleNotFoundError as error:
    sys.exit(f"bench-gpu: {error}; `pip install -e .` in this Python's environment brings what dtrrun needs")

if __name__ == "__main__":
    sys.exit(main())
