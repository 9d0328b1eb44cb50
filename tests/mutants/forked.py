"""Runs tests in a forked child, with a mutant.

Children are forked from a process that has imported PyTorch once, and nothing else has happened in.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any, NamedTuple

import mutants_of_memory  # noqa: F401
import mutants_of_programs  # noqa: F401
import mutants_of_replays  # noqa: F401
import mutants_of_values  # noqa: F401
import pytest
from mutant import MUTANTS

ROOT = Path(__file__).parents[2]

os.environ["NATIVE"] = "off"  # the mutants are of the Python mode, too
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["numpy", "pytest", "torch._dynamo", "dtrrun.runtime.session"])


class Ended(NamedTuple):
    exit: int | None  # pytest's status, or the signal that the child died of, negative; None: it hung
    errors: list[str]  # what the tests failed with: type, folder of the source that raised it, text
    log: str


def run(tests: list[str], mutant: str, folder: Path, seconds: float) -> Ended:
    """Run tests with the mutant of that name ("": none), and no longer than that."""
    errors, log = folder / "errors", folder / "log"
    errors.touch()
    child = CONTEXT.Process(target=_child, args=(tests, mutant, errors, log))
    child.start()
    child.join(seconds)
    hangs = child.is_alive()
    if hangs:
        child.kill()
        child.join()
    return Ended(None if hangs else child.exitcode, errors.read_text().splitlines(), log.read_text()[-3000:])


def _child(tests: list[str], mutant: str, errors: Path, log: Path) -> None:
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.chdir(ROOT)
    for one in MUTANTS:
        if one.name == mutant:
            one.apply()
    # The crashes that are meant to happen need no report, nor do assertions need to be explained.
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--assert=plain", *tests]
    status = pytest.main(words, plugins=[_Witness(errors)])
    os._exit(status)  # whatever threads a mutant has left behind


class _Witness:
    """Notes what tests fail with."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Any:
        yield
        if call.excinfo is not None:
            error, folder = call.excinfo, call.excinfo.traceback[-1].path.parent.name
            with self._errors.open("a") as errors:
                print(error.typename, folder, repr(str(error.value))[:200], file=errors)
