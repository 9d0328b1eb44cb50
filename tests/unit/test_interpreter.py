"""dtrrun.launch.interpreter"""

import importlib
import os
import sys

import pytest

from dtrrun.launch import torch_build
from dtrrun.launch.errors import LaunchError
from dtrrun.launch.interpreter import choose

WITH_TORCH = "#!/bin/sh\necho /lib/torch/__init__.py\n"


def program(path, text="#!/bin/sh\nexit 1\n"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def on_path(tmp_path):
    """dtrrun as found on PATH, as after `pipx install dtrrun`."""
    return program(tmp_path / "tools" / "dtrrun")


def environ(tmp_path, **more):
    return {"PATH": f"{tmp_path / 'tools'}:{tmp_path / 'system'}", **more}


def test_what_is_asked_for(tmp_path, on_path):
    python = program(tmp_path / "other" / "python")
    assert choose(python, environ(tmp_path, VIRTUAL_ENV="/x"), on_path) == python
    for wanted, status in ((str(tmp_path / "none"), 127), (str(tmp_path), 126)):
        with pytest.raises(LaunchError, match="--python") as caught:
            choose(wanted, environ(tmp_path), on_path)
        assert caught.value.exit_status == status


@pytest.mark.parametrize("called", [".venv/bin/dtrrun", "/somewhere/dtrrun/__main__.py"])
def test_our_own_where_dtrrun_is_called_by_its_path_or_as_a_module(tmp_path, on_path, called):
    program(tmp_path / "env" / "bin" / "python")
    assert choose(None, environ(tmp_path, VIRTUAL_ENV=str(tmp_path / "env")), called) == sys.executable


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environments(tmp_path, on_path, variable):
    python = program(tmp_path / "env" / "bin" / "python")
    assert choose(None, environ(tmp_path, **{variable: str(tmp_path / "env")}), on_path) == python


def test_the_innermost_environment_wins_and_a_broken_one_does_not(tmp_path, on_path):
    outer = program(tmp_path / "conda" / "bin" / "python")
    both = environ(tmp_path, VIRTUAL_ENV=str(tmp_path / "venv"), CONDA_PREFIX=str(tmp_path / "conda"))
    assert choose(None, both, on_path) == outer
    inner = program(tmp_path / "venv" / "bin" / "python")
    assert choose(None, both, on_path) == inner


def test_our_own_environment_when_it_is_the_active_one(tmp_path, on_path):
    assert choose(None, environ(tmp_path, VIRTUAL_ENV=sys.prefix), on_path) == sys.executable


@pytest.mark.parametrize("name", ["python", "python3"])
@pytest.mark.parametrize("has_torch", [True, False])
def test_python_on_path_if_it_has_torch(tmp_path, on_path, name, has_torch):
    system = program(tmp_path / "system" / name, *([WITH_TORCH] if has_torch else []))
    assert choose(None, environ(tmp_path), on_path) == (system if has_torch else sys.executable)


@pytest.fixture
def without_torch(monkeypatch):
    """dtrrun's own interpreter lacks torch, as after `pip install dtrrun` in a separate environment."""
    monkeypatch.setattr(torch_build, "find_spec", lambda name: None)


CALLED = {"by its path": "/own/bin/dtrrun", "active": None}


@pytest.mark.parametrize("called", CALLED.values(), ids=CALLED)
def test_our_own_without_torch_gives_way_to_one_that_has_it(tmp_path, on_path, without_torch, called):
    active = {"VIRTUAL_ENV": sys.prefix} if called is None else {}
    called = called or on_path
    assert choose(None, environ(tmp_path, **active), called) == sys.executable
    conda = program(tmp_path / "conda" / "bin" / "python")
    active["CONDA_PREFIX"] = str(tmp_path / "conda")
    assert choose(None, environ(tmp_path, **active), called) == sys.executable
    system = program(tmp_path / "system" / "python3", WITH_TORCH)
    assert choose(None, environ(tmp_path, **active), called) == system
    program(tmp_path / "conda" / "bin" / "python", WITH_TORCH)
    assert choose(None, environ(tmp_path, **active), called) == conda


def test_an_active_environment_is_meant_whatever_it_has(tmp_path, on_path, without_torch):
    """It is chosen even without torch: `python train.py` would fail there in the same way."""
    python = program(tmp_path / "env" / "bin" / "python")
    program(tmp_path / "system" / "python3", WITH_TORCH)
    assert choose(None, environ(tmp_path, VIRTUAL_ENV=str(tmp_path / "env")), on_path) == python


def test_where_none_has_torch_it_is_the_terminals_python(tmp_path, on_path, without_torch):
    system = program(tmp_path / "system" / "python")
    assert choose(None, environ(tmp_path), on_path) == system


def test_a_folder_called_torch_is_no_torch(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch").mkdir()
    importlib.invalidate_caches()
    assert not torch_build.origin_of(sys.executable)
    (tmp_path / "torch" / "__init__.py").touch()
    importlib.invalidate_caches()
    assert torch_build.origin_of(sys.executable)


def test_our_own_where_there_is_nothing_else(tmp_path, on_path):
    assert choose(None, environ(tmp_path), on_path) == sys.executable
    assert os.path.isabs(sys.executable)
