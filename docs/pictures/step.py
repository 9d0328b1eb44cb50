"""Memory over one step of an example: `python docs/pictures/step.py BUDGET SCRIPT ARGUMENTS...`.

Without a budget where BUDGET is "none". Writes JSON: milliseconds of processor time since the step began, and
the bytes of tensor memory then. Processor time, because other programs may keep the machine busy.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
import time
from itertools import pairwise

from torch.optim.optimizer import register_optimizer_step_post_hook

import dtrrun

FIRST = 3
"""Of this step and those after it, the median one is kept: by then operators have been measured."""
EVERY, MOST = 0.001, 150
"""Seconds between two readings, and how many pairs of a least and a greatest one are kept."""


def main(budget: str, *words: str) -> None:
    readings: list[tuple[int, int]] = []
    ends: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.wait(EVERY):
            readings.append((time.process_time_ns(), session.ledger.resident_bytes))

    register_optimizer_step_post_hook(lambda *_: ends.append(time.process_time_ns()))
    sys.argv, out = list(words), sys.stdout
    sys.stdout = sys.stderr
    with dtrrun.budget(None if budget == "none" else budget, device="cpu", remember=False) as session:
        reader = threading.Thread(target=read)
        reader.start()
        try:
            runpy.run_path(words[0], run_name="__main__")
        finally:
            over.set()
            reader.join()
    steps = sorted(pairwise(ends[FIRST - 2 :]), key=lambda step: step[1] - step[0])
    begin, end = steps[len(steps) // 2]
    seen = [(at - begin, nbytes) for at, nbytes in readings if begin <= at <= end]
    json.dump({"budget": budget, "milliseconds": (end - begin) / 1e6, "bytes": thinned(seen)}, out)


def thinned(seen: list[tuple[int, int]]) -> list[tuple[float, int]]:
    """The least and the greatest reading of each stretch of time, so that no peak is lost."""
    size = -(-len(seen) // MOST)
    kept = set[tuple[int, int]]()
    for first in range(0, len(seen), size):
        stretch = seen[first : first + size]
        kept |= {min(stretch, key=lambda one: one[1]), max(stretch, key=lambda one: one[1])}
    return [(round(at / 1e6, 2), nbytes) for at, nbytes in sorted(kept)]


if __name__ == "__main__":
    main(*sys.argv[1:])
