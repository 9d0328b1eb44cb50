"""dtrrun.boot.dynamo; tests/inject/test_without_dynamo.py runs a program under it."""

import inspect

import pytest
from torch import _compile, optim
from torch.optim import optimizer

from dtrrun.boot import dynamo


def disable_nothing(monkeypatch, change):
    """Return whether `torch._disable_dynamo` is recognized after a change to its source."""
    monkeypatch.setattr(_compile, "_disable_dynamo", changed(_compile, "_disable_dynamo", change))
    return undone(dynamo._disable_nothing())


def break_no_graph(monkeypatch, change):
    """Return whether an optimizer's `step` is recognized after a change to its decorator's source."""
    decorate = changed(optimizer, "_use_grad_for_differentiable", change)
    monkeypatch.setattr(optimizer, "_use_grad_for_differentiable", decorate)
    made = type("Made", (), {"step": decorate(lambda self: None)})
    monkeypatch.setattr(optim, "Made", made, raising=False)
    return undone(dynamo._break_no_graph())


def changed(module, name, change):
    source = inspect.getsource(getattr(module, name))
    assert change[0] in source
    made = {}
    exec(source.replace(*change), vars(module), made)
    return made[name]


def undone(generator):
    undo = [*generator]
    for each in undo:
        each()
    return bool(undo)


@pytest.mark.parametrize(
    ("put_off", "change", "recognised"),
    [
        (disable_nothing, ("inner", "inner"), True),
        (disable_nothing, ("__dynamo_disable", "__disabled"), False),
        (disable_nothing, ("getattr(fn, ", "fn.__dict__.get("), False),
        (disable_nothing, ("inner", "otherwise"), False),
        (break_no_graph, ("prev_grad", "before"), True),
        (break_no_graph, ("graph_break()", "graph_break('why')"), False),
        (break_no_graph, ("graph_break()", "graph_break(why=1)"), False),
        (break_no_graph, ("graph_break()", "stop()"), False),
    ],
)
def test_the_import_stays_if_pytorchs_code_is_different(monkeypatch, put_off, change, recognised):
    before = [*vars(_compile)]
    assert put_off(monkeypatch, change) is recognised
    assert [*vars(_compile)] == before
