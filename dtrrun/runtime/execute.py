"""Runs a recorded operator again, on PyTorch's storages.

`core.rematerialize` decides when, and in which order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.core.graph import Operation, Overwritten, Version
from dtrrun.runtime.dispatch.arguments import fill, outputs_of, over
from dtrrun.runtime.dispatch.kernels import Again
from dtrrun.runtime.guards import autocasting, silently
from dtrrun.runtime.rng import replaying

GiveUp = Callable[[Sequence[Version]], AbstractContextManager[None]]


class Executor:
    """Runs operations recorded by the slow path and the fast path (`Operation.recorded`)."""

    in_python = False
    """For tests: in new sessions, C++ leaves all replays to this class."""

    def __init__(self, native: Any, memory: Any, device: Any, between: Callable[[], None]) -> None:
        """native: the extension. memory: see `core.backend`. device: the session's. between: called between
        replayed operators."""
        self._native, self._memory, self._device, self.between = native, memory, device, between
        self.given_up: GiveUp = lambda _: nullcontext()
        """Context for code of the program, in which other threads have their turns (`Turns.given_up`)."""

    def below(self) -> AbstractContextManager[None]:
        """A context beneath autograd and all modes, where the operators first ran."""
        below: AbstractContextManager[None] = self._device.below()
        return below

    def quietly(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call `function`, suppressing the warnings of its operators."""
        return silently(partial(function, *args))

    def execute(self, operation: Operation, taken: set[int]) -> tuple[list[Any], int]:
        """Run an operator again, which may overwrite the scratch versions with the ids in `taken`.

        Returns the storages that it has made, by output, and the time it took in ns.
        """
        guard = self.below()
        with guard, guard:  # twice, because of interrupts
            return self._execute(operation, taken)

    def _execute(self, operation: Operation, taken: set[int]) -> tuple[list[Any], int]:
        mutated = operation.mutated()
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
                target = written.get(id(entry))
                if target is None:
                    target = written[id(entry)] = self._memory.allocate(entry.size, entry.device)
                storage = target
            elif id(entry) in mutated:
                target = written.get(id(entry))
                if target is None:
                    own = id(entry) in taken
                    target = written[id(entry)] = entry.scratch if own else self._copy(entry.memory())
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
        unlocked = not taken and self._needs_no_lock(operation)
        with self.given_up(operation.inputs) if unlocked else nullcontext():
            result = self._device.replay(operation, lambda: self._call(operation, args, kwargs))
        cost = now_ns() - started
        results = outputs_of(result, [])
        made = [
            targets[~where] if where < 0 else self._memory.storage_of(results[where])
            for where in operation.places
        ]
        return made, cost

    def _needs_no_lock(self, operation: Operation) -> bool:
        """Return whether to run an operator without the lock.

        Its kernel is not PyTorch's own, and may wait for another thread; and it changes nothing that other
        threads see.
        """
        operator = operation.signature.operator
        if not operator.foreign:
            return False
        func, _, _, drawn, state, _ = operation.recorded
        changes = drawn or self._native.changes_others(state)
        return not (changes or (isinstance(func, Again) and func.reading.changes()))

    def _call(self, operation: Operation, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator with the settings and the random state of its first run."""
        func, _, _, rng, state, autocast = operation.recorded

        def run() -> Any:
            with (
                replaying(rng) if rng else nullcontext(),
                autocasting(autocast) if autocast else nullcontext(),
            ):
                return func(*args, **kwargs)

        return self._native.with_state(state, run, not operation.signature.operator.foreign)

    def bring_back(self, run: Callable[[], None], nbytes: int) -> None:
        """Call run(), which copies so many bytes back from the host. A GPU has had no memory for them."""
        self._device.run_again(run, nbytes)

    def copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return a new storage with the same content, or None if the system has no memory for it."""
        guard = self.below()
        try:
            with guard, guard:  # twice, because of interrupts
                return self._copy(storage)
        except (RuntimeError, MemoryError):
            return None

    def _copy(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy: torch.UntypedStorage = self._memory.allocate(storage.nbytes(), storage.device)
        copy.copy_(storage)
        return copy
