"""Operators of a session on a GPU: timed, measured, retried when out of memory, moved off side streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrrun.core.graph import Operation, Signature
from dtrrun.runtime.cost_model import GPU, modelled_ns
from dtrrun.runtime.cuda.oom_retry import Retry, retriable, short_of_memory
from dtrrun.runtime.dispatch.arguments import outputs_of
from dtrrun.runtime.dispatch.call import TensorCall
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.operators import Operator
from dtrrun.runtime.rng import put_back
from dtrrun.runtime.storage import size_of, storage_of
from dtrrun.settings import RuntimeSettings

SIDE_STREAM = (
    "tensors that are used on a side stream stay in memory: dtrrun evicts only those of the main stream"
)


class CudaOperators:
    """Runs operators on a GPU for the slow path and rematerializations."""

    def __init__(self, gpu: Any, settings: RuntimeSettings, loaded: Callable[[], None]) -> None:
        """loaded: called after calls that may have loaded kernels, or a library."""
        self.gpu = gpu
        self.loaded = loaded
        self.capturing = False  # a CUDA graph
        self.blind = False  # an allocator without statistics
        self.times = settings.cost == "measured"
        self.side_storages = 0
        self._tells: bool | None = None

    def connect(self, slow_path: SlowPath, retry: Retry, warn: Callable[[str], None]) -> None:
        """Connect to a session."""
        self._slow_path, self._ledger, self._retry, self._warn = slow_path, slow_path.ledger, retry, warn

    def call(self, call: TensorCall) -> Any:
        """Run one operator of the program: timed, measured, and retried after an out-of-memory error."""
        if self.capturing:
            return self._retry.once(lambda: self._slow_path.call(call), call.operator.name)
        signature, rng, retry = call.signature, call.rng, self._retry
        is_early, retries = signature.calls < 2, retry.retries
        attempted = False
        needed = -1

        def run() -> Any:
            nonlocal attempted, needed
            if attempted and rng is not None:
                put_back(rng)
            attempted = True
            result, needed = self._slow_path.native.measured(signature, self._slow_path.call, call)
            return result

        name = call.operator.name
        if retriable(call.operator, random_state_known=rng is not None):
            result = retry.attempt(run, name, signature.output_bytes, ran=signature.calls > 0)
        else:
            result = retry.once(run, name)
        if is_early or retry.retries != retries:
            call.needed = needed
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
        self._slow_path.native.count_measured(signature)

    def finished(self, call: TensorCall, signature: Signature) -> None:
        """Update a signature once its operator's results are in the ledger."""
        results = outputs_of(call.result, []) if call.operator.convolves else []
        made = sum(size_of(storage_of(tensor)) for tensor in results)
        self._slow_path.native.learn_measured(signature, call.needed, made)
        if call.statistics:
            call.replay_signature()
        if self.gpu.on_side_stream() and not self.capturing:
            self._pin_side(call)

    def _pin_side(self, call: TensorCall) -> None:
        """Pin what two streams use, because neither could safely free it."""
        touched = [self._ledger.versions.get(version.key) for version in call.versions]
        touched += [self._slow_path.version_of(tensor) for tensor in outputs_of(call.result, [])]
        for version in touched:
            if version is None:
                continue
            self._ledger.fix(version)
            if version.operation is not None:
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
