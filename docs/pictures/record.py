"""Real runs of an example: what pictures are made from.

Kept as runs.json, for the tables and the time, and as the trace that Perfetto shows.

`python docs/pictures/record.py`. Takes some minutes, and gives other figures each time. While the first run
is under way its records are read from outside, as `dtrrun top` does.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtrrun.launch.running import find
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.rates import KEPT_NS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / "runs.json"
TRACE = ROOT / "tests" / "pictures" / "trace.json.gz"
SCRIPT = "docs/examples/transformer.py"
BUDGET, BUDGETS = "210MB", ("420MB", "336MB", "252MB", "210MB", "168MB", "126MB")
STEPS, SEEN = "8", 6
"""Steps of the run that is shown, and how many are over at the moment of the picture."""
OF_PROCESS = ("pid", "rank", "start", "torch", "device", "heuristic")
EVERY = 0.5
"""Seconds between two looks."""


def main() -> None:
    shown = watched("--budget", BUDGET, SCRIPT, "--steps", STEPS)
    times = [reported("--budget", size, SCRIPT, "--steps", "6") for size in BUDGETS]
    KEPT.write_text(json.dumps({"shown": shown, "times": times}, indent=0) + "\n")
    TRACE.write_bytes(gzip.compress(traced("--budget", BUDGET, "--where", SCRIPT, "--steps", "3"), mtime=0))


def watched(*words: str) -> dict[str, Any]:
    """The command, what it had written and the newest records after SEEN steps, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        with output.open("w") as stream:
            command = [sys.executable, "-m", "dtrrun", "--json", str(report), *words]
            process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=ROOT)
        seen: list[Snapshot] = []
        lines: list[str] = []
        while process.poll() is None:
            before = output.read_text().splitlines()
            found = next((run.snapshots[0] for run in find() if run.pid == process.pid), None)
            if found is not None and found.counters["steps"] <= SEEN:
                seen.append(found)
                lines = before
            time.sleep(EVERY)
        if process.returncode or not seen:
            raise SystemExit(f"{words} ended with {process.returncode}: {output.read_text()}")
        told = json.loads(report.read_text())
    newest = seen[-1]
    recent = [one for one in seen if newest.read_ns - one.read_ns <= KEPT_NS]
    told["command"] = ["dtrrun", *words]
    for process_told in told["processes"]:
        process_told["argv"] = [SCRIPT]
    return {
        "command": ["dtrrun", *words],
        "output": lines,
        "snapshots": [*(kept(one, {}) for one in recent[:-1]), kept(newest, newest.tables)],
        "report": told,
    }


def reported(*words: str) -> dict[str, Any]:
    """Budget, peak and seconds by part of a run's report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [sys.executable, "-m", "dtrrun", "--quiet", "--json", str(report), *words]
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, check=True)
        found = json.loads(report.read_text())
    return {key: found[key] for key in ("budget_bytes", "peak_bytes", "steps", "seconds")}


def traced(*words: str) -> bytes:
    """A run's trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        command = [sys.executable, "-m", "dtrrun", "--quiet", "--trace", str(trace), *words]
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, check=True)
        return trace.read_bytes().replace(json.dumps(sys.executable).encode(), b'"python"')


def kept(snapshot: Snapshot, tables: dict[str, Any]) -> dict[str, Any]:
    """Without what only the machine of the recording has."""
    meta = {key: value for key, value in snapshot.meta.items() if key in OF_PROCESS}
    return asdict(replace(snapshot, meta=meta, tables=tables))


if __name__ == "__main__":
    main()
