"""Runs the training step in a child process, plainly or under dtrrun, and records how it went."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from dtrrun.sizes import format_size
from tests.bench.gpu.driver import Device, Sampler

ROOT = Path(__file__).resolve().parents[3]

KEPT = (
    "peak_bytes",
    "evictions",
    "rematerializations",
    "rematerialized_bytes",
    "oom_retries",
    "least_budget_bytes",
    "slowdown_estimate",
    "seconds",
    "warnings",
    "verify",
)
"""Fields to keep of dtrrun's report, if this version has them."""

OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "_STATUS_ALLOC_FAILED")
"""Signs of PyTorch's own error, CUDA's, and those of cuBLAS and cuDNN, which allocate themselves."""


@dataclass(frozen=True)
class Setting:
    """Where and for how long the children run. `device` is None on the CPU, and where NVML shows none."""

    on: str = "cuda"
    tiny: bool = False
    warm_up: int = 5
    steps: int = 10
    device: Device | None = None


@dataclass
class Run:
    """`status`: ok, out of memory, budget (too small), no end (within its time), or failed.

    Bytes are None where unknown, and on the CPU; `driver_source` is where `driver` comes from: NVML for the
    `process` or the `device`, or dtrrun's own report. `capped` is the run's limit: dtrrun's budget, else the
    allocator's cap. `flushes` is how often the allocator ran short and returned its cache, which waits for
    the GPU. `error` is the end of standard error.
    """

    status: str
    kind: str
    seconds: float
    capped: int | None = None
    steps_ms: list[float] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    parameters: str | None = None
    no_deterministic_kernel: list[str] = field(default_factory=list)
    allocated: int | None = None
    reserved: int | None = None
    overhead: int | None = None
    driver: int | None = None
    driver_source: str | None = None
    flushes: int | None = None
    report: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def ms(self) -> float:
        """Return the median time of a step."""
        return median(self.steps_ms)

    @property
    def said(self) -> str:
        """Return the outcome in words, for a person."""
        least = self.report.get("least_budget_bytes")
        needs = f", needs {format_size(least)}" if least and self.status == "budget" else ""
        why = self.error.rpartition("\n")[2].strip()[:300] if self.status == "failed" else ""
        return f"{self.status}{needs}" + (f": {why}" if why else "")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(
    setting: Setting,
    model: str,
    patience: float,
    *,
    budget: int | None = None,
    counted: bool = False,
    verify: bool = False,
    checkpoint: bool = False,
    deterministic: bool = False,
    cap: int = 0,
    size: dict[str, Any] | None = None,
    steps: int | None = None,
) -> Run:
    """Run one child. With `budget` (bytes) or `counted` (no budget) under dtrrun; `patience` in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result, report = Path(folder, "result.json"), Path(folder, "report.json")
        command = [sys.executable, "-m", "tests.bench.gpu.step", model, "--json", str(result)]
        command += ["--device", setting.on, "--warm-up", str(setting.warm_up)]
        command += ["--steps", str(setting.steps if steps is None else steps)]
        command += ["--tiny"] * setting.tiny + ["--checkpoint"] * checkpoint
        command += ["--deterministic"] * deterministic
        command += ["--size", json.dumps(size)] if size else []
        command += ["--allocator-cap", str(cap)] if cap else []
        ours = budget is not None or counted
        if ours:
            options = ["--quiet", "--device", setting.on, "--json", str(report)]
            options += [] if budget is None else ["--budget", f"{budget}B"]
            options += ["--verify"] * verify
            command = [sys.executable, "-m", "dtrrun", *options, *command]
        begun = time.perf_counter()
        with Sampler(setting.device) as sampler:
            status, stderr = _finished(command, deterministic, patience, sampler)
        found = Run(
            _status(status, stderr, result.exists()),
            "dtrrun" if ours else "checkpointed" if checkpoint else "plain",
            time.perf_counter() - begun,
            capped=budget if ours else cap or None,
            driver=sampler.peak,
            driver_source=sampler.source,
            error=_end(stderr),
        )
        _read_result(found, _json(result))
        _read_report(found, _json(report))
    return found


def _read_result(found: Run, result: dict[str, Any]) -> None:
    if not result:
        return
    found.error = ""
    for name in (
        "steps_ms",
        "losses",
        "parameters",
        "no_deterministic_kernel",
        "allocated",
        "reserved",
        "flushes",
    ):
        setattr(found, name, result.get(name))
    if found.reserved is not None and found.reserved:
        # The driver's figure beyond the allocator's, at the end: context, libraries, kernels.
        if found.driver is None:  # without NVML, CUDA's figure for the whole device
            found.driver, found.driver_source = result["in_use"], "device"
        found.overhead = max(found.driver - found.reserved, 0)


def _read_report(found: Run, report: dict[str, Any]) -> None:
    found.report = {name: report[name] for name in KEPT if name in report}
    shown = [process.get("driver_peak_bytes") or 0 for process in report.get("processes", ())]
    if shown and max(shown) > (found.driver or 0):
        found.driver, found.driver_source = max(shown), "dtrrun"
    if found.allocated is None and report:  # on the CPU: tensor memory, as dtrrun counts it
        found.allocated = report.get("peak_bytes")


def _finished(
    command: list[str], deterministic: bool, patience: float, sampler: Sampler
) -> tuple[int | None, str]:
    """Return exit status and standard error; the status is None if the child had to be ended."""
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env=_environment(deterministic),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as child:
        sampler.pid = child.pid
        try:
            _, stderr = child.communicate(timeout=patience)
            return child.returncode, stderr
        except BaseException as error:
            # dtrrun passes the signal on. On Ctrl-C, the terminal has already signaled the child.
            child.terminate()
            try:
                _, stderr = child.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                _, stderr = child.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                return None, stderr
            raise


def _environment(deterministic: bool) -> dict[str, str]:
    """Return our environment without dtrrun's options, with the project's folder first on Python's path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DTRRUN_")}
    kept["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    if deterministic:
        kept["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return kept


def _status(exit_status: int | None, stderr: str, has_result: bool) -> str:
    if exit_status is None:
        return "no end"
    if has_result and exit_status in (0, 3):  # 3: --verify found a difference
        return "ok"
    if "BudgetError: " in stderr:
        return "budget"
    return "out of memory" if any(sign in stderr for sign in OUT_OF_MEMORY) else "failed"


def _end(stderr: str) -> str:
    lines = [line.rstrip() for line in stderr.splitlines() if line.strip()]
    return "\n".join(lines)[-2000:]


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
