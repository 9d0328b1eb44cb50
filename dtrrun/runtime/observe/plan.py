"""Which modules to checkpoint (`torch.utils.checkpoint`) to have part of what a budget saves without dtrrun.

A module that is checkpointed frees what was made in it and only it has saved for its backward pass, until
that runs. Modules that are alike are taken together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from dtrrun.runtime.observe.callers import Call
from dtrrun.runtime.observe.holding import Held, alike, is_evictable
from dtrrun.telemetry.holding import SAVED

WORTH = 0.05
"""The share of the peak from which a plan is worth mentioning."""


class Plan(NamedTuple):
    """To checkpoint all modules with names like `name`. keys: the storages that this frees, by module.

    seconds: what is recomputed in a step, at least.
    """

    name: str
    keys: dict[str, set[int]]
    nbytes: int
    seconds: float


def plans(held: Held, origin: Callable[[Any], Call], maker_of: Callable[[int], Call]) -> list[Plan]:
    """Return the plans that are worth it, those that free the most first."""
    keys: dict[str, dict[str, set[int]]] = {}
    sizes: dict[int, int] = {}
    costs: dict[int, int] = {}
    for one in held.versions:
        if held.classes[one.key] != SAVED or not is_evictable(one) or one.key not in held.savers:
            continue
        sizes[one.key], costs[one.key] = one.nbytes, one.operation.signature.cost
        modules = [origin(one).module, *(maker_of(node).module for node in held.savers[one.key])]
        for module in _prefixes(_common(modules)):
            if (name := alike(module)) != module:
                keys.setdefault(name, {}).setdefault(module, set()).add(one.key)
    found = []
    for name, modules_keys in keys.items():
        freed = [sum(sizes[key] for key in one) for one in modules_keys.values()]
        nbytes = sum(freed) - max(freed)  # one module at a time has all of it
        seconds = sum(costs[key] for one in modules_keys.values() for key in one) / 1e9
        if nbytes >= WORTH * held.nbytes:
            found.append(Plan(name, modules_keys, nbytes, seconds))
    found.sort(key=lambda one: (-one.nbytes, one.seconds))
    # Of modules within each other that free as much, the inner ones: less is run again.
    best: list[Plan] = []
    for one in sorted(found, key=lambda plan: -plan.name.count(".")):
        if not any(other.nbytes >= one.nbytes for other in best):
            best.append(one)
    return sorted(best, key=lambda one: -one.nbytes)


def _common(modules: list[str]) -> list[str]:
    """Return the parts that the names begin with."""
    first, *rest = [module.split(".") for module in modules]
    for other in rest:
        count = 0
        while count < min(len(first), len(other)) and first[count] == other[count]:
            count += 1
        first = first[:count]
    return first


def _prefixes(parts: list[str]) -> Iterator[str]:
    for count in range(1, len(parts) + 1):
        if parts[count - 1]:
            yield ".".join(parts[:count])


def numbered(names: list[str]) -> str:
    """Return names that differ in one number as one: `blocks.0-7.mlp`."""
    split = [name.split(".") for name in names]
    shown = []
    for parts in zip(*split, strict=False):
        different = sorted({*parts}, key=lambda part: (len(part), part))
        if len(different) == 1:
            shown.append(different[0])
        elif all(part.isdecimal() for part in different):
            numbers = sorted(map(int, different))
            whole = numbers == list(range(numbers[0], numbers[-1] + 1))
            shown.append(f"{numbers[0]}-{numbers[-1]}" if whole else ",".join(map(str, numbers)))
        else:
            shown.append("*")
    return ".".join(shown)
