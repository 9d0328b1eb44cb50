"""Describes the PyTorch of the interpreter that would run the target, without importing torch here."""

from __future__ import annotations

import json
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
PROBE = PACKAGE / "runtime" / "probe.py"
EXTENSIONS = PACKAGE / "extensions"
MARK = "dtrrun-probe:"
SECONDS = 120.0
"""For importing torch and creating a context, on a slow disk."""


@contextmanager
def probed(python: str, device: str, seconds: float = SECONDS) -> Iterator[dict[str, Any]]:
    """Context with the result of `runtime/probe.py`, which holds its context on the GPU meanwhile.

    On failure the dict contains only `error`, the reason.
    """
    try:
        # As text: dtrrun may not be installed there, and an additional folder on its path could shadow
        # modules.
        child = subprocess.Popen(
            [python, "-c", PROBE.read_text(), device, str(EXTENSIONS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        yield {"error": f"{python} cannot be run: {error.strerror}"}
        return
    timer = threading.Timer(seconds, child.kill)
    timer.start()
    try:
        yield _answer(child, python, seconds)
    finally:
        timer.cancel()
        with suppress(subprocess.TimeoutExpired, OSError):
            child.communicate(timeout=10)  # closes its standard input
        child.kill()
        child.communicate()


def _answer(child: subprocess.Popen[str], python: str, seconds: float) -> dict[str, Any]:
    assert child.stdout is not None
    said = deque[str](maxlen=1)
    for line in child.stdout:  # a sitecustomize may print something first
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
        if line.strip():
            said.append(line.strip())
    child.wait()
    if child.returncode == -9:
        return {"error": f"{python} did not answer within {seconds:.0f} s"}
    return {"error": f"{python} ended with {child.returncode}: {said[-1] if said else 'it printed nothing'}"}
