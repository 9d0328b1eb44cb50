"""What it costs to choose a storage to evict, natively and in Python, in a live run.

`python -m tests.bench.choices [EXAMPLE…] [--steps N]`, from the project's folder. The examples are so small
that their steps are mostly the host's time. They run inside half of their peak with the costs of `--cost
model`, so that both ways make the same choices.
"""

import argparse

from tests.bench.decisions import run
from tests.bench.runs import Run, share
from tests.bench.section import row

EXAMPLES = {
    "lstm": ["--hidden", "32", "--batch-size", "64"],
    "treelstm": ["--hidden", "32", "--batch-size", "32", "--min-leaves", "30", "--max-leaves", "40"],
}
PERCENT = 50
HEURISTICS = (
    "h_dtr_eq",
    "h_chain(c=ancestors,s=.6,next=0,released=alike)",
    "h_chain(c=ancestors,s=.2,next=1,released=alike)",
    "h_chain(c=e_star,s=.2,next=1,released=alike)",
)
HEADERS = [
    "Example",
    "Heuristic",
    "Evictions",
    "µs a choice: native",
    "in Python",
    "Seconds a step: native",
    "in Python",
]


def spent(one: Run) -> float:
    """Return the seconds spent choosing."""
    return float(one.report["seconds"]["scoring"] + one.report["seconds"]["search"])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.choices", description=__doc__)
    parser.add_argument("examples", nargs="*", metavar="EXAMPLE", default=list(EXAMPLES))
    parser.add_argument("--steps", default="8")
    args = parser.parse_args()
    print(row(HEADERS), row(["---"] * len(HEADERS)), sep="\n", flush=True)
    for example in args.examples:
        arguments = [*EXAMPLES[example], "--steps", args.steps]
        peak = run("native", None, example, *arguments).report["peak_bytes"]
        for heuristic in HEURISTICS:
            native, python = (
                run(way, share(PERCENT, peak), example, *arguments, heuristic=heuristic)
                for way in ("native", "search")
            )
            evictions = native.report["evictions"]
            same = f"{evictions:,}" if python.report["evictions"] == evictions else "not the same"
            choices = [f"{spent(one) / evictions * 1e6:.1f}" for one in (native, python)]
            seconds = [f"{one.step_seconds:.3f}" for one in (native, python)]
            print(row([example, f"`{heuristic}`", same, *choices, *seconds]), flush=True)


if __name__ == "__main__":
    main()
