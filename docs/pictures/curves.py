"""The simulator's pictures: slowdown over budget, and the trace of a theorem.

`python docs/pictures/curves.py [ROWS.json]` draws them beside this file. ROWS are those of `dtrrun simulate
tests/logs --json`, of which what the picture shows is kept in curves.json; it takes minutes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dtrrun.research.figures.slowdown import draw_slowdown
from dtrrun.research.figures.theory import draw_linear_trace

HERE = Path(__file__).parent
KEPT = HERE / "curves.json"
SHOWN = ("log", "heuristic", "budget_ratio", "status", "overhead")


def main(folder: Path) -> None:
    kept, title = json.loads(KEPT.read_text()), "Slowdown by heuristic"
    draw_slowdown(kept["logs"], kept["rows"], lambda row: row["heuristic"], title, folder, "slowdown", "svg")
    draw_linear_trace("e_star", folder, "svg")


def keep(result: dict[str, Any]) -> None:
    rows = [{name: row[name] for name in SHOWN} for row in result["rows"]]
    logs = [{name: value for name, value in log.items() if name != "path"} for log in result["logs"]]
    KEPT.write_text(json.dumps({"logs": logs, "rows": rows}) + "\n")


if __name__ == "__main__":
    if sys.argv[1:]:
        keep(json.loads(Path(sys.argv[1]).read_text()))
    main(HERE)
