"""Compares `dtrrun estimate` with a GPU: `python -m tests.bench.estimates [PROGRAM…]`.

For each example, what tensors take at most in the first steps: as estimated, and as `dtrrun` without a budget
counts on the GPU. Needs a PyTorch for CUDA; without a GPU, counts on the stand-in (`tests.hollow`). Fails
above 5 %.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.bench.runs import ROOT

EXAMPLES = ("amp", "densenet", "lstm", "resnet", "transformer", "treelstm", "unet", "unrolled_gan", "vae")
STEPS = 6
"""Optimizer steps on the GPU; a program with two optimizers makes as many in the estimate."""
MOST = 0.05


def main(names: list[str]) -> int:
    missed = 0
    print("| Program | Estimated | On the GPU | Difference |\n|---|---:|---:|---:|")
    for name in names or EXAMPLES:
        script = name if name.endswith(".py") else f"docs/examples/{name}.py"
        target = [script, "--device", "cuda"]
        estimated = report(["estimate", "--gpu", "H100", "--steps", str(STEPS)], target)["tensors_bytes"]
        stand_in = [] if torch.cuda.is_available() else [sys.executable, "-m", "tests.hollow", "--idle"]
        options = ["--device", "cuda", "--max-steps", str(STEPS)]
        counted = report(options, target, stand_in)["peak_bytes"]
        difference = estimated / counted - 1
        missed += abs(difference) > MOST
        print(f"| {name} | {estimated:,} | {counted:,} | {100 * difference:+.3f} % |", flush=True)
    return missed


def train(name: str) -> None:
    """Train a model of `tests.bench.gpu` at full size, for `dtrrun estimate -c`."""
    from tests.bench.gpu.cases import BY_NAME
    from tests.bench.gpu.models.task import task_of

    case = BY_NAME[name]
    task = task_of(case, "cuda", False, case.size)
    for _ in range(STEPS):
        task.step()


def report(options: list[str], target: list[str], before: list[str] | None = None) -> Any:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        about = ["--python", sys.executable, "--quiet", "--json", file.name]
        ours = [sys.executable, "-m", "dtrrun", *options, *about]
        done = subprocess.run(
            [*(before or []), *ours, *target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        text = Path(file.name).read_text()
    if not text:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
