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

TAIL_BYTES = 4096
TICK_SECONDS = 0.1
GRACE_SECONDS = 3.0  # between SIGTERM and SIGKILL


class Captured(NamedTuple):
    """How it ended. returncode: negative signal number if a signal ended it. tail: the end of its output."""

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

    `attend` is called repeatedly meanwhile. Ctrl-C at the terminal reaches only us: it ends the command, as
    any other exception does, and is re-raised. Raises LaunchError if the command cannot be started.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = start(
            command,
            environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            while (status := _wait(child)) is None:
                attend()
                if time.monotonic() - started > patience:
                    timed_out = True
                    end(child)
        except BaseException:
            end(child)
            raise
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)  # processes that it left running
        return Captured(status, time.monotonic() - started, _tail(output), timed_out)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(TICK_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its children: SIGTERM, then SIGKILL."""
    for number, grace in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace)
            if number == signal.SIGKILL:
                return


def _tail(output: IO[bytes]) -> str:
    length = output.seek(0, os.SEEK_END)
    output.seek(max(length - TAIL_BYTES, 0))
    return output.read().decode(errors="replace")
