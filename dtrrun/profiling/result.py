"""The results, as JSON values and as the YAML profile of `dtrrun --profile`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from dtrrun.profiling.curve import Point
from dtrrun.profiling.study import Study
from dtrrun.profiling.trial import Trial
from dtrrun.profiling.variation import Variation
from dtrrun.sizes import AUTO_HOST, NO_HOST, format_size, format_size_up
from dtrrun.telemetry.private import replacing

SCHEMA = "dtrrun.profile/1"
COSTS = ".costs.gz"
"""Suffix of the costs file, which is stored next to the profile."""


def study_result(study: Study, words: Sequence[str]) -> dict[str, Any]:
    """Return the figures; unknown ones are None. words: the target as the user wrote it."""
    plain = study.plain
    best = study.points.get(study.recommended) if study.recommended is not None else None
    least = study.points.get(study.minimum) if study.minimum is not None else None
    return {
        "schema": SCHEMA,
        "target": list(words),
        "steps": study.steps,
        "limit": study.limit,
        "max_slowdown": study.max_slowdown,
        "complete": study.complete,
        "seconds": study.seconds,
        "plain_run_seconds": plain and plain.seconds,
        "plain_step_seconds": plain and plain.steps[-1].wall_ns / 1e9,
        "plain_peak_bytes": plain and study.peak,
        "plain_overhead_bytes": plain and plain.overhead_bytes,
        "plain_reserve_bytes": plain and study.reserve,
        "processes": plain and plain.processes,
        "minimum_bytes": study.minimum,
        "minimum_certified": study.certified,
        "minimum_heuristic": least and least.heuristic,
        "minimum_host_bytes": least and least.host_bytes,
        "recommended_bytes": study.recommended,
        "recommended_heuristic": best and best.heuristic,
        "recommended_host_bytes": best and best.host_bytes,
        "points": [_point(study, study.points[budget]) for budget in sorted(study.points, reverse=True)],
    }


def _point(study: Study, point: Point) -> dict[str, Any]:
    predicted = asdict(point.predicted)
    del predicted["steps"]
    return {
        "budget_bytes": point.budget_bytes,
        "share": point.budget_bytes / study.peak,
        "heuristic": point.heuristic,
        "predicted": predicted,
        "measured": None if point.trial is None else _trial(point.trial),
    }


def _trial(trial: Trial) -> dict[str, Any]:
    return {
        "status": trial.status,
        "exit_code": trial.returncode,
        "slowdown": trial.told_slowdown,
        "evictions": sum(step.evictions for step in trial.steps),
        "rematerializations": sum(step.rematerializations for step in trial.steps),
        "peak_bytes": trial.peak_bytes,
        "host_bytes": trial.host_bytes,
        "least_budget_bytes": trial.least_budget_bytes,
        "seconds": trial.seconds,
        "steps": [
            {
                "index": step.number,
                "seconds": step.wall_ns / 1e9,
                "evictions": step.evictions,
                "rematerializations": step.rematerializations,
            }
            for step in trial.steps
        ],
    }


def variation_result(variation: Variation, words: Sequence[str]) -> dict[str, Any]:
    """Return the figures of `--vary`."""
    return {
        "schema": SCHEMA,
        "target": list(words),
        "steps": variation.settings.max_steps,
        "limit": variation.limit,
        "complete": variation.complete,
        "seconds": variation.seconds,
        "vary": list(variation.template),
        "range": [variation.low, variation.high],
        "target_budget_bytes": variation.settings.budget_bytes,
        "largest": variation.best,
        "certain": variation.certain,
        "margin_budget_bytes": variation.margin_budget,
        "values": [{"value": value, **_trial(trial)} for value, trial in sorted(variation.tried.items())],
        "with_margin": [
            {"value": value, **_trial(trial)} for value, trial in sorted(variation.with_margin.items())
        ],
    }


def write_profile(path: Path, study: Study, words: Sequence[str]) -> None:
    """Write the recommended budget's profile and the costs, readable only by the user. Raises OSError."""
    assert study.recommended is not None
    assert study.plain is not None
    point = study.points[study.recommended]
    costs = path.with_name(path.stem + COSTS)
    facts = [
        f"plain peak {format_size(study.peak)}",
        f"minimum {format_size(study.minimum)}" if study.minimum else "",
        f"this budget: {told:.2f} times the plain time" if (told := point.told_slowdown) else "",
        f"needs {format_size_up(point.host_bytes)} of host memory" if point.host_bytes else "",
    ]
    options = {"budget": f"{study.recommended}B", "heuristic": point.heuristic, "costs": costs.name}
    if study.settings.host_budget not in (AUTO_HOST, NO_HOST):
        options["host_budget"] = study.settings.host_budget
    target = "".join(c if c.isprintable() else "?" for c in shlex.join(words))
    text = (
        f"# Found by dtrrun profile, in {study.steps} steps of: {target}\n"
        f"# {', '.join(filter(None, facts))}\n"
        f"{yaml.safe_dump(options, sort_keys=False, allow_unicode=True)}"
    )
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for file_path, content in ((costs, study.costs_path.read_bytes()), (path, text.encode())):
        with replacing(file_path) as file:
            file.write(content)
