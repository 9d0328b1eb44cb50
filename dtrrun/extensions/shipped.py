"""Tries the binary that a wheel brings for this PyTorch, once for each installation, before it is loaded.

It was compiled against the same PyTorch sources, but perhaps for other libraries than are here, and a
mismatch may crash the process. So a child loads it first, and trains a small network with it
(`boot/trial.py`). The result is kept in the cache, or, if that cannot be written, in the run's folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from . import compiling

TRIAL = compiling.PACKAGE / "boot" / "trial.py"
WORKS = "works"
"""What a successful trial prints last, and what is then kept. A program that ignores SIGCHLD gets no exit
status, and a power cut may leave an empty file."""
TIME_LIMIT_SECONDS = 300.0
"""Mostly for importing torch, on a slow disk."""
UNFIT = "the binary that came with dtrrun does not work here ({})"
DAMAGED = "the binary that came with dtrrun is damaged"
OTHERS = "dtrrun came with binaries for PyTorch {} only"
OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGHUP)
"""Signals that others have sent to the child: they say nothing about the binary."""


def binary() -> Path | None:
    """Return the binary for this PyTorch and Python, or None."""
    if not torch._C._GLIBCXX_USE_CXX11_ABI or torch.version.debug:
        return None
    return next(iter(compiling.binaries(torch.version.git_version or "none").values()), None)


def why_not(binary: Path | None, folder: Path) -> str:
    """Return why there is no binary that can be used here; "" if there is, or if there are none at all.

    folder: where the result of a trial is kept.
    """
    if binary is None:
        others = ", ".join(sorted(compiling.binaries(), key=lambda one: [*map(int, one.split("."))]))
        return OTHERS.format(others) if others else ""
    digest = compiling.digest_of(binary)
    if digest is None:
        return DAMAGED
    name, run = _name(digest), os.environ.get("DTRRUN_RECORDS")
    places = [folder, *([Path(run)] if run else [])]
    why = _kept(places, name)
    if why is None:
        with _alone(places):
            why = _kept(places, name)  # another process may have tried meanwhile
            if why is None:
                why, is_certain = _try(binary)
                any(is_certain and _keep(why or WORKS, place, name) for place in places)
    return why


@contextmanager
def _alone(places: list[Path]) -> Iterator[None]:
    """Let only one process at a time in, if one of these folders can be written."""
    with ExitStack() as stack:
        for place in places:
            with suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(place / "trial.lock", "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                break
        yield


def _kept(places: list[Path], name: str) -> str | None:
    """Return the result of an earlier trial as `why_not` does, or None."""
    for place in places:
        with suppress(OSError, ValueError):
            text = (place / name).read_text()
            return "" if text == WORKS else text or None
    return None


def _name(digest: bytes) -> str:
    """Return the name of the result for a binary and this installation of PyTorch."""
    library = os.stat(torch._C.__file__)
    installation = (torch._C.__file__, library.st_size, library.st_mtime_ns)
    return f"trial-{hashlib.sha256(digest + repr(installation).encode()).hexdigest()[:16]}"


def _keep(text: str, place: Path, name: str) -> bool:
    """Write a file atomically. Return whether that was possible."""
    try:
        handle, unfinished = tempfile.mkstemp(prefix="unfinished-", dir=place)
        with open(handle, "w") as file:
            file.write(text)
        os.rename(unfinished, place / name)
    except OSError:
        return False
    return True


def _try(binary: Path) -> tuple[str, bool]:
    """Load the binary in a child; return ("", True) if it works, else why not and whether it is certain."""
    if not sys.executable or getattr(sys, "frozen", False):
        return UNFIT.format("there is no interpreter that could try it"), False
    dropped = ("DTRRUN_", "PYTHON")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    if "PYTHONHOME" in os.environ:
        environment["PYTHONHOME"] = os.environ["PYTHONHOME"]
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-SP",
                "-W",
                "ignore",
                str(TRIAL),
                str(binary),
                json.dumps([*map(os.fsdecode, sys.path)]),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_SECONDS,
            start_new_session=True,  # Ctrl-C is for this process, which then ends the child
        )
    except subprocess.TimeoutExpired:
        return UNFIT.format(f"a trial did not end within {TIME_LIMIT_SECONDS:g} seconds"), True
    except OSError as error:
        return UNFIT.format(f"it could not be tried: {error.strerror}"), False
    status = done.returncode
    if done.stdout.split()[-1:] == [WORKS]:
        return "", True
    said = done.stderr.strip().splitlines() or [f"exit status {status}"]
    if status < 0:
        said = [signal.strsignal(-status) or f"signal {-status}"]
    return UNFIT.format(f"in a trial: {said[-1].strip()}"), -status not in OUTSIDE
