"""Files of results (`--json`, `--html`, `--trace`): found to be writable before the target starts."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dtrrun.launch.errors import FAILED, LaunchError

NUMBERS = re.compile(r"\[\n[-+\d.eE,\s]*\n\s*\]")
"""A list of numbers over several lines; never inside a string, where JSON has no line ends."""


@contextmanager
def report_writer(path: str | None, option: str = "--json") -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a report as JSON; see `file_writer`."""
    with file_writer(path, option) as write:
        yield lambda report: write([_encoded(report)] if path is not None else [])


@contextmanager
def file_writer(path: str | None, option: str) -> Iterator[Callable[[Iterable[bytes]], None]]:
    """A function that writes pieces to `path`: a file (mode 0600 if new), `-` for standard output, or none.

    A file is opened at once, and keeps its old content until something is written; one that we made and
    never wrote is removed. Raises LaunchError, which names `option`, where it cannot be written.
    """
    if path is None:
        yield lambda pieces: None
    elif path == "-":
        yield lambda pieces: _write(sys.stdout.fileno(), pieces, "standard output", option)
    else:
        new = not os.path.lexists(path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"{option}: {path} cannot be written: {error.strerror}") from None
        written = False

        def write(pieces: Iterable[bytes]) -> None:
            nonlocal written
            _write(descriptor, pieces, path, option)
            written = True

        try:
            yield write
        finally:
            os.close(descriptor)
            if new and not written:
                with suppress(OSError):
                    os.unlink(path)


def _encoded(report: dict[str, Any]) -> bytes:
    """With each list of numbers on a line of its own: a timeline has thousands."""
    text = json.dumps(report, indent=2)
    return (NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n").encode()


def _write(descriptor: int, pieces: Iterable[bytes], name: str, option: str) -> None:
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and name != "standard output":
            os.ftruncate(descriptor, 0)
        for piece in pieces:
            data = memoryview(piece)
            while data:
                data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise LaunchError(f"{option}: {name} cannot be written: {error.strerror}", FAILED) from None
