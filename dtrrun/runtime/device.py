"""The device of a session, chosen once: on the CPU it does nothing, and costs nothing."""

from __future__ import annotations

import os
from typing import Any

import torch

from dtrrun.runtime import storage
from dtrrun.runtime.mode import DTRMode
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
"""Those of `telemetry.fields` that are a GPU's."""

NO_CUDA = "there is a GPU, but this PyTorch ({version}) was built without CUDA: the budget is the CPU's"
DRIVER = "/proc/driver/nvidia/gpus"
"""The Linux driver's folder of its devices, which can be seen without a library."""
DRIVERS_ELSEWHERE = ("/dev/dxg", "/dev/nvhost-gpu")  # under WSL, and on Jetson boards, which lack NVML


class Cpu:
    """What the session asks of its device; see `cuda.Cuda` for what that takes on a GPU."""

    type = "cpu"
    uuid = ""

    def __init__(self, notice: str = "") -> None:
        self._notice = notice

    def make_mode(self, session: Any) -> DTRMode:
        if self._notice:
            session.warn(self._notice)
        storage.use_device(storage.CPU_ROUNDING, None)
        return DTRMode(session.careful)

    def install(self) -> None:
        pass

    def remove(self) -> None:
        pass

    def usable(self) -> bool:
        """Whether operators can run in this process."""
        return True

    def look(self) -> None:
        """Measure what the device's memory is taken by, and adjust the limit."""

    def step_ended(self) -> None:
        pass

    def ended(self, steps: int) -> None:
        """The process ends, after so many optimizer steps."""

    def set_budget(self, budget_bytes: int | None) -> None:
        pass

    def counters(self) -> dict[str, int]:
        return dict.fromkeys(COUNTERS, 0) | {"device_index": -1}


def _gpu_is_there() -> bool:
    """Whether there is a GPU, asked without CUDA.

    CUDA itself could not be used any more by forked children, and CUDA_VISIBLE_DEVICES would be settled
    before the script can set it. That is what `torch.cuda.device_count()` asks where NVML is missing, or a
    MIG device is meant; then the driver's own files have to do. A session that finds no GPU after all sleeps.
    """
    count: Any = getattr(torch.cuda, "_device_count_nvml", None)
    if count is None or torch.version.hip:
        return torch.cuda.device_count() > 0
    found = int(count())
    return found > 0 if found >= 0 else any(os.path.exists(path) for path in (DRIVER, *DRIVERS_ELSEWHERE))


def choose(settings: RuntimeSettings) -> Any:
    """The device that the settings name. Raises ValueError where there is no such device."""
    kind, _, index = settings.device.partition(":")
    if kind == "auto":
        if not torch.backends.cuda.is_built():
            return Cpu(NO_CUDA.format(version=torch.__version__) if os.path.isdir(DRIVER) else "")
        kind = "cuda" if _gpu_is_there() else "cpu"
    if kind == "cpu":
        return Cpu()
    if not torch.backends.cuda.is_built():
        raise ValueError(f"device {settings.device}: PyTorch {torch.__version__} was built without CUDA")
    from dtrrun.runtime.cuda import Cuda
    from dtrrun.runtime.gpu import Gpu

    return Cuda(Gpu(), settings, int(index) if index else None)
