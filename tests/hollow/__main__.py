"""Run a command on a GPU that is not there: `python -m tests.hollow [OPTION...] COMMAND [ARGUMENT...]`.

For a PyTorch with CUDA 13, as pip installs it. All of PyTorch is the real one: its caching allocator asks a
driver that accounts for every page, and NVML tells of it; streams, events and graphs keep their order. What
kernels would compute, the CPU does, over memory that is mapped where the program mapped it and nowhere else.
So it can be seen here that a budget is kept, and that values are right. Times mean nothing, but for those of
the host with --idle, and those of a clock.

Options:
  --idle         compute nothing: memory reads as zeros and takes no place, and a step costs the host alone
  --clock        compute nothing, and keep the time of an NVIDIA H200 and its host: operators take what they
                 took there (h200.json.gz, or the file of `python -m tests.bench.gpu_short.signatures` that
                 HOLLOW_COSTS names), and the program's clock, events and waits show that
  --races        check that work waits for what it uses: between streams, and between streams and the host. A
                 race is told on stderr, and makes the exit status 1
  --devices N    the number of GPUs
  --no-nvml      as in a container without libnvidia-ml.so.1

More can be set by environment variables: HOLLOW_TOTAL, HOLLOW_CONTEXT, HOLLOW_KERNEL (device.h) and
HOLLOW_WORKSPACE (cudnn.c), in bytes; HOLLOW_POISON (cuda.c); HOLLOW_RACES=2 (races.c); HOLLOW_HOST, how many
times slower the host is than this machine (clock.c); HOLLOW_TOLD=1, to be told what each operator takes, and
whether that was measured (timed.cpp).

Needs compilers of C and C++, and CUDA's headers, which pip installs beside such a PyTorch, except for those
of the package nvidia-cuda-crt. What is built is kept in build/hollow.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "hollow"
CUDA = [HERE / name for name in ("cuda.c", "streams.c", "races.c", "blas.c", "cudnn.c", "clock.c")]
COMPUTE = [HERE / name for name in ("compute.cpp", "operators.cpp")]
TIMED = [HERE / "timed.cpp"]
COSTS = HERE / "h200.json.gz"
BYTES_PER_NS, FLOPS_PER_NS = 4000, 125_000  # as in timed.cpp
ASK = (
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libc10_cuda.so",
    "libcaffe2_nvrtc.so",
)
"""PyTorch's libraries that call CUDA's."""
CALLS = re.compile(r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn)\w+$")


def built(name: str, sources: list[Path], build: Callable[[Path, Path], None]) -> Path:
    """Return the folder of what is built from these sources, for the PyTorch of this Python."""
    import torch

    if int((torch.version.cuda or "0").partition(".")[0]) < 13:
        raise SystemExit("tests.hollow: this is no PyTorch with CUDA 13 as pip installs it")
    content = b"".join(path.read_bytes() for path in sorted({*sources, *HERE.glob("*.h"), Path(__file__)}))
    folder = BUILT / f"torch-{torch.__version__}-{name}-{hashlib.sha256(content).hexdigest()[:12]}"
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as made:
            build(Path(made), Path(torch.__file__).parent)
            with suppress(OSError):  # another process was faster
                Path(made).rename(folder)  # whole, or not at all
                Path(made).mkdir()  # which the context removes
    return folder


def headers(torch: Path) -> list[str]:
    return sorted({f"-I{header.parent}" for header in torch.parent.glob("nvidia/*/include/cu*.h")})


def build_cuda(folder: Path, torch: Path) -> None:
    """Build libhollow.so, loaded before all others."""
    asked = set[str]().union(*(called_by(torch / "lib" / name) for name in ASK))
    succeeding = folder / "succeeding.c"  # weak: what CUDA defines goes before
    weak = "__attribute__((weak)) long {}(void) {{ return 0; }}\n"
    succeeding.write_text("".join(weak.format(name) for name in sorted(asked) if CALLS.match(name)))
    compile_(folder / "libhollow.so", *headers(torch), *CUDA, succeeding)
    (folder / "libcuda.so.1").symlink_to("libhollow.so")
    (folder / "nvml").mkdir()
    compile_(folder / "nvml" / "libnvidia-ml.so.1", HERE / "nvml.c")


def build_operators(folder: Path, torch: Path, sources: list[Path]) -> None:
    """Build liboperators.so, which libhollow.so loads: what replaces PyTorch's kernels."""
    include = torch / "include"
    cpp = ["-std=c++20", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", *headers(torch), "-c"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    with ThreadPoolExecutor() as pool:  # a minute each
        list(pool.map(lambda one, source: compile_(one, *cpp, source), objects, sources))
    linked = (torch / "lib" / f"lib{name}.so" for name in ("c10", "c10_cuda", "torch_cpu", "torch_cuda"))
    compile_(folder / "liboperators.so", *objects, *linked)


def operators(name: str, sources: list[Path]) -> str:
    """Return the path of a liboperators.so."""
    return str(built(name, sources, partial(build_operators, sources=sources)) / "liboperators.so")


def compile_(made: Path, *arguments: str | Path) -> None:
    compiler = "c++" if any(str(argument).endswith((".cpp", ".o")) for argument in arguments) else "cc"
    shared = [] if "-c" in arguments else ["-shared", "-ldl", "-lpthread", "-lm"]
    subprocess.run([compiler, "-O1", "-fPIC", "-o", made, *arguments, *shared], check=True)


def called_by(library: Path) -> set[str]:
    if not library.exists():
        return set()
    command = ["nm", "-D", "--undefined-only", library]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in told.splitlines()}


