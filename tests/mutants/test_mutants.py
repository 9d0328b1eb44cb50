"""Each handling of a hazard, switched off in turn: some test must notice.

The mutants are tables (`mutants_of_*.py`): a function or a constant of dtrrun, and what it is replaced with.
The tests that are named must fail, or crash, with it, and pass without.
"""

import signal

import pytest
from forked import ROOT, run
from mutant import MUTANTS, NOT_APPLICABLE, ROWS, around

SECONDS = 120  # for the tests of one mutant; that they hang does not count as noticed
EVERY = 12  # mutants, of which one is in the sample that `-k "sample or row"` runs
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "UnboundLocalError")
MISCALLED = ("TypeError", "AttributeError")  # raised by a replacement: what it replaces takes other arguments


def test_each_row_of_the_hazard_table_has_a_mutant():
    covered = {mutant.row for mutant in MUTANTS}
    assert covered | set(NOT_APPLICABLE) == set(ROWS)
    assert not covered & set(NOT_APPLICABLE)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_no_row_is_stale():
    for mutant in MUTANTS:
        _, _, original = mutant.found()
        replacement = mutant.replacement
        assert original != replacement, mutant.name
        assert callable(original) or not isinstance(replacement, around), mutant.name
        for path in mutant.paths:
            file, _, test = path.partition("::")
            assert f"def {test}(" in (ROOT / file).read_text(), f"{mutant.name}: {path}"


def test_the_tests_pass_without_a_mutant(tmp_path):
    ended = run(sorted({test for mutant in MUTANTS for test in mutant.paths}), "", tmp_path, seconds=900)
    assert ended.exit == 0, ended


def check_noticed(mutant, folder):
    ended = run(mutant.paths, mutant.name, folder, SECONDS)
    assert ended.exit is not None, "the tests did not end"
    if -ended.exit in CRASHES:
        return
    assert ended.exit == 1, f"nobody noticed (exit {ended.exit}): {ended.log[-500:]}"
    assert ended.errors, f"the mutant itself is broken: {ended.log}"
    kind, folder, _ = ended.errors[0].split(maxsplit=2)
    broken = kind in BROKEN or (kind in MISCALLED and folder == "mutants")
    assert not broken, f"the mutant itself is broken: {ended.errors}"


@pytest.mark.parametrize("mutant", MUTANTS[::EVERY], ids=lambda mutant: mutant.name)
def test_a_mutant_of_the_sample_is_noticed(mutant, tmp_path):
    check_noticed(mutant, tmp_path)


@pytest.mark.parametrize(
    "mutant",
    [mutant for place, mutant in enumerate(MUTANTS) if place % EVERY],
    ids=lambda mutant: mutant.name,
)
def test_a_mutant_is_noticed(mutant, tmp_path):
    check_noticed(mutant, tmp_path)
