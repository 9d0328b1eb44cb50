"""The environment in which the target is started."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.monitor.gpus import gpus
from dtrrun.settings import RuntimeSettings

HOOK = str(Path(__file__).resolve().parent.parent / "boot" / "path")
RECORDS = "DTRRUN_RECORDS"
"""Variable with the folder of records, for code that must not spend time reading the settings."""


ALLOCATOR = "PYTORCH_ALLOC_CONF"
FORMER = "PYTORCH_CUDA_ALLOC_CONF"  # its name before PyTorch 2.9, which still reads it


def allocator_settings(environ: Mapping[str, str], platform: str = sys.platform) -> dict[str, str]:
    """Return changes for CUDA's caching allocator: expandable segments reduce fragmentation.

    There are none if the user has set this or chosen another allocator, or where it does not work (PyTorch
    supports it only on Linux; WSL's driver lacks a requirement).
    """
    present = {name: environ[name] for name in (ALLOCATOR, FORMER) if environ.get(name, "").strip()}
    text = ",".join(present.values())
    if "expandable_segments" in text or "backend:cudaMallocAsync" in text.replace(" ", ""):
        return {}
    if platform != "linux" or "microsoft" in os.uname().release.lower():
        return {}
    # Both names if both are set, since each is read by parts of PyTorch. Only FORMER if only that is set.
    return {
        name: f"{before.strip().rstrip(',')},expandable_segments:True" for name, before in present.items()
    } or {ALLOCATOR: "expandable_segments:True"}


def child_environment(settings: RuntimeSettings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environ` with the settings, and with our hook first on PYTHONPATH."""
    if os.pathsep in HOOK:
        raise LaunchError(
            f"dtrrun is installed in {HOOK}, and PYTHONPATH cannot hold a {os.pathsep!r}", FAILED
        )
    before = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder != HOOK]
    path = os.pathsep.join([HOOK, *before]) if any(before) else HOOK
    return {
        **environ,
        # PyTorch 2.13 calls NVML for expandable segments, and crashes without it (`get_nvml_device` in
        # ATen/cuda/PeerToPeerAccess.cpp).
        **(allocator_settings(environ) if settings.device != "cpu" and gpus(None).nvml else {}),
        **settings.to_environment(),
        "PYTHONPATH": path,
        RECORDS: settings.record_dir or "",
    }
