"""All access to `torch.cuda`, in one place: tests without a GPU substitute a model of it.

Uses functions of `torch._C` where the public ones cost tens of microseconds more (the allocator's statistics)
or do not exist (the current stream as a number). Nothing here waits for the GPU, except `empty_cache` when it
returns memory to the driver.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from dtrrun.monitor.own import OwnMemory
from dtrrun.runtime.cuda.fractions import Fractions
from dtrrun.runtime.cuda.fragmentation import Block, Segment

_C: Any = torch._C
_has_traces = "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters
WITHOUT_HISTORY: dict[str, Any] = {"include_traces": False} if _has_traces else {}
Tensor = torch.Tensor
OCCUPIED_CYCLES = 500_000
"""Of the GPU: some 0.3 ms. A first call takes 0.1 to 0.2 ms to launch an operator."""

REFUSALS = (
    "allocator for GPUs that asks dtrrun",
    "nothing is evicted in the middle of an operator that needs memory, only before it runs again",
)
FLUSHES = (
    "callbacks of the allocator for GPUs",
    "nothing is evicted to keep it from returning its memory to the driver, and steps take longer",
)


class AllocatorStatistics(NamedTuple):
    """Of the caching allocator, in bytes. `total`: everything ever allocated; `ooms`: its refusals;
    `flushes`: how often it has returned its cache because memory was short; `unmapped`: everything ever
    returned to the driver."""

    allocated: int
    peak: int
    total: int
    reserved: int
    reserved_peak: int
    ooms: int
    flushes: int
    unmapped: int


class Gpu:
    """The CUDA device of a session, once it is bound to one."""

    type = "cuda"
    index = -1
    _own: OwnMemory | None = None
    _main = 0  # the program's main stream: cudaStream_t as a number
    _main_stream: Any = None
    follows: bool | None = None  # whether the extension knows the allocator's blocks; None: not asked yet

    def __init__(self) -> None:
        self.fractions = Fractions()

    @staticmethod
    def initialized() -> bool:
        return bool(torch.cuda.is_initialized())

    @staticmethod
    def usable() -> bool:
        """Return False in a forked child, which can't use CUDA if its parent did."""
        return not torch.cuda._is_in_bad_fork()

    @staticmethod
    def touched_by(args: Any, kwargs: Any) -> torch.device | None:
        """Return the first device other than the CPU among an operator's arguments."""
        for arg in args:
            if isinstance(arg, Tensor):
                if not arg.is_cpu:
                    return arg.device
            elif type(arg) is list or type(arg) is tuple:
                for item in arg:
                    if isinstance(item, Tensor) and not item.is_cpu:
                        return item.device
        for arg in (kwargs or {}).values():
            if isinstance(arg, Tensor):
                if not arg.is_cpu:
                    return arg.device
            elif type(arg) is torch.device or (type(arg) is str and arg.startswith("cuda")):
                device = torch.device(arg)
                if device.type != "cpu":
                    return device
        return None

    def bind(self, index: int | None) -> None:
        """Bind the session to the device of that index (None: the current one)."""
        self.index = torch.cuda.current_device() if index is None else index
        self._main_stream = torch.cuda.default_stream(self.index)
        self._main = self._main_stream.cuda_stream

    def install(self, limited: Callable[[], Any]) -> None:
        """Answer the program's own calls. limited: called after it has limited the allocator."""
        self.fractions.install(limited)

    def remove(self) -> None:
        self.fractions.remove()

    def unheard(self, native: Any) -> list[tuple[str, str]]:
        """Return what of the allocator could not be replaced, and what that means. Call it once tensors have
        memory."""
        is_asked, calls_back = native.hears_device_allocator()
        return [*([] if is_asked else [REFUSALS]), *([] if calls_back else [FLUSHES])]

    def is_current(self) -> bool:
        return bool(_C._cuda_getDevice() == self.index)

    def uuid(self) -> str:
        """Return the driver's identifier of the device, independent of CUDA's numbering."""
        return str(getattr(torch.cuda.get_device_properties(self.index), "uuid", ""))

    def statistics(self) -> AllocatorStatistics:
        found = _C._cuda_memoryStats(self.index)
        allocated, reserved = found["allocated_bytes"]["all"], found["reserved_bytes"]["all"]
        return AllocatorStatistics(
            allocated["current"],
            allocated["peak"],
            allocated["allocated"],
            reserved["current"],
            reserved["peak"],
            found.get("num_ooms", 0),
            found.get("num_alloc_retries", 0),
            reserved["freed"],
        )

    def used_and_total(self) -> tuple[int, int]:
        """Return the bytes of the device that any process uses, and its total (cudaMemGetInfo)."""
        free, total = torch.cuda.mem_get_info(self.index)
        return total - free, total

    def shown(self) -> int | None:
        """Return the bytes that the driver shows for this process, if it does. May take milliseconds."""
        if self._own is None:
            self._own = OwnMemory(self.uuid(), self.index)
        return self._own.nbytes()

    def set_cap(self, nbytes: int | None) -> None:
        """Set how much the allocator may take from the driver. None restores the program's setting."""
        self.fractions.limit(self.index, None if nbytes is None else nbytes / self.used_and_total()[1])

    def cap_stands(self) -> bool:
        """Return whether the allocator's limit is still that of `set_cap`, or the program's lower one."""
        return self.fractions.stands()

    def programs_cap(self) -> int | None:
        """Return the bytes that the program itself lets the allocator take; None: all."""
        share = self.fractions.programs
        return None if share >= 1 else int(share * self.used_and_total()[1])

    @staticmethod
    def empty_cache() -> None:
        torch.cuda.empty_cache()

    def follows_blocks(self, native: Any) -> bool:
        """Return whether the extension knows the allocator's blocks. The first time, this takes a snapshot.

        It does not where the allocator does not tell of its blocks, or rounds their sizes in its own way.
        """
        if self.follows is None:
            self.follows = bool(native.follow_blocks(self.index, torch.cuda.device_count())) and bool(
                native.start_blocks(
                    [
                        (
                            segment["address"],
                            segment["total_size"],
                            segment["segment_type"] == "small",
                            segment["is_expandable"],
                            self._serves(segment),
                            list(_blocks(segment)),
                        )
                        for segment in self._snapshot()
                        if segment["device"] == self.index
                    ]
                )
            )
        return self.follows

    def leave_blocks(self, native: Any) -> None:
        """Stop following the blocks, until they are asked for again."""
        native.leave_blocks()
        self.follows = None

    def check_blocks(self, native: Any, reserved: int) -> None:
        """Take another snapshot before blocks are next needed, if these are not the bytes of all segments."""
        if self.follows and native.segment_bytes() != reserved:
            self.leave_blocks(native)

    def segments(self, nbytes: int) -> list[Segment]:
        """Return the allocator's segments that can serve a request of that size on the program's stream.

        Takes milliseconds if there are thousands of blocks.
        """
        kind = "small" if nbytes <= 1 << 20 else "large"  # kSmallSize
        try:
            snapshot = self._snapshot()
        except RuntimeError:  # an allocator without segments (cudaMallocAsync, a custom one)
            return []
        return [
            [Block(address, size, free) for address, size, _, free in _blocks(segment)]
            for segment in snapshot
            if segment["device"] == self.index and segment["segment_type"] == kind and self._serves(segment)
        ]

    def _serves(self, segment: dict[str, Any]) -> bool:
        """Return whether requests on the program's stream may get memory of a segment."""
        return segment["stream"] == self._main and not _is_private(segment)

    def stranded_bytes(self) -> int:
        """Return the free bytes in private pools, which serve no other requests."""
        return sum(
            block["size"]
            for segment in self._snapshot()
            if segment["device"] == self.index and _is_private(segment)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        )

    @staticmethod
    def _snapshot() -> Any:
        """Return the allocator's snapshot without the history that the program may have it record.

        With a history, that takes seconds, so an older PyTorch, which always adds it, is not asked.
        """
        if WITHOUT_HISTORY:
            return torch.cuda.memory_snapshot(**WITHOUT_HISTORY)
        return [] if _C._cuda_isHistoryEnabled() else torch.cuda.memory_snapshot()

    def on_side_stream(self) -> bool:
        return bool(_C._cuda_getCurrentRawStream(self.index) != self._main)

    def come_from(self) -> int | None:
        """Make our device current. Returns the previous one if it was different."""
        if torch.cuda.current_device() == self.index:
            return None
        return int(torch.cuda._exchange_device(self.index))

    @staticmethod
    def go_back(index: int) -> None:
        """Make the previous device current again."""
        torch.cuda._maybe_exchange_device(index)

    def leave_side_stream(self) -> Any:
        """Switch to the program's main stream, which waits for the current one. Returns the latter.

        Our device must be current: `set_stream` would make it so.
        """
        side = torch.cuda.current_stream(self.index)
        self._main_stream.wait_stream(side)
        torch.cuda.set_stream(self._main_stream)
        return side

    def return_to(self, side: Any) -> None:
        """Return to the side stream, which waits for everything done in the meantime."""
        torch.cuda.set_stream(side)
        side.wait_stream(self._main_stream)

    def occupy(self) -> None:
        """If the GPU has no work on the program's stream, the current one, let it do nothing for a moment."""
        if self.is_current() and self._main_stream.query():
            torch.cuda._sleep(OCCUPIED_CYCLES)


def _is_private(segment: dict[str, Any]) -> bool:
    """Return whether a segment belongs to a CUDA graph, or to a pool of the program's own."""
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def _blocks(segment: dict[str, Any]) -> Iterator[tuple[int, int, int, bool]]:
    """Yield for each of a segment's blocks its address, its bytes, those requested, and if it is free."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block["size"], block["requested_size"], block["state"] == "inactive"
        address += block["size"]
