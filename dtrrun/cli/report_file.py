"""Files of results (`--json`, `--html`, `--trace`), checked to be writable before the target starts."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dtrrun.cli.messages import say, to_stdout
from dtrrun.launch.errors import FAILED, LaunchError

NUMBERS = re.compile(r"\[\n[-+\d.eE,\s]*\n\s*\]")
"""A list of numbers over several lines; never matches in a string, since JSON allows no line ends there."""


def refuse_one_path_twice(paths: Mapping[str, str | None]) -> None:
    """Raise LaunchError if two options (by their names) would overwrite each other's file."""
    taken: dict[str, str] = {}
    for option, path in paths.items():
        if path is None or (path != "-" and os.path.exists(path) and not os.path.isfile(path)):
            continue  # two options may both write to /dev/null
        place = path if path == "-" else os.path.realpath(path)
        if place in taken:
            name = "standard output" if path == "-" else path
            raise LaunchError(f"{taken[place]} and {option} both write to {name}")
        taken[place] = option


def check_writable(path: Path) -> None:
    """Raise LaunchError if no file can be written there. Missing folders will be created."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        there = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise LaunchError(f"{path} cannot be written: {error.strerror}", FAILED) from None


def write_each(writes: Mapping[str, Callable[[], object]]) -> list[str]:
    """Run all of `writes`, named by the option that requested each. Returns the names of those that failed.

    Each failure is reported in one line on stderr; the others still run.
    """
    failed: list[str] = []
    for option, write in writes.items():
        try:
            write()
            continue
        except LaunchError as error:
            said = str(error)
        except OSError as error:
            said = f"{option} cannot be written: {error.strerror}"
        except Exception as error:
            if os.environ.get("DTRRUN_DEBUG"):
                raise
            said = f"{option}: {type(error).__name__}: {error} (DTRRUN_DEBUG=1 shows where)"
        say(f"error: {said}")
        failed.append(option)
    return failed


@contextmanager
def report_writer(path: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield a function that writes a report as JSON (`--json`); see `file_writer`."""
    with file_writer(path, "--json") as write:
        yield lambda report: write([_encoded(report)] if path is not None else [])


@contextmanager
def file_writer(path: str | None, option: str) -> Iterator[Callable[[Iterable[bytes]], None]]:
    """Yield a function that writes pieces to `path`: a file (mode 0600 if new), `-` for stdout, or none.

    A file is opened immediately, and keeps its old content until something is written. A new file that is
    never written is removed. Raises LaunchError, which names `option`, if it cannot be written.
    """
    if path is None:
        yield lambda pieces: None
    elif path == "-":
        yield lambda pieces: _write(sys.stdout.fileno(), pieces, "standard output", option)
    else:
        new = not os.path.lexists(path)
        try:
            # Do not block silently on a pipe without a reader.
            flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            descriptor = os.open(path, flags, 0o600)
            os.set_blocking(descriptor, True)
        except OSError as error:
            unread = error.errno == errno.ENXIO and stat.S_ISFIFO(os.stat(path).st_mode)
            why = "no process reads this pipe" if unread else error.strerror
            raise LaunchError(f"{option}: {path or repr(path)} cannot be written: {why}") from None
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
    """Encode as JSON, with each list of numbers on one line: a timeline has thousands."""
    text = json.dumps(report, indent=2)
    return (NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n").encode()


def _write(descriptor: int, pieces: Iterable[bytes], name: str, option: str) -> None:
    try:
        if name == "standard output":
            with to_stdout():
                _write_pieces(descriptor, pieces)
            return
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.ftruncate(descriptor, 0)
        _write_pieces(descriptor, pieces)
    except OSError as error:
        raise LaunchError(f"{option}: {name} cannot be written: {error.strerror}", FAILED) from None


def _write_pieces(descriptor: int, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        data = memoryview(piece)
        while data:
            data = data[os.write(descriptor, data) :]
