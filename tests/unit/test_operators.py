"""dtrrun.runtime.operators: facts that PyTorch does not state, checked against the existing schemas."""

from pathlib import Path

import pytest
import torch

import dtrrun
from dtrrun.runtime import operators
from dtrrun.runtime.dispatch.kernels import has_python_kernel, replaces_own_kernel
from dtrrun.runtime.operators import operator_of
from dtrrun.simulator.log import Call, read_log

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("file", "foreign"), [("_native/registry.py", False), ("library.py", True), ("", True)]
)
def test_a_kernel_in_python_is_pytorchs_own_if_pytorch_has_registered_it(file, foreign):
    """Those of `torch.library` are registered for others."""
    path = Path(torch.__file__).parent / file if file else __file__
    register = "library = torch.library.Library('aten', 'IMPL'); library.impl('erfinv', torch.sin, 'CPU')"
    variables = {"torch": torch}
    exec(compile(register, str(path), "exec"), variables)
    try:
        assert has_python_kernel(aten.erfinv.default)
        assert replaces_own_kernel(aten.erfinv.default) == foreign
    finally:
        variables["library"]._destroy()
    assert not replaces_own_kernel(aten.erfinv.default)


@pytest.mark.parametrize("name", operators._WRITES_UNSAID)
def test_what_is_written_to_is_where_the_schema_has_it(name):
    operator = getattr(aten, name.removeprefix("aten::")).default
    places = operators._WRITES_UNSAID[name]
    named = {operator._schema.arguments[place].name for place in places}
    assert named in ({"reserve"}, {"reserveSpace"}, {"running_mean", "running_var"})
    assert operator_of(operator).mutates == places


def test_the_statistics_of_sync_batch_norm_have_a_new_version(monkeypatch):
    """What the operator writes without saying so gets a new version; a CPU operator stands in for CUDA's."""
    monkeypatch.setitem(operators._WRITES_UNSAID, "aten::lerp", (0, 1))
    operator_of.cache_clear()
    mean, variance = torch.ones(64), torch.ones(64)
    try:
        with dtrrun.budget("1GB") as session:
            made = mean * 2
            before = session.callbacks.version_of(mean)
            torch.lerp(mean, variance, 0.5)
            assert before.superseded
            assert not session.dtr.recipes.secure(
                session.callbacks.version_of(made)
            )  # the old version is lost
    finally:
        operator_of.cache_clear()


@pytest.fixture
def tanh_keeps_state(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(operators, "_KEEPS_STATE", {"aten::tanh"})
        operator_of.cache_clear()
        yield
    operator_of.cache_clear()


def test_state_that_a_library_advances_is_never_evicted_or_replayed_from(tanh_keeps_state):
    with dtrrun.budget(1, over_budget="evict") as session:
        state = torch.ones(64).tanh()
        made = state + 1
        record = session.callbacks.version_of(state)
        assert record.resident
        assert record.escaped
        assert session.callbacks.version_of(made).operation is None


def test_a_log_says_so_as_well(tanh_keeps_state, tmp_path):
    path = str(tmp_path / "step.log")
    weight = torch.nn.Parameter(torch.ones(64))
    optimizer = torch.optim.SGD([weight], 0.1)
    with dtrrun.budget(None, log=path, log_first=1, log_last=1):
        (weight * torch.ones(64).tanh()).sum().backward()
        optimizer.step()
    calls = {one.operator: one.facts for one in read_log(path) if isinstance(one, Call)}
    kinds = {name: [kind for *_, kind in calls[name]["out"]] for name in ("aten.tanh", "aten.mul")}
    assert kinds == {"aten.tanh": ["untracked"], "aten.mul": [""]}


def test_other_operators_are_as_they_were():
    assert operator_of(aten.tanh.default).simple
    assert operator_of(aten._cudnn_init_dropout_state.default).keeps_state
