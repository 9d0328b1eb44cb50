"""PyTorch's own tests of its compiler, with everything evicted: `python -m tests.pytorch FOLDER`.

FOLDER is `test` of a checkout of PyTorch, of the version that is installed. Each test that passes plainly
must pass under dtrrun, too, and nothing may be recomputed with other bits. `names.txt` says which tests:
those of what a compiled graph can meet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.pytorch.inside import EVICTED, RESULTS

ROOT = Path(__file__).parents[2]
NAMES = Path(__file__).with_name("names.txt")
KNOWN = {
    "test_optim_state_references_cleared": "The hook that counts steps adds a graph break to the optimizer's "
    "step, and PyTorch's errors of graph breaks hold on to frames until garbage is collected.",
}
"""Tests that fail, and why."""

Outcomes = dict[str, dict[str, object]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.pytorch", description=__doc__)
    parser.add_argument("folder", type=Path, help="`test` of a checkout of PyTorch")
    parser.add_argument("files", nargs="*", help="only these files of it")
    options = parser.parse_args()
    failed = 0
    for file, wanted in names().items():
        if options.files and file not in options.files:
            continue
        plain = outcomes(options.folder, file, wanted, evicted=False)
        passed = {name for name, one in plain.items() if one["outcome"] == "passed"}
        found = outcomes(options.folder, file, passed, evicted=True)
        bad = [name for name in sorted(passed) if found.get(name, {}).get("outcome") != "passed"]
        evicted = sum(bool(one["evictions"]) for one in found.values())
        print(
            f"{file}: {len(passed)} of {len(wanted)} pass plainly, {len(passed) - len(bad)} under dtrrun",
            end="",
        )
        print(f" ({evicted} with evictions)")
        for name in bad:
            known = KNOWN.get(name.rpartition("::")[2])
            failed += known is None
            print(f"  {name}: {known or found.get(name, {}).get('why', 'did not end')}", flush=True)
    return failed != 0


def names() -> dict[str, set[str]]:
    """Return the tests of each file, as pytest names them there."""
    found: dict[str, set[str]] = {}
    file = group = ""
    for line in NAMES.read_text().splitlines():
        if line.startswith("  "):
            found.setdefault(file, set()).update(f"{group}::test_{name}" for name in line.split())
        elif not line.startswith("#"):
            file, group = line.split("::")
    return found


def outcomes(folder: Path, file: str, wanted: set[str], *, evicted: bool) -> Outcomes:
    """Run tests of a file in a process; return what became of each that is there."""
    path = folder / file
    results = Path(tempfile.mkdtemp()) / "results"
    environment = {
        **os.environ,
        RESULTS: str(results),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",  # with more, index_put adds in any order
        "INDUCTOR_TEST_DISABLE_FRESH_CACHE": "1",  # what has been compiled plainly is not compiled again
        **({EVICTED: "1"} if evicted else {}),
    }
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.pytorch.inside"]

    def pytest(*more: str) -> str:
        return subprocess.run(
            [*call, *more], cwd=path.parent, env=environment, capture_output=True, text=True, check=False
        ).stdout

    there = {line.partition("::")[2] for line in pytest("--collect-only", path.name).splitlines()}
    if ours := sorted(wanted & there):
        pytest(*(f"{path.name}::{name}" for name in ours))
    if not results.exists():
        return {}
    told = map(json.loads, results.read_text().splitlines())
    return {one["name"].partition("::")[2]: one for one in told}


if __name__ == "__main__":
    sys.exit(main())
