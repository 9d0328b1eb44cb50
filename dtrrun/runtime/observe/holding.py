"""Says what the program's tensors are for it: weights, what autograd has saved, what variables keep.

It looks once, at Python's objects and at autograd's graphs, so nothing is tracked for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from dtrrun.core.graph import Operation
from dtrrun.core.ledger import Ledger
from dtrrun.runtime.observe.callers import Call
from dtrrun.runtime.observe.holders import Holder, Search, saved_by_graphs
from dtrrun.runtime.observe.labels import COMPUTED
from dtrrun.runtime.observe.training_memory import (
    BUFFER,
    GRADIENT,
    OPTIMIZER_STATE,
    PARAMETER,
    Training,
    by_storage,
    find_training,
    in_backward,
)
from dtrrun.telemetry import holding as words

Facts = dict[str, Any]
OF_ROLES = {
    PARAMETER: words.PARAMETERS,
    GRADIENT: words.GRADIENTS,
    OPTIMIZER_STATE: words.STATE,
    BUFFER: words.BUFFERS,
}
LONGEST_NS = 1_000_000_000
"""Processor time that the search for variables may take."""
NAMED = 12
"""How many variables are named."""
WORTH = 0.001
"""The share of all from which a variable is named."""
VOCABULARY = 1000
LARGE = 0.15
"""The share of the peak from which the logits of a vocabulary are named."""
ALONE = 0.25
"""The share of the peak from which what one operator has made is named."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Now(NamedTuple):
    """A moment, and what is known of its step.

    age: the number of the operator that has just run, 0 if none has. began: the first of the step, 0 if
    unknown. inputs: tensors that the program's outermost modules were called with. is_backward, in_module:
    return whether a storage was made in a backward pass, or in a module. first_module: the first operator
    within a module, 0 if unknown.
    """

    age: int
    began: int
    inputs: Sequence[torch.Tensor]
    is_backward: Callable[[Any], bool]
    in_module: Callable[[Any], bool] = lambda _: False
    first_module: int = 0


class Program(NamedTuple):
    """What is found among Python's objects in one search.

    tensors: those with a graph. also: keys of storages whose variables are wanted in any case. traceback: of
    an error, whose functions may have ended.
    """

    training: Training
    tensors: list[torch.Tensor]
    also: set[int]
    traceback: TracebackType | None = None

    @classmethod
    def look(cls, device: str) -> Program:
        tensors: list[torch.Tensor] = []
        return cls(find_training(device, tensors), tensors, set())


class Held(NamedTuple):
    """What was in memory, or evicted. versions: of the program's storages. classes, holders: by key.

    savers: by key, the numbers of the nodes in autograd's graph that have saved it. unexplained: bytes of
    which it was not found why they are there.
    """

    versions: list[Any]
    classes: dict[int, str]
    holders: dict[int, Holder]
    savers: dict[int, list[int]]
    unexplained: int = 0

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.versions)


def hold(ledger: Ledger, now: Now, program: Program, longest_ns: int = LONGEST_NS) -> Held:
    """Return what the program's tensors are at this moment."""
    training, tensors, also, traceback = program
    roles = training.roles(ledger.key_of)
    savers = saved_by_graphs(tensors, ledger.key_of)
    versions = [one for one in ledger.versions.values() if one.nbytes and one.device == ledger.device]
    batch = set(by_storage(now.inputs, ledger.key_of))
    in_use = _in_use(versions, now.age)
    classes: dict[int, str] = {}
    for one in versions:
        if name := _by_role(one, roles.get(one.key, ""), now, batch):
            classes[one.key] = name
        elif one.key in savers and one.age >= now.began and not _is_batch(one, now):
            classes[one.key] = words.SAVED
        elif one.key in in_use and one.age >= now.began and not _is_batch(one, now):
            classes[one.key] = words.TEMPORARIES
    wanted = {one.key for one in versions if one.key not in classes} | also
    holders = Search(wanted, ledger.key_of, longest_ns).run(traceback) if wanted else {}
    unexplained = 0
    for one in versions:
        if one.key not in classes:
            holder, saved = holders.get(one.key), one.key in savers
            classes[one.key] = _by_holder(one, holder, now, saved)
            # What a backward pass has made may be on its way within autograd.
            if holder is None and not saved and not now.is_backward(one) and classes[one.key] != words.BATCH:
                unexplained += one.nbytes
    return Held(versions, classes, holders, savers, unexplained)


def _by_role(one: Any, role: str, now: Now, batch: Collection[int]) -> str:
    if role in OF_ROLES:
        return OF_ROLES[role]
    if one.pin in (GRADIENT, PARAMETER):
        return OF_ROLES[one.pin]
    if one.key in batch and not now.in_module(one):  # a loss is a module, too
        return words.BATCH
    return ""


def _is_batch(one: Any, now: Now) -> bool:
    """Return whether a storage came with the step: it was made before the first module or by no operator."""
    if not now.began or one.age < now.began or one.age == now.age:
        return False
    return one.age < now.first_module or (one.operation is None and one.pin not in COMPUTED)


def _by_holder(one: Any, holder: Holder | None, now: Now, saved: bool) -> str:
    if holder is not None and holder.of_optimizer:
        return words.TEMPORARIES
    if holder is not None and holder.role:
        return OF_ROLES[holder.role]
    is_new = one.age >= now.began
    if _is_batch(one, now) and not (holder is not None and holder.container):
        return words.BATCH
    if one.escaped and one.pin not in COMPUTED:
        return words.GIVEN
    # What a compiled backward pass has taken over from the graph, or a node in C++ that Python does not see.
    unseen = holder is None or holder.generated
    if unseen and not saved and in_backward() and is_new and not now.is_backward(one):
        return words.SAVED
    if holder is not None:
        # What a function of a library has, or one in a backward pass, is on its way.
        passing = holder.of_library or (is_new and now.is_backward(one))
        return words.TEMPORARIES if passing and not holder.container else words.KEPT
    if saved:
        return words.SAVED if is_new else words.KEPT
    return words.TEMPORARIES


