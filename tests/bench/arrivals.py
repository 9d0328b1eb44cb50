"""What dtrrun adds to operators that take a microsecond: `python -m tests.bench.arrivals`, from the root.

Prints a table of docs/design/native.md: in ns, the least of several alternating runs, called from Python.
"""

import os
import subprocess
import sys
import time
from collections import defaultdict

import torch

import dtrrun
from dtrrun.native import ways_in
from tests.bench.runs import ROOT
from tests.bench.section import row

PROCESSES, ROUNDS, CALLS = 4, 60, 400
WAYS = (ways_in.FAKE, ways_in.CUSTOM_RNG)
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


def in_child(way: str) -> list[list[int]]:
    """Measure in a child process, since a process can take only one way in; return its lines of figures."""
    environ = os.environ | {ways_in.VARIABLE: way, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.bench.arrivals", "child"]
    output = subprocess.check_output(command, text=True, env=environ, cwd=ROOT)
    return [[int(ns) for ns in line.split()] for line in output.splitlines()]


def main() -> None:
    runs: dict[str, list[list[int]]] = defaultdict(list)
    for _ in range(PROCESSES):
        for way in WAYS:
            before, inside, after = in_child(way)
            runs["without dtrrun"].append(before)
            runs[f"in a session, `{way}`"].append(inside)
            runs[f"after it, `{way}`"].append(after)
    print(row(["", *(f"`{name}`" for name in OPERATORS)]))
    print("|---" + "|---:" * len(OPERATORS) + "|")
    for name in sorted(runs, key=lambda name: "wia".index(name[0])):  # without, in, after
        print(row([name, *(f"{min(column):,}" for column in zip(*runs[name], strict=True))]))


def before_inside_and_after() -> None:
    torch.set_num_threads(1)
    print(measured())
    with dtrrun.budget("1GB", device="cpu"):
        print(measured())
    print(measured())


if __name__ == "__main__":
    before_inside_and_after() if sys.argv[1:] == ["child"] else main()
