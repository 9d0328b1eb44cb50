"""The launcher's description of a run, in the run's private folder of records, for observers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrrun.telemetry.private import write_private
from dtrrun.telemetry.record import Snapshot, read_all

ABOUT = "run.json"
ELSEWHERE = "elsewhere.json"
"""What the runtime has learned from another node."""


@dataclass(frozen=True)
class Run:
    """pid: of the command `dtrrun`; start: in seconds since the epoch."""

    pid: int
    command: list[str]
    start: float
    snapshots: list[Snapshot]


def announce(folder: str, command: Sequence[str], start: float) -> None:
    """Write what `read_run` needs to our own folder."""
    about = {"pid": os.getpid(), "command": list(command), "start": start}
    write_private(os.path.join(folder, ABOUT), json.dumps(about))


def tell_of_another_node(folder: str, rank: str, world: str) -> None:
    """Write that the budget of a rank on another node was too small. Raises OSError."""
    write_private(os.path.join(folder, ELSEWHERE), json.dumps({"rank": rank, "world": world}))


def told_of_another_node(folder: str) -> dict[str, str]:
    """Return the rank and the world that `tell_of_another_node` was given; empty if nothing was told."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(Path(folder, ELSEWHERE).read_text())
        return {name: str(told[name]) for name in ("rank", "world")}
    return {}


def read_run(folder: str) -> Run | None:
    """Return the run with this folder of records; None if there is none or it belongs to another user."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        if os.stat(folder).st_uid != os.getuid():
            return None
        about: dict[str, Any] = json.loads(Path(folder, ABOUT).read_text())
        command = [str(word) for word in about["command"]]
        return Run(int(about["pid"]), command, float(about["start"]), read_all(folder))
    return None
