"""What runs have learned about a program, in the user's cache: a file for each program and budget."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dtrrun.telemetry.private import open_private

FORMAT = 2
MOST = 200
"""How many files are kept: the most recently used."""
UNWRITTEN = "cannot keep what was learned about this program for the next run ({why})"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "dtrrun", "rules")


class Remembered:
    """The file of this program with this budget."""

    def __init__(self, budget_bytes: int, device: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        try:
            folder = os.getcwd()
        except OSError:  # it has been removed
            folder = ""
        program = [FORMAT, sys.orig_argv[1:], folder, budget_bytes, device, torch.__version__]
        program.append(os.environ.get("RANK", ""))
        digest = hashlib.sha256(json.dumps(program).encode()).hexdigest()
        self._path = cache_folder() / f"{digest[:32]}.json.gz"

    def read(self) -> dict[str, Any] | None:
        """Return what was kept, or None if nothing can be read."""
        try:
            found: dict[str, Any] = json.loads(gzip.decompress(self._path.read_bytes()))
        except (OSError, ValueError, EOFError, zlib.error):
            return None
        with suppress(OSError):  # the cache may be read-only
            os.utime(self._path)
        whole = isinstance(found, dict) and {"heuristic", "overhead", "steps", "costs"} <= found.keys()
        if not (whole and isinstance(found["overhead"], float) and isinstance(found["heuristic"], str)):
            return None
        return None if ":" in found["heuristic"] else found  # never import a module that a file names

    def forget(self) -> None:
        """Leave nothing for the next run."""
        with suppress(OSError):
            self._path.unlink()

    def write(self, found: dict[str, Any]) -> None:
        """Replace the file's content. Warn if that is impossible."""
        part = self._path.with_suffix(f".{os.getpid()}")
        content = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 6, mtime=0)
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.unlink(missing_ok=True)  # left by a killed process with the same id
            with open_private(part, "wb") as file:
                file.write(content)
            os.replace(part, self._path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            self._warn(UNWRITTEN.format(why=error.strerror))
        with suppress(OSError):  # other processes may be deleting the same files
            kept = sorted(self._path.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
            for path in kept[:-MOST]:
                path.unlink()
