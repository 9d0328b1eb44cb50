"""Waiting for the program to import a module (`runtime/imports.py`)."""

import importlib
import sys

import pytest

from dtrrun.runtime.imports import after_import


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module that can be imported, and return its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text):
        (tmp_path / "waited_for.py").write_text(text)
        importlib.invalidate_caches()
        return "waited_for"

    yield write
    sys.modules.pop("waited_for", None)


def test_it_calls_back_once_the_module_has_run(module):
    name, seen, before = module("value = 3"), [], [*sys.meta_path]
    after_import(name, lambda found: seen.append(found.value))
    assert (seen, name in sys.modules) == ([], False)
    importlib.import_module(name)
    assert (seen, sys.meta_path) == ([3], before)
    importlib.reload(sys.modules[name])
    assert seen == [3]


def test_it_calls_back_at_once_if_the_module_is_there(module):
    name, seen, before = module("value = 3"), [], [*sys.meta_path]
    importlib.import_module(name)
    after_import(name, lambda found: seen.append(found.value))
    assert (seen, sys.meta_path) == ([3], before)


def test_it_can_be_taken_back(module):
    name, seen, before = module("value = 3"), [], [*sys.meta_path]
    after_import(name, seen.append)()
    importlib.import_module(name)
    assert (seen, sys.meta_path) == ([], before)


def test_a_module_that_fails_is_waited_for_again(module):
    name, seen = module("raise ValueError(7)"), []
    take_back = after_import(name, seen.append)
    with pytest.raises(ValueError, match="7"):
        importlib.import_module(name)
    assert seen == []
    module("value = 3 + 0")
    assert seen == [importlib.import_module(name)]
    take_back()


def test_two_may_wait_for_the_same_module(module):
    name, seen = module("value = 3"), []
    for number in range(2):
        after_import(name, lambda _, number=number: seen.append(number))
    importlib.import_module(name)
    assert sorted(seen) == [0, 1]
