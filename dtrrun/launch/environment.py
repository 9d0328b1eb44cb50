"""The environment in which the target is started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.settings import RuntimeSettings

HOOK = str(Path(__file__).resolve().parent.parent / "boot" / "path")
RECORDS = "DTRRUN_RECORDS"
"""Names the folder of records for code that must not take the time to read the settings."""


def child_environment(settings: RuntimeSettings, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` with the settings in it, and our hook first on PYTHONPATH, which stays as it is otherwise."""
    if os.pathsep in HOOK:
        raise LaunchError(
            f"dtrrun is installed in {HOOK}, and PYTHONPATH cannot hold a {os.pathsep!r}", FAILED
        )
    before = [folder for folder in environ.get("PYTHONPATH", "").split(os.pathsep) if folder != HOOK]
    path = os.pathsep.join([HOOK, *before]) if any(before) else HOOK
    return {
        **environ,
        **settings.to_environment(),
        "PYTHONPATH": path,
        RECORDS: settings.record_dir or "",
    }
