"""Step times on a GPU that is not there (`tests.hollow --clock`), against an H200's and the paper's."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.gpu.cases import BY_NAME
from tests.bench.runs import ROOT
from tests.bench.section import Section

WITHIN, SAID_WITHIN = 0.15, 0.07
H200 = {  # ms: plain, counting, 70 %, 50 %; docs/design/cuda.md
    "unet": (64.7, 64.7, 95.4, 140),
    "densenet121": (72.9, 78.8, 95.2, 132),
    "inception_v4": (104, 116, 131, 151),
    "transformer": (93.8, 128, 118, 120),
    "gpt2": (48.9, 55.8, 104, None),
    "lstm": (307, 325, 403, 448),
    "unrolled_gan": (738, 791, None, None),
    "resnet1202": (355, 664, None, None),
    "treelstm": (1415, 1610, None, None),
}
PROTOTYPES_SHARE = {
    "unet": 0.82,
    "densenet121": 0.39,
    "inception_v4": 0.38,
    "transformer": 0.43,
    "lstm": 0.36,
    "unrolled_gan": 0.54,
    "resnet1202": 0.45,
    "treelstm": 0.45,
}
"""One of the shares of the plain peak at which the paper's prototype was run."""
MEASURED_THERE = ("unet", "densenet121")
"""The models whose operators have been timed there: by these the clock is judged."""
SETTINGS = ("plain", "counting", "70%", "50%")
LINE = re.compile(r"(?:.*; (plain)|(.*?): measured x\S+, said x(\S+)) ({.*})")

TEXT = f"""\
The ms of the fastest of six steps by [the clock of a GPU that is not there](design/cuda.md#a-clock), not
measured on a GPU. In brackets: what an NVIDIA H200 took with an older dtrrun (commit a2cbf9e), which did
not avoid flushes. Without a budget, the two should be within {WITHIN:.0%} for U-Net and DenseNet-121, whose
operators have been timed there. Those of the other models take what a model says, so their ratios tell more
than their times. "Said" is the report's slowdown, divided by the clock's own (of the median steps): it
should be within {SAID_WITHIN:.0%} of 1. "As the prototype": inside one of the shares of the peak at which
the paper's prototype was run, the time in multiples of a plain step, which should not be more than the
prototype's, in brackets (on a Titan V); and per step, rematerializations, flushes, and the part of the time
after which the host has asked for all of the step's work. Where that is nearly all for a plain step, too,
the step waits for the host, whose time the clock only estimates."""


def python() -> Path | None:
    """Return the Python of `make gpu-without-gpu` with the newest PyTorch."""
    return max((ROOT / ".venv").glob("gpu-*/bin/python"), default=None)


def steps(python: Path, model: str) -> dict[str, dict[str, Any]]:
    """Return a step's figures by setting, with the slowdown that was said over that of the median step."""
    shares = [f"{share}" for share in (0.7, 0.5, PROTOTYPES_SHARE.get(model)) if share is not None]
    program = [python, "-m", "tests.bench.gpu_short.times", model, *shares]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    told = subprocess.run(
        [python, "-m", "tests.hollow", "--clock", *program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    found: dict[str, dict[str, Any]] = {}
    for line in told.stdout.splitlines():
        if match := LINE.match(line):
            plain, setting, said, text = match.groups()
            figures = found[plain or setting] = ast.literal_eval(text)
            slowdown = figures["median"] / found["plain"]["median"]
            figures["said"] = 1.0 if plain else float(said) / slowdown
    return found


def as_the_prototype(model: str, found: dict[str, dict[str, Any]], missed: list[str]) -> list[str]:
    """Return the cells about the prototype's share."""
    share = PROTOTYPES_SHARE.get(model)
    if share is None:
        return ["", "", ""]
    figures, plain, prototype = (
        found.get(f"{share:.0%}"),
        found["plain"],
        BY_NAME[model].prototype_ratio(share),
    )
    if figures is None:
        missed.append(f"{model}, {share:.0%}: too small a budget")
        return [f"{share:.0%}: – ({prototype})", "", ""]
    ratio = figures["ms"] / plain["ms"]
    if prototype is not None and ratio > prototype:
        missed.append(f"{model}, {share:.0%}: {ratio:.2f} times a plain step, the prototype {prototype}")
    again = f"{figures['rematerializations']:.0f}, {figures['flushes']:.1f}"
    host = ", ".join(f"{one['host'] / one['median']:.0%}" for one in (plain, figures))
    return [f"{share:.0%}: {ratio:.2f} ({prototype})", again, host]


def measure(quick: bool) -> Section | None:
    """Return the section, or None without a PyTorch for CUDA."""
    gpu = python()
    if gpu is None:
        return None
    headers = ["Model", "Plain", "Counting", "70 %", "50 %", "Said: counting, 70 %, 50 %"]
    headers += ["As the prototype", "again, flushes", "host: plain, there"]
    section = Section("27. A GPU's time by a clock", TEXT, headers)
    for model in MEASURED_THERE[:1] if quick else H200:
        found = steps(gpu, model)
        cells = []
        for setting, real in zip(SETTINGS, H200[model], strict=True):
            figures = found.get(setting)
            ms, ratio = (None, 1.0) if figures is None else (figures["ms"], figures["said"])
            cells.append(f"{'–' if ms is None else format(ms, '.0f')} ({real or '–'})")
            if abs(ratio - 1) > SAID_WITHIN:
                section.missed.append(f"{model}, {setting}: said {ratio:.2f} of what it was")
            off = 1.0 if ms is None or real is None else ms / real
            if setting in SETTINGS[:2] and model in MEASURED_THERE and abs(off - 1) > WITHIN:
                section.missed.append(f"{model}, {setting}: {off:.2f} of what the H200 took")
        said = [f"{found[one]['said']:.2f}" if one in found else "–" for one in SETTINGS[1:]]
        beside = as_the_prototype(model, found, section.missed) if "plain" in found else ["", "", ""]
        section.rows.append([model, *cells, ", ".join(said), *beside])
        print(*section.rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return section
