"""The table of docs/compatibility.md, from the outcomes of a run."""

from importlib.metadata import version

from tests.bench.section import machine
from tests.ecosystem.check import Outcome
from tests.ecosystem.runs import ROOT

PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- written by make ecosystem -->", "<!-- end of what make ecosystem writes -->"
HEADERS = ("What", "Version", "Plain peak", "Budget", "Evicted, recomputed", "Step", "Same bits")


def write(outcomes: list[Outcome]) -> None:
    """Replace what stands between the two marks."""
    before, rest = PAGE.read_text().split(BEGIN)
    _, after = rest.split(END)
    lines = [_row(HEADERS), "|---|---|---:|---:|---:|---:|---|", *map(_row, map(_cells, outcomes))]
    text = "\n".join(["", f"On {machine()}.", "", *lines, ""])
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


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


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"
