"""dtrrun.boot.path._dtrrun_hook"""

import ast
import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import dtrrun
from dtrrun.boot.path import _dtrrun_hook
from dtrrun.boot.path._dtrrun_hook import AfterImport, OwnPackage, mark

NAME = "dtrrun_test_module"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The folder of an importable module, and the calls made by an AfterImport for it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.setenv("DTRRUN_RECORDS", str(tmp_path))
    yield tmp_path / f"{NAME}.py"
    sys.modules.pop(NAME, None)


def watch():
    calls = []
    finder = AfterImport(NAME, lambda module: calls.append((module, getattr(module, "value", None))))
    sys.meta_path.insert(0, finder)
    return finder, calls


def test_the_call_comes_after_the_import_and_once(module):
    module.write_text("value = 1\nimport sys\nfound_at = len(sys.meta_path)\n")
    finder, calls = watch()
    imported = importlib.import_module(NAME)
    assert calls == [(imported, 1)]
    assert finder not in sys.meta_path
    importlib.reload(imported)
    assert len(calls) == 1


def test_other_modules_are_left_alone(module):
    finder, calls = watch()
    assert finder.find_spec("json") is None
    assert calls == []


def test_no_trace_is_left_on_the_module(module):
    module.write_text("")
    plain = importlib.import_module(NAME)
    traces = type(plain.__loader__), vars(plain.__loader__), plain.__spec__.origin
    del sys.modules[NAME]
    watch()
    ours = importlib.import_module(NAME)
    assert (type(ours.__loader__), vars(ours.__loader__), ours.__spec__.origin) == traces


def test_looking_for_the_module_is_not_importing_it(module):
    module.write_text("value = 1\n")
    _, calls = watch()
    assert importlib.util.find_spec(NAME).origin == str(module)
    assert (calls, NAME in sys.modules) == ([], False)
    importlib.import_module(NAME)
    assert len(calls) == 1


def test_an_import_that_fails_may_be_tried_again(module):
    module.write_text("raise ValueError('half way')\n")
    _, calls = watch()
    with pytest.raises(ValueError, match="half way"):
        importlib.import_module(NAME)
    assert calls == []
    module.write_text("value = 2  # of another length than before\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert [value for _, value in calls] == [2]


def test_a_module_that_is_not_there(module, tmp_path):
    watch()
    with pytest.raises(ModuleNotFoundError, match=f"No module named '{NAME}'"):
        importlib.import_module(NAME)
    assert (tmp_path / f"no-{NAME}").read_text() == f"{sys.executable}\n"


def test_a_folder_that_merely_has_the_name(module, tmp_path):
    (tmp_path / NAME).mkdir()
    _, calls = watch()
    importlib.import_module(NAME)
    assert calls == []


def test_two_finders_that_ask_each_other(module):
    module.write_text("value = 1\n")
    _, first = watch()
    _, second = watch()
    importlib.import_module(NAME)
    assert [value for _, value in first + second] == [1, 1]


def test_our_package_is_found_in_the_launchers_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    spec = OwnPackage().find_spec("dtrrun")
    assert spec.origin == dtrrun.__file__
    assert list(spec.submodule_search_locations) == list(dtrrun.__path__)
    assert OwnPackage().find_spec("dtrrun.runtime") is None
    assert OwnPackage().find_spec("torch") is None


def test_marks_are_left_if_the_launcher_is_still_there(tmp_path, monkeypatch):
    monkeypatch.setenv("DTRRUN_RECORDS", str(tmp_path))
    mark("python")
    mark("no-torch", "a\n")
    mark("no-torch", "b\n")
    assert (tmp_path / "python").read_text() == ""
    assert (tmp_path / "no-torch").read_text() == "a\nb\n"
    monkeypatch.setenv("DTRRUN_RECORDS", str(tmp_path / "gone"))
    mark("python")
    monkeypatch.delenv("DTRRUN_RECORDS")
    mark("python")


def test_an_old_python_can_read_it_and_say_so(monkeypatch):
    """It runs on Python 3.7 and later, and refuses versions before 3.11 rather than run without a budget."""
    ast.parse(Path(_dtrrun_hook.__file__).read_text(), feature_version=(3, 7))
    said = []
    monkeypatch.setattr(_dtrrun_hook, "fail", said.append)
    monkeypatch.setattr(_dtrrun_hook, "LEAST", (4, 0))
    monkeypatch.setattr("dtrrun.boot.activation.activate", lambda: None)
    _dtrrun_hook._torch_imported(SimpleNamespace(Tensor=None))
    assert said == [f"{sys.executable} is Python {sys.version.split()[0]}, and dtrrun needs 4.0 or later"]


def test_the_hook_needs_little():
    """Its top-level imports are modules that every Python has already loaded at startup."""
    found = vars(_dtrrun_hook).items()
    names = {name for name, one in found if isinstance(one, type(sys)) and name[0] != "@"}  # not pytest's own
    assert names == {"os", "sys", "time"}
    code = "import sys; print({'os', 'sys', 'time'} <= set(sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
