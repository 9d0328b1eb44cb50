"""Observers of operators: what C++ tells them."""

import pytest
import torch
from faults import check_accounts
from programs import batch, mlp
from torch import nn

import dtrrun
from dtrrun.core.observer import Observer
from dtrrun.runtime.observe.lookahead import Lookahead
from dtrrun.runtime.observe.recorder import Recorder

pytestmark = pytest.mark.usefixtures("extension")


class Told(Observer):
    """Notes what it is told, and may raise an error when told of a certain event."""

    def __init__(self):
        self.events, self.calls, self.raises = [], [], None

    def note(self, event, call):
        self.events.append((event, call.signature.operator.name))
        self.calls.append(call)
        if self.raises == event:
            self.raises = None
            raise KeyboardInterrupt

    def admitted(self, call):
        self.note("admitted", call)

    def finished(self, call, outputs):
        self.note("finished", call)

    def failed(self, call):
        self.note("failed", call)

    def abandoned(self, call):
        self.note("abandoned", call)


def steps(session):
    """Train endlessly; the first steps have all kinds of operators."""
    model = mlp(6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    while True:
        x, y = batch(256)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        yield session.interposer.native_calls, session.interposer.python_calls


def record(session, folder):
    recorder = Recorder(str(folder / "log"), 1, 9, "model", alone=False)
    recorder.connect(session.callbacks)
    recorder.step_begins()


def look_ahead(session, _):
    Lookahead(session.callbacks)._watch(True)


@pytest.mark.parametrize("begin", [record, look_ahead])
def test_observed_operators_stay_in_cpp(begin, tmp_path):
    with dtrrun.budget(1 << 30, cost="model") as session:
        training = steps(session)
        for _ in range(3):
            next(training)
        begin(session, tmp_path)
        native, python = next(training)  # the first views that are observed
        assert sum(python.values()) < sum(native.values())
        before = sum(native.values()), sum(python.values())
        native, python = next(training)
        native, python = sum(native.values()) - before[0], sum(python.values()) - before[1]
        assert python < 0.05 * native
        assert session.ledger.observers


@pytest.mark.parametrize("begin", [record, look_ahead])
def test_decisions_are_those_without_observers(begin, tmp_path):
    def decisions(budget, begin):
        torch.manual_seed(0)
        with dtrrun.budget(budget, cost="model") as session:
            training = steps(session)
            for step in range(6):
                next(training)
                if step == 1 and begin is not None:
                    begin(session, tmp_path)
            return session.ledger.peak_bytes, session.ledger.decisions, session.ledger.digest

    peak, pinned, _ = decisions(1 << 30, None)
    observed = decisions(int(0.6 * peak), begin)
    assert observed == decisions(int(0.6 * peak), None)
    assert observed[1] > pinned + 50


@pytest.fixture
def told():
    """A session that knows these operators already, and an observer of it."""
    with dtrrun.budget(200_000, cost="model") as session:
        words, place, x = torch.randn(10, 8), torch.tensor([3]), torch.randn(64, 64)
        observer = Told()
        session.ledger.observers.append(observer)
        for _ in range(2):
            words[place], x.add(1), x.view(-1), x.mul_(1)
        del observer.events[:], observer.calls[:]
        native = sum(session.interposer.native_calls.values())
        yield session, observer, words, place, x
        assert sum(session.interposer.native_calls.values()) > native
        check_accounts(session)


def test_the_order_of_events(told):
    _, observer, _, _, x = told
    x.view(-1), x.mul_(1), x.add(1)
    assert observer.events == [
        (event, name) for name in ("aten.view", "aten.mul_", "aten.add") for event in ("admitted", "finished")
    ]


def test_an_operator_that_fails(told):
    _, observer, words, place, x = told
    place = place + 10
    del observer.events[:]
    with pytest.raises(IndexError):
        words[place]
    x.add(1)
    names = [event for event, _ in observer.events]
    assert names == ["admitted", "failed", "admitted", "finished"]


def test_an_operator_for_which_there_is_no_room(told):
    session, observer, _, _, x = told

    def fill():
        pinned = []
        while True:
            pinned.append(x.add(1))
            session.pin(pinned[-1])

    with pytest.raises(dtrrun.BudgetError):
        fill()
    assert observer.events[-2:] == [("admitted", "aten.add"), ("abandoned", "aten.add")]


@pytest.mark.parametrize("event", ["admitted", "finished"])
def test_an_observer_is_interrupted(told, event):
    """The program gets the interrupt as if it had come within the operator."""
    _, observer, _, _, x = told
    observer.raises = event
    with pytest.raises(KeyboardInterrupt):
        x.add(1)
    left = ["admitted", "abandoned"] if event == "admitted" else ["admitted", "finished"]
    assert [event for event, _ in observer.events] == left
    assert torch.equal(x.add(1), x + 1)


def test_nothing_is_told_of_an_operator_that_is_over(told):
    """It cannot ask about the arguments, either, once the operator has run."""
    _, observer, _, _, x = told
    asked = []
    observer.finished = lambda call, outputs: asked.append((call, len(call.results), ask(call, "leaves")))

    def ask(call, name):
        with pytest.raises(RuntimeError, match="an observer asks") as error:
            getattr(call, name)
        return str(error.value)

    x.add(1)
    ((call, results, late),) = asked
    assert results == 1
    assert "too late" in late
    assert "over" in ask(call, "versions")
