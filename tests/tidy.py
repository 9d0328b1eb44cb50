"""Looks for mistakes in the C++ with clang-tidy (.clang-tidy says for which): python -m tests.tidy [FILE…]

Takes some minutes for all files; with names of files (`mutation.cpp`), only those.
"""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from os import sched_getaffinity
from pathlib import Path

from dtrrun.extensions import compiling
from tests.warnings import units

TIDY = Path(sys.executable).with_name("clang-tidy")


def check(unit: compiling.Unit) -> str:
    """Return what clang-tidy says about a file, or ""."""
    flags = [flag for flag in unit.flags if flag.startswith(("-std", "-D", "-isystem"))]
    command = [str(TIDY), "--quiet", *map(str, unit.files), "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout if done.returncode or done.stdout.strip() else ""


def main(names: list[str]) -> None:
    wanted = [unit for unit in units() if not names or unit.files[-1].name in names]
    with ThreadPoolExecutor(len(sched_getaffinity(0))) as pool:
        found = [text for text in pool.map(check, wanted) if text]
    sys.exit("\n".join(found) or None)


if __name__ == "__main__":
    main(sys.argv[1:])
