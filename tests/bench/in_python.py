"""Runs a script so that the native interposer only brings its operators, and Python does all the rest.

`python in_python.py SCRIPT [ARGS…]`, as a target of `dtrrun --native require`. The search is in Python only
for rules other than the default one.
"""

import runpy
import sys

import torch  # noqa: F401  # which starts the session

from dtrrun import runtime
from dtrrun.core.evict import Eviction
from dtrrun.core.rematerialize import Rematerializer


def main() -> None:
    session = runtime._active
    session.slow_path.reasons.add("a comparison")
    Rematerializer._natively = lambda *_: False
    Eviction._natively = lambda *_: None
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
    assert all(name.startswith("profiler.") for name in session.mode.native_calls), session.mode.native_calls


if __name__ == "__main__":
    main()
