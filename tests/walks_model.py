"""The definitions of what `core/history.h` and `core/copies.h` look for among all versions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

WEIGHTS = ("parameter", "running statistics", "updated in place", "mutated")
SMALL_BYTES = 16 << 10


def held_bytes(versions: Iterable[Any]) -> int:
    return sum(one.nbytes for one in versions if one.operation is not None and one.has_storage)


def carried(versions: Iterable[Any], cut_age: int) -> list[Any]:
    def from_before(source: Any) -> bool:
        """Return true if it is needed, released, and from before the cut; or if one of its inputs is."""
        if source.alive or source.operation is None:
            return False
        return source.age < cut_age or any(map(from_before, source.inputs))

    return [one for one in _since(versions, cut_age) if not one.locks and any(map(from_before, one.inputs))]


def mutated(versions: Iterable[Any], age: int, trusted: list[Any]) -> list[Any]:
    def lost(source: Any) -> bool:
        if source.operation is None:
            is_constant = not source.escaped or any(one is source for one in trusted)
            return not (source.resident and is_constant and source.memory() is not None)
        return not source.operation.secured and any(map(lost, source.inputs))

    return [
        one
        for one in _since(versions, age)
        if one.resident and one.has_storage and not one.operation.secured and any(map(lost, one.inputs))
    ]


def _since(versions: Iterable[Any], age: int) -> Iterator[Any]:
    for one in reversed(list(versions)):
        if one.age < age and one.mutations == 0:
            return  # only older ones follow
        if one.operation is not None:
            yield one


def weigh(versions: Iterable[Any]) -> tuple[set[int], int]:
    """Group what the program holds with what it is computed from and its weights; choose what to copy."""
    listed, seen = list(versions), dict[int, Any]()
    group = {id(one): {id(one)} for one in listed}

    def join(one: Any, other: Any) -> None:
        both = group.setdefault(id(one), {id(one)}) | group.setdefault(id(other), {id(other)})
        group.update(dict.fromkeys(both, both))

    held = [one for one in listed if one.operation is not None and one.has_storage and not one.has_left]
    weights, others = dict[int, Any](), list[tuple[Any, Any]]()
    stack = list(held)
    while stack:
        reader = stack.pop()
        for source in reader.inputs:
            if source.operation is not None:
                if not source.alive:
                    join(reader, source)
                    if id(source) not in seen:
                        seen[id(source)] = source
                        stack.append(source)
            elif source.resident and not (source.superseded or source.escaped):
                if source.pin in WEIGHTS:
                    weights[id(source)] = source
                    join(reader, source)
                elif source.nbytes <= SMALL_BYTES:
                    others.append((source, reader))
    read = {(id(group[id(one)]), one.key): one for one in weights.values()}
    read |= {(id(group[id(reader)]), source.key): source for source, reader in others}
    chosen = set()
    for of, key in read:
        copies = sum(one.nbytes for (other, _), one in read.items() if other == of)
        if sum(one.nbytes for one in held if id(group[id(one)]) == of) >= 4 * copies:
            chosen.add(key)
    return chosen, len(listed) + len(seen)
