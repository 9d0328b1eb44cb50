"""A mutant: what is switched off, and the tests that must notice. The tables are in `mutants_of_*.py`."""

from __future__ import annotations

from typing import NamedTuple

ROWS = (
    "in-place operators",
    "mutated constants",
    "gradients",
    "schemas that lie",
    "randomness",
    "uninitialised memory",
    "views by identity",
    "escapes",
    "native extensions",
    "storages that are not ours",
    "several outputs",
    "other layouts and subclasses",
    "DDP and FSDP",
    ".data, set_, swap_tensors",
    "torch.compile",
    "opaque operators",
    "operators that are not replayed",
    "threads",
    "fork",
    "long chains",
    "failing operators",
    "thrashing",
    "what PyTorch does otherwise under a mode",
    "accounting",
    "replays",
)

NOT_APPLICABLE: dict[str, str] = {}


class Mutant(NamedTuple):
    row: str  # of the design's hazard table
    name: str
    file: str  # of dtrrun/runtime or dtrrun/ledger
    old: str
    new: str
    tests: str  # "file::test file::test", without "tests/conformance/test_" and ".py"

    @property
    def paths(self) -> list[str]:
        return [f"tests/conformance/test_{test.replace('::', '.py::test_')}" for test in self.tests.split()]


MUTANTS: list[Mutant] = []


def row(name: str, *mutants: tuple[str, str, str, str, str]) -> None:
    MUTANTS.extend(Mutant(name, *mutant) for mutant in mutants)
