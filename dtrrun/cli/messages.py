"""dtrrun's own lines on stderr. Standard output belongs to the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.views.text import plain

LONGEST = 4000


def say(message: str) -> None:
    """Print one line, prefixed with our name."""
    with if_someone_reads():
        print(as_line(message), file=sys.stderr, flush=True)


def as_line(message: str) -> str:
    """Return one line with our name, without anything that a terminal would interpret as a command."""
    return plain(" ".join(f"dtrrun: {message}".split()), LONGEST)


def show_tail(tail: str) -> None:
    """Show the last captured output of a program, unchanged, before our own lines."""
    with if_someone_reads():
        sys.stderr.write(tail if not tail or tail.endswith("\n") else f"{tail}\n")
        sys.stderr.flush()


def program_failed(what: str, tail: str, absent: str | None) -> None:
    """Show the program's last output, and say how it failed, and why if that is known.

    absent: why it never ran under dtrrun.
    """
    show_tail(tail)
    why = absent or ("see above" if tail else "")
    say(f"error: the program {what}{why and ': '}{why}")


@contextmanager
def if_someone_reads() -> Iterator[None]:
    """For writing to stderr: failures are ignored, since they can't be reported, and the run continues."""
    try:
        yield
    except OSError:
        discard(2)


@contextmanager
def to_stdout() -> Iterator[None]:
    """For writing to stdout: a closed pipe (`| head`) is no error, and the verb continues.

    Raises LaunchError if writing fails for another reason.
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
    """Redirect further output to /dev/null.

    Otherwise flushing the rest of Python's buffer would fail again at interpreter exit.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
