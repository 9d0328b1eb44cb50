"""Decisions are those of the file: a safety net for changes that must not change any.

`-k sample` runs some of them. `python -m tests.decisions` writes the file.
"""

from __future__ import annotations

from typing import Any

import pytest

from dtrrun.core.heuristics import STEADY
from tests.decisions import frozen, runs

FROZEN = frozen.read()
EXAMPLES = [
    (name, called, heuristic, budget_bytes)
    for name, entry in FROZEN["examples"].items()
    for called, heuristic, budget_bytes in frozen.budgets(entry["peak_bytes"])
]
SAMPLE = [("transformer", f"40% {STEADY}"), ("densenet", "50% h_dtr_eq"), ("vae", "50% h_next")]
BLOCKS_IN_SAMPLE = (7, 31)

pytestmark = pytest.mark.skipif(
    FROZEN["torch"] != frozen.version(), reason=f"the decisions are those with PyTorch {FROZEN['torch']}"
)


def named(run: Any) -> str:
    return f"{run[0]} {run[1]}"


def check(entry: dict[str, Any], same: bool, operators: Any, *arguments: Any) -> None:
    """Fail if decisions differ, unless the operators do, which are not up to dtrrun."""
    if same:
        return
    if not runs.HERE and runs.apart(operators, *arguments) != entry["operators"]:
        pytest.skip("without dtrrun, too, the program calls other operators on this machine")
    pytest.fail("dtrrun decides otherwise than when the file was made")


def check_example(name: str, called: str, heuristic: str, budget_bytes: int) -> None:
    entry = FROZEN["examples"][name]
    found = runs.apart(runs.decisions_of, name, heuristic, budget_bytes)
    print(f"{found} in place of {entry['decisions'][called]}")
    check(entry, found == entry["decisions"][called], runs.operators_of, name)


def check_block(number: int) -> None:
    entry = FROZEN["programs"][str(number)]
    found, expected = runs.apart(runs.decisions_in_block, number), entry["decisions"]
    others = [
        place for place in range(len(found) // 4) if found[4 * place :][:4] != expected[4 * place :][:4]
    ]
    for place, one in enumerate(runs.decidable(number)):
        if place in others[:3]:
            print(f"decided_in{one!r}")
    print(f"{len(others)} of {len(found) // 4} programs differ")
    check(entry, not others, runs.operators_in_block, number)


def test_entries_are_complete() -> None:
    assert sorted(runs.SIZES) == sorted(path.stem for path in runs.EXAMPLES.glob("*.py"))
    for name, called, *_ in EXAMPLES:
        decisions, _ = FROZEN["examples"][name]["decisions"][called].split(maxsplit=1)
        assert int(decisions) > 0, f"{name}, {called}: nothing was decided"


@pytest.mark.parametrize("run", [run for run in EXAMPLES if run[:2] in SAMPLE], ids=named)
def test_an_example_of_the_sample(run: Any) -> None:
    check_example(*run)


@pytest.mark.parametrize("number", BLOCKS_IN_SAMPLE)
def test_a_block_of_the_sample(number: int) -> None:
    check_block(number)


@pytest.mark.parametrize("run", [run for run in EXAMPLES if run[:2] not in SAMPLE], ids=named)
def test_an_example(run: Any) -> None:
    check_example(*run)


@pytest.mark.parametrize("number", sorted(set(map(int, FROZEN["programs"])) - set(BLOCKS_IN_SAMPLE)))
def test_a_block(number: int) -> None:
    check_block(number)
