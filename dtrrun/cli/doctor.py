"""The verb `doctor`: what dtrrun finds on this machine, and what to do about each problem."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from dtrrun import __version__, values
from dtrrun.cli.findings import CACHING_OFF, findings
from dtrrun.cli.messages import to_stdout
from dtrrun.cli.report_file import report_writer, write_each
from dtrrun.launch import interpreter
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.torch_probe import probed
from dtrrun.monitor.checkup import device_facts, source_for, surroundings, versions
from dtrrun.monitor.gpus import Gpus, build_of, choose, gpus
from dtrrun.monitor.ladder import Ladder
from dtrrun.monitor.nvml import NvmlUnavailable, start, stop
from dtrrun.settings import option
from dtrrun.views.doctor import print_doctor

SCHEMA = "dtrrun.doctor/1"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    CACHING_OFF,
)

USAGE = "doctor [OPTIONS]"
EPILOG = """
[bold]Examples[/bold]

dtrrun doctor

dtrrun doctor --device cuda:1 --python .venv/bin/python --json -

[bold]Exit status[/bold]: 0, a run on that device can work, perhaps with advice; 1, it cannot; 2, usage error;
125, dtrrun failed, or the result could not be written.
"""


@dataclass(frozen=True)
class Doctor:
    """The options of `dtrrun doctor`."""

    device: str = option(
        "Device to check: auto (the GPU, if there is one that PyTorch can use), cpu, cuda or cuda:N.",
        default="auto",
        read=values.device,
    )
    python: str | None = option(
        "The interpreter whose PyTorch to check; by default the one that a run would use."
    )
    json: str | None = option("Write the findings as JSON; - is standard output, in place of the tables.")


def doctor(given: Doctor, target: Sequence[str]) -> int:
    """Check the driver, the GPUs and PyTorch as a run would find them, and say what to do about problems.

    On a GPU, a small process is started with the target's Python, to see what the driver shows for it.
    """
    if target:
        raise LaunchError(f"doctor takes no target: {target[0]!r} is unexpected")
    json, python = given.json, interpreter.choose(given.python)
    with report_writer(json) as write:
        facts = examine(given.device, python)
        unwritten = write_each(
            {"standard output": lambda: _show(facts, json), "--json": lambda: write(facts)}
        )
    if not facts["ok"]:
        return 1
    return FAILED if unwritten else 0


def _device(device: str, torch: Mapping[str, Any], nvml: Any) -> str:
    """Return the device of a run. torch: the result of the probe, which queried CUDA itself."""
    count = torch.get("count", 0)
    if device == "auto":
        build = build_of(SimpleNamespace(**torch))
        device = choose(device, build, lambda build: Gpus((0,) * count) if count else gpus(build, nvml))
    return "cuda:0" if device == "cuda" else device


def _show(facts: dict[str, Any], json: str | None) -> None:
    if json != "-":
        with to_stdout():
            print_doctor(facts, sys.stdout)


def examine(device: str, python: str, nvml: Any = None) -> dict[str, Any]:
    """Return the report as JSON values. nvml: a substitute for NVML."""
    error, substitute = None, nvml
    try:
        nvml = start(nvml)
    except NvmlUnavailable as why:
        nvml, error = None, str(why)
    try:
        ladder = Ladder(nvml)  # before the probe creates a context
        with probed(python, device) as torch:
            seen = source_for(ladder, torch)
        told: dict[str, Any] = (
            versions(nvml) if nvml is not None else dict.fromkeys(("driver", "nvml", "cuda"))
        )
        facts: dict[str, Any] = {
            "schema": SCHEMA,
            "ok": True,
            "dtrrun": __version__,
            "device": device,
            **surroundings(),
            "interpreter": python,
            "driver": {**told, "error": error},
            **device_facts(ladder),
            "torch": torch,
            "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
            "source": seen[0] if seen else None,
            "shown_bytes": seen[1] if seen else None,
        }
    finally:
        if nvml is not None:
            stop(nvml)
    facts["device"] = _device(device, torch, substitute)
    found = findings(facts)
    facts["findings"] = [finding._asdict() for finding in found]
    facts["ok"] = all(finding.level != "problem" for finding in found)
    return facts
