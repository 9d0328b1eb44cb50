"""Run a command on a GPU that computes nothing: `python -m tests.hollow COMMAND [ARGUMENT...]`.

For a PyTorch with CUDA on a machine without a GPU. Kernels, copies and products of matrices end at once, and
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
    if not headers or not torch.backends.cuda.is_built():
        raise SystemExit("tests.hollow: this is no PyTorch with CUDA as pip installs it")
    hollow = folder / "libhollow.so"
    compile_(hollow, *headers, *SOURCES)
    libraries = [packages / "torch" / "lib" / name for name in ASK]
    asked = set[str]().union(*(symbols(one, "--undefined-only") for one in libraries if one.exists()))
    left = sorted(name for name in asked - symbols(hollow, "--defined-only") if CALLS.match(name))
    rest = folder / "rest.c"
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in left))
    compile_(hollow, *headers, *SOURCES, rest)
    (folder / "libcuda.so.1").symlink_to(hollow)
    compile_(folder / "libnvidia-ml.so.1", HERE / "nvml.c")


def compile_(library: Path, *arguments: str | Path) -> None:
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", library, *arguments, "-ldl", "-lpthread"], check=True
    )


def symbols(library: Path, kind: str) -> set[str]:
    told = subprocess.run(["nm", "-D", kind, library], check=True, capture_output=True, text=True).stdout
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
