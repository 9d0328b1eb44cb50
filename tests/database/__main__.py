"""PyTorch's own databases under dtrrun: `python -m tests.database`."""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.bench.section import replace_marked, row
from tests.database.contexts import covering
from tests.database.judge import CRASHED, EQUAL, FAILED, NONDETERMINISTIC, PINNED, PINS
from tests.database.sweep import sweep

KINDS = ("operators", "modules", "optimizers")
IN_CONTEXT = "in_context"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"

Result = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.database", description=__doc__)
    parser.add_argument("names", nargs="*", help="units to judge (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="a random share of all units")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--json", help="write all results to this file")
    parser.add_argument("--contexts", action="store_true", help="operators in contexts, instead")
    parser.add_argument("--docs", action="store_true", help="write the summary into docs/compatibility.md")
    options = parser.parse_args()
    kinds = (IN_CONTEXT,) if options.contexts else KINDS
    units = chosen(options.names, options.share, options.seed, kinds)
    write = write_contexts if options.contexts else write_docs
    told = line_of_contexts if options.contexts else line
    results: list[Result] = []
    started = time.monotonic()
    for result in sweep(units, options.jobs):
        results.append(result)
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=1))
        if result["status"] != EQUAL:
            reason = result["reasons"][0][:300]
            print(f"{result['status']}: {result['kind']} {result['name']}: {reason}", flush=True)
        if len(results) % 50 == 0:
            print(f"{len(results)} of {len(units)}, {time.monotonic() - started:.0f} s", file=sys.stderr)
    if options.docs:
        write(results)
    print(told(results))
    return any(result["status"] in (FAILED, CRASHED) for result in results)


def chosen(
    names: list[str], share: float, seed: int, kinds: tuple[str, ...] = KINDS
) -> list[tuple[str, str]]:
    """Return units (kind, name) in random order, so that long ones are not adjacent."""
    units = [
        (kind, name)
        for kind in kinds
        for name in importlib.import_module(f"tests.database.{kind}").names()
        if not names or name in names
    ]
    random.Random(seed).shuffle(units)
    return units[: max(1, round(len(units) * share))]


def line(results: list[Result]) -> str:
    counts = Counter(result["status"] for result in results)
    kinds = Counter(result["kind"] for result in results)
    tried = ", ".join(f"{kinds[kind]} {kind}" for kind in KINDS if kinds[kind])
    programs = sum(sum(result["cases"].values()) for result in results)
    return (
        f"{tried} tried ({programs} programs): {counts[EQUAL]} equal, {counts[PINNED]} pinned by rule, "
        f"{counts[NONDETERMINISTIC]} not deterministic by themselves, {counts[FAILED]} failed, "
        f"{counts[CRASHED]} crashes"
    )


def write_docs(results: list[Result]) -> None:
    """Write the line, and what was pinned by which rule, between the marks in docs/compatibility.md."""
    by_rule: dict[str, set[str]] = {}
    for result in results:
        if result["status"] == PINNED:
            for reason in result["reasons"]:
                for rule in reason.rpartition(": ")[2].split("; "):
                    by_rule.setdefault(rule, set()).add(result["name"])
    own = {result["name"] for result in results if result["status"] == NONDETERMINISTIC}
    rows = [row([rule, PINS[rule], _listed(names)]) for rule, names in sorted(by_rule.items())]
    told = [
        f"{line(results)}.",
        "",
        "| Pinned as | What that is | Results that stay in memory, of |",
        "|---|---|---|",
        *rows,
        "",
        f"Other bits each time, without dtrrun too: {_listed(own)}.",
    ]
    replace_marked(PAGE, "conformance", "\n".join(told))


def line_of_contexts(results: list[Result]) -> str:
    """Return a line that counts programs by their own result, not by the worst of each unit."""
    counts: Counter[str] = Counter()
    for result in results:
        counts.update(result["cases"])
    crashes = sum(result["status"] == CRASHED for result in results)
    return (
        f"{len(results)} operators and composites in {len(covering())} contexts "
        f"({sum(counts.values())} programs): {counts[EQUAL]} equal, {counts[FAILED]} differ, "
        f"{counts[NONDETERMINISTIC]} not deterministic by themselves, {crashes} crashes"
    )


def write_contexts(results: list[Result]) -> None:
    """Write the line, and which operators differ in which contexts, to docs/compatibility.md."""
    where: dict[str, set[str]] = {}
    for result in results:
        if result["status"] in (FAILED, CRASHED):
            for reason in result["reasons"]:
                context = reason.partition("[")[2].partition("]")[0]
                where.setdefault(result["name"], set()).add(context)
    rows = [row([f"`{name}`", "; ".join(sorted(contexts))]) for name, contexts in sorted(where.items())]
    table = ["", "| Differs | In which contexts |", "|---|---|", *rows] if rows else []
    replace_marked(PAGE, "conformance, in contexts", "\n".join([f"{line_of_contexts(results)}.", *table]))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    sys.exit(main())
