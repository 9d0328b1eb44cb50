"""The outputs that pages show, made by the command's own code.

`python docs/pictures/outputs.py` writes them into the pages. What takes long is made from runs that are kept
(`make docs-runs`); the simulator is run. An output follows its command in a fenced block; an ellipsis stands
for what a page leaves out.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dtrrun.cli import smoke as smoking
from dtrrun.cli.main import main as dtrrun
from dtrrun.launch.captured import Captured
from dtrrun.profiling.result import write_profile
from dtrrun.settings import RuntimeSettings
from dtrrun.smoke.runs import Run
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.final import print_final
from dtrrun.views.profile import print_profile

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LOG = ROOT / "tests" / "logs" / "transformer.log.gz"
WIDTH = 80
BLOCK = re.compile(r"^( *)```(?:console|yaml)?\n((?:.*\n)*?)\1```$", re.MULTILINE)
"""A fenced block, with what it is indented by, and its lines."""


def main() -> None:
    for page in sorted({page for page, _ in OUTPUTS}):
        path = ROOT / page
        path.write_text(with_outputs(page, path.read_text()))


def with_outputs(page: str, text: str) -> str:
    """The page with the outputs of today's code."""

    def written(block: re.Match[str]) -> str:
        margin, lines = block[1], [line.removeprefix(block[1]) for line in block[2].splitlines()]
        known = [line for line in lines if (page, line) in OUTPUTS]
        if not known:
            return block[0]
        keep = lines[: lines.index(known[-1]) + 1]
        made = "".join(f"{margin}{line}".rstrip() + "\n" for line in (*keep, *OUTPUTS[page, known[-1]](text)))
        return block[0].replace(block[2], made)

    return BLOCK.sub(written, text)


