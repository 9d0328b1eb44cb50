"""Real runs of an example: what pictures are made from.

Kept as runs.json, for tables, drawings and the outputs that pages show, and in tests/pictures, for the
page and the trace that Perfetto shows.

`python docs/pictures/record.py [PART...]` records these parts, or all. Takes some minutes, and gives other
figures each time. While the first run is under way its records are read from outside, as `dtrrun top` does.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dtrrun.cli import smoke as smoking
from dtrrun.cli.main import main as dtrrun
from dtrrun.launch.running import find
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.rates import KEPT_NS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
KEPT = HERE / "runs.json"
PAGES = ROOT / "tests" / "pictures"
SCRIPT = "docs/examples/transformer.py"
BUDGET, BUDGETS = "210MB", ("420MB", "336MB", "252MB", "210MB", "168MB", "126MB")
STEPS, SEEN = "8", 6
"""Steps of the run that is shown, and how many are over at the moment of the picture."""
OF_PROCESS = ("pid", "rank", "start", "torch", "device", "heuristic")
EVERY = 0.5
"""Seconds between two looks."""
ENVIRONMENT = os.environ | {
    "DTRRUN_REMEMBER": "0",
    "DTRRUN_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
"""As on a machine that has not run the example before."""


def main(*names: str) -> None:
    for name in names or (*OF_RUNS, *OF_PAGES):
        if name in OF_RUNS:
            runs = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            KEPT.write_text(json.dumps(runs | {name: OF_RUNS[name]()}, indent=0) + "\n")
        else:
            (PAGES / name).write_bytes(OF_PAGES[name]())


def shown() -> dict[str, Any]:
    return watched("--budget", BUDGET, SCRIPT, "--steps", STEPS)


def times() -> list[dict[str, Any]]:
    return [reported("--budget", size, SCRIPT, "--steps", "6") for size in BUDGETS]


def step() -> list[dict[str, Any]]:
    """Memory over one step, without a budget and with one."""
    return [stepped(budget, SCRIPT, "--steps", "12") for budget in ("none", BUDGET)]


def stepped(*words: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "step.py"), *words]
    found = subprocess.run(command, stdout=subprocess.PIPE, cwd=ROOT, env=ENVIRONMENT, check=True)
    return dict(json.loads(found.stdout))


def watched(*words: str) -> dict[str, Any]:
    """The command, what it had written and the newest records after SEEN steps, and its report."""
    with tempfile.TemporaryDirectory() as folder:
        report, output = Path(folder, "report.json"), Path(folder, "output")
        with output.open("w") as stream:
            command = [sys.executable, "-m", "dtrrun", "--json", str(report), *words]
            process = subprocess.Popen(command, stdout=stream, stderr=stream, cwd=ROOT, env=ENVIRONMENT)
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
        subprocess.run(command, stdout=subprocess.DEVNULL, cwd=ROOT, env=ENVIRONMENT, check=True)
        found = json.loads(report.read_text())
    return {key: found[key] for key in ("budget_bytes", "peak_bytes", "steps", "seconds")}


def written(option: str, verb: list[str], *words: str, status: int = 0) -> bytes:
    """What a run writes with that option; the paths of this machine are left out."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "made.json")
        command = [sys.executable, "-m", "dtrrun", *verb, "--quiet", option, str(made), *words]
        quiet = subprocess.DEVNULL
        done = subprocess.run(
            command, stdout=quiet, stderr=quiet if status else None, cwd=ROOT, env=ENVIRONMENT
        )
        if done.returncode != status:
            raise SystemExit(f"{words} ended with {done.returncode}")
        return without_paths(made.read_text()).encode()


def without_paths(text: str) -> str:
    """Without what only this machine has."""
    return text.replace(json.dumps(sys.executable), '"python"').replace(f"{ROOT / 'docs' / 'examples'}/", "")


def page() -> bytes:
    """The report that the page shows."""
    return written("--json", [], "--budget", "190MB", "--where", SCRIPT, "--steps", "12")


def curve() -> bytes:
    """The budgets that it shows beside it."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder, "transformer.yaml")
        made = written("--json", ["profile"], "-o", str(profile), SCRIPT, "--steps", "12")
        return made.replace(str(profile.with_suffix("")).encode(), b"transformer")


def trace() -> bytes:
    words = ("--budget", BUDGET, "--where", SCRIPT, "--steps", "3")
    return gzip.compress(written("--trace", [], *words), mtime=0)


def smoke() -> list[dict[str, Any]]:
    """What the three runs of `dtrrun smoke` have left, of which its checks are made."""
    made: list[Any] = []
    once = smoking.run_once

    def run_once(*given: Any) -> Any:
        made.append(once(*given))
        return made[-1]

    smoking.run_once = run_once
    os.environ.update(ENVIRONMENT)
    with suppress(SystemExit):
        dtrrun(["smoke", "docs/examples/vae.py"])
    return [
        {
            "seconds": run.ended.seconds,
            "error": run.error,
            "snapshots": [kept(one, {"latest_steps": one.tables["latest_steps"]}) for one in run.snapshots],
            "states": [(state["step"], len(state["digests"])) for state in run.states],
        }
        for run in made
    ]


def ranks() -> dict[str, Any]:
    """The report of two processes."""
    words = ("torchrun", "--nproc-per-node", "2", "tests/ecosystem/programs/ddp.py")
    with tempfile.TemporaryDirectory() as folder:
        ENVIRONMENT["RESULTS"] = folder
        return dict(json.loads(written("--json", [], "--budget", "3.6MB", *words)))


def too_small() -> dict[str, Any]:
    """The report of a run whose budget is too small."""
    return dict(json.loads(written("--json", [], "--budget", "30MB", SCRIPT, "--steps", "1", status=1)))


def peak() -> dict[str, Any]:
    """The report of `dtrrun peak`."""
    found = dict(json.loads(written("--json", ["peak"], SCRIPT)))
    found["holds"]["layers"] = found["timeline"] = None  # which the table does not show
    return found


def kept(snapshot: Snapshot, tables: dict[str, Any]) -> dict[str, Any]:
    """Without what only the machine of the recording has."""
    meta = {key: value for key, value in snapshot.meta.items() if key in OF_PROCESS}
    return asdict(replace(snapshot, meta=meta, tables=tables))


OF_RUNS: dict[str, Any] = {
    "shown": shown,
    "times": times,
    "step": step,
    "smoke": smoke,
    "ranks": ranks,
    "too_small": too_small,
    "peak": peak,
}
OF_PAGES: dict[str, Any] = {"run.json": page, "profile.json": curve, "trace.json.gz": trace}


if __name__ == "__main__":
    main(*sys.argv[1:])
