"""Our own lines on stderr: the script's standard output is its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
    """For writing to stderr: where it is a pipe that nobody reads any more, that is no error of the run."""
    try:
        yield
    except BrokenPipeError:
        # What is left in the buffer would fail again when the interpreter ends.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
