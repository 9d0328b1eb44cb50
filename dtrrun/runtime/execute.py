"""Runs a recorded operator again, on PyTorch's storages.

`core.rematerialize` decides when, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.core.graph import Operation, Overwritten
from dtrrun.runtime.ambient import Ambient
from dtrrun.runtime.dispatch.arguments import fill, outputs_of, over
from dtrrun.runtime.guards import autocasting
from dtrrun.runtime.rng import replaying
from dtrrun.runtime.silence import silently


class Executor:
    """Runs operations recorded by the slow path and the fast path (`Operation.recorded`)."""

    def __init__(self, ambient: Ambient, memory: Any, device: Any) -> None:
        """memory: see `core.backend`. device: the session's."""
        self._ambient, self._memory, self._device = ambient, memory, device

    def below(self) -> AbstractContextManager[None]:
        """A context beneath autograd and all modes, where the operators first ran."""
        below: AbstractContextManager[None] = self._device.below()
        return below

    def quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function` without the warnings that its operators give."""
        return silently(function, *args)

    def hold(self, operation: Operation) -> list[torch.UntypedStorage] | None:
        """Return the storages of its inputs; None if one has gone: what only a cycle of references holds does
        so at any time, and at the latest when the collector is asked to make room."""
        held = [source.memory() for source in operation.inputs]
        return None if any(one is None for one in held) else held

    def execute(
        self, operation: Operation, mutated: set[int], taken: dict[int, torch.UntypedStorage]
    ) -> tuple[Any, list[Any], int]:
        """Run an operator again; see `core.backend`."""
        written: dict[int, torch.UntypedStorage] = {}
        tensors: list[torch.Tensor] = []
        targets: list[torch.UntypedStorage | None] = []
        same = operation.signature.same
        for position, geometry in enumerate(operation.signature.geometries):
            if same and same[position] < position:
                tensors.append(tensors[same[position]])
                targets.append(None)
                continue
            entry = operation.tensors[position]
            target = None
            if type(entry) is Overwritten:
                storage = target = self._memory.allocate(entry.size, entry.device)
            elif id(entry) in mutated:
                target = written.get(id(entry))
                if target is None:
                    given = taken.get(id(entry))
                    target = written[id(entry)] = self._copy(entry.memory()) if given is None else given
                storage = target
            else:
                storage = entry.memory()
            tensors.append(over(storage, geometry))
            targets.append(target)
        feed = iter(tensors)
        _, template, named, *_ = operation.recorded
        args = [fill(arg, feed) for arg in template]
        kwargs = {name: fill(arg, feed) for name, arg in named.items()} if named else {}
        started = now_ns()
        result = self._device.replay(operation, lambda: self._call(operation, args, kwargs))
        cost = now_ns() - started
        return outputs_of(result, []), targets, cost

    def _call(self, operation: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator with the settings and the random state of its first run."""
        func, _, _, rng, state, autocast = operation.recorded
        family = operation.signature.operator.family
        if not (rng or autocast) and self._ambient.readers[family]() == state:
            return func(*args, **kwargs)
        with (
            self._ambient.restored(family, state),
            replaying(rng) if rng else nullcontext(),
            autocasting(autocast) if autocast else nullcontext(),
        ):
            return func(*args, **kwargs)

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a new storage with the same content."""
        guard = self.below()
        with guard, guard:  # twice, because of interrupts
            return self._copy(storage)

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy: torch.UntypedStorage = self._memory.allocate(storage.nbytes(), storage.device)
        copy.copy_(storage)
        return copy
