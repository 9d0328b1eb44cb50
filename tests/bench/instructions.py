"""How many instructions dtrrun adds to a step: `python -m tests.bench.instructions [PROGRAM…]`.

Unlike times, they are the same on a busy machine, to a few in a thousand. Needs valgrind, which counts them,
and takes some minutes for each program. Programs are `cells_of_lstm`, of `host_bound`, and the ten of
`small_operators`; without any, all are counted. Each row is one step, without Python's garbage collector,
after eight of a session. Inside 60 % of the peak, the heuristic is h_dtr_eq.
"""

import contextlib
import gc
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console

import dtrrun
from tests.bench.host_bound import AMPLE, COUNTED, FULL, SHARE, ample, in_full, training
from tests.bench.section import Section
from tests.bench.small_operators import PROGRAMS

WARM = 8
PLAIN, TIGHT = "plain", f"{SHARE:.0%} of the peak"
BY_NAME: dict[str, Callable[[], Callable[[], object]]] = {
    "cells_of_lstm": training,
    **{program.__name__: program for program in PROGRAMS},
}
WAYS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    PLAIN: lambda program: contextlib.nullcontext(),
    COUNTED: lambda program: dtrrun.budget(None, device="cpu"),
    AMPLE: lambda program: ample(),
    FULL: lambda program: in_full(),
    TIGHT: lambda program: dtrrun.budget(int(peak_of(program) * SHARE), device="cpu", heuristic="h_dtr_eq"),
}
COMMAND = ("valgrind", "--tool=callgrind", "--instr-atstart=no", "--callgrind-out-file=/dev/null")


def peak_of(program: Callable[[], Callable[[], object]]) -> int:
    torch.manual_seed(0)
    with dtrrun.budget(None, device="cpu") as session:
        step = program()
        for _ in range(3):
            step()
    return int(session.report()["peak_bytes"])


def take_steps(name: str, way: str) -> None:
    """Run as a process under valgrind, which counts during the last step alone."""
    program = BY_NAME[name]
    context = WAYS[way](program)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step = program()
    with context:
        for _ in range(WARM):
            step()
        gc.collect()
        gc.disable()
        step()
        for state in "on", "off":
            subprocess.run(
                ["callgrind_control", f"--instr={state}", str(os.getpid())],
                stdout=subprocess.DEVNULL,
                check=True,
            )
            if state == "on":
                step()


def instructions_of(name: str, way: str) -> int | None:
    """Return the instructions of a step; None if the program does not run that way."""
    command = [*COMMAND, sys.executable, "-m", "tests.bench.instructions", "--counted", name, way]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        print(f"{name}, {way}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    found = re.search(r"I\s+refs:\s+([\d,]+)", done.stderr)
    assert found is not None, done.stderr
    return int(found[1].replace(",", ""))


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in BY_NAME]:
        sys.exit(f"no such program: {', '.join(unknown)}; there are {', '.join(BY_NAME)}")
    headers = ["Program", "plain, M", "counted", "ample", "in full", TIGHT]
    table = Section("Instructions of a step, and times as many", "", headers)
    for name in names or BY_NAME:
        plain, *others = (instructions_of(name, way) for way in WAYS)
        assert plain is not None
        ratios = ["–" if other is None else f"{other / plain:.3f}" for other in others]
        table.rows.append([name, f"{plain / 1e6:.1f}", *ratios])
    table.print(Console())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--counted"]:
        take_steps(*sys.argv[2:])
    else:
        main(sys.argv[1:])
