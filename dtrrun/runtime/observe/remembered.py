"""What runs have learned about a program, in the user's cache: rules by budget, and peaks without one."""

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


def cache_folder(kind: str = "rules") -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "dtrrun", kind)


def _named(*facts: Any) -> str:
    """Return a name for this program, run in this folder, and for `facts`."""
    try:
        folder = os.getcwd()
    except OSError:  # it has been removed
        folder = ""
    program = [FORMAT, sys.orig_argv[1:], folder, *facts, torch.__version__]
    return hashlib.sha256(json.dumps(program).encode()).hexdigest()[:32]


def _first_rank() -> str:
    """Return the first of the ranks on this machine, whose rules the others follow; "" if this is none."""
    rank, local = (os.environ.get(name, "") for name in ("RANK", "LOCAL_RANK"))
    return str(int(rank) - int(local)) if rank.isdecimal() and local.isdecimal() else rank


def _replace(path: Path, content: bytes) -> None:
    """Write a file of the cache, and delete the oldest beside it. Raises OSError."""
    part = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        part.unlink(missing_ok=True)  # left by a killed process with the same id
        with open_private(part, "wb") as file:
            file.write(content)
        os.replace(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink()
        raise
    with suppress(OSError):  # other processes may be deleting the same files
        kept = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime_ns)
        for one in kept[:-MOST]:
            one.unlink()


class Remembered:
    """The file of this program with this budget."""

    def __init__(self, budget_bytes: int, device: str, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._path = cache_folder() / f"{_named(budget_bytes, device, _first_rank())}.json.gz"

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
        content = gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 6, mtime=0)
        try:
            _replace(self._path, content)
        except OSError as error:
            self._warn(UNWRITTEN.format(why=error.strerror))


class Peak:
    """The file with the peak that this program would have without a budget, as earlier runs have seen it.

    The program is known by its command line and by the contents of its script. If something else has changed,
    such as a module that it imports, the peak is not this program's, and whoever reads it must check that.
    """

    def __init__(self, device: str) -> None:
        script, rank = b"", os.environ.get("RANK", "")
        with suppress(OSError, IndexError):
            script = Path(sys.argv[0]).read_bytes()
        self._path = (
            cache_folder("peaks") / f"{_named(device, hashlib.sha256(script).hexdigest(), rank)}.json"
        )

    def read(self) -> int:
        """Return the bytes of tensors; 0 if unknown."""
        return self._read()[0]

    def write(self, nbytes: int, operators: int) -> None:
        """Keep the peak of a run with this many operators, unless a longer one has seen more."""
        before, longest = self._read()
        if (nbytes, operators) == (before, longest) or (nbytes < before and operators < longest):
            return
        with suppress(OSError):  # only advice depends on it
            _replace(self._path, json.dumps([nbytes, max(operators, longest)]).encode())

    def _read(self) -> tuple[int, int]:
        try:
            nbytes, operators = map(int, json.loads(self._path.read_bytes()))
        except (OSError, ValueError, TypeError):
            return 0, 0
        return nbytes, operators
