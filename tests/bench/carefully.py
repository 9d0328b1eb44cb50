"""Runs a script whose operators are all handled with care (`Reasons`).

`python carefully.py SCRIPT [ARGS…]`, as a target of `dtrrun`.
"""

import runpy
import sys

import torch  # noqa: F401  # starts the session

from dtrrun import runtime


def main() -> None:
    session = runtime._active
    session.callbacks.reasons.add("a comparison")
    del sys.argv[:1]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