def simulated(page: str, *words: str) -> list[str]:
    """Of `dtrrun simulate step.log`, beside the page's own mine.py."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder), importing_afresh("mine"):
        shutil.copy(LOG, "step.log.gz")
        if mine := re.search(r"^```python\n(# mine.py.*?)^```", page, re.DOTALL | re.MULTILINE):
            Path("mine.py").write_text(mine[1])
        lines = printed("simulate", "step.log.gz", "--jobs", "1", *words)
    return lines


@contextmanager
def importing_afresh(name: str) -> Iterator[None]:
    path = list(sys.path)
    sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.path[:] = path
        sys.modules.pop(name, None)


def smoked(page: str) -> list[str]:
    """Of `dtrrun smoke`, whose runs are the kept ones."""
    kept = iter(runs()["smoke"])

    def run_once(*_: Any) -> Run:
        one = next(kept)
        states = tuple(
            {"step": step, "digests": dict.fromkeys(map(str, range(count)), "")}
            for step, count in one["states"]
        )
        snapshots = tuple(Snapshot(**fields) for fields in one["snapshots"])
        return Run(Captured(0, one["seconds"], "", False), one["error"], snapshots, states)  # type: ignore[arg-type]

    once, smoking.run_once = smoking.run_once, run_once
    try:
        return printed(
            "smoke",
            "--python",
            sys.executable,
            str(ROOT / "docs/examples/vae.py"),
            names={str(ROOT) + "/": ""},
        )
    finally:
        smoking.run_once = once


def printed(*words: str, names: dict[str, str] | None = None) -> list[str]:
    """What the command prints, within WIDTH columns."""
    columns, os.environ["COLUMNS"] = os.environ.get("COLUMNS"), str(WIDTH)
    out = io.StringIO()
    try:
        with redirect_stdout(out):
            dtrrun(words)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"dtrrun {words} ended with {end.code}") from None
    finally:
        os.environ.pop("COLUMNS")
        if columns is not None:
            os.environ["COLUMNS"] = columns
    text = out.getvalue()
    for ours, shown in (names or {}).items():
        text = text.replace(ours, shown)
    return text.splitlines()


def ended(name: str, begins: str) -> list[str]:
    """The final table of a kept run, from the line that matches until the next empty line."""
    out = io.StringIO()
    print_final(runs()[name], out, width=WIDTH)
    lines = out.getvalue().splitlines()
    first = next(place for place, line in enumerate(lines) if re.match(begins, line))
    last = lines.index("", first) if "" in lines[first:] else len(lines)
    return ["...", *lines[first:last]]


def profiled(page: str) -> list[str]:
    """Of `dtrrun profile`, whose figures are the kept ones; without the budgets in the middle."""
    out = io.StringIO()
    print_profile(study(), out, width=WIDTH)
    lines = out.getvalue().splitlines()
    first = next(place for place, line in enumerate(lines) if line.startswith("budget"))
    best = next(place for place, line in enumerate(lines) if line.endswith("recommended"))
    return [*lines[: first + 4], "  …", *lines[best - 1 :]]


def profile(page: str) -> list[str]:
    """The profile that it writes."""
    found = study()
    best = next(one for one in found["points"] if one["budget_bytes"] == found["recommended_bytes"])
    with tempfile.TemporaryDirectory() as folder:
        costs, path = Path(folder, "costs"), Path(folder, "transformer.yaml")
        costs.touch()
        told = SimpleNamespace(
            peak=found["plain_peak_bytes"],
            minimum=found["minimum_bytes"],
            recommended=best["budget_bytes"],
            plain=True,
            points={
                best["budget_bytes"]: SimpleNamespace(
                    heuristic=best["heuristic"], told_slowdown=best["measured"]["slowdown"], host_bytes=0
                )
            },
            settings=RuntimeSettings(),
            steps=found["steps"],
            costs_path=costs,
        )
        write_profile(path, told, found["target"])  # type: ignore[arg-type]
        return path.read_text().splitlines()[1:]


def doctor(page: str) -> list[str]:
    """Of a machine with a GPU, as a test has it."""
    return (ROOT / "tests" / "unit" / "snapshots" / "doctor_good_80.txt").read_text().splitlines()


def runs() -> dict[str, Any]:
    return dict(json.loads((HERE / "runs.json").read_text()))


def study() -> dict[str, Any]:
    """As if it had written its profile where it does by default."""
    found = json.loads((ROOT / "tests" / "pictures" / "profile.json").read_text())
    for name in ("run", "run_minimum"):
        found[name] = [word.removesuffix(".yaml") for word in found[name]]
    return dict(found)


def options(line: str) -> Sequence[str]:
    return line.split()[4:]


SIMULATE = "$ dtrrun simulate step.log --semantics dtrrun --heuristic {} --budgets 0.7,0.5,0.4,0.3"
OF_PAPER, OF_OURS = SIMULATE.format("h_dtr_eq,h_chain,h_next"), SIMULATE.format("h_dtr_eq,mine:score")
OUTPUTS: dict[tuple[str, str], Callable[[str], list[str]]] = {
    ("docs/ci.md", "$ dtrrun smoke docs/examples/vae.py"): smoked,
    ("docs/doctor.md", "$ dtrrun doctor"): doctor,
    ("docs/howto/choose-a-budget.md", OF_PAPER): lambda page: simulated(page, *options(OF_PAPER)),
    ("docs/howto/own-heuristic.md", OF_OURS): lambda page: simulated(page, *options(OF_OURS)),
    ("docs/howto/out-of-memory.md", "$ dtrrun --budget 30MB docs/examples/transformer.py --steps 1"): (
        lambda page: ended("too_small", "budget too small")
    ),
    ("docs/howto/several-gpus.md", "$ dtrrun --budget 3.6MB torchrun --nproc-per-node 2 ddp.py"): (
        lambda page: ended("ranks", "process +peak")
    ),
    ("docs/profile.md", "$ dtrrun profile docs/examples/transformer.py --steps 12"): profiled,
    (
        "docs/profile.md",
        "# Found by dtrrun profile, in 3 steps of: docs/examples/transformer.py --steps 12",
    ): profile,
}
"""By page, and the line that stands before the output. Given the page's text."""


if __name__ == "__main__":
    main()
