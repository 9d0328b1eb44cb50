"""The paper's models on a GPU: `python -m tests.bench.gpu [PART…]`, from the project's folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from dtrrun.research.figures.style import MissingMatplotlib
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.children import ROOT, Setting
from tests.bench.gpu.driver import first_device
from tests.bench.gpu.page import PICTURE, machines, markdown, sections
from tests.bench.gpu.parts import MEASURES, Clock, names
from tests.bench.gpu.picture import draw
from tests.bench.gpu.store import load, save
from tests.bench.section import replace_sections

USAGE, NO_GPU, INTERRUPTED = 2, 3, 130

PROBE = """
import json, torch
found = {"torch": torch.__version__}
if torch.cuda.is_available():
    one = torch.cuda.get_device_properties(0)
    found |= {"gpu": one.name, "total": one.total_memory, "cuda": torch.version.cuda}
print(json.dumps(found))
"""


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.parts == ["list"]:
        print("\n".join(names()))
        return 0
    # NVML numbers devices in this order, so its first is then CUDA's first.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    parts = args.parts or names()
    if unknown := [part for part in parts if part not in names()]:
        return _refuse(f"no part is called {', '.join(unknown)}; there are {', '.join(names())}", USAGE)
    if args.device == "cpu" and not args.tiny:
        return _refuse("on the CPU there are tests of the bench alone: add --tiny", USAGE)
    if args.table:
        return _write(args)
    machine = _machine(args.device)
    if machine is None:
        return _refuse("no NVIDIA GPU that PyTorch can use (torch.cuda.is_available() is False)", NO_GPU)
    device = first_device() if args.device == "cuda" else None
    if args.device == "cuda" and device is None:
        _say("NVML does not answer: what the driver shows is asked from CUDA, of the device as a whole")
    setting = Setting(args.device, args.tiny, args.warm_up, args.steps, device)
    try:
        for number, part in enumerate(parts, 1):
            _measure(part, setting, machine, args, f"{part} ({number} of {len(parts)})")
    except KeyboardInterrupt:
        _say(f"interrupted; what was measured is in {args.results}")
        _write(args)
        return INTERRUPTED
    return _write(args)


def _measure(part: str, setting: Setting, machine: str, args: argparse.Namespace, title: str) -> None:
    name, _, kind = part.partition("-")
    begun = time.monotonic()
    _say(f"{title}, on {machine}")

    def keep(result: dict[str, Any]) -> None:
        about = {"machine": machine, "steps": setting.steps, "warm_up": setting.warm_up}
        save(args.results, part, result | about)

    options = {"budget": args.budget} if kind == "batch" and args.budget else {}
    try:
        MEASURES[kind or "time"](BY_NAME[name], setting, Clock(args.minutes * 60), keep, _say, **options)
    except RuntimeError as error:
        _say(f"{part}: {error}")
    _say(f"{part}: done in {time.monotonic() - begun:.0f} s")


def _write(args: argparse.Namespace) -> int:
    """Write tables of all existing results; return 1 if they miss something."""
    results = load(args.results)
    found = sections(results)
    if not found:
        return _refuse(f"no results in {args.results}", 1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    for section in found:
        section.print(console)
    page = args.page or (None if args.tiny else ROOT / "docs" / "measurements.md")
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        picture = page.parent / PICTURE
        timed = [result for result in results.values() if result["kind"] == "time"]
        if timed:
            try:
                picture.parent.mkdir(exist_ok=True)
                draw(timed, f"Time over memory: {machines(timed)}", picture)
                _say(f"written: {picture}")
            except MissingMatplotlib as error:
                _say(str(error))
        texts = {section.title: markdown(section, results, picture.exists()) for section in found}
        replace_sections(page, texts)
        _say(f"written: {page}")
    return 1 if any(section.missed for section in found) else 0


def _machine(device: str) -> str | None:
    """Return the machine in one line; None if PyTorch lacks a GPU that it should have."""
    # In a child: a process that queries CUDA devices may keep a context, whose memory would count.
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        _say(f"torch: {(probe.stderr.strip().splitlines() or ['cannot be imported'])[-1]}")
        return None
    found = json.loads(probe.stdout)
    versions = f"Python {platform.python_version()}, torch {found['torch']}"
    if device == "cpu":
        return f"the CPU, {versions}"
    if "gpu" not in found:
        return None
    nvml = first_device()
    driver = f", driver {nvml.driver}" if nvml else ""
    return f"{found['gpu']}, {found['total'] / 2**30:.0f} GiB{driver}, CUDA {found['cuda']}, {versions}"


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.gpu", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help="all if none is given; list: name them")
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "gpu", metavar="FOLDER")
    parser.add_argument("--table", action="store_true", help="measure nothing: tables of what is in FOLDER")
    parser.add_argument("--page", type=Path, help="the page to write; docs/measurements.md if not --tiny")
    parser.add_argument("--minutes", type=float, default=7.5, help="that a part may take")
    parser.add_argument("--warm-up", type=int, default=5, metavar="STEPS", help="before, at most")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    parser.add_argument("--budget", type=int, metavar="BYTES", help="for the largest batch, not 12 GB")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for a test of the bench")
    return parser.parse_args(argv)


def _refuse(text: str, status: int) -> int:
    print(f"bench-gpu: {text}", file=sys.stderr)
    return status


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
