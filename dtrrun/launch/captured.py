"""Run a command whose output is kept back, and end it with everything that it started."""

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
GRACE_SECONDS = 3.0  # between the request to end and the end


class Captured(NamedTuple):
    """How it ended. returncode: minus the number of the signal that ended it. tail: of what it wrote."""

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
    """Run `command` with no input, in a session of its own, for at most `patience` seconds.

    `attend` is called over and over meanwhile. A Ctrl-C at the terminal comes to us alone: this ends the
    command, as any other exception does, and goes on upwards. Raises LaunchError where it cannot be started.
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
            os.killpg(child.pid, signal.SIGKILL)  # what it left running
        return Captured(status, time.monotonic() - started, _tail(output), timed_out)


def _wait(child: subprocess.Popen[bytes]) -> int | None:
    try:
        return child.wait(TICK_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def end(child: subprocess.Popen[bytes]) -> None:
    """End the child and its children: by request, then by force."""
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
