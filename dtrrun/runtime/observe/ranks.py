"""Keeps ranks in step: all recompute the same, so that none keeps the others waiting in a collective.

What a rank evicts depends on what operators have cost there, and on the heuristic that it has found, and both
depend on the load of the machine. So the ranks of a program on one machine take over those of the first of
them, through the run's folder of records: at the end of a step, it writes what is new, and the others look.
None waits for another. As ranks meet in each step, the others have read it a step later. A rank whose steps
have another number of operators, such as a stage of a pipeline, finds a heuristic of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol
from zlib import crc32

from dtrrun.runtime.costs import costs_from
from dtrrun.runtime.dispatch.signatures import Signatures
from dtrrun.telemetry.private import write_private

SETTLED = 3
"""Steps after which costs are written: until then, operators are timed again."""
PATIENCE = 8
"""Steps after which a rank that has read nothing goes on by itself: the first may not train."""
ALIKE = 0.02
"""By what share numbers of operators may differ in steps that are alike: one rank may print the loss."""
MOST = 4096
"""Signatures whose costs are written. If there are more, shapes do not repeat."""


class Rule(Protocol):
    """What finds the heuristic (`Learning`)."""

    changes: int
    """How many times it has changed the heuristic."""
    follows: bool
    """Whether another rank searches for it."""

    def current(self) -> dict[str, Any]:
        """Return the present rule as JSON values."""

    def follow(self, told: Mapping[str, Any]) -> None:
        """Change to what `current` has returned in another process."""


class Ranks:
    """One of several ranks. `first`: the one that the others follow."""

    def __init__(
        self, folder: str, world: str, first: bool, signatures: Signatures, rule: Rule | None
    ) -> None:
        """rule: None if the heuristic was named."""
        self.first = first
        self._signatures, self._rule = signatures, rule
        name = os.path.join(folder, f"ranks-{crc32(world.encode()):08x}")
        self._costs = _Told(f"{name}.costs")
        self._rules = _Told(f"{name}.rule")
        self._settled: dict[str, tuple[int, int]] = {}
        self._changes = -1  # of the rule, when it was written
        self._age = self._operators = 0
        signatures.keep_names()

    def step_ended(self, steps: int, age: int) -> None:
        """Called at the end of each step, the `steps`-th, once its heuristic has been chosen.

        age: how many operators have run.
        """
        if steps <= SETTLED:
            self._operators, self._age = age - self._age, age
        if steps < SETTLED:
            return
        if self.first:
            self._lead()
        else:
            self._follow(steps)

    def _lead(self) -> None:
        new = self._signatures.settle() if len(self._settled) < MOST else {}
        if new:
            self._settled |= new
            self._costs.write(self._settled)
        if self._rule is not None and self._rule.changes != self._changes:
            self._changes = self._rule.changes
            self._rules.write(self._rule.current() | {"operators": self._operators})

    def _follow(self, steps: int) -> None:
        # Files that something else has written are ignored.
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            if costs := self._costs.read():
                self._signatures.take_over(costs_from(costs))
            if self._rule is None or not self._rule.follows:
                return
            if told := self._rules.read():
                self._rule.follows = abs(told["operators"] - self._operators) <= ALIKE * self._operators
                if self._rule.follows:
                    self._rule.follow(told)
            elif steps == PATIENCE and not self._rules.read_ns:
                self._rule.follows = False


class _Told:
    """A file that one process replaces and others read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self.read_ns = 0  # when what has been read was written

    def write(self, values: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the folder has been removed, or the disk is full: each rank goes on alone
            write_private(self._path, json.dumps(values, separators=(",", ":")))

    def read(self) -> dict[str, Any] | None:
        """Return what is new in it, or None."""
        try:
            if (written := os.stat(self._path).st_mtime_ns) == self.read_ns:
                return None
            self.read_ns = written
            with open(self._path, encoding="utf-8") as file:
                found = json.load(file)
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None
