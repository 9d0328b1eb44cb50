"""A model sharded by FSDP2, inside budgets and with checkpoints."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from tests.bench.runs import environment
from tests.bench.section import Section

PERCENTS = (80, 60, 45, 35)
AT_MOST = 1.05
INSIDE = "inside the peak of checkpoints"

TEXT = """\
A small GPT (six blocks, each a group of `fully_shard`) is trained by two processes over gloo: as it is, with
every block as a checkpoint of `torch.utils.checkpoint`, and unchanged inside budgets. The peaks are those of
the tensors of one process. The times are processor times of a step after the second, as multiples of the
plain model's in the same round, medians of the rounds. The weights must be the same to the last bit."""


def run(budget: int, *arguments: str) -> tuple[float, str, int]:
    """Return the processor time of a step in ms, a digest of the weights, and the peak in bytes.

    budget: 0 for a run without dtrrun.
    """
    script = str(Path(__file__).parent / "scripts" / "sharded_gpt.py")
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *arguments]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        ours = ["-m", "dtrrun", "--quiet", "--device", "cpu", "--json", str(report), "--budget", f"{budget}B"]
        command = [sys.executable, *(*ours, sys.executable) * bool(budget), *words]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True)
        line = next((line for line in done.stdout.splitlines() if line.startswith("{")), None)
        if line is None:
            raise AssertionError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        peak = json.loads(report.read_text())["peak_bytes"] if budget else 0
    found = json.loads(line)
    return found["ms"], found["shards"], peak


def measure(quick: bool) -> Section:
    rounds = 1 if quick else 3
    section = Section("28. Sharded models", TEXT, ["Run", "Peak", "Share", "Time"])
    enough = 10**9
    _, expected, whole = run(enough)
    *_, theirs = run(enough, "checkpoints")
    runs = {"unchanged": 0, "with checkpoints": 0, INSIDE: theirs}
    runs |= {f"inside {percent} %": whole * percent // 100 for percent in PERCENTS}
    ratios: dict[str, list[float]] = {}
    peaks = {"unchanged": whole, "with checkpoints": theirs}
    for _ in range(rounds):
        plain = 0.0
        for name, budget in runs.items():
            took, found, peak = run(budget, *(["checkpoints"] if name == "with checkpoints" else []))
            if found != expected:
                raise AssertionError(f"{name}: other weights")
            plain = plain or took
            ratios.setdefault(name, []).append(took / plain)
            if budget:
                peaks[name] = max(peaks.get(name, 0), peak)
    for name, values in ratios.items():
        share = f"{peaks[name] / whole:.0%}"
        section.rows.append([name, f"{peaks[name] / 1e6:.1f} MB", share, f"{median(values):.2f}"])
    ratio = median(ratios[INSIDE]) / median(ratios["with checkpoints"])
    if peaks[INSIDE] > theirs or ratio > AT_MOST:
        section.missed.append(f"{INSIDE}: {peaks[INSIDE]} bytes, {ratio:.2f} times the time of checkpoints")
    return section
