"""The file of frozen decisions: what it contains, and how it is made.

An entry has the decisions in a program, and a digest of the operators that it calls without dtrrun. If both
differ from the file's, the program itself differs on this machine: PyTorch may choose operators by the CPU.
Nothing follows then. If only the decisions differ, dtrrun decides otherwise than when the file was made.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.decisions import runs

PATH = Path(__file__).parent / "frozen.json"


def version() -> str:
    """Return PyTorch's version, without the build suffix."""
    return torch.__version__.partition("+")[0]


def read() -> dict[str, Any]:
    """Return the content of the file."""
    found: dict[str, Any] = json.loads(PATH.read_text())
    return found


def write(frozen: dict[str, Any]) -> None:
    """Write the file, sorted."""
    PATH.write_text(json.dumps(frozen, indent=1, sort_keys=True) + "\n")


def budgets(peak_bytes: int) -> list[tuple[str, str, int]]:
    """Return the runs of an example: each one's name in the file, its heuristic, its budget in bytes."""
    found = [(share, heuristic) for share in runs.SHARES for heuristic in runs.HEURISTICS]
    found += [(runs.SHARES[1], heuristic) for heuristic in runs.OTHERS]
    return [(f"{share}% {heuristic}", heuristic, peak_bytes * share // 100) for share, heuristic in found]


def example(name: str) -> dict[str, Any]:
    """Run an example, and return its entry."""
    peak_bytes = runs.apart(runs.peak_of, name)
    decisions = {
        called: runs.apart(runs.decisions_of, name, heuristic, budget_bytes)
        for called, heuristic, budget_bytes in budgets(peak_bytes)
    }
    operators = runs.apart(runs.operators_of, name)
    return {"operators": operators, "peak_bytes": peak_bytes, "decisions": decisions}


def block(number: int) -> dict[str, str]:
    """Run a block of programs, and return its entry."""
    return {
        "operators": runs.apart(runs.operators_in_block, number),
        "decisions": runs.apart(runs.decisions_in_block, number),
    }
