"""The verb `estimate`: whether a program fits a GPU that is not in this machine."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtrrun.cli.command import of_run
from dtrrun.cli.messages import program_failed
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import collect
from dtrrun.cli.report_file import report_writer
from dtrrun.cli.sweeping import print_and_write
from dtrrun.core.heuristics import STEADY
from dtrrun.launch.errors import FAILED, LaunchError
from dtrrun.launch.interpreter import choose
from dtrrun.launch.records import records_folder
from dtrrun.launch.target import refuse_stream, resolve
from dtrrun.profiling.cards import Chosen, parse_card
from dtrrun.profiling.estimate import FITS, NO, Fit, NothingOnGpu, fit_of
from dtrrun.profiling.trial import OK, run_trial
from dtrrun.settings import OUTPUT, RuntimeSettings, option
from dtrrun.simulator.log import LogError
from dtrrun.values import Reader
from dtrrun.views.estimate import print_estimate
from dtrrun.views.profile import Bar

USAGE = "estimate --gpu GPU [OPTIONS] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun estimate --gpu 24GB train.py --epochs 3

dtrrun estimate --gpu "RTX 4090" --json estimate.json -m mypackage.train --device cuda

[bold]Exit status[/bold]: 0, it fits; 1, only inside a budget, or if the allocator gives back what it does not
use; 3, not at all; the target's own, where it fails; 2, usage error, such as an unknown GPU; 125, no step was
seen, or the program did not use its GPU.
"""
MAY, NOT = 1, 3
NO_STEP = "the program made no optimizer step, and estimate looks at steps"
UNUSED = (
    "the program put nothing on the GPU: give it its option for that, as in dtrrun estimate --gpu H100 "
    "train.py --device cuda"
)
RUNNING, TRYING = "running the first steps", "trying budgets"
HEURISTICS = "h_dtr_eq", STEADY


@dataclass(frozen=True)
class Estimate:
    """The options of `dtrrun estimate`."""

    gpu: Chosen | None = option(
        "The GPU: its name (RTX 4090, H100, A100 40GB), or its memory as it is sold (24GB).",
        read=Reader("GPU", parse_card),
    )
    steps: int = option("How many optimizer steps to look at.", default=3)
    json: str | None = option(
        "Write the figures as JSON; - is standard output (the table then goes to standard error).", OUTPUT
    )
    quiet: bool = option("Print nothing but errors.", OUTPUT, False)
    of_run: Mapping[str, Any] = of_run("python")


def estimate(given: Estimate, target: Sequence[str]) -> int:
    """Say whether TARGET, an unmodified CUDA training script, fits a GPU that is not in this machine.

    TARGET runs for a few steps as if it had that GPU. Nothing is computed there, so it needs neither a GPU
    nor the memory, and numbers that it reads from the GPU are not the real ones. From the operators and their
    sizes follow the memory that it takes, the least budget with dtrrun, and what that costs in time.
    """
    refuse_stream(target, "estimate")
    if given.gpu is None:
        raise LaunchError("estimate needs --gpu, such as --gpu 24GB or --gpu H100")
    options = inside_another(collect({**given.of_run, "device": "cpu"}), limits=False)
    command = resolve(target, lambda: choose(options.python))
    card = given.gpu.card
    settings = replace(
        options.settings,
        budget_bytes=None,
        gpu=(f"NVIDIA {card.name}", card.programs_bytes),
        max_steps=given.steps,
        verify=False,
        plain=False,
    )
    with report_writer(given.json) as write, records_folder() as folder:
        path = Path(folder) / "steps.log"
        found = _look(given, replace(settings, log=str(path)), command, path)
        if isinstance(found, int):
            return found
        result = found.values(target)
        if found.verdict not in (FITS, NO):
            result["run"] = ["dtrrun", "--budget", f"{card.programs_bytes // 10**8 / 10:g}GB", *target]
        unwritten = print_and_write(result, print_estimate, given.json, given.quiet, write)
    if unwritten:
        return FAILED
    return {FITS: 0, NO: NOT}.get(found.verdict, MAY)


def _look(given: Estimate, settings: RuntimeSettings, command: Sequence[str], path: Path) -> Fit | int:
    """Run the program and return what it takes, or the exit status if that cannot be told.

    path: of the log that it writes. Raises LaunchError.
    """
    assert given.gpu is not None
    began = time.monotonic()
    with Bar(sys.stderr, quiet=given.quiet) as bar:
        trial = run_trial(
            settings, command, math.inf, lambda: bar.update(RUNNING, time.monotonic() - began, None)
        )
        if trial.status != OK or trial.absent:
            program_failed(f"failed (exit status {trial.exit_status})", trial.tail, trial.absent)
            return trial.exit_status or FAILED
        if not trial.steps:
            raise LaunchError(NO_STEP, FAILED)
        if not path.exists():
            raise LaunchError(f"its operators cannot be recorded: {trial.log_error}", FAILED)
        try:
            return fit_of(
                path,
                given.gpu,
                trial.steps[-1].number,  # those that are kept are fewer
                HEURISTICS,
                lambda: bar.update(TRYING, time.monotonic() - began, None),
            )
        except NothingOnGpu:
            raise LaunchError(UNUSED, FAILED) from None
        except (LogError, OSError) as error:
            raise LaunchError(f"what was recorded cannot be read: {error}", FAILED) from None
