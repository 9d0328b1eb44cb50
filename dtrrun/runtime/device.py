"""The device of a session, chosen once. On the CPU, almost all of its methods do nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from dtrrun.monitor.gpus import NEITHER, Gpus, build_of, gpus
from dtrrun.monitor.gpus import choose as choose_by_name
from dtrrun.runtime import storage
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.interposer import Interposer
from dtrrun.runtime.guards import below
from dtrrun.runtime.host import memory_left
from dtrrun.settings import RuntimeSettings

COUNTERS = (
    "reserved_bytes",
    "reserved_peak_bytes",
    "overhead_bytes",
    "footprint_peak_bytes",
    "guard_bytes",
    "cap_bytes",
    "device_index",
    "oom_retries",
    "fragmented_bytes",
)
"""The counters of `telemetry.fields` that only a GPU has."""

NO_CUDA = "there is a GPU, but this PyTorch ({version}) was built without CUDA: the budget applies to the CPU"
DRIVER = "/proc/driver/nvidia/gpus"
"""The Linux driver's list of devices, which needs no library."""


class Cpu:
    """The interface between the session and its device; `cuda.Cuda` implements it for a GPU."""

    type = "cpu"
    uuid = ""

    operators: Any = None  # how operators are run, if different from a CPU
    memory: Any = storage  # see `core.backend`
    capturing = False  # a CUDA graph, so that nothing may wait for the device

    def __init__(self, notice: str = "") -> None:
        self._notice = notice

    def connect(
        self, dtr: Any, callbacks: Callbacks, warn: Callable[[str], None], alert: Callable[[str], None]
    ) -> None:
        """Take part in a session."""
        self._ledger, self._native = dtr.ledger, callbacks.native
        if self._notice:
            warn(self._notice)
        storage.use_device(storage.CPU_ROUNDING)

    def make_interposer(self, native: ModuleType, callbacks: Callbacks, *told: Any) -> Interposer:
        """Return the interposer. told: the callbacks that `Interposer` takes."""
        return Interposer(native, callbacks, *told)

    def below(self) -> AbstractContextManager[None]:
        """The context in which recorded operators are replayed."""
        return below()

    def run_again(self, run: Callable[[], None], nbytes: int) -> None:
        """Call a function that allocates so many bytes, and has found no memory for them."""
        run()

    def install(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def refused(self, error: BaseException) -> None:
        """Note that the allocator has refused memory, and that this has been handled."""

    def usable(self) -> bool:
        """Return whether operators can run in this process."""
        return True

    def look(self, *, settles: bool = True) -> None:
        """Measure the device's memory use, and adjust the limit. settles: it may rise."""

    def step_ended(self) -> None:
        pass

    def ended(self, steps: int) -> None:
        """The process ends after this many optimizer steps."""

    def set_budget(self, budget_bytes: int | None) -> None:
        pass

    def most_bytes(self) -> int:
        """Return the largest budget that there is memory for."""
        _, free, *_ = self._native.heap_figures()  # of its own pages, and of the machine's
        return int(self._ledger.resident_bytes + free + memory_left())

    def sufficient_bytes(self, counters: Mapping[str, int]) -> int:
        """Return the budget in which nothing would have been evicted so far. counters: the session's."""
        return counters["peak_bytes"]

    def pool_growth_bytes(self) -> int:
        """Return by how much the program's own memory pools may grow in a larger budget."""
        return 0

    def waited_ns(self) -> int:
        """Return how long a GPU's allocator has kept the program waiting, in ns."""
        return 0

    def avoiding_ns(self) -> int:
        """Return how long dtrrun has worked for a GPU's allocator inside the program's operators, in ns."""
        return 0

    def hint(self) -> str:
        """Return what limits the program besides the budget, or ""."""
        return ""

    def others(self) -> list[dict[str, int]]:
        """Return the figures of the GPUs that the program uses besides the first."""
        return []

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0) | {"device_index": -1}


def _see(build: str | None) -> Gpus:
    """Return the existing GPUs, without initializing CUDA if the program has not."""
    return Gpus((0,) * torch.cuda.device_count()) if torch.cuda.is_initialized() else gpus(build)


def choose(settings: RuntimeSettings) -> Any:
    """Return the device that the settings name. Raises ValueError if there is no such device."""
    build = build_of(torch.version)
    device = choose_by_name(settings.device, build, _see)
    if device == "cpu":
        unused = settings.device == "auto" and build == NEITHER and os.path.isdir(DRIVER)
        return Cpu(NO_CUDA.format(version=torch.__version__) if unused else "")
    from dtrrun.runtime.cuda.gpu import Gpu
    from dtrrun.runtime.cuda.session import Cuda

    _, _, index = device.partition(":")
    return Cuda(Gpu(), settings, int(index) if index else None)
