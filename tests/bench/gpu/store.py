"""Results as JSON, one file per part, written after every run: an interrupted part keeps its results."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

from tests.bench.gpu.children import Run

KINDS = ("time", "bits", "batch")


def save(folder: Path, part: str, result: dict[str, Any]) -> None:
    """Write a result, which may hold runs as values and in lists. Never leaves half a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{part}.json"
    half = path.with_suffix(".tmp")
    half.write_text(json.dumps(result, indent=1, default=lambda value: value.to_json()))
    os.replace(half, path)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the existing results by the part's name."""
    return {path.stem: _runs(json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))}


def _runs(value: Any) -> Any:
    """Return the value with runs restored from their JSON form."""
    if isinstance(value, list):
        return [_runs(one) for one in value]
    if not isinstance(value, dict):
        return value
    if {"status", "kind", "seconds"} <= value.keys():
        known = {field.name for field in fields(Run)}
        return Run(**{name: one for name, one in value.items() if name in known})
    return {name: _runs(one) for name, one in value.items()}
