"""Tests dtrrun with real packages: `python -m tests.ecosystem [NAME…]`, from the project's folder.

Without a name, all cases; then the table of docs/compatibility.md is written anew.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.ecosystem.cases import CASES
from tests.ecosystem.check import check
from tests.ecosystem.table import write

AT_ONCE = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.ecosystem", description=__doc__)
    names = [case.name for case in CASES]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"no case is called {', '.join(sorted(unknown))}")

    outcomes = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for outcome in pool.map(check, [case for case in CASES if not args.names or case.name in args.names]):
            outcomes.append(outcome)
            print(
                f"{outcome.case.name}: {'FAILED' if outcome.problems else 'ok'}, "
                f"{outcome.percent} % of {outcome.peak:,} bytes, {outcome.evictions} evictions, "
                f"{outcome.rematerializations} rematerializations, {outcome.slowdown:.2f} ×",
                *outcome.problems,
                sep="\n  ",
                flush=True,
            )
    if not args.names:
        write(outcomes)
    return 1 if any(outcome.problems for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
