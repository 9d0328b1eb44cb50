"""What the memory that can't be evicted is for the program, and why it stays.

First its role: a parameter, a gradient, the optimizer's state, a buffer, or what a variable of the program
keeps. A role is found by looking at the program's objects. Where none is found, the ledger's reason is given.
"""

from __future__ import annotations

import weakref
from time import perf_counter_ns as now_ns
from typing import Any, NamedTuple

import torch

from dtrrun.core.eviction import by_size
from dtrrun.core.graph import Version
from dtrrun.core.ledger import INPUT_LOST, INPUT_MUTATED, Ledger
from dtrrun.runtime.observe.holders import Holder, Search
from dtrrun.runtime.observe.training_memory import (
    GRADIENT,
    OPTIMIZER_STATE,
    PARAMETER,
    Training,
    by_storage,
    states_of,
)

Facts = dict[str, Any]
CONSTANT = "constant"
KEPT = "kept by the program"
TEMPORARIES = "temporaries of the optimizer"
COMPUTED = {INPUT_MUTATED, INPUT_LOST, "carried over", "small and old"}
"""Reasons why what was computed can't be computed again."""
BELONGS = {PARAMETER, GRADIENT, OPTIMIZER_STATE}
"""Roles that say why the memory stays, whatever the ledger's reason. A buffer may have been handed out."""
SHARE = 200
"""At most one part in so many of the time is spent on the labels while a program runs."""
NAMED = 3
"""How many holders the report names for each reason."""
SHOWN = 2
"""How many of them a message names."""
LEAST = 5
"""One part in so many of a reason's bytes is worth a name in a message."""


class Row(NamedTuple):
    """Memory that stays for one reason. held_by: what refers to most of it, largest first."""

    reason: str
    nbytes: int
    storages: int
    why: dict[str, int]  # the bytes by the ledger's reasons
    held_by: list[Facts]

    def table(self) -> Facts:
        """Return the row in the form of the report."""
        return {
            "reason": self.reason,
            "bytes": self.nbytes,
            "storages": self.storages,
            "held_by": self.held_by,
        }


class Labels:
    """Labels the constants of a ledger."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._optimizers: dict[int, weakref.ref[torch.optim.Optimizer]] = {}
        self._rows_lately: list[Row] = []
        self._due_ns = 0  # when to make them again

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note an optimizer, which has state from now on."""
        number, forget = id(optimizer), self._optimizers.pop
        if number not in self._optimizers:
            self._optimizers[number] = weakref.ref(optimizer, lambda _: forget(number, None))

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have stepped and are still there."""
        return [one for it in [*self._optimizers.values()] if (one := it()) is not None]

    def rows(self, *, lately: bool = False) -> list[Row]:
        """Return what stays, the largest first. The roles are those known without a search.

        lately: what was found not long ago is enough.
        """
        began = now_ns()
        if not lately or began > self._due_ns:
            self._rows_lately = self._rows(self._roles_of_optimizers(), {})
            ended = now_ns()
            self._due_ns = ended + SHARE * (ended - began)
        return self._rows_lately

    def searched(self, training: Training) -> list[Row]:
        """Return what stays, the largest first. Searches the program's objects."""
        wanted = self.unknown(training)
        return self.named(training, Search(wanted, self._ledger.key_of).run() if wanted else {})

    def unknown(self, training: Training) -> set[int]:
        """Return the keys of what stays, but does not belong to the program's training."""
        roles = training.roles(self._ledger.key_of)
        return {one.key for one in self._constants() if one.key not in roles and one.pin not in BELONGS}

    def named(self, training: Training, holders: dict[int, Holder]) -> list[Row]:
        """Return what stays, the largest first. holders: by key, as found by a search."""
        return self._rows(training.roles(self._ledger.key_of), holders)

    def _constants(self) -> list[Version]:
        versions = [one for one in self._ledger.versions.values() if one.device == self._ledger.device]
        return [one for one in versions if one.resident and one.nbytes and one.operation is None]

    def _rows(self, roles: dict[int, str], holders: dict[int, Holder]) -> list[Row]:
        found: dict[str, list[Version]] = {}
        for version in self._constants():
            found.setdefault(reason_of(version, roles, holders.get(version.key)), []).append(version)
        rows = [
            Row(reason, sum(one.nbytes for one in versions), len(versions), *_held_by(versions, holders))
            for reason, versions in found.items()
        ]
        return sorted(rows, key=lambda row: -row.nbytes)

    def _roles_of_optimizers(self) -> dict[int, str]:
        """Return the roles of what the optimizers hold that have stepped, by key."""
        known = [one for reference in list(self._optimizers.values()) if (one := reference()) is not None]
        parameters = (
            one for optimizer in known for group in optimizer.param_groups for one in group["params"]
        )
        found: dict[int, str] = {}
        for role, tensors in ((OPTIMIZER_STATE, states_of(known)), (PARAMETER, parameters)):
            found |= dict.fromkeys(by_storage(tensors, self._ledger.key_of), role)
        return found


def reason_of(version: Version, roles: dict[int, str], holder: Holder | None) -> str:
    """Return a constant's role, or else why it can't be evicted."""
    why, role = version.pin or CONSTANT, roles.get(version.key, "")
    if role in BELONGS or (role and why in COMPUTED):
        return role
    if holder is not None and why in COMPUTED:
        return TEMPORARIES if holder.of_optimizer else KEPT
    return why


def without_role_bytes(rows: list[Row]) -> int:
    """Return the bytes that do not belong to the program's training, as far as is known."""
    return sum(row.nbytes for row in rows if row.reason not in BELONGS)


def relabelled(pinned: dict[str, int], rows: list[Row]) -> dict[str, int]:
    """Return the bytes that can't be evicted by the labels of `rows`, the largest first.

    pinned: by the ledger's reasons, when the budget was too small.
    """
    found = dict(pinned)
    for row in rows:
        for why, nbytes in row.why.items():
            moved = min(nbytes, found.get(why, 0))
            if why != row.reason and moved:
                found[why] -= moved
                found[row.reason] = found.get(row.reason, 0) + moved
    return by_size({reason: nbytes for reason, nbytes in found.items() if nbytes})


def _held_by(versions: list[Version], holders: dict[int, Holder]) -> tuple[dict[str, int], list[Facts]]:
    """Return the bytes of versions by the ledger's reasons, and by what refers to them."""
    whys: dict[str, int] = {}
    names: dict[tuple[str, str], int] = {}
    for one in versions:
        why = one.pin or CONSTANT
        whys[why] = whys.get(why, 0) + one.nbytes
        if (holder := holders.get(one.key)) is not None:
            place = str(holder), why
            names[place] = names.get(place, 0) + one.nbytes
    largest = sorted(names.items(), key=lambda item: -item[1])[:NAMED]
    return whys, [{"name": name, "why": why, "bytes": nbytes} for (name, why), nbytes in largest]


def held_by(rows: list[Row]) -> dict[str, str]:
    """Return what refers to most of the memory that stays for a reason, and why that stays, by reason."""
    found = {}
    for row in rows:
        names = [one for one in row.held_by if one["bytes"] * LEAST >= row.nbytes]
        if names and row.reason not in BELONGS:
            whys = {one["why"] for one in names} - {row.reason}
            words = " and ".join(dict.fromkeys(one["name"] for one in names[:SHOWN]))
            found[row.reason] = "; ".join([words, *sorted(whys)])
    return found
