"""Running a recorded operator again, on PyTorch's storages; when and in which order, `dtrrun.ledger` says."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from time import perf_counter_ns as now_ns
from typing import Any

import torch

from dtrrun.ledger.record import Blank, Op, Record
from dtrrun.ledger.replay import Replay as AnyReplay
from dtrrun.runtime.ambient import Ambient
from dtrrun.runtime.arguments import fill, outputs_of, over
from dtrrun.runtime.guards import as_without_mode, below
from dtrrun.runtime.rng import replaying
from dtrrun.runtime.silence import silently


class Replay(AnyReplay):
    """Brings evicted records back; counts what that cost."""

    def __init__(self, ledger: Any) -> None:
        super().__init__(ledger)
        self.ambient = Ambient(ledger.device_type)

    tick: Any = None  # called now and then, also in the middle of a long replay
    next_tick = 0
    device: Any = None  # that of the session, if it is a GPU
    guard: Any = below
    _began: tuple[int, int] | None = None  # the replay under way, and what was accounted for until then

    def materialize(self, targets: Iterable[Record]) -> None:
        if self._began is not None:  # one within another: an operator that makes room
            super().materialize(targets)
            return
        self._began = now_ns(), self._accounted()
        try:
            silently(super().materialize, targets)
        finally:
            self._began = None

    def _accounted(self) -> int:
        return self.operators_ns + self.ledger.making_room_ns

    def under_way_ns(self) -> int:
        """Bookkeeping of a replay that has not ended: counted at its end, which may be minutes away."""
        began = self._began
        if began is None:
            return 0
        started, accounted = began
        return now_ns() - started - (self._accounted() - accounted)

    def below(self) -> below:
        guard: below = self.guard()
        return guard

    def _run(self, wanted: Record, op: Op) -> None:
        started = now_ns()
        super()._run(wanted, op)
        if started > self.next_tick and self.tick is not None:
            self.tick()

    def execute(self, op: Op, mutated: set[int], stolen: list[Record]) -> tuple[Any, list[Any], int]:
        written: dict[int, torch.UntypedStorage] = {}
        tensors: list[torch.Tensor] = []
        targets: list[torch.UntypedStorage | None] = []
        same = op.signature.same
        for position, geometry in enumerate(op.signature.geometries):
            if same and same[position] < position:
                tensors.append(tensors[same[position]])
                targets.append(None)
                continue
            entry = op.tensors[position]
            target = None
            if type(entry) is Blank:
                storage = target = self.ledger.memory.allocate(entry.nbytes, entry.device)
            elif id(entry) in mutated:
                target = written.get(id(entry))
                if target is None:
                    take = any(record is entry for record in stolen)
                    target = written[id(entry)] = self._take(entry) if take else self._copy(entry)
                storage = target
            else:
                storage = entry.memory()
            tensors.append(over(storage, geometry))
            targets.append(target)
        feed = iter(tensors)
        args = [fill(arg, feed) for arg in op.args]
        kwargs = {name: fill(arg, feed) for name, arg in op.kwargs.items()} if op.kwargs else {}
        started = now_ns()
        if self.device is None:
            result = self._call(op, args, kwargs)
        else:
            result = self.device.replay(op, lambda: self._call(op, args, kwargs))
        cost = now_ns() - started
        return outputs_of(result, []), targets, cost

    def _call(self, op: Op, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Run the operator with the settings and the random state that it saw first."""
        family = op.signature.operator.family
        if not (op.rng or op.autocast) and self.ambient.readers[family]() == op.state:
            return op.func(*args, **kwargs)
        with (
            self.ambient.restored(family, op.state),
            replaying(op.rng) if op.rng else nullcontext(),
            as_without_mode(op.autocast) if op.autocast else nullcontext(),
        ):
            return op.func(*args, **kwargs)

    def _copy(self, source: Record) -> torch.UntypedStorage:
        storage = source.memory()
        assert storage is not None
        copy: torch.UntypedStorage = self.ledger.memory.allocate(storage.nbytes(), storage.device)
        copy.copy_(storage)
        return copy