def _in_use(versions: Iterable[Any], age: int) -> set[int]:
    """Return the keys of what the last operator has read and made."""
    made = [one for one in versions if one.age == age and one.operation is not None]
    return {one.key for one in made} | {source.key for one in made for source in one.operation.inputs}


def by_name(one: Any) -> bool:
    """Return whether a storage was made in a backward pass, as far as its operator's name tells."""
    return one.operation is not None and "backward" in one.operation.signature.operator.name


# -- tables ----------------------------------------------------------------------------------------------


def is_evictable(one: Any) -> bool:
    return one.operation is not None and not one.locks and not one.escaped


def told(held: Held) -> Facts:
    """Return the tables of an error's message."""
    return {"bytes": held.nbytes, "classes": class_rows(held), "variables": variable_rows(held)}


def class_rows(held: Held) -> list[Facts]:
    """Return bytes by class, the largest first."""
    rows: dict[str, _Sum] = {}
    for one in held.versions:
        rows.setdefault(held.classes[one.key], _Sum()).add(one)
    return sorted(({"name": name, **row.told()} for name, row in rows.items()), key=_bytes)


def variable_rows(held: Held) -> list[Facts]:
    """Return bytes by what variables keep, the largest first."""
    rows: dict[Holder, _Sum] = {}
    for one in held.versions:
        if held.classes[one.key] in (words.KEPT, words.GIVEN) and one.key in held.holders:
            rows.setdefault(held.holders[one.key], _Sum()).add(one)
    found = [
        {
            "name": holder.variable,
            "place": holder.place,
            "how": words.DETACH if holder.by_graph else words.ITEM if holder.container else words.DELETE,
            **row.told(),
        }
        for holder, row in rows.items()
        if row.nbytes >= WORTH * held.nbytes
    ]
    return sorted(found, key=_bytes)[:NAMED]


def alike(module: str) -> str:
    """Return a module's name, with `*` in place of numbers: `blocks.*.mlp`."""
    return NUMBER.sub("*", f".{module}")[1:]


def place_rows(held: Held, origin: Callable[[Any], Call], longest: int) -> list[Facts]:
    """Return bytes by class, by modules that are alike, and by line; the largest first."""
    rows: dict[tuple[str, str, str, str], tuple[_Sum, set[str]]] = {}
    for one in held.versions:
        name = held.classes[one.key]
        if name in (words.PARAMETERS, words.GRADIENTS, words.STATE, words.BUFFERS):
            continue
        called = origin(one)
        operator = "" if one.operation is None else one.operation.signature.operator.name
        place = name, alike(called.module), called.line, operator
        row, modules = rows.setdefault(place, (_Sum(), set()))
        row.add(one)
        modules.add(called.module)
    found = [
        {
            "class": name,
            "module": module,
            "alike": len(modules),
            "line": line,
            "operator": operator,
            **row.told(),
        }
        for (name, module, line, operator), (row, modules) in rows.items()
    ]
    return sorted(found, key=_bytes)[:longest]


def largest(held: Held, origin: Callable[[Any], Call]) -> Facts | None:
    """Return what one operator holds alone, if that is much of all: `logits` has rows and columns."""
    whole = held.nbytes
    logits: dict[tuple[int, int], list[Any]] = {}
    by_operation: dict[int, list[Any]] = {}
    for one in held.versions:
        if one.operation is None:
            continue
        by_operation.setdefault(id(one.operation), []).append(one)
        if "log_softmax" in one.operation.signature.operator.name:
            for size, *_ in one.operation.signature.geometries[:1]:
                if size and size[-1] >= VOCABULARY:
                    logits.setdefault((_product(size[:-1]), size[-1]), []).append(one)
    for shape, members in logits.items():
        size = members[0].nbytes
        # The same for the input, the gradients and whatever else has one number for each.
        same = [one for one in held.versions if one.nbytes == size and one.operation is not None]
        if (nbytes := sum(one.nbytes for one in same)) >= LARGE * whole:
            return _named(members[0], origin, nbytes, len(same)) | {"logits": list(shape)}
    for members in by_operation.values():
        if (nbytes := sum(one.nbytes for one in members)) >= ALONE * whole:
            return _named(members[0], origin, nbytes, len(members)) | {"logits": None}
    return None


def _named(one: Any, origin: Callable[[Any], Call], nbytes: int, count: int) -> Facts:
    called = origin(one)
    return {
        "operator": one.operation.signature.operator.name,
        "module": called.module,
        "line": called.line,
        "bytes": nbytes,
        "storages": count,
    }


def _product(lengths: Iterable[int]) -> int:
    found = 1
    for length in lengths:
        found *= length
    return found


class _Sum:
    """Bytes of versions, and what recomputing those takes that can be evicted."""

    def __init__(self) -> None:
        self.nbytes = self.storages = self.evictable = self.ns = 0
        self._operations: dict[int, Operation] = {}

    def add(self, one: Any) -> None:
        self.nbytes += one.nbytes
        self.storages += 1
        if is_evictable(one):
            self.evictable += one.nbytes
            if id(one.operation) not in self._operations:
                self._operations[id(one.operation)] = one.operation
                self.ns += one.operation.signature.cost

    def told(self) -> Facts:
        return {
            "bytes": self.nbytes,
            "storages": self.storages,
            "evictable_bytes": self.evictable,
            "recompute_seconds": self.ns / 1e9,
        }


def _bytes(row: Facts) -> int:
    return -int(row["bytes"])
