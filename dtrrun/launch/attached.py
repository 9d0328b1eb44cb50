"""Trick: a child that ends when we do, even where we are killed and can pass nothing on.

Linux sends a process a signal of its choice when the thread that started it ends; the choice survives `exec`.
Start such a child from the main thread. Elsewhere than on Linux nothing happens, and the processes that the
child starts itself are not covered: those that train look for us now and then (`runtime.launcher`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def end_with_us() -> Callable[[], None] | None:
    """For `Popen(preexec_fn=)`: SIGTERM for the child when we end, so that it may still save its state."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: little may be done between fork and exec
    parent = os.getpid()
    reset = callable(signal.getsignal(signal.SIGTERM))

    def attach() -> None:
        if reset:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as exec does, but before the signal can come
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # we had been killed before it was asked for
            os._exit(128 + signal.SIGTERM)

    return attach
