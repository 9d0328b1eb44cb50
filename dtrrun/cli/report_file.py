"""Where `--json` writes the report: found to be writable before the target starts, not hours later."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from dtrrun.launch.errors import FAILED, LaunchError


@contextmanager
def report_writer(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A function that writes a report to `path`: a file (mode 0600 if new), `-` for standard output, or
    nowhere.

    A file is opened at once, and keeps its old content until the report is written; one that we made and
    never wrote is removed. Raises LaunchError where it cannot be written.
    """
    if path is None:
        yield lambda report: None
    elif path == "-":
        yield lambda report: _write(sys.stdout.fileno(), report, "standard output")
    else:
        new = not os.path.lexists(path)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise LaunchError(f"--json: {path} cannot be written: {error.strerror}") from None
        written = False

        def write(report: dict[str, Any]) -> None:
            nonlocal written
            _write(descriptor, report, path)
            written = True

        try:
            yield write
        finally:
            os.close(descriptor)
            if new and not written:
                with suppress(OSError):
                    os.unlink(path)


def _write(descriptor: int, report: dict[str, Any], name: str) -> None:
    data = memoryview((json.dumps(report, indent=2) + "\n").encode())
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode) and name != "standard output":
            os.ftruncate(descriptor, 0)
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError as error:
        raise LaunchError(f"--json: {name} cannot be written: {error.strerror}", FAILED) from None
