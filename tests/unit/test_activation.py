"""dtrrun.boot.activation"""

import pytest

import dtrrun
from dtrrun import runtime
from dtrrun.boot import activation
from dtrrun.settings import RuntimeSettings


@pytest.fixture
def started(monkeypatch):
    """The settings with which the runtime was started."""
    calls = []
    monkeypatch.setattr(runtime, "activate", calls.append)
    monkeypatch.setattr(activation, "_started_in", None)
    monkeypatch.setattr(activation.dynamo, "put_off", lambda: None)  # it would outlast the test
    return calls


def leave(monkeypatch, settings):
    for name, value in settings.to_environment().items():
        monkeypatch.setenv(name, value)


def test_with_the_launchers_settings_and_once_in_a_process(started, monkeypatch, tmp_path):
    settings = RuntimeSettings(budget_bytes=7, record_dir=str(tmp_path))
    leave(monkeypatch, settings)
    activation._start()
    activation._start()
    assert started == [settings]


def test_again_in_another_process(started, monkeypatch):
    leave(monkeypatch, RuntimeSettings())
    activation._start()
    monkeypatch.setattr(activation.os, "getpid", lambda: 1)
    activation._start()
    assert len(started) == 2


def test_without_a_record_where_the_launcher_has_gone(started, monkeypatch, tmp_path):
    leave(monkeypatch, RuntimeSettings(budget_bytes=7, record_dir=str(tmp_path / "gone")))
    activation._start()
    assert started == [RuntimeSettings(budget_bytes=7)]


def test_not_at_all_where_the_program_took_the_settings_away(started, monkeypatch):
    monkeypatch.delenv("DTRRUN_RUNTIME", raising=False)
    activation._start()
    assert started == []


def test_not_in_a_free_threaded_python(started, monkeypatch):
    """dtrrun must not start there, neither by the command nor from code; `fail` would end this process."""
    said = []
    monkeypatch.setattr(runtime.sysconfig, "get_config_var", lambda name: int(name == "Py_GIL_DISABLED"))
    monkeypatch.setattr(activation, "fail", said.append)
    monkeypatch.setattr(activation, "_start", lambda: None)
    monkeypatch.setattr(activation.helpers, "watch", lambda _: None)
    monkeypatch.setattr(activation.children, "watch", lambda *_: None)
    activation.activate()
    assert said == [runtime.FREE_THREADED]
    with pytest.raises(RuntimeError, match="free-threaded"), dtrrun.budget("1GB"):
        pass
