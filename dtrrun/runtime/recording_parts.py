"""The session's ledger, operators and accesses while `dtrrun record` is on; each tells the recorder.

They take the place of the plain ones, so that a session that records nothing pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.ledger.record import Record, Signature
from dtrrun.runtime.access import Access
from dtrrun.runtime.arguments import PLAIN, is_leaf
from dtrrun.runtime.calls import Call
from dtrrun.runtime.careful import Careful
from dtrrun.runtime.costs import identity
from dtrrun.runtime.ledger import Ledger
from dtrrun.runtime.lookahead import WHY
from dtrrun.runtime.mutation import overwritten
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.passing import until_return
from dtrrun.runtime.recording import Pending, Recorder
from dtrrun.runtime.step_log import Facts
from dtrrun.runtime.storage import storage_of
from dtrrun.settings import RuntimeSettings


def recording(settings: RuntimeSettings) -> tuple[Any, Any, Any, Recorder]:
    """What to make a session's ledger, careful handling and access of, bound to one recorder."""
    assert settings.log is not None
    recorder = Recorder(settings.log, settings.log_first, settings.log_last, settings.cost)

    def ledger(*args: Any, **options: Any) -> RecordingLedger:
        made = RecordingLedger(*args, **options)
        made.watched_by(recorder)
        return made

    def careful(*args: Any, **options: Any) -> RecordingCareful:
        return RecordingCareful(recorder, *args, **options)

    return ledger, careful, RecordingAccess, recorder


class RecordingLedger(Ledger):
    """Tells of what is not part of an operator."""

    recorder: Recorder

    def watched_by(self, recorder: Recorder) -> None:
        self.recorder = recorder
        queue = self.on_death

        def died(record: Record) -> None:
            queue(record)
            recorder.died(record)

        self.on_death = died

    def _tell(self, event: str, record: Record, **facts: Any) -> None:
        if not self.recorder.inside and record.key in self.recorder.numbers:
            self.recorder.annotate(event, storage=self.recorder.numbers[record.key], **facts)

    def expose(self, record: Record, why: str) -> None:
        self._tell("EXPOSE", record, why=why)
        super().expose(record, why)

    def written_outside(self, record: Record, why: str, *, exposes: bool) -> None:
        self._tell("OUTSIDE", record, why=why, exposes=exposes)
        super().written_outside(record, why, exposes=exposes)

    def trusted(self, record: Record) -> None:
        self._tell("TRUST", record)
        super().trusted(record)

    def pin(self, record: Record, why: str) -> None:
        self._tell("PIN", record, why=why)
        super().pin(record, why)

    def resized(self, record: Record, nbytes: int) -> None:
        self._tell("RESIZED", record, bytes=nbytes)
        super().resized(record, nbytes)

    def compact(self, age: int) -> None:
        self.recorder.annotate("COMPACT", age=age)
        super().compact(age)

    def end_period(self) -> None:
        self.recorder.annotate("PERIOD")
        super().end_period()

    def restore_all(self) -> list[Record]:
        self.recorder.annotate("RESTORE")
        return super().restore_all()

    def end_step(self) -> None:
        super().end_period()  # the step's own end says so
        self.recorder.steps += 1
        self.recorder.step_begins(self)


