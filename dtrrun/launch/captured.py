"""Runs a command with captured output, and ends it with everything that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, NamedTuple

from dtrrun.launch.process import start
from dtrrun.launch.signals import held_back

TAIL_BYTES = 4096
TICK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # after SIGTERM, and after SIGKILL


class Captured(NamedTuple):
    """How a command ended. returncode: negative signal number if one ended it. tail: last part of output."""

    returncode: int
    seconds: float
    tail: str
    timed_out: bool


def run_captured(
    command: Sequence[str],
    environment: Mapping[str, str],
    patience: float,
    attend: Callable[[], None] = lambda: None,
) -> Captured:
    """Run `command` without input, in its own session, for at most `patience` seconds.

    `attend` is called repeatedly meanwhile. Ctrl-C at the terminal reaches only us: it ends the command, as a
    termination request and any exception do, and takes effect here after that. Raises LaunchError if the
    command cannot be started.
    """
    started = time.monotonic()
    timed_out = False
    # An exception in the middle of Popen's work would leave an untracked child, or one of Popen's locks
    # held, on which we would then wait forever.
    with held_back() as requests, tempfile.TemporaryFile() as output:
        child = start(
            command,
            environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while _wait(child, TICK_SECONDS) is None and not requests:
                attend()
                if time.monotonic() - started > patience:
                    timed_out = True
                    end(child)
        finally:
            if child.returncode is None:
                end(child)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # processes that it left running
        tail = _tail(output)
    return Captured(child.returncode, time.monotonic() - started, tail, timed_out)


def _wait(child: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its children: SIGTERM, then SIGKILL.

    A process blocked in the kernel, for example on a device, ends only when it leaves the kernel: we do not
    wait for that.
    """
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        _wait(child, GRACE_SECONDS)


def _tail(output: IO[bytes]) -> str:
    length = output.seek(0, os.SEEK_END)
    output.seek(max(length - TAIL_BYTES, 0))
    return output.read().decode(errors="replace")
