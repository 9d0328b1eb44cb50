"""Operators of a session on a GPU: timed, measured, retried when out of memory, moved off side streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrrun.core.graph import Operation, Signature
from dtrrun.runtime.cost_model import GPU, modelled_ns
from dtrrun.runtime.cuda.oom_retry import Retry, retriable, short_of_memory
from dtrrun.runtime.cuda.timing import Timer
from dtrrun.runtime.dispatch.arguments import outputs_of
from dtrrun.runtime.dispatch.call import TensorCall
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.rng import put_back
from dtrrun.runtime.storage import size_of, storage_of
from dtrrun.settings import RuntimeSettings

TIMED = 3
"""Calls of a signature that are timed, in Python: some 70 µs each (on an H100's host). If none of them
counts, since the allocator has waited for the GPU, more are, up to `Signature.SETTLED`."""
MOST = 10_000  # kernels seen
LEAST_WORKSPACE = 1 << 20  # bytes; less fits into the slack

SIDE_STREAM = (
    "tensors that are used on a side stream stay in memory: dtrrun evicts only those of the main stream"
)


class CudaOperators:
    """Runs operators on a GPU for the slow path and rematerializations."""

    def __init__(self, gpu: Any, settings: RuntimeSettings, loaded: Callable[[], None]) -> None:
        """loaded: called after the first call of each operator on tensors of these dtypes."""
        self.gpu = gpu
        self.loaded = loaded
        self.timer = Timer(gpu.event, gpu.home_stream, gpu.occupy)
        self.capturing = False  # a CUDA graph
        self.blind = False  # an allocator without statistics
        self.times = settings.cost == "measured"
        self._seen: set[Any] = set()  # operators with dtypes, and signatures of those that choose kernels
        self.side_storages = 0
        self._tells: bool | None = None

    def connect(self, slow_path: SlowPath, retry: Retry, warn: Callable[[str], None]) -> None:
        """Connect to a session."""
        self._slow_path, self._ledger, self._retry, self._warn = slow_path, slow_path.ledger, retry, warn

    def call(self, call: TensorCall) -> Any:
        """Run one operator of the program: timed, measured, and retried after an out-of-memory error."""
        signature, rng = call.signature, call.rng
        if self.capturing:
            return self._slow_path.call(call)
        if self.timer.pending:
            with self._slow_path.lock:
                self.timer.poll()
        # The first two calls: the first may initialize libraries or try several kernels.
        measured = signature.calls < 2 and not self.blind
        tells = self.tells_of_blocks()
        state = [self.state() if measured and not tells else None]
        retries = self._retry.retries
        first = [True]
        timed = self.times and signature.calls < Signature.SETTLED and not self.gpu.on_side_stream()

        def run() -> Any:
            if not first[0]:
                state[0] = None if self.blind or tells else self.state()
                if rng is not None:
                    put_back(rng)
            first[0] = False
            start = self.timer.begin(signature) if timed else None
            try:
                result = self._slow_path.call(call)
            except BaseException:
                if start is not None:
                    self.timer.dropped(start)
                raise
            if start is not None:
                self.timer.end(signature, start)
            return result

        if retriable(call.operator, random_state_known=rng is not None):
            ran = signature.calls > 0
            result = self._retry.attempt(run, call.operator.name, signature.output_bytes, ran=ran)
        else:
            result = self._retry.once(run, call.operator.name)
        if state[0] is not None:
            call.needed = self.taken(state[0])
        elif tells and (measured or self._retry.retries != retries):
            call.needed = self._slow_path.native.needed()
        return result

    def tells_of_blocks(self) -> bool:
        """Return whether the allocator tells of the blocks that it hands out."""
        if self._tells is None:
            self._tells = bool(self._slow_path.native.tells_of_blocks())
        return self._tells

    def state(self) -> tuple[Any, int]:
        """Return the allocator's statistics, and how often it has caused evictions."""
        return self.gpu.statistics(), self._retry.retries + self._retry.avoided

    def replay(self, operation: Operation, run: Callable[[], Any]) -> Any:
        """Run a recorded operator."""
        operator = operation.signature.operator
        if retriable(operator, random_state_known=True):
            return self._retry.attempt(run, operator.name, operation.signature.output_bytes)
        return run()

    def price(self, call: TensorCall, args: Any, kwargs: dict[str, Any]) -> None:
        """Set the cost of a signature: the cost model's, until the timer has read one."""
        signature = call.signature
        if not signature.calls and not signature.cost:
            nbytes = sum(version.nbytes for version in call.versions) + signature.output_bytes
            signature.cost = modelled_ns(call.func, args, kwargs, call.result, nbytes, GPU)
        if signature.calls < Signature.SETTLED:
            more = self.times and (signature.calls + 1 < TIMED or not signature.timed)
            signature.calls = signature.calls + 1 if more else Signature.SETTLED

    def finished(self, call: TensorCall, signature: Signature) -> None:
        """Update a signature once its operator's results are in the ledger."""
        if call.needed >= 0:
            if signature.calls == 2:
                signature.output_bytes = min(call.needed, signature.output_bytes)
            elif signature.calls == 1 and not call.operator.dynamic:
                signature.output_bytes = call.needed
            else:
                signature.output_bytes = max(call.needed, signature.output_bytes)
        if call.operator.convolves:
            made = sum(size_of(storage_of(tensor)) for tensor in outputs_of(call.result, []))
            workspace = signature.output_bytes - made
            signature.workspace = workspace if workspace >= LEAST_WORKSPACE else 0
        if call.statistics:
            call.replay_signature()
        if self.gpu.on_side_stream() and not self.capturing:
            self._pin_side(call)
        kernel: Any = call.operator, frozenset(dtype for _, _, _, dtype, *_ in signature.geometries)
        if call.operator.chooses_kernels and len(self._seen) < MOST:
            kernel = call.operator, signature.geometries
        if kernel not in self._seen:
            self._seen.add(kernel)
            self.loaded()  # kernels, perhaps a library

    def _pin_side(self, call: TensorCall) -> None:
        """Pin what two streams use, because neither could safely free it."""
        touched = [self._ledger.versions.get(version.key) for version in call.versions]
        touched += [self._slow_path.version_of(tensor) for tensor in outputs_of(call.result, [])]
        for version in touched:
            if version is not None and version.operation is not None:
                self._slow_path.dtr.recipes.make_constant(version, "side stream")
                self.side_storages += 1
                self._warn(SIDE_STREAM)

    def taken(self, before: tuple[Any, int]) -> int:
        """Return the bytes that a call has used at its peak since that `state`."""
        return _taken(before, self.state())

    def can_retry(self, operator: Operator, error: BaseException, random_state_known: bool = False) -> bool:
        """Return whether an operator of the fast path that raised `error` will run again."""
        return (
            short_of_memory(error, self.gpu.index)
            and self._ledger.budget_bytes is not None
            and retriable(operator, random_state_known=random_state_known)
        )


def _taken(before: tuple[Any, int], after: tuple[Any, int]) -> int:
    """Return the bytes that a call used at its peak, or slightly more, without resetting statistics.

    There are two bounds: everything allocated by the call, and how far the peak is above the initial memory.
    The second is exact if the call has raised the peak, and too low if something was evicted in between.
    """
    (first, evictions), (last, evictions_now) = before, after
    total = last.total - first.total
    return int(total if evictions_now != evictions else min(total, last.peak - first.allocated))
