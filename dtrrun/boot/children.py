"""Starts the runtime again in children forked by `multiprocessing`, unless they are helpers.

The runtime ends in every forked child, since it does not know the child's memory and threads. But a child of
`multiprocessing` (start methods fork and forkserver) may train, and would do so without a budget.
`multiprocessing` calls functions registered with `register_after_fork` in its children before their own work
begins: available since 2.6, undocumented, and used by its own queues and locks. A child of a direct call of
`os.fork` has no budget.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import util

from dtrrun.boot.helpers import is_helper
from dtrrun.boot.path._dtrrun_hook import fail, mark


def watch(activate: Callable[[], None], finish: Callable[[], None]) -> None:
    """From now on, call `activate` at the start of each such child process, and `finish` at its end."""

    def start(_: object) -> None:
        if is_helper(getattr(multiprocessing.current_process(), "_target", None)):
            return
        if multiprocessing.current_process().daemon:
            mark("daemons", f"{os.getpid()}\n")
        try:
            activate()
        except Exception as error:  # multiprocessing would swallow it
            fail(f"{type(error).__name__}: {error}")
        util.Finalize(None, finish, exitpriority=0)  # these children exit without atexit (before 3.13)

    util.register_after_fork(start, start)  # the first is held weakly, the second strongly
