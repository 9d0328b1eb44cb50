"""How the extensions are compiled, and the form in which they are kept.

Imports no torch: wheels are made without it. A file that is kept ends with a digest of its contents: loading
a file that a full disk or a power cut has truncated would crash the process.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
BINDINGS, CORE = HERE.parent / "bindings", HERE.parent / "core"
FILES = HERE / "interposer.cpp", HERE / "way_in.cpp"
CORE_FILES = (BINDINGS / "core.cpp",)
NAME, CORE_NAME = "_dtrrun_native", "_dtrrun_core"
LIBRARIES = ("torch_python", "torch_cpu", "c10")
"""PyTorch's: a process that has imported it has loaded them."""
BINARIES = "binaries"
"""The folder beside this file where wheels have binaries."""
DIGEST_BYTES = hashlib.sha256().digest_size


COMMON = (
    *("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-w"),
    # No other library replaces an extension's functions: its calls to them need no symbol lookup.
    *("-fno-semantic-interposition", "-Wl,-Bsymbolic-functions", "-fno-plt"),
)


def core_flags(python: str) -> list[str]:
    """Return what the compiler needs for the core alone. python: the folder of Python's headers."""
    # Hidden: a process may load the native extension, too, whose variables have the same names.
    return [*COMMON, "-fvisibility=hidden", f"-isystem{python}"]


def flags(torch: Path, python: str, abi: int) -> list[str]:
    """Return what the compiler needs besides the source and the result's name.

    torch: PyTorch's folder. python: that of Python's headers. abi: 1 if PyTorch uses the C++11 ABI, else 0.
    """
    folders = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", python)
    return [
        *(*COMMON, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-isystem{folder}" for folder in folders),
        *(f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)),
    ]


def stages(
    compiler: Sequence[str], files: Sequence[Path], flags: Sequence[str], target: Path
) -> list[list[list[str]]]:
    """Return the commands that make `target`. Those of a stage may run in parallel.

    They leave files beside the target whose names begin with the target's.
    """
    if len(files) == 1:
        return [[[*compiler, str(files[0]), *flags, "-o", str(target)]]]
    objects = {file: f"{target}.{file.stem}.o" for file in files}
    return [
        [[*compiler, str(file), "-c", *flags, "-o", made] for file, made in objects.items()],
        [[*compiler, *objects.values(), *flags, "-o", str(target)]],
    ]


@cache
def sources() -> str:
    """Return a digest of the native extension's C++ sources and of how they are compiled."""
    return _digest_of([*sorted(HERE.glob("*.cpp")), *sorted(HERE.glob("*.h")), *_core_headers()])


@cache
def core_sources() -> str:
    """Return the same for the core."""
    return _digest_of([*CORE_FILES, *_core_headers()])


def _core_headers() -> list[Path]:
    return [*sorted(BINDINGS.glob("*.h")), *sorted(CORE.rglob("*.h"))]


def _digest_of(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in [*files, HERE / "compiling.py"]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def seal(path: Path) -> bool:
    """Add the digest to what the compiler has written. Return False if it has written nothing."""
    with open(path, "r+b") as file:
        code = file.read()
        file.write(hashlib.sha256(code).digest())
    return bool(code)


def digest_of(path: Path) -> bytes | None:
    """Return the digest at the end of a file, or None if the file is not as it was written."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    code, digest = data[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    return digest if code and hashlib.sha256(code).digest() == digest else None


def binary_name(version: str, commit: str) -> str:
    """Return the name of a wheel's file, in `BINARIES`, for this Python and a release of PyTorch.

    version: without what follows a `+`. commit: the release's, by which the file is found, since PyTorch
    changes its C++ classes even in patch versions.
    """
    return f"torch-{version}-{commit[:12]}-{sysconfig.get_config_var('SOABI')}-{sources()}.so"


def core_binary_name() -> str:
    """Return the name of a wheel's file with the core, for this Python."""
    return f"core-{sysconfig.get_config_var('SOABI')}-{core_sources()}.so"


def binaries(commit: str = "*") -> dict[str, Path]:
    """Return the wheel's files for this Python, by the version of PyTorch that they are for.

    commit: only the file for a PyTorch that was built from this commit.
    """
    found = sorted((HERE / BINARIES).glob(binary_name("*", commit)))
    return {path.name.split("-")[1]: path for path in found}
