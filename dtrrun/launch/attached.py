"""Makes a child end with the launcher, even if the launcher is killed.

Linux can send a process a signal when the thread that started it ends; the setting survives `exec`. So start
the child from the main thread. On other systems nothing happens. Processes started by the child are not
covered; those that train check for the launcher occasionally (`runtime.launcher`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

PR_SET_PDEATHSIG = 1


def end_with_us() -> Callable[[], None] | None:
    """For `Popen(preexec_fn=)`: send SIGTERM to the child when we end, so that it can save its state."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here, since little is safe between fork and exec
    parent = os.getpid()
    reset = callable(signal.getsignal(signal.SIGTERM))

    def attach() -> None:
        if reset:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as exec does, but before the signal can arrive
        prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # we were killed before prctl
            os._exit(128 + signal.SIGTERM)

    return attach
