"""Starts the target, passes on signals, and waits for it."""

from __future__ import annotations

import errno
import subprocess
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtrrun.launch.attached import end_with_us
from dtrrun.launch.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError
from dtrrun.launch.signals import passed_on

Streams = Mapping[str, int | None]
"""`stdin`, `stdout` and `stderr` for the target: a descriptor, or None to inherit ours."""


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    streams: Streams | None = None,
    attend: Callable[[], None] | None = None,
    started: Callable[[Callable[[int], None]], None] | None = None,
) -> int:
    """Run `command` to its end. Returns its exit status, or the negative number of the signal that ended it.

    The target is in our process group. While it runs, `attend` is called repeatedly, and should return
    quickly. `started` is called once it runs, with a function that sends it a signal. Raises LaunchError if
    the command cannot be started (126, 127).
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrived while the child was being started

    def send(number: int) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    with passed_on(send, lambda: child is not None):
        # Inherited descriptors (from make, or a shell's pipe) are meant for the target, so leave them open.
        child = start(command, environment, close_fds=False, **(streams or {}))
        for number in early:
            child.send_signal(number)
        try:
            if started is not None:
                started(child.send_signal)
            while attend is not None and child.poll() is None:
                attend()
        except BaseException:
            child.terminate()  # otherwise it would be unattended
            raise
        return child.wait()


def start(command: Sequence[str], environment: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
    """Return a `Popen` of `command`, which ends if we are killed. Call it from the main thread.

    Raises LaunchError if it cannot be started (126, 127).
    """
    try:
        with warnings.catch_warnings():
            # Python 3.12 and later warn about forks in multithreaded processes. The child needs none of our
            # threads' locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            return subprocess.Popen(command, env=environment, preexec_fn=end_with_us(), **options)
    except FileNotFoundError:
        # The file was there a moment ago, so the interpreter in its first line is missing.
        raise LaunchError(
            f"{command[0]}: no such command, or no such interpreter in its #! line", NOT_FOUND
        ) from None
    except OSError as error:
        if error.errno == errno.E2BIG:
            raise LaunchError(
                "the target's arguments are longer than the system allows", NOT_EXECUTABLE
            ) from None
        raise LaunchError(f"{command[0]}: cannot be executed: {error.strerror}", NOT_EXECUTABLE) from None
