"""Our own lines on stderr: the script's standard output is its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.views.text import plain

LONGEST = 4000


def say(message: str) -> None:
    """One line, with our name before it."""
    with if_someone_reads():
        print(as_line(message), file=sys.stderr, flush=True)


def as_line(message: str) -> str:
    """Without line ends, and without what a terminal would take for a command."""
    return plain(" ".join(f"dtrrun: {message}".split()), LONGEST)


def show_tail(tail: str) -> None:
    """What a program whose output was kept back wrote last, as it wrote it, before our own lines."""
    with if_someone_reads():
        sys.stderr.write(tail if not tail or tail.endswith("\n") else f"{tail}\n")
        sys.stderr.flush()


@contextmanager
def if_someone_reads() -> Iterator[None]:
    """For writing to stderr: where that fails there is nowhere left to say so, and the run goes on."""
    try:
        yield
    except OSError:
        discard(2)


@contextmanager
def to_stdout() -> Iterator[None]:
    """For writing to stdout: `| head` reads as much as it wants, and the verb still does its work.

    Raises LaunchError where it cannot be written for another reason.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(1)
    except OSError as error:
        discard(1)
        raise LaunchError(f"standard output cannot be written: {error.strerror}", FAILED) from None


def discard(descriptor: int) -> None:
    """Send what else is written there nowhere.

    What is left in Python's buffer would otherwise fail once more when the interpreter ends.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
