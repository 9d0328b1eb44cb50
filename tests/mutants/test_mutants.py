"""Each hazard's handling and each part of the native code is broken in turn: some test must notice.

The mutants are tables. Those of Python (`mutants_of_*.py`) list a function or constant of dtrrun and its
replacement; those of C++ (`native_*.py`) a piece of the sources and its replacement. The named tests must
fail, or crash, with the mutant, and pass without it.
"""

import os
import signal

import pytest
import schemata
from forked import ROOT, run
from mutant import MUTANTS, NOT_APPLICABLE, ROWS, around, paths_of
from native import NATIVE

NOTICED = [mutant for mutant in NATIVE if mutant.tests]
ON_GPU = [mutant for mutant in NOTICED if mutant.tests.startswith("gpu/")]  # by the races that they cause
SECONDS = 240  # for the tests of one mutant; a hang does not count as noticed
EVERY = 24  # `make test` runs one Python mutant in this many
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE}
BROKEN = ("ImportError", "ModuleNotFoundError", "SyntaxError", "NameError", "UnboundLocalError")
MISCALLED = ("TypeError", "AttributeError")  # raised by a replacement: the original takes other arguments


@pytest.fixture(scope="session")
def library():
    """The folder of the extensions with all native mutants."""
    return schemata.library(NATIVE)


def test_each_row_of_the_hazard_table_has_a_mutant():
    covered = {mutant.row for mutant in (*MUTANTS, *NATIVE)} & set(ROWS)
    assert {mutant.row for mutant in MUTANTS} <= set(ROWS)
    assert covered | set(NOT_APPLICABLE) == set(ROWS)
    assert not covered & set(NOT_APPLICABLE)
    for mutants in (MUTANTS, NATIVE):
        assert len({mutant.name for mutant in mutants}) == len(mutants)


def test_no_row_is_stale():
    for mutant in MUTANTS:
        _, _, original = mutant.found()
        replacement = mutant.replacement
        assert original != replacement, mutant.name
        assert callable(original) or not isinstance(replacement, around), mutant.name
    schemata.sources(NATIVE)  # raises unless each piece occurs exactly once
    for mutant in (*MUTANTS, *NOTICED):
        for path in paths_of(mutant):
            file, _, test = path.partition("::")
            assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text(), f"{mutant.name}: {path}"


def test_code_that_has_changed_is_no_row_of_the_table():
    source = "int one = 1;\nint two = one;\n"
    row = schemata.NativeMutant("row", "name", "file", "int «one = 1»;", "one = 2", "")
    other = row._replace(code="int two   = «one»;", instead="0")
    switched = schemata.mutated("file", source, {1: row, 2: other})
    assert switched == "int (mutant(1) ? (one = 2) : (one = 1));\nint two = (mutant(2) ? (0) : (one));\n"
    for code in ("«three»", "two", "«one»", "«int» «two»"):
        with pytest.raises(ValueError, match=r"times|between"):
            schemata.mutated("file", source, {1: row._replace(code=code)})
    with pytest.raises(ValueError, match="overlap"):
        schemata.mutated("file", source, {1: row, 2: row._replace(code="one = «1»;")})


@pytest.mark.parametrize("mutants", [MUTANTS, NOTICED], ids=["python", "native"])
def test_the_tests_pass_without_a_mutant(mutants, library, tmp_path):
    tests = sorted({test for mutant in mutants for test in paths_of(mutant)})
    ended = run(tests, "", tmp_path, 900, library if mutants is NOTICED else None)
    assert ended.exit == 0, ended


def check_noticed(mutant, folder, library=None):
    ended = run(paths_of(mutant), mutant.name, folder, SECONDS, library)
    assert ended.exit is not None, "the tests did not end"
    if -ended.exit in CRASHES:
        return
    assert ended.exit == 1, f"nobody noticed (exit {ended.exit}): {ended.log[-500:]}"
    assert ended.errors, f"the mutant itself is broken: {ended.log}"
    kind, folder, _ = ended.errors[0].split(maxsplit=2)
    broken = kind in BROKEN or (kind in MISCALLED and folder == "mutants")
    assert not broken, f"the mutant itself is broken: {ended.errors}"


def named(mutant):
    return mutant.name


@pytest.mark.parametrize("mutant", MUTANTS[::EVERY], ids=named)
def test_a_mutant_of_the_sample_is_noticed(mutant, tmp_path):
    check_noticed(mutant, tmp_path)


@pytest.mark.parametrize("mutant", [one for place, one in enumerate(MUTANTS) if place % EVERY], ids=named)
def test_a_mutant_is_noticed(mutant, tmp_path):
    check_noticed(mutant, tmp_path)


@pytest.mark.parametrize("mutant", [one for one in NOTICED if one not in ON_GPU], ids=named)
def test_a_native_mutant_is_noticed(mutant, library, tmp_path):
    check_noticed(mutant, tmp_path, library)


@pytest.mark.skipif("HOLLOW_RACES" not in os.environ, reason="needs python -m tests.hollow --races")
@pytest.mark.parametrize("mutant", ON_GPU, ids=named)
def test_a_race_is_noticed(mutant, library, tmp_path):
    check_noticed(mutant, tmp_path, library)