def costs(path: Path) -> Iterator[str]:
    """Yield the lines that timed.cpp reads, from a file of `python -m tests.bench.gpu_short.signatures`."""
    with gzip.open(path, "rt") as file:
        models = [one for one in json.load(file).values() if isinstance(one, dict)]
    calls: dict[tuple[str, str], float] = {}
    took: dict[tuple[str, str], float] = {}
    shapes_of: dict[tuple[str, str], list[list[int]]] = {}
    for name, shapes, count, us in (row for model in models for row in model["operators"]):
        if sizes := [shape for shape in shapes if shape]:
            key = name.removeprefix("aten::"), text_of(sizes)
            shapes_of[key] = sizes
            calls[key] = calls.get(key, 0) + count
            took[key] = took.get(key, 0) + us * 1e3
    backward = [sizes for (name, _), sizes in shapes_of.items() if name == "convolution_backward"]
    results = {text_of(sizes[1:3]): sizes[0] for sizes in backward}  # by the sizes of input and weight
    for (name, text), sizes in shapes_of.items():
        flops = 0
        if name == "convolution_backward":
            flops = 4 * math.prod(sizes[0]) * math.prod(sizes[2][1:])
        elif name == "cudnn_convolution" and text in results:
            flops = 2 * math.prod(results[text]) * math.prod(sizes[1][1:])
        least = sum(4 * math.prod(one) for one in sizes) / BYTES_PER_NS + flops / FLOPS_PER_NS
        yield f"{name} {text} {took[name, text] / calls[name, text]:.0f} {least:.0f}"
    for model in models:
        for key, nbytes in model["workspaces"].items():
            name, _, shapes = key.partition(" ")
            name, found = name.split(".")[1], json.loads(shapes)
            if name.startswith("convolution"):
                yield f"workspace {name} {text_of(found[: 3 if 'backward' in name else 2])} {nbytes}"


def text_of(sizes: list[list[int]]) -> str:
    return ",".join("x".join(map(str, one)) for one in sizes)


def main(arguments: list[str]) -> int:
    cuda = built("cuda", [*CUDA, HERE / "nvml.c"], build_cuda)
    paths = [str(cuda / "nvml"), str(cuda)]
    ours = {"LD_PRELOAD": str(cuda / "libhollow.so")}
    idle = clock = False
    while arguments and arguments[0].startswith("--"):
        match arguments.pop(0):
            case "--idle":
                idle = True
            case "--clock":
                idle = clock = True
            case "--races":
                ours["HOLLOW_RACES"] = os.environ.get("HOLLOW_RACES", "1")
            case "--no-nvml":
                del paths[0]
            case "--devices" if arguments:
                ours["HOLLOW_DEVICES"] = arguments.pop(0)
            case other:
                raise SystemExit(f"tests.hollow: no such option: {other}\n\n{__doc__}")
    ours["HOLLOW_COMPUTE"] = "" if idle else operators("compute", COMPUTE)
    ours["LD_LIBRARY_PATH"] = ":".join(filter(None, [*paths, os.environ.get("LD_LIBRARY_PATH")]))
    with tempfile.TemporaryDirectory() as name:
        ours["HOLLOW_STATE"] = f"{name}/state"
        if clock:
            ours["HOLLOW_TIMED"], ours["HOLLOW_CLOCK"] = operators("timed", TIMED), f"{name}/costs"
            lines = costs(Path(os.environ.get("HOLLOW_COSTS", COSTS)))
            Path(name, "costs").write_text("\n".join(lines) + "\n")
        ours["HOLLOW_RACES_FOUND"] = f"{name}/races"
        status = subprocess.run(arguments or [sys.executable], env=os.environ | ours).returncode
        found = Path(name, "races")
        if found.exists():
            print(f"tests.hollow: {len(found.read_text().splitlines())} races", file=sys.stderr)
        return status or int(found.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
