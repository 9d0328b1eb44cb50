"""Each handling of a hazard, switched off in turn: some test must notice.

The mutants are tables (`mutants_of_*.py`): a text of the runtime's source and what it is replaced with. The
tests that are named must fail, or crash, with it, and pass without.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import mutants_of_memory  # noqa: F401
import mutants_of_programs  # noqa: F401
import mutants_of_replays  # noqa: F401
import mutants_of_values  # noqa: F401
import pytest
from mutant import MUTANTS, NOT_APPLICABLE, ROWS

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
SECONDS = 120  # for the tests of one mutant; that they hang does not count as noticed
EVERY = 12  # mutants, of which one is in the sample that `-k "sample or row"` runs
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
PARTS = ("runtime", "ledger")
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "UnboundLocalError")


@pytest.fixture(scope="module")
def run():
    server = subprocess.Popen(
        [sys.executable, str(FOLDER / "mutant_server.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )

    def answer(tests, module="", old="", new="", seconds=SECONDS):
        order = {"tests": tests, "module": module, "old": old, "new": new, "seconds": seconds}
        server.stdin.write(json.dumps(order) + "\n")
        server.stdin.flush()
        return json.loads(server.stdout.readline())

    yield answer
    server.stdin.close()
    server.wait(60)


def test_each_row_of_the_hazard_table_has_a_mutant():
    covered = {mutant.row for mutant in MUTANTS}
    assert covered | set(NOT_APPLICABLE) == set(ROWS)
    assert not covered & set(NOT_APPLICABLE)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_the_tests_pass_without_a_mutant(run):
    told = run(sorted({test for mutant in MUTANTS for test in mutant.paths}), seconds=900)
    assert told["exit"] == 0, told


def test_no_row_is_stale():
    for mutant in MUTANTS:
        module_of(mutant)


def module_of(mutant):
    """The one that has the text."""
    paths = [path for part in PARTS if (path := ROOT / "dtrrun" / part / f"{mutant.file}.py").exists()]
    found = {path: count for path in paths if (count := path.read_text().count(mutant.old))}
    assert list(found.values()) == [1], f"stale: {mutant.old!r} is in {mutant.file}.py: {found}"
    return f"dtrrun.{next(iter(found)).parent.name}.{mutant.file}"


def check_noticed(run, mutant):
    told = run(mutant.paths, module_of(mutant), mutant.old, mutant.new)
    assert told["applied"], "the module was never imported"
    if told["signal"]:
        assert told["signal"] in CRASHES, told
        return
    assert told["errors"] != ["hangs"], "the tests did not end"
    assert told["exit"] == 1, f"nobody noticed (exit {told['exit']}): {told.get('log', '')[-500:]}"
    assert not told["errors"][0].startswith(BROKEN), f"the mutant itself is broken: {told['errors']}"


@pytest.mark.parametrize("mutant", MUTANTS[::EVERY], ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_sample_is_noticed(run, mutant):
    check_noticed(run, mutant)


@pytest.mark.parametrize(
    "mutant",
    [mutant for place, mutant in enumerate(MUTANTS) if place % EVERY],
    ids=lambda mutant: mutant.name,
)
def test_a_mutant_is_noticed(run, mutant):
    check_noticed(run, mutant)
