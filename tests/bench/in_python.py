"""Runs a script so that Python does what the native extension would.

`python in_python.py SCRIPT [ARGS…]`, as a target of `dtrrun`. The interposer only brings the operators.
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
    del sys.argv[:1]
    runpy.run_path(sys.argv[0], run_name="__main__")
    calls = session.interposer.native_calls
    assert all(name.startswith("profiler.") for name in calls), calls


if __name__ == "__main__":
    main()
