"""Runs a script so that Python does what the native extension would.

`python in_python.py all|search SCRIPT [ARGS…]`, as a target of `dtrrun`. all: the interposer
only brings the operators. search: Python only chooses what to evict.
"""

import runpy
import sys

import torch  # noqa: F401  # which starts the session

from dtrrun import runtime
from dtrrun.core.evict import Eviction
from dtrrun.core.rematerialize import Rematerializer
from dtrrun.runtime.dispatch import native


def main() -> None:
    session = runtime._active
    session.ledger.change_policy(native.python_policy(session.settings))
    part = sys.argv[1]
    if part == "all":
        session.slow_path.reasons.add("a comparison")
        Rematerializer._natively = lambda *_: False
        Eviction._natively = lambda *_: None
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")
    calls = session.interposer.native_calls
    assert part == "search" or all(name.startswith("profiler.") for name in calls), calls


if __name__ == "__main__":
    main()
