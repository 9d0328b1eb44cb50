"""Step times on a GPU without a GPU: `tests.hollow --clock`, against what an H200 took."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.bench.runs import ROOT
from tests.bench.section import Section

WITHIN, SAID_WITHIN = 0.15, 0.07
H200 = {  # ms: plain, counting, 70 %, 50 %; docs/design/cuda.md
    "unet": (64.7, 64.7, 95.4, 140),
    "densenet121": (72.9, 78.8, 95.2, 132),
    "inception_v4": (104, 116, 131, 151),
    "transformer": (93.8, 128, 118, 120),
    "gpt2": (48.9, 55.8, 104, None),
}
MEASURED_THERE = ("unet", "densenet121")
"""The models whose operators have been timed there: by these the clock is judged."""
SETTINGS = ("plain", "counting", "70%", "50%")
LINE = re.compile(r"(?:.*; (plain)|(.*?): measured x\S+, said x(\S+)) ({.*})")

TEXT = f"""\
The ms of the fastest of six steps by [the clock of a GPU that is not there](design/cuda.md#a-clock), not
measured on a GPU. In brackets: what an NVIDIA H200 took with an older dtrrun (commit a2cbf9e), which did not
avoid flushes. Without a budget, the two should be within {WITHIN:.0%} for U-Net and DenseNet-121, whose
operators have been timed there. Those of the other models take what a model says, so their ratios tell more
than their times. "Said" is the report's slowdown, divided by the clock's own (of the median steps): it should
be within {SAID_WITHIN:.0%} of 1."""


def python() -> Path | None:
    """Return the Python of `make gpu-without-gpu` with the newest PyTorch."""
    return max((ROOT / ".venv").glob("gpu-*/bin/python"), default=None)


def steps(python: Path, model: str) -> dict[str, tuple[float, float]]:
    """Return, by setting, the ms of a step, and the slowdown that was said over that of the median step."""
    command = [python, "-m", "tests.hollow", "--clock", python, "-m", "tests.bench.gpu_short.times", model]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    told = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    found: dict[str, tuple[float, float]] = {}
    median = 0.0
    for line in told.stdout.splitlines():
        if match := LINE.match(line):
            plain, setting, said, text = match.groups()
            figures = ast.literal_eval(text)
            median = figures["median"] if plain else median
            slowdown = figures["median"] / median
            found[plain or setting] = figures["ms"], 1.0 if plain else float(said) / slowdown
    return found


def measure(quick: bool) -> Section | None:
    """Return the section, or None without a PyTorch for CUDA."""
    gpu = python()
    if gpu is None:
        return None
    headers = ["Model", "Plain", "Counting", "70 %", "50 %", "Said: counting, 70 %, 50 %"]
    section = Section("27. A GPU's time by a clock", TEXT, headers)
    for model in MEASURED_THERE[:1] if quick else H200:
        found = steps(gpu, model)
        cells = []
        for setting, real in zip(SETTINGS, H200[model], strict=True):
            ms, ratio = found.get(setting, (None, 1.0))
            cells.append(f"{'–' if ms is None else format(ms, '.0f')} ({real or '–'})")
            if abs(ratio - 1) > SAID_WITHIN:
                section.missed.append(f"{model}, {setting}: said {ratio:.2f} of what it was")
            off = 1.0 if ms is None or real is None else ms / real
            if setting in SETTINGS[:2] and model in MEASURED_THERE and abs(off - 1) > WITHIN:
                section.missed.append(f"{model}, {setting}: {off:.2f} of what the H200 took")
        said = [f"{found[one][1]:.2f}" if one in found else "–" for one in SETTINGS[1:]]
        section.rows.append([model, *cells, ", ".join(said)])
        print(*section.rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return section
