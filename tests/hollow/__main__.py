"""Run a command on a GPU that is not there: `python -m tests.hollow [OPTION...] COMMAND [ARGUMENT...]`.

For a PyTorch with CUDA 13, as pip installs it. All of PyTorch is the real one: its caching allocator asks a
driver that accounts for every page, and NVML tells of it; streams, events and graphs keep their order. What
kernels would compute, the CPU does, over memory that is mapped where the program mapped it and nowhere else.
So it can be seen here that a budget is kept, and that values are right. Times mean nothing, but for those of
the host with --idle.

Options:
  --idle         compute nothing: memory reads as zeros and takes no place, and a step costs the host alone
  --races        check that work waits for what it uses: between streams, and between streams and the host. A
                 race is told on stderr, and makes the exit status 1
  --devices N    the number of GPUs
  --no-nvml      as in a container without libnvidia-ml.so.1

More can be set by environment variables: HOLLOW_TOTAL, HOLLOW_CONTEXT, HOLLOW_KERNEL (device.h) and
HOLLOW_WORKSPACE (cudnn.c), in bytes; HOLLOW_POISON (cuda.c); HOLLOW_RACES=2 (races.c).

Needs compilers of C and C++, and CUDA's headers, which pip installs beside such a PyTorch, except for those
of the package nvidia-cuda-crt. What is built is kept in build/hollow.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "hollow"
CUDA = [HERE / name for name in ("cuda.c", "streams.c", "races.c", "blas.c", "cudnn.c")]
COMPUTE = [HERE / name for name in ("compute.cpp", "operators.cpp")]
ASK = (
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libc10_cuda.so",
    "libcaffe2_nvrtc.so",
)
"""PyTorch's libraries that call CUDA's."""
CALLS = re.compile(r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn)\w+$")


def libraries() -> Path:
    """Return the folder of what is built: libhollow.so, loaded before all others, and what it loads."""
    import torch

    if int((torch.version.cuda or "0").partition(".")[0]) < 13:
        raise SystemExit("tests.hollow: this is no PyTorch with CUDA 13 as pip installs it")
    sources = sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".cpp", ".h"))
    content = b"".join(path.read_bytes() for path in [*sources, Path(__file__)])
    folder = BUILT / f"torch-{torch.__version__}-{hashlib.sha256(content).hexdigest()[:12]}"
    if not folder.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as name:
            build(Path(name), Path(torch.__file__).parent)
            with suppress(OSError):  # another process was faster
                Path(name).rename(folder)  # whole, or not at all
                Path(name).mkdir()  # which the context removes
    return folder


def build(folder: Path, torch: Path) -> None:
    headers = sorted({f"-I{header.parent}" for header in torch.parent.glob("nvidia/*/include/cu*.h")})
    asked = set[str]().union(*(called_by(torch / "lib" / name) for name in ASK))
    succeeding = folder / "succeeding.c"  # weak: what CUDA defines goes before
    weak = "__attribute__((weak)) long {}(void) {{ return 0; }}\n"
    succeeding.write_text("".join(weak.format(name) for name in sorted(asked) if CALLS.match(name)))
    compile_(folder / "libhollow.so", *headers, *CUDA, succeeding)
    (folder / "libcuda.so.1").symlink_to("libhollow.so")
    (folder / "nvml").mkdir()
    compile_(folder / "nvml" / "libnvidia-ml.so.1", HERE / "nvml.c")
    include = torch / "include"
    cpp = ["-std=c++20", f"-I{include}", f"-I{include / 'torch/csrc/api/include'}", *headers, "-c"]
    objects = [folder / f"{source.stem}.o" for source in COMPUTE]
    with ThreadPoolExecutor() as pool:  # a minute each
        list(pool.map(lambda one, source: compile_(one, *cpp, source), objects, COMPUTE))
    linked = (torch / "lib" / f"lib{name}.so" for name in ("c10", "c10_cuda", "torch_cpu", "torch_cuda"))
    compile_(folder / "libcompute.so", *objects, *linked)


def compile_(made: Path, *arguments: str | Path) -> None:
    compiler = "c++" if any(str(argument).endswith((".cpp", ".o")) for argument in arguments) else "cc"
    shared = [] if "-c" in arguments else ["-shared", "-ldl", "-lpthread"]
    subprocess.run([compiler, "-O1", "-fPIC", "-o", made, *arguments, *shared], check=True)


def called_by(library: Path) -> set[str]:
    if not library.exists():
        return set()
    command = ["nm", "-D", "--undefined-only", library]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in told.splitlines()}


def main(arguments: list[str]) -> int:
    folder = libraries()
    paths = [str(folder / "nvml"), str(folder)]
    ours = {
        "LD_PRELOAD": str(folder / "libhollow.so"),
        "HOLLOW_COMPUTE": str(folder / "libcompute.so"),
    }
    while arguments and arguments[0].startswith("--"):
        match arguments.pop(0):
            case "--idle":
                ours["HOLLOW_COMPUTE"] = ""
            case "--races":
                ours["HOLLOW_RACES"] = os.environ.get("HOLLOW_RACES", "1")
            case "--no-nvml":
                del paths[0]
            case "--devices" if arguments:
                ours["HOLLOW_DEVICES"] = arguments.pop(0)
            case other:
                raise SystemExit(f"tests.hollow: no such option: {other}\n\n{__doc__}")
    ours["LD_LIBRARY_PATH"] = ":".join(filter(None, [*paths, os.environ.get("LD_LIBRARY_PATH")]))
    with tempfile.TemporaryDirectory() as name:
        ours["HOLLOW_STATE"] = f"{name}/state"
        ours["HOLLOW_RACES_FOUND"] = f"{name}/races"
        status = subprocess.run(arguments or [sys.executable], env=os.environ | ours).returncode
        found = Path(name, "races")
        if found.exists():
            print(f"tests.hollow: {len(found.read_text().splitlines())} races", file=sys.stderr)
        return status or int(found.exists())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
