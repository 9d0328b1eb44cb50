"""Runs tests with a mutant in a forked child.

Children are forked from a process that has imported PyTorch and done nothing else.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import mutants_of_memory  # noqa: F401
import mutants_of_programs  # noqa: F401
import mutants_of_replays  # noqa: F401
import mutants_of_values  # noqa: F401
import native_choice  # noqa: F401
import native_compiled  # noqa: F401
import native_memory  # noqa: F401
import native_operators  # noqa: F401
import native_replays  # noqa: F401
import pytest
import schemata
from mutant import MUTANTS
from native import NATIVE

from dtrrun.extensions import building, compiling

ROOT = Path(__file__).parents[2]
FEW = {"PROGRAMS": "25", "PROGRAMS_SHRINK": "no", "DECISIONS": "15"}
"""How many of the random programs children run."""

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["numpy", "pytest", "torch._dynamo", "dtrrun.runtime.session"])


class Ended(NamedTuple):
    exit: int | None  # pytest's status, or the negated signal that killed the child; None: it hung
    errors: list[str]  # what the tests failed with: type, folder of the source that raised it, text
    log: str


def run(tests: list[str], mutant: str, folder: Path, seconds: float, library: Path | None = None) -> Ended:
    """Run tests with the mutant of that name ("": none), for at most `seconds`.

    library: the folder of the extensions with the native mutants, which replace the ordinary ones.
    """
    errors, log = folder / "errors", folder / "log"
    errors.touch()
    child = CONTEXT.Process(target=_child, args=(tests, mutant, errors, log, library))
    child.start()
    child.join(seconds)
    hangs = child.is_alive()
    if hangs:
        child.kill()
        child.join()
    return Ended(None if hangs else child.exitcode, errors.read_text().splitlines(), log.read_text()[-3000:])


def _child(tests: list[str], mutant: str, errors: Path, log: Path, library: Path | None) -> None:
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(ROOT)
    os.environ.update(FEW)
    os.environ.pop("HOLLOW_RACES_FOUND", None)  # `tests.hollow` would fail for a race that a mutant causes
    if library is None:
        for one in MUTANTS:
            if one.name == mutant:
                one.apply()
    else:
        numbers = {one.name: number for number, one in enumerate(NATIVE, 1)}
        os.environ[schemata.VARIABLE] = str(numbers.get(mutant, 0))
        for name in (compiling.NAME, compiling.CORE_NAME):
            sys.modules[name] = building.import_from(name, library / f"{name}.so")
    # Expected crashes need no fault report, and assertions need no explanation.
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--assert=plain", *tests]
    status = pytest.main(words, plugins=[_Witness(errors)])
    os._exit(status)  # even if a mutant has left threads behind


class _Witness:
    """Records the errors that tests fail with."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Any:
        yield
        if call.excinfo is not None:
            error, folder = call.excinfo, call.excinfo.traceback[-1].path.parent.name
            with self._errors.open("a") as errors:
                print(error.typename, folder, repr(str(error.value))[:200], file=errors)
