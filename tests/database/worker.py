"""Judges units (an operator, a module, an optimizer) whose names come line by line on standard input.

Answers each with lines of JSON: where it is ("at"), and at last what came of the unit. Whoever reads them
knows, should this process die, what it died of.
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
    os.dup2(2, 1)  # what the samples print is no answer
    for line in sys.stdin:
        kind, name = line.rstrip().split(" ", 1)
        database = importlib.import_module(f"tests.database.{kind}")
        gc.collect()
        gc.freeze()  # the databases: each collection would go through all of them

        def tell(**facts: Any) -> None:
            print(json.dumps(facts), file=answers)

        tell(**unit(database, name, tell))


def unit(database: Any, name: str, tell: Any) -> dict[str, Any]:
    """The worst status over all cases of one unit, with the reasons for it."""
    started = time.monotonic()
    counts: dict[str, int] = {}
    found: dict[str, list[str]] = {}
    evicted = 0
    verdict_on = getattr(database, "judge", judge)  # those in contexts have rules of their own
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
