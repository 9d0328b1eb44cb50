"""How the extensions are compiled, and the form in which they are kept.

Where dtrrun is installed, each is compiled once and as a whole, in as few units as keep two cores busy: most
of a unit's time goes into PyTorch's headers. In a checkout, each file is compiled by itself and its object is
kept, so that after a change only the files that include what has changed are compiled again.

Imports no torch: wheels are made without it. A file that is kept ends with a digest of its contents: loading
a file that a full disk or a power cut has truncated would crash the process.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PACKAGE = HERE.parent
NATIVE, BINDINGS, CORE = PACKAGE / "native", PACKAGE / "bindings", PACKAGE / "core"
NAME, CORE_NAME = "_dtrrun_native", "_dtrrun_core"
LIBRARIES = ("torch_python", "torch_cpu", "c10")
"""PyTorch's: a process that has imported it has loaded them."""
BINARIES, HEADERS = "binaries", "include"
"""The folders beside this file where wheels have binaries, and pybind11's headers."""
DIGEST_BYTES = hashlib.sha256().digest_size

TYPES = BINDINGS / "core_types.cpp"
LIBRARY = (
    *(CORE / f"{name}.cpp" for name in ("rematerialize", "policy/policy", "mutation", "recipes", "eviction")),
    TYPES,
)
"""The core, which both extensions contain."""
FILES = (
    (
        *(NATIVE / f"{name}.cpp" for name in ("interposer", "memory_functions", "foreign_functions")),
        *LIBRARY[:-1],
    ),
    (*(NATIVE / f"{name}.cpp" for name in ("python_objects", "turn_lock", "way_in")), TYPES),
)
"""The native extension's, in the units in which they are compiled as a whole."""
CORE_FILES = ((BINDINGS / "core.cpp",), LIBRARY)


class Unit(NamedTuple):
    """Files that are compiled in one go."""

    files: tuple[Path, ...]
    flags: tuple[str, ...]
    against: str = ""
    """Which PyTorch."""

    def command(self, compiler: Sequence[str], made: Path | str) -> list[str]:
        """Return the command that compiles it into an object."""
        *others, last = self.files
        included = (word for file in others for word in ("-include", str(file)))
        return [*compiler, *included, str(last), "-c", *self.flags, "-o", str(made)]


class Recipe(NamedTuple):
    """How an extension is compiled."""

    units: tuple[Unit, ...]
    linking: tuple[str, ...]

    def plus(self, *flags: str) -> Recipe:
        """Return a recipe with more flags."""
        units = (unit._replace(flags=(*unit.flags, *flags)) for unit in self.units)
        return Recipe(tuple(units), (*self.linking, *flags))

    def link(self, compiler: Sequence[str], objects: Sequence[Path | str], target: Path | str) -> list[str]:
        """Return the command that links it."""
        return [*compiler, *map(str, objects), *self.linking, "-o", str(target)]

    def objects(self, target: Path) -> list[Path]:
        """Return where the objects of the units are made."""
        return [target.with_name(f"{target.name}.{place}.o") for place in range(len(self.units))]

    def stages(
        self, compiler: Sequence[str], target: Path, found: Mapping[int, Path] | None = None
    ) -> list[list[list[str]]]:
        """Return the commands that make `target`. Those of a stage may run in parallel.

        They leave files beside the target whose names begin with the target's. found: objects of units that
        are there already, by the unit's place.
        """
        objects = dict(enumerate(self.objects(target))) | dict(found or {})
        commands = [
            unit.command(compiler, objects[place])
            for place, unit in enumerate(self.units)
            if place not in (found or {})
        ]
        return [commands, [self.link(compiler, list(objects.values()), target)]]


COMMON = (
    *("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-w"),
    # No other library replaces an extension's functions: its calls to them need no symbol lookup.
    *("-fno-semantic-interposition", "-fno-plt"),
    # In KB, what g++ allocates before it collects garbage: without it, it takes a tenth longer.
    *("--param", "ggc-min-heapsize=500000"),
)
LINKING = ("-shared", "-O2", "-Wl,-Bsymbolic-functions")


def core_flags(python: str, pybind11: Path | str, abi: int = 1) -> tuple[str, ...]:
    """Return what the compiler needs for a file of the core. python, pybind11: folders of headers."""
    # Hidden: a process may load both extensions, whose variables have the same names.
    folders = f"-isystem{python}", f"-isystem{pybind11}"
    return (*COMMON, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", "-fvisibility=hidden", *folders)


def core(python: str, pybind11: Path | str, whole: bool) -> Recipe:
    """Return how the simulator's extension is compiled.

    python, pybind11: the folders of their headers. whole: in as few units as possible.
    """
    flags = core_flags(python, pybind11)
    return Recipe(tuple(Unit(files, flags) for files in _units(CORE_FILES, whole)), LINKING)


def native(torch: Path, python: str, abi: int, whole: bool, against: str = "") -> Recipe:
    """Return how the native extension is compiled.

    torch: PyTorch's folder. python: that of Python's headers. abi: 1 if PyTorch uses the C++11 ABI, else 0.
    whole: in as few units as possible. against: which PyTorch it is.
    """
    folders = (torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include", python)
    flags = *COMMON, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *(f"-isystem{folder}" for folder in folders)
    linking = *LINKING, f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)
    of_library = core_flags(python, folders[0], abi)  # PyTorch has pybind11
    units = (
        Unit(files, of_library) if files[0] in LIBRARY else Unit(files, flags, against)
        for files in _units(FILES, whole)
    )
    return Recipe(tuple(units), linking)


def _units(units: Sequence[tuple[Path, ...]], whole: bool) -> Sequence[tuple[Path, ...]]:
    return units if whole else [(file,) for files in units for file in files]


def is_checkout() -> bool:
    """Return whether these are sources that someone works on."""
    return (PACKAGE.parent / ".git").exists()


def object_name(unit: Unit, compiler: str) -> str:
    """Return the name of the object of a unit. It depends on all that its file includes of ours.

    compiler: the command, and its version.
    """
    digest = hashlib.sha256(repr((compiler, unit.flags, unit.against)).encode())
    for path in sorted({path for file in unit.files for path in included(file)}):
        digest.update(
            path.relative_to(PACKAGE.resolve()).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
        )
    return f"{unit.files[-1].stem}-{digest.hexdigest()[:24]}.o"


def included(file: Path) -> set[Path]:
    """Return a source and all of ours that it includes."""
    found: set[Path] = set()
    waiting = [file.resolve()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
        waiting.extend((path.parent / name).resolve() for name in names)
    return found


@cache
def sources() -> str:
    """Return a digest of the native extension's C++ sources and of how they are compiled."""
    return _digest_of([*sorted(NATIVE.glob("*.cpp")), *sorted(NATIVE.glob("*.h")), *_core_sources()])


@cache
def core_sources() -> str:
    """Return the same for the core."""
    return _digest_of(_core_sources())


def _core_sources() -> list[Path]:
    return [
        path
        for folder in (BINDINGS, CORE)
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".h", ".cpp")
    ]


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