class RecordingCareful(Careful):
    """Tells of each operator; while a step is recorded all of them come here."""

    asks_sizes = True
    _plain = False

    def __init__(self, recorder: Recorder, *args: Any, **options: Any) -> None:
        self.recorder = recorder
        self._pending: dict[int, Pending] = {}
        self._identities: dict[Any, str] = {}
        self._identity = ""  # of the call that is being prepared
        super().__init__(*args, **options)

    @property
    def always(self) -> bool:
        return self._always or self.recorder.active

    @always.setter
    def always(self, value: bool) -> None:
        self._always = value

    def record_of(self, tensor: torch.Tensor) -> Record | None:
        record = super().record_of(tensor)
        if record is not None:
            self.recorder.meet(record)
        return record

    def run(
        self,
        mode: Any,
        operator: Operator,
        func: Any,
        types: Any,
        args: Any,
        kwargs: dict[str, Any],
        entered: int,
    ) -> Any:
        self._plain = not types or types == PLAIN
        return super().run(mode, operator, func, types, args, kwargs, entered)

    def _prepare(self, operator: Operator, func: Any, args: Any, kwargs: dict[str, Any]) -> Call:
        recorder = self.recorder
        recorder.operator_begins()
        call = super()._prepare(operator, func, args, kwargs)
        if recorder.active:
            recorder.inside += 1
            short = operator.simple and self._plain and not self._reasons - {WHY}
            facts = self._facts(call, args, kwargs, short)
            keys = [record.key for record in call.records]
            self._pending[id(call)] = Pending(facts, keys, list(call.signature.geometries))
        return call

    def _signature(
        self, call: Call, key: tuple[Any, ...], geometries: list[Any], elsewhere: bool
    ) -> Signature:
        if self.recorder.active:
            if key not in self._identities:
                self._identities[key] = identity(key)
            self._identity = self._identities[key]
        return super()._signature(call, key, geometries, elsewhere)

    def _facts(self, call: Call, args: Any, kwargs: dict[str, Any], short: bool) -> Facts:
        operator, numbers = call.operator, self.recorder.numbers
        facts: Facts = {
            "in": [numbers[record.key] for record in call.records],
            "bytes": call.signature.output_bytes,
            "signature": self._identity,
        }
        flags = {
            "view": operator.view and not operator.reshapes_storage,
            "short": operator.view and short and bool(args) and isinstance(args[0], torch.Tensor),
            "untouching": operator.untouching,
            "once": not operator.replayable
            or operator.uninitialised
            or call.opaque
            or bool(self._elsewhere(kwargs.get("device"), call.tensors)),
            "uninitialised": operator.uninitialised,
            "reshapes": operator.reshapes_storage,
            "opaque": call.opaque,
            "opaque_output": operator.opaque_output >= 0,
            "takes": operator.takes_storage and until_return() is None,
            "shrinks": not (operator.view or (operator.mutates and not operator.grows)),
        }
        facts |= {name: True for name, value in flags.items() if value}
        if not call.opaque:
            leaves = [
                hole for hole, tensor in enumerate(call.tensors) if tensor.requires_grad and is_leaf(tensor)
            ]
            if leaves:
                facts["leaves"] = leaves
        if call.written:
            facts["written"] = list(call.written.values())
            whole = [
                [place, storage_of(call.tensors[holes[0]]).nbytes()]
                for place, holes in enumerate(call.written.values())
                if overwritten(call, call.records[holes[0]], holes)
            ]
            if whole:
                facts["overwritten"] = whole
        rule = operator.statistics
        if rule is not None:
            holes = self._statistics_of(call)
            if holes:
                facts["statistics"] = holes
                if rule.updates:
                    facts["updates"] = True
        return facts

    def _finish(
        self, call: Call, args: Any, kwargs: dict[str, Any], result: Any, cost: int, recipe_rng: Any
    ) -> None:
        pending = self._pending.pop(id(call), None)
        before = [record.nbytes for record in call.records]
        written = [holes[0] for holes in call.written.values()]
        super()._finish(call, args, kwargs, result, cost, recipe_rng)
        if pending is None:
            return
        self.recorder.inside -= 1
        resized = {
            hole: nbytes
            for hole in written
            if (nbytes := self.ledger.records[pending.keys[hole]].nbytes) != before[hole]
        }
        if resized:
            pending.facts["resized"] = resized
        if call.signature.output_bytes != pending.facts["bytes"]:
            pending.facts["again"] = call.signature.output_bytes
        self.recorder.operator_ended(call.operator, pending, self.ledger, result, call.signature.cost)

    def _failed(self, call: Call) -> None:
        pending = self._pending.pop(id(call), None)
        super()._failed(call)
        if pending is not None:
            self.recorder.inside -= 1
            self.recorder.annotate("FAILED", **pending.facts)


class RecordingAccess(Access):
    """Tells of what is locked by other than operators."""

    def __init__(self, careful: RecordingCareful) -> None:
        super().__init__(careful)
        self._recorder = careful.recorder
        self._locks = 0

    def lock(self, tensors: list[torch.Tensor]) -> Callable[[], None]:
        unlock = super().lock(tensors)
        recorder = self._recorder
        records = [record for tensor in tensors if (record := self._record(tensor)) is not None]
        if not records or not recorder.active:
            return unlock
        self._locks += 1
        number = self._locks
        numbers = [recorder.numbers[record.key] for record in records]
        recorder.annotate("LOCK", lock=number, storages=numbers)

        def unlocked() -> None:
            recorder.annotate("UNLOCK", lock=number)
            unlock()

        return unlocked
