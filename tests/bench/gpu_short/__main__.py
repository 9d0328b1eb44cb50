"""What a GPU tells in a quarter of an hour: `python -m tests.bench.gpu_short PART [SECONDS]`.

For a machine with a GPU that is there for some minutes only. It works from a bare checkout, without an
installation: it needs PyTorch, a compiler, and pytest for part 2. Part 1 takes at most 560 s, part 2, which
uses what part 1 has compiled, at most 230 s; SECONDS sets another limit. Each program has a limit of its own,
so that a slow one does not take the time of the others, and is left out when less than 12 s are left. What
programs print goes to files in OUT (default: build/gpu-short), at most six, and a line for each program to
standard output.

To try it without a GPU: `python -m tests.hollow --idle python -m tests.bench.gpu_short 1` with
GPU_SHORT_QUICK=1, which makes each program as short as possible.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
HERE = "tests.bench.gpu_short"
LEAST_SECONDS = 12
LIMITS = {"1": 560, "2": 230}
ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


@dataclass(frozen=True)
class Program:
    """`file`: where its output is appended. `limit`: of its time, in seconds. `arguments`: of Python."""

    file: str
    limit: int
    arguments: tuple[str, ...]


def module(file: str, limit: int, name: str, *arguments: str) -> Program:
    return Program(file, limit, ("-m", name, *arguments))


MODELS = {
    "unet": 40,
    "densenet121": 45,
    "transformer": 35,
    "gpt2": 35,
    "inception_v4": 45,
    "lstm": 45,
    "unrolled_gan": 50,
    "resnet1202": 60,
    "treelstm": 50,
}
"""The models whose steps are timed, the most telling ones first, and the limit of each in seconds."""

PARTS = {
    "1": [
        *(module("b-times.txt", limit, f"{HERE}.times", name) for name, limit in MODELS.items()),
        module("c-bits.txt", 30, f"{HERE}.convolutions"),
        module("d-signatures.txt", 90, f"{HERE}.signatures"),
    ],
    "2": [
        module("e-compiled.txt", 75, f"{HERE}.compiled"),
        module("f-tests.txt", 60, "pytest", "-q", "-x", "tests/gpu/test_training.py", "-k", "nccl", "-rA"),
        module("f-tests.txt", 80, "pytest", "-q", "-n", "6", "tests/gpu", "--tb=line", "-rf"),
        module("g-bits.txt", 60, "tests.bench.gpu", "resnet1202-bits", "--minutes", "0.8"),
    ],
}
"""What runs after the native extension has been compiled."""

BESIDE_THE_BUILD = [
    module("a-machine.txt", 45, f"{HERE}.calls"),
    module("a-machine.txt", 30, f"{HERE}.maps"),
]


class Run:
    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self.end = time.monotonic() + seconds

    def program(self, program: Program) -> None:
        left = self.end - time.monotonic() - 4
        if left < LEAST_SECONDS:
            self._write(program, f"left out: {left:.0f} s left")
            return
        limit = min(program.limit, left)
        started = time.monotonic()
        with (self.out / program.file).open("a") as file:
            print("==", *program.arguments, f"(limit: {limit:.0f} s)", file=file, flush=True)
            status = self._start(program, file).wait_at_most(limit)
        self._write(program, f"exit status {status} after {time.monotonic() - started:.0f} s")

    def build(self) -> Process:
        """Compile the native extension, while other programs run."""
        return self._start(module("", 0, "dtrrun.native"), subprocess.DEVNULL)

    def _start(self, program: Program, output: object) -> Process:
        return Process([sys.executable, *program.arguments], output)

    def _write(self, program: Program, text: str) -> None:
        with (self.out / program.file).open("a") as file:
            print("==", text, file=file)
        print(f"{program.file}: {' '.join(program.arguments[1:3])}: {text}", flush=True)


class Process:
    """A child in a process group of its own, so that its children end with it."""

    def __init__(self, command: list[str], output: object) -> None:
        self._child = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            stdout=output,  # type: ignore[arg-type]
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_at_most(self, seconds: float) -> int | str:
        """Return its exit status; or say that it was ended."""
        try:
            return self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, 9)
            self._child.wait()
            return "none: ended"


def main() -> int:
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    if part not in PARTS:
        print(__doc__, file=sys.stderr)
        return 2
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else LIMITS[part]
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu-short")
    out.mkdir(parents=True, exist_ok=True)
    run = Run(out, seconds)
    build = run.build()
    if part == "1":
        for program in BESIDE_THE_BUILD:
            run.program(program)
    print("compiled:", build.wait_at_most(200), flush=True)
    for program in PARTS[part]:
        run.program(program)
    return 0


if __name__ == "__main__":
    sys.exit(main())
