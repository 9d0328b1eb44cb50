"""What dtrrun adds to operators that take a microsecond: `python -m tests.bench.arrivals`, from the root.

Prints a table of docs/design/native.md: in ns, the least of several runs, called from Python.
"""

import os
import subprocess
import sys
import time

import torch

import dtrrun
from tests.bench.runs import ROOT
from tests.bench.section import row

PROCESSES, ROUNDS, CALLS = 4, 60, 400
NAMES = "without dtrrun", "in a session", "after it"
x, y = torch.rand(4, 4), torch.rand(4, 4)
OPERATORS = {
    "add": lambda: x + y,
    "mm": lambda: x @ y,
    "view": lambda: x.view(16),
    "zeros": lambda: torch.zeros(4, 4),
    "empty": lambda: torch.empty(4, 4),
    "ones_like": lambda: torch.ones_like(x),
    "to": lambda: x.to(torch.float64),
}


def measured() -> str:
    """Return a line with the least time of each operator, in ns."""
    least = dict.fromkeys(OPERATORS, float("inf"))
    for _ in range(ROUNDS):
        for name, call in OPERATORS.items():
            began = time.perf_counter_ns()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter_ns() - began) / CALLS)
    return " ".join(f"{ns:.0f}" for ns in least.values())


def in_child() -> list[list[int]]:
    """Measure in a child process, which must not have had a session; return its lines of figures."""
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.bench.arrivals", "child"]
    output = subprocess.check_output(command, text=True, env=environ, cwd=ROOT)
    return [[int(ns) for ns in line.split()] for line in output.splitlines()]


def main() -> None:
    runs = [in_child() for _ in range(PROCESSES)]
    print(row(["", *(f"`{name}`" for name in OPERATORS)]))
    print("|---" + "|---:" * len(OPERATORS) + "|")
    for name, lines in zip(NAMES, zip(*runs, strict=True), strict=True):
        print(row([name, *(f"{min(column):,}" for column in zip(*lines, strict=True))]))


def before_inside_and_after() -> None:
    torch.set_num_threads(1)
    print(measured())
    with dtrrun.budget("1GB", device="cpu"):
        print(measured())
    print(measured())


if __name__ == "__main__":
    before_inside_and_after() if sys.argv[1:] == ["child"] else main()
