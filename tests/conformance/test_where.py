"""`--where` attributes recomputed operators to module and line; without it nothing is hooked."""

import inspect
import threading
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.nn.modules import module as modules

import dtrrun

HERE = Path(__file__).name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return torch.sigmoid(self.inner(x))  # in Block


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def train(steps=3):
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(torch.randn(256, 64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def line_of(function, text):
    lines, start = inspect.getsourcelines(function)
    return f"{HERE}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def hooks():
    return len(modules._global_forward_hooks), len(modules._global_forward_pre_hooks)


def test_modules_and_lines_of_what_is_run_again():
    plain = train()
    with dtrrun.budget("700KB", where=True) as session:
        assert train() == plain
        report = session.report()
    places = {
        (row["module"], Path(row["line"]).name, row["name"]): row["rematerializations"]
        for row in report["places"]
    }
    assert sum(places.values()) > 10
    sigmoid, linear = line_of(Block, "# in Block"), line_of(Block, "# in Block")
    assert any(key == (f"blocks.{i}", sigmoid, "aten.sigmoid") for i in range(8) for key in places)
    assert any(key == (f"blocks.{i}.inner", linear, "aten.addmm") for i in range(8) for key in places)
    assert {line.partition(":")[0] for _, line, _ in places} == {HERE}
    assert hooks() == (0, 0)


def test_all_that_is_run_again_is_told():
    with dtrrun.budget("700KB", where=True) as session:
        train()
    tallies = session._where.tallies
    assert sum(count for count, _, _ in tallies.values()) == session.dtr.rematerializer.rematerializations
    assert sum(ns for _, ns, _ in tallies.values()) == session.dtr.rematerializer.operators_ns


def test_what_autograd_called():
    with dtrrun.budget(None, where=True) as session:
        where = session._where
        x = torch.randn(8, 8, requires_grad=True)
        y = x.sigmoid()
        forward = session.ledger.age
        y.sum().backward()
        callers = session._callers
        assert callers.at(forward).module == ""
        backward = {callers.at(age).module for age in range(forward + 2, session.ledger.age + 1)}
        assert "backward" in backward
        # That of the operator whose backward it is.
        assert callers.origin(session.ledger.age).line.endswith(line_of(test_what_autograd_called, "y = x"))
        z = x + 1
        assert where.module_of(session.ledger.version_of(z.untyped_storage())) == ""
        assert callers.at(session.ledger.age).line.endswith(
            line_of(test_what_autograd_called, "z = x" + " + 1")
        )
        del z


def test_a_module_that_raises_and_one_of_another_thread():
    class Bad(nn.Module):
        def forward(self, x):
            raise RuntimeError("mine")

    with dtrrun.budget(None, where=True) as session:
        for _ in range(3):
            with suppress(RuntimeError):
                nn.Sequential(nn.Linear(4, 4), Bad())(torch.randn(2, 4))
        net = nn.Linear(4, 4)
        thread = threading.Thread(target=lambda: net(torch.randn(2, 4)))
        thread.start()
        thread.join()
        assert session._callers._stack == []


def test_notes_do_not_pile_up():
    with dtrrun.budget(None, where=True) as session:
        train(2)
        few = session._callers.notes.size
        train(6)
        assert session._callers.notes.size <= 2 * few


def test_without_it_nothing_is_hooked():
    with dtrrun.budget("700KB") as session:
        assert hooks() == (0, 0)
        train(1)
        assert not session.callbacks.reasons.any
        assert session.ledger.decision_observers == []
        assert session.report()["places"] == []
