"""`Session.on_step`: a function of the program gets the figures of each step."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import dtrrun

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "log-each-step.md"
STEPS = 4


def training(steps=STEPS):
    torch.manual_seed(0)
    net = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(64, 64), nn.Tanh())))
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(512, 64)).square().mean().backward()
        optimizer.step()


def test_the_figures_of_all_steps_add_up_to_the_report():
    told = []
    with dtrrun.budget("1.7MB", "cpu", cost="model") as session:
        session.on_step(told.append)
        session.on_step(lambda figures: told and session.set_budget("1.8MB"))
        training()
        report = session.report()
    assert [one["step"] for one in told] == [1, 2, 3, 4]
    for name in ("evictions", "rematerializations"):
        assert sum(one[name] for one in told) == report[name] > 0
    assert max(one["peak_bytes"] for one in told) == report["peak_bytes"]
    assert [one["budget_bytes"] for one in told] == [1_700_000] + 3 * [1_800_000]
    assert all(0 < one["rematerialization_seconds"] < one["seconds"] < 60 for one in told)
    training()
    assert len(told) == STEPS  # it ends with the session


def test_copies_to_the_host_are_counted(tmp_path):
    told = []
    with dtrrun.budget("700kB", "cpu", host_budget=f"10MB:{tmp_path}", cost="model", quiet=True) as session:
        session.on_step(told.append)
        training()
        report = session.report()
    copies = report["copies_out"] + report["copies_in"]
    assert 0 < sum(one["host_copies"] for one in told) <= copies
    assert (
        0
        < sum(one["host_copied_bytes"] for one in told)
        <= report["copied_out_bytes"] + report["copied_in_bytes"]
    )


def test_its_operators_and_its_errors_are_the_programs():
    def stops(figures):
        (torch.ones(10) * figures["step"]).sum().item()
        if figures["step"] == 2:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"), dtrrun.budget("100MB", "cpu") as session:  # noqa: PT012
        assert dtrrun.current() is session
        before = session.ledger.age
        session.on_step(stops)
        training()
    assert session.steps.count == 2
    assert session.ledger.age > before
    assert dtrrun.current() is None


class Writer:
    def __init__(self):
        self.scalars = []

    def add_scalar(self, name, value, step):
        self.scalars.append((name, float(value), step))


def test_the_recipes_of_the_page(monkeypatch):
    logged, writer = [], Writer()
    wandb, tensorboard = ModuleType("wandb"), ModuleType("torch.utils.tensorboard")
    wandb.init = lambda project: None
    wandb.log = lambda figures, commit: logged.append((figures, commit))
    tensorboard.SummaryWriter = lambda: writer
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", tensorboard)
    recipes = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    for recipe in recipes:
        exec(recipe, {})  # without a session, they do nothing
    assert (logged, writer.scalars) == ([], [])
    with dtrrun.budget("100MB", "cpu"):
        for recipe in recipes:
            exec(recipe, {})
        training(2)
    assert [(one["dtrrun"]["step"], commit) for one, commit in logged] == [(1, False), (2, False)]
    assert ("dtrrun/budget_bytes", 100e6, 2) in writer.scalars
    rows = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall("`(.*?)`", row)]
    assert sorted(named) == sorted(logged[0][0]["dtrrun"])
    assert {name.removeprefix("dtrrun/") for name, *_ in writer.scalars} == set(named)
