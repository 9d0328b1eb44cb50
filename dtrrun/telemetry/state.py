"""Digests of the training state at the end of the last step: a JSON file per process (`dtrrun smoke`)."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TypedDict

from dtrrun.telemetry.private import write_private

SUFFIX = ".state"


class State(TypedDict):
    """step: number of completed steps. digests: by the name of the tensor or value."""

    step: int
    digests: dict[str, str]


def write_state(record_dir: str, pid: int, state: State) -> None:
    """Replace the state written by process `pid`. Raises OSError."""
    write_private(_path(record_dir, pid), json.dumps(state))


def read_state(record_dir: str, pid: int) -> State | None:
    """Return the last state of process `pid`, or None."""
    with suppress(OSError, ValueError, KeyError, TypeError), open(_path(record_dir, pid)) as file:
        state = json.load(file)
        return {"step": int(state["step"]), "digests": dict(state["digests"])}
    return None


def _path(record_dir: str, pid: int) -> str:
    return os.path.join(record_dir, f"{pid}{SUFFIX}")
