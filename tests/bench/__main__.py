"""Measures what dtrrun promises: `python -m tests.bench [NAME…] [--quick | --only PROGRAM]`, from the
project's folder."""

import argparse
import importlib
import os
import sys

from rich.console import Console

from tests.bench.runs import ROOT
from tests.bench.section import replace_sections

NAMES = (
    "exactness",
    "residence",
    "slowdown",
    "overhead",
    "growth",
    "predictions",
    "learning",
    "cold_start",
    "searching",
    "profile",
    "optimizers",
    "advice",
    "host_bound",
    "said",
    "checkpointing",
    "peers",
    "compiled",
    "device_clock",
    "host_tier",
    "host_links",
    "host_beside",
    "sharded",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all if none is given"
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and rounds; writes nothing")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PROGRAM",
        help="of advice: only this program, each budget of it; may be repeated; writes nothing",
    )
    args = parser.parse_args()
    if args.only and args.names != ["advice"]:
        parser.error("--only is for advice alone")
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"no measurement is called {', '.join(sorted(unknown))}")
    os.environ["OMP_NUM_THREADS"] = "1"

    console = Console()
    missed = 0
    for name in args.names or NAMES:
        chosen = (args.only,) if args.only else ()
        section = importlib.import_module(f"tests.bench.{name}").measure(args.quick, *chosen)
        if section is None:
            console.print(f"{name}: left out, since it needs make gpu-without-gpu")
            continue
        section.print(console)
        missed += len(section.missed)
        if not (args.quick or args.only):  # after each, so that an interrupted run keeps its results
            text = section.markdown(f"python -m tests.bench {name}")
            replace_sections(ROOT / "docs" / "measurements.md", {section.title: text})
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
