"""Judges units (an operator, a module, an optimizer) whose names arrive line by line on standard input.

Answers each with lines of JSON: its progress ("at"), and finally the outcome of the unit. If this process
dies, the reader knows at which case.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import warnings
from typing import Any

from tests.database.judge import EQUAL, RANK, judge


def main() -> None:
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of the samples must not mix with the answers
    for line in sys.stdin:
        kind, name = line.rstrip().split(" ", 1)
        database = importlib.import_module(f"tests.database.{kind}")
        gc.collect()
        gc.freeze()  # the databases, which each collection would otherwise traverse

        def tell(**facts: Any) -> None:
            print(json.dumps(facts), file=answers)

        tell(**unit(database, name, tell))


def unit(database: Any, name: str, tell: Any) -> dict[str, Any]:
    """Return the worst status over all cases of one unit, with the reasons for it."""
    started = time.monotonic()
    counts: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    evicted = 0
    verdict_on = getattr(database, "judge", judge)  # contexts have their own
    for case in database.cases(name):
        tell(at=case.name)
        verdict = verdict_on(case)
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
        evicted += verdict.evicted
        if verdict.reasons:
            found.setdefault(verdict.status, []).append(f"{case.name}: {'; '.join(verdict.reasons)}")
    status = max(counts, key=RANK.index, default=EQUAL)
    return {
        "name": name,
        "status": status,
        "cases": counts,
        "evicted": evicted,
        "reasons": found.get(status, []),
        "seconds": round(time.monotonic() - started, 2),
    }


if __name__ == "__main__":
    main()
