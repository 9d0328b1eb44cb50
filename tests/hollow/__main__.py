"""Run a command on a GPU that computes nothing: `python -m tests.hollow COMMAND [ARGUMENT...]`.

For a PyTorch with CUDA 13 on a machine without a GPU. Kernels, copies and matrix products end at once, and
memory reads as zeros. What allocates is real: PyTorch's caching allocator asks a driver that accounts for
every page, and NVML tells of it. So losses and times mean nothing; that a budget is kept does, and what the
host's side of a step takes.

Needs a C compiler, and CUDA's headers, which pip installs beside such a PyTorch, but for those of the package
nvidia-cuda-crt. HOLLOW_TOTAL, HOLLOW_CONTEXT, HOLLOW_KERNEL, HOLLOW_WORKSPACE (bytes): see device.h, cudnn.c.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("cuda.c", "blas.c", "cudnn.c")]
ASK = (
    "libtorch_cuda.so",
    "libtorch_cuda_linalg.so",
    "libtorch_python.so",
    "libc10_cuda.so",
    "libcaffe2_nvrtc.so",
)
"""PyTorch's libraries that call CUDA's."""
CALLS = re.compile(r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn)\w+$")


def build(folder: Path) -> None:
    """libhollow.so, to be loaded before all others, and libcuda.so.1 and libnvidia-ml.so.1, in `folder`."""
    import torch

    packages = Path(torch.__file__).parents[1]
    headers = sorted({f"-I{header.parent}" for header in packages.glob("nvidia/*/include/cu*.h")})
    if not headers or int((torch.version.cuda or "0").partition(".")[0]) < 13:
        raise SystemExit("tests.hollow: this is no PyTorch with CUDA 13 as pip installs it")
    libraries = [packages / "torch" / "lib" / name for name in ASK]
    asked = set[str]().union(*(called_by(one) for one in libraries if one.exists()))
    succeeding = folder / "succeeding.c"  # weak: what SOURCES define goes before
    weak = "__attribute__((weak)) long {}(void) {{ return 0; }}\n"
    succeeding.write_text("".join(weak.format(name) for name in sorted(asked) if CALLS.match(name)))
    hollow = folder / "libhollow.so"
    compile_(hollow, *headers, *SOURCES, succeeding)
    (folder / "libcuda.so.1").symlink_to(hollow)
    compile_(folder / "libnvidia-ml.so.1", HERE / "nvml.c")


def compile_(library: Path, *arguments: str | Path) -> None:
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", library, *arguments, "-ldl", "-lpthread"], check=True
    )


def called_by(library: Path) -> set[str]:
    command = ["nm", "-D", "--undefined-only", library]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0] for line in told.splitlines()}


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        paths = [name, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        ours = {
            "LD_PRELOAD": str(folder / "libhollow.so"),
            "LD_LIBRARY_PATH": ":".join(paths),
            "HOLLOW_STATE": str(folder / "state"),
        }
        return subprocess.run(sys.argv[1:] or [sys.executable], env=os.environ | ours).returncode


if __name__ == "__main__":
    sys.exit(main())
