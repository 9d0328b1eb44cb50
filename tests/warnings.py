"""Compiles the C++ with all of the compiler's warnings, as errors: python -m tests.warnings.

A user's compiler may be newer and warn of more, so dtrrun itself is compiled without warnings. PyTorch's and
Python's headers are system headers, which have none.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from os import sched_getaffinity

from dtrrun.extensions import build, building, compiling

WARNINGS = (
    *("-Wall", "-Wextra", "-Werror", "-fsyntax-only"),
    # Nodes are embedded in Python objects (bindings/nodes.h). g++ and clang++ know the place of a node there
    # even though its class has a base class.
    "-Wno-invalid-offsetof",
    # pybind11's classes are hidden, and ours that hold them are not in the native extension, like PyTorch's.
    "-Wno-attributes",
)


def check(unit: compiling.Unit) -> str:
    """Return what the compiler says about a file, or ""."""
    flags = [flag for flag in unit.flags if flag != "-w"]
    command = [*building.compiler(), *map(str, unit.files), *flags, *WARNINGS]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def units() -> list[compiling.Unit]:
    """Return each file of both extensions, and how it is compiled."""
    recipes = (
        build.recipe(whole=False),
        compiling.core(building.python_headers(), building.pybind11_headers(), whole=False),
    )
    return list({unit.files: unit for recipe in recipes for unit in recipe.units}.values())


def main() -> None:
    with ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        found = [text for text in pool.map(check, units()) if text]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main()
