"""The native extension evicts and recomputes what Python would, in random programs.

Whole rematerializations and the eviction loop exist twice (`dtrrun/native` and `dtrrun/core`).
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, note

from dtrrun.core.evict import Eviction
from dtrrun.core.rematerialize import Rematerializer
from tests.programs import drawing
from tests.programs.amount import NUMBER, search, seeded
from tests.programs.language import Program
from tests.programs.running import Conditions, compare, plain, settle

COUNTS = (
    "evictions",
    "evicted_bytes_total",
    "rematerializations",
    "rematerialized_bytes",
    "peak_bytes",
    "over_budget",
)
HEURISTICS = ("h_dtr_eq", "h_dtr_eq", "h_chain", "random")


def decisions(report: dict[str, Any]) -> dict[str, Any]:
    if report["error"]:  # while it is handled, its traceback keeps what the frames of Python code refer to
        return {"error": report["error"]["operator"]}
    return {name: report[name] for name in COUNTS}


@pytest.mark.skipif(os.environ.get("NATIVE") == "off", reason="there is nothing to compare")
def test_decisions_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    tally: Counter[str] = Counter()

    @search(max(NUMBER // 3, 1))
    @given(drawing.programs, drawing.conditions)
    def same(program: Program, conditions: Conditions) -> None:
        expected = plain(program)
        least = None
        for share in (None, conditions.share, 0.3):
            heuristic = HEURISTICS[len(program) % len(HEURISTICS)]
            one = conditions._replace(share=share, verify=False, copies=False, heuristic=heuristic)
            note(f"compare({program!r}, {one!r})")
            native = decisions(compare(program, one, expected, least))
            with monkeypatch.context() as patch:
                patch.setattr(Rematerializer, "_natively", lambda *_: False)
                patch.setattr(Eviction, "_natively", lambda *_: None)
                python = decisions(compare(program, one, expected, least))
            assert native == python
            least = native.get("peak_bytes") if least is None else least
            tally["compared"] += 1
            tally["errors"] += "error" in native
            tally["rematerialized"] += native.get("rematerializations", 0) > 0
            settle()

    gc.disable()  # when it frees cycles depends on how many objects have been made
    try:
        seeded(same)()
    finally:
        gc.enable()
    print(dict(tally))
    assert tally["rematerialized"] > tally["compared"] / 4
