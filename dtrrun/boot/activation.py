"""Starts the runtime in a process of the target once torch has been imported."""

from __future__ import annotations

import dataclasses
import os

from dtrrun.boot import children, dynamo, helpers
from dtrrun.boot.path._dtrrun_hook import fail
from dtrrun.settings import RuntimeSettings


def activate() -> None:
    """Start the runtime here, and prepare to start it in child processes. An error ends the process."""
    from dtrrun import runtime

    if why := runtime.unsupported():
        fail(why)
    _start()
    dynamo.put_off()
    helpers.watch(runtime.deactivate)
    children.watch(_start, lambda: runtime.finish(os.getpid()))


def _start() -> None:
    """Start the runtime once per process: this is called twice in a spawned child, once in a forked one."""
    from dtrrun import runtime

    global _started_in
    if _started_in == os.getpid():
        return
    _started_in = os.getpid()
    settings = RuntimeSettings.from_environment()
    if settings is None:  # the program removed it from its environment
        return
    if settings.record_dir is not None and not os.path.isdir(settings.record_dir):
        settings = dataclasses.replace(settings, record_dir=None)  # the launcher has ended
    try:
        runtime.activate(settings)
    except runtime.CannotBuild as error:
        fail(str(error))


_started_in: int | None = None
