"""Operators of a session on a GPU: timed, measured, run again when memory runs out, kept off side streams."""

from __future__ import annotations

from math import prod
from typing import Any

from dtrrun.ledger.record import Geometry, Op, Signature
from dtrrun.runtime.arguments import outputs_of
from dtrrun.runtime.calls import SIGNATURES_LIMIT, Call, call_operator
from dtrrun.runtime.cost_model import GPU, modelled_ns
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.relief import Relief, retriable, short_of_memory
from dtrrun.runtime.rng import put_back
from dtrrun.runtime.storage import size_of, storage_of
from dtrrun.runtime.timing import Timer
from dtrrun.settings import RuntimeSettings

DOES_WITHOUT = {"aten.convolution", "aten.convolution_backward"}
"""Operators whose library takes another algorithm, with other bits, if it cannot have its workspace."""
LEAST_WORKSPACE = 1 << 20  # bytes: less is found in the slack
GUESS_SHARE = 4  # a workspace that is not known yet is taken for a quarter of the limit at most

SIDE_STREAM = "tensors that are used on a side stream stay in memory: dtrrun evicts those of the main stream"


class CudaCalls:
    """What `careful` and replays ask of the device."""

    relief: Relief
    careful: Any
    ledger: Any
    _session: Any

    def __init__(self, gpu: Any, settings: RuntimeSettings) -> None:
        self.gpu = gpu
        self.timer = Timer(gpu.event, gpu.home_stream)
        self.capturing = False  # a CUDA graph
        self._blind = False  # an allocator without statistics
        self._timed = settings.cost == "measured"
        self._young: dict[Any, Signature] = {}
        self._guesses: dict[Signature, int] = {}  # bytes of `output_bytes` before the first call
        self._seen: set[Operator] = set()
        self.side_storages = 0

    def look(self) -> None:
        raise NotImplementedError

    def young_signature(self, key: Any) -> Signature | None:
        """A signature that the short cut is not to know yet: its first calls are measured."""
        signature = self._young.get(key)
        if signature is not None and signature.calls >= Signature.SETTLED:
            self.careful.signatures[key] = self._young.pop(key)
        return signature

    def add_signature(self, key: Any, signature: Signature) -> None:
        if len(self._young) >= SIGNATURES_LIMIT:
            self._young.clear()
            self._guesses.clear()
        self._young[key] = signature
        unknown = not signature.calls and self.ledger.budget_bytes is not None and not self._blind
        if signature.operator.name in DOES_WITHOUT and unknown and not self.capturing:
            # cuDNN's copies of what it reads and makes, in a layout of its own, are the most that is usual.
            copies = signature.output_bytes + sum(map(bytes_of, signature.geometries))
            self._guesses[signature] = guess = min(copies, self.ledger.limit // GUESS_SHARE)
            signature.output_bytes += guess

    def call(self, call: Call, args: Any, kwargs: dict[str, Any], rng: Any) -> Any:
        """Run one operator of the program: timed, measured, and again after an out-of-memory error."""
        signature = call.signature
        call.needed = -1
        if self.capturing:
            return call_operator(call, args, kwargs)
        if self.timer.pending:
            with self.careful.lock:
                self.timer.poll()
        self.provide(signature)
        # Twice: the first call may set up libraries, or try several kernels.
        measured = signature.calls < 2 and not self._blind
        state = [self.gpu.statistics() if measured else None]
        first = [True]
        timed = self._timed and signature.calls < Signature.SETTLED and not self.gpu.on_side_stream()

        def run() -> Any:
            if not first[0]:
                state[0] = None if self._blind else self.gpu.statistics()
                if rng is not None:
                    put_back(rng)
            first[0] = False
            start = self.timer.begin() if timed else None
            try:
                result = call_operator(call, args, kwargs)
            except BaseException:
                if start is not None:
                    self.timer.dropped(start)
                raise
            if start is not None:
                self.timer.end(signature, start)
            return result

        if retriable(call.operator, random_state_known=rng is not None):
            wanted = signature.output_bytes - self._guesses.get(signature, 0)
            ran = signature.calls > 0
            result = self.relief.attempt(run, call.operator.name, wanted, ran=ran)
        else:
            result = run()
        if state[0] is not None:
            call.needed = _taken(state[0], self.gpu.statistics())
        return result

    def replay(self, op: Op, run: Any) -> Any:
        """Run a recorded operator."""
        operator = op.signature.operator
        self.provide(op.signature)
        if retriable(operator, random_state_known=True):
            return self.relief.attempt(run, operator.name, op.signature.output_bytes)
        return run()

    def provide(self, signature: Signature) -> None:
        """Once memory is short: see that a library that would do without its workspace gets it."""
        workspace = signature.workspace or (self._guesses.get(signature, 0) if self._guesses else 0)
        if workspace and self.ledger.pressure and not self.gpu.on_side_stream():
            self.relief.provide((signature.output_bytes - workspace, workspace))

    def price(self, call: Call, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """The cost of a signature: the model's, until the timer has read one."""
        signature = call.signature
        if not signature.calls and not signature.timed:
            nbytes = sum(record.nbytes for record in call.records) + signature.output_bytes
            signature.cost = modelled_ns(call.func, args, kwargs, result, nbytes, GPU)
        if signature.calls < Signature.SETTLED:
            signature.calls = signature.calls + 1 if self._timed else Signature.SETTLED

    def finished(self, call: Call, signature: Signature, result: Any) -> None:
        """An operator's results are in the ledger."""
        guess = self._guesses.pop(signature, 0) if self._guesses else 0
        if call.needed < 0:
            signature.output_bytes -= guess
        else:
            if signature.calls == 2:
                signature.output_bytes = min(call.needed, signature.output_bytes)
            elif signature.calls == 1 and not call.operator.dynamic:
                signature.output_bytes = call.needed
            else:
                signature.output_bytes = max(call.needed, signature.output_bytes)
        if call.operator.name in DOES_WITHOUT:
            made = sum(size_of(storage_of(tensor)) for tensor in outputs_of(result, []))
            beside = signature.output_bytes - made
            signature.workspace = beside if beside >= LEAST_WORKSPACE else 0
        if self.gpu.on_side_stream() and not self.capturing:
            self._pin_side(call, result)
        if call.operator not in self._seen:
            self._seen.add(call.operator)
            self.look()  # its kernels have been loaded, perhaps a library's

    def _pin_side(self, call: Call, result: Any) -> None:
        """What two streams use must not be freed on the word of one of them."""
        touched = [self.ledger.records.get(record.key) for record in call.records]
        touched += [self.careful.record_of(tensor) for tensor in outputs_of(result, [])]
        for record in touched:
            if record is not None and record.op is not None:
                self.ledger.make_constant(record, "side stream")
                self.side_storages += 1
                self._session.warn(SIDE_STREAM)

    def forgives(self, operator: Operator, error: BaseException) -> bool:
        """Whether an operator of the short cut that raised `error` is going to run again."""
        return (
            short_of_memory(error, self.gpu.index)
            and self.ledger.budget_bytes is not None
            and retriable(operator, random_state_known=False)
        )


def bytes_of(geometry: Geometry) -> int:
    """Of a tensor's elements."""
    size, _, _, dtype, *_ = geometry
    return int(prod(size)) * int(dtype.itemsize)


def _taken(before: Any, after: Any) -> int:
    """Bytes that a call took at its peak, or a little more, without a reset of the program's statistics.

    Two bounds: all that was handed out meanwhile, and how far the peak now lies above what there was. The
    second is exact where the call has raised the peak.
    """
    return int(min(after.total - before.total, after.peak - before.allocated))
