"""The device of a session, chosen once. On the CPU it does nothing and costs nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any

import torch

from dtrrun.core.graph import Operation
from dtrrun.runtime import storage
from dtrrun.runtime.dispatch.interposer import Interposer
from dtrrun.runtime.dispatch.mode import DTRMode
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.guards import below
from dtrrun.settings import RuntimeSettings

COUNTERS = (
    "reserved_bytes",
    "reserved_peak_bytes",
    "overhead_bytes",
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
DRIVERS_ELSEWHERE = ("/dev/dxg", "/dev/nvhost-gpu")  # under WSL, and on Jetson boards, which lack NVML


class Cpu:
    """The interface between the session and its device; `cuda.Cuda` implements it for a GPU."""

    type = "cpu"
    uuid = ""

    operators: Any = None  # how operators are run, if not as on a CPU
    memory: Any = storage  # see `core.backend`

    def __init__(self, notice: str = "") -> None:
        self._notice = notice

    def connect(
        self, dtr: Any, slow_path: SlowPath, warn: Callable[[str], None], alert: Callable[[str], None]
    ) -> None:
        """Take part in a session."""
        if self._notice:
            warn(self._notice)
        storage.use_device(storage.CPU_ROUNDING, None)

    def make_mode(self, slow_path: SlowPath) -> DTRMode:
        return DTRMode(slow_path)

    def make_interposer(self, native: ModuleType, slow_path: SlowPath, *told: Any) -> Interposer:
        """Return what brings operators natively. told: as `Interposer` takes it."""
        return Interposer(native, slow_path, *told)

    def below(self) -> AbstractContextManager[None]:
        """The context in which recorded operators are run again."""
        return below()

    def replay(self, operation: Operation, run: Callable[[], Any]) -> Any:
        """Run a recorded operator."""
        return run()

    def install(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def usable(self) -> bool:
        """Return whether operators can run in this process."""
        return True

    def look(self) -> None:
        """Measure the device's memory use, and adjust the limit."""

    def step_ended(self) -> None:
        pass

    def ended(self, steps: int) -> None:
        """The process ends after this many optimizer steps."""

    def set_budget(self, budget_bytes: int | None) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0) | {"device_index": -1}


def _gpu_is_there() -> bool:
    """Return whether there is a GPU, without using CUDA.

    Using CUDA would break it in forked children, and would fix CUDA_VISIBLE_DEVICES before the script can set
    it. `torch.cuda.device_count()` also uses CUDA if NVML is missing or a MIG device is selected; then the
    driver's own files are consulted. A session that finds no GPU after all sleeps.
    """
    count: Any = getattr(torch.cuda, "_device_count_nvml", None)
    if count is None or torch.version.hip:
        return torch.cuda.device_count() > 0
    found = int(count())
    return found > 0 if found >= 0 else any(os.path.exists(path) for path in (DRIVER, *DRIVERS_ELSEWHERE))


def choose(settings: RuntimeSettings) -> Any:
    """Return the device that the settings name. Raises ValueError if there is no such device."""
    kind, _, index = settings.device.partition(":")
    if kind == "auto":
        if not torch.backends.cuda.is_built():
            return Cpu(NO_CUDA.format(version=torch.__version__) if os.path.isdir(DRIVER) else "")
        kind = "cuda" if _gpu_is_there() else "cpu"
    if kind == "cpu":
        return Cpu()
    if not torch.backends.cuda.is_built():
        raise ValueError(f"device {settings.device}: PyTorch {torch.__version__} was built without CUDA")
    from dtrrun.runtime.cuda.gpu import Gpu
    from dtrrun.runtime.cuda.session import Cuda

    return Cuda(Gpu(), settings, int(index) if index else None)
