"""Runs a script whose operators all take the slow path, in Python.

`python in_python.py SCRIPT [ARGS…]`, as a target of `dtrrun`. The interposer only passes operators on.
"""

import runpy
import sys

import torch  # noqa: F401  # starts the session

from dtrrun import runtime


def main() -> None:
    session = runtime._active
    session.slow_path.reasons.add("a comparison")
    del sys.argv[:1]
    runpy.run_path(sys.argv[0], run_name="__main__")
    calls = session.interposer.native_calls
    assert all(name.startswith("profiler.") for name in calls), calls


if __name__ == "__main__":
    main()
