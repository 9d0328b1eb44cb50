"""dtrrun.boot.helpers"""

import importlib
import pickle
import sys

import pytest

from dtrrun.boot import helpers

TRAINS = "dtrrun_test_worker"


@pytest.fixture
def worker(tmp_path, monkeypatch):
    (tmp_path / f"{TRAINS}.py").write_text("def loop(a, *, b):\n    'Doc.'\n    return a + b\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", sys.meta_path[:])
    monkeypatch.setattr(helpers, "HELPERS", {TRAINS: "loop"})
    yield
    sys.modules.pop(TRAINS, None)


@pytest.mark.parametrize("imported_before", [True, False])
def test_the_runtime_ends_before_the_helpers_work(worker, imported_before):
    calls = []
    if imported_before:
        importlib.import_module(TRAINS)
    helpers.watch(lambda: calls.append("deactivate"))
    module = importlib.import_module(TRAINS)
    assert calls == []
    assert module.loop(1, b=2) == 3
    assert calls == ["deactivate"]


def test_the_function_keeps_its_name_for_pickling(worker):
    helpers.watch(lambda: None)
    module = importlib.import_module(TRAINS)
    assert pickle.loads(pickle.dumps(module.loop)) is module.loop
    assert (module.loop.__qualname__, module.loop.__doc__) == ("loop", "Doc.")
    assert helpers.is_helper(module.loop)
    assert not helpers.is_helper(module.loop.__wrapped__)
    assert not helpers.is_helper(None)


def test_the_functions_of_pytorch_are_there():
    """The wrapped functions must exist, or a worker would run under the budget unnoticed."""
    for name, function in helpers.HELPERS.items():
        if name.startswith("torch."):
            assert callable(getattr(importlib.import_module(name), function))
