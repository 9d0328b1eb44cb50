"""The table of docs/compatibility.md, from the outcomes of a run."""

from importlib.metadata import version

from tests.bench.section import machine, replace_marked, row
from tests.ecosystem.check import Outcome
from tests.ecosystem.runs import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
HEADERS = ("What", "Version", "Plain peak", "Budget", "Evicted, recomputed", "Step", "Same bits")


def write(outcomes: list[Outcome]) -> None:
    """Replace what stands between the two marks."""
    lines = [row(HEADERS), "|---|---|---:|---:|---:|---:|---|", *map(row, map(_cells, outcomes))]
    replace_marked(PAGE, "ecosystem", "\n".join([f"On {machine()}.", "", *lines]))


def _cells(outcome: Outcome) -> tuple[str, ...]:
    versions = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in outcome.case.packages)
    return (
        outcome.case.title,
        versions,
        f"{outcome.peak / 1e6:.1f} MB",
        f"{outcome.budget / 1e6:.1f} MB ({outcome.percent} %)",
        f"{outcome.evictions}, {outcome.rematerializations}",
        f"{outcome.slowdown:.2f} ×",
        "no: " + outcome.problems[0].splitlines()[0] if outcome.problems else "yes",
    )
