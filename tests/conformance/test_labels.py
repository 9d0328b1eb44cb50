"""What an error and the report say about memory that can't be evicted, and what the program holds."""

import sys
import weakref
from collections import deque

import pytest
import torch
from torch import nn

import dtrrun
from dtrrun.runtime.observe.labels import KEPT
from dtrrun.runtime.storage import size_of, storage_of

WIDTH = 128
BUDGET = 4_000_000


def nbytes(session, tensors):
    """Return the bytes of those storages that stay, each counted once."""
    storages = {storage._cdata: storage for storage in map(storage_of, tensors)}.values()
    found = ((storage, session.ledger.version_of(storage)) for storage in storages)
    return sum(size_of(storage) for storage, version in found if version.resident and version.constant)


SEQUENCES = list, tuple, deque


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = [*value.values()]
    return [one for each in value for one in tensors_in(each)] if isinstance(value, SEQUENCES) else []


class Factored(torch.optim.Optimizer):
    """An optimizer with its state in lists, as Adafactor's, and some of it in an attribute."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})
        self.scales = []

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for one in group["params"]:
                factors = self.state[one].setdefault("factors", [torch.zeros(len(one)), torch.zeros(WIDTH)])
                square = one.grad.square().reshape(len(one), -1)
                factors[0].lerp_(square.mean(1), 0.1)
                factors[1].lerp_(square.mean(0).expand(WIDTH), 0.1)
                if len(self.scales) < 4:
                    self.scales.append(one.grad.abs() * 2)
                one.add_(one.grad, alpha=-group["lr"])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw of lists": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
    "its own": Factored,
}


class Trainer:
    def __init__(self, optimizer, normalize=False):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        self.model = nn.Sequential(*layers, nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.optimizer = optimizer(self.model.parameters())

    def step(self, *, zero=True):
        loss = self.model(torch.randn(256, WIDTH)).square().mean()
        loss.backward()
        self.optimizer.step()
        if zero:
            self.optimizer.zero_grad()
        return loss

    def facts(self, session):
        """Return what this holds, by label."""
        parameters = [*self.model.parameters()]
        state = [getattr(self.optimizer, "scales", []), *self.optimizer.state.values()]
        return {
            "parameter": nbytes(session, parameters),
            "gradient": nbytes(session, [one.grad for one in parameters if one.grad is not None]),
            "optimizer state": nbytes(session, tensors_in(state)),
        }


def refuse():
    """Ask for more than any budget here."""
    torch.ones(1 << 26)


def train(make, steps):
    """Return a trainer after some steps, whose last gradients are still there."""
    trainer = Trainer(make)
    for step in range(steps):
        trainer.step(zero=step + 1 < steps)
    return trainer


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_memory_has_its_role(name, steps):
    """The roles are those of the program's objects, in the error and, under `warn`, in the report."""
    with dtrrun.budget(BUDGET) as session:
        trainer = train(OPTIMIZERS[name], steps)
        with pytest.raises(dtrrun.BudgetError) as caught:
            refuse()
        facts = trainer.facts(session)
    assert facts["optimizer state"] > WIDTH * WIDTH * (name != "adafactor")
    assert {label: caught.value.pinned.get(label, 0) for label in facts} == facts
    with dtrrun.budget(sum(facts.values()) // 2, over_budget="warn") as session:
        trainer = train(OPTIMIZERS[name], steps)
        torch.ones(1)
        pinned = {row["reason"]: row["bytes"] for row in session.report()["pinned"]}
        facts = trainer.facts(session)
    assert {label: pinned.get(label, 0) for label in facts} == facts


# Each of these keeps something, measures it by `note`, and then asks for too much.


def losses_with_their_graph(trainer, note):
    losses = []
    for _ in range(3):
        trainer.step()
        losses.append(trainer.model(torch.randn(256, WIDTH)).square().mean())
    note(losses)
    refuse()


def losses_of_steps(trainer, note):
    losses = [trainer.step() for _ in range(4)]
    note(losses)
    refuse()


def logits_of_an_evaluation(trainer, note):
    logits = []
    trainer.step()
    with torch.no_grad():
        for _ in range(3):
            logits.append(trainer.model(torch.randn(256, WIDTH)))
    trainer.step()
    note(logits)
    refuse()


def average_in_a_dict(trainer, note):
    average = {name: one.detach().clone() for name, one in trainer.model.named_parameters()}
    for _ in range(3):
        trainer.step()
        with torch.no_grad():
            for name, one in trainer.model.named_parameters():
                average[name].lerp_(one, 0.1)
    note(average)
    refuse()


def average_in_a_module(trainer, note):
    average = torch.optim.swa_utils.AveragedModel(trainer.model)
    for _ in range(2):
        trainer.step()
        average.update_parameters(trainer.model)
    note([*trainer.model.parameters(), *average.parameters()])
    refuse()


def scaler(trainer, note):
    scaling = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        trainer.optimizer.zero_grad()
        loss = trainer.model(torch.randn(256, WIDTH)).square().mean()
        scaling.scale(loss).backward()
        scaling.step(trainer.optimizer)
        scaling.update()
    del loss
    note([one.grad for one in trainer.model.parameters()])
    refuse()


class Cache:
    def __init__(self):
        self.keys = []

    def use(self, model, x):
        self.keys.append(model(x))


def cache_of_an_object(trainer, note):
    cache = Cache()
    trainer.step()
    with torch.no_grad():
        for _ in range(3):
            cache.use(trainer.model, torch.randn(256, WIDTH))
    trainer.step()
    note(cache.keys)
    refuse()


def replay_buffer(trainer, note):
    buffer = deque(maxlen=100)
    for _ in range(8):
        buffer.append(torch.tensor([[float(number) for number in range(64)] for _ in range(128)]))
        trainer.step()
    note(buffer)
    refuse()


def closed_over(trainer, note):
    features = []

    def hook(module, inputs, output):
        features.append(output.detach())

    trainer.model[0].register_forward_hook(hook)
    for _ in range(4):
        trainer.step()
    note(features)
    refuse()


def statistics(trainer, note):
    trainer.step()
    trainer.step()
    note([trainer.model[3].running_mean, trainer.model[3].running_var])
    refuse()


def target_built_in_place(trainer, note):
    trainer.step()
    with torch.no_grad():
        rows = trainer.model(torch.randn(256, WIDTH)).softmax(-1)
        target = torch.zeros_like(rows)
        for row in range(64):
            target[row].index_add_(0, torch.arange(WIDTH), rows[row])
    note([target])
    refuse()


def solutions_of_least_squares(trainer, note):
    trainer.step()
    with torch.no_grad():
        made = trainer.model(torch.randn(256, WIDTH))
        solutions = [torch.linalg.lstsq(made, torch.randn(256, WIDTH)).solution for _ in range(3)]
    note(solutions)
    refuse()


KEEPING = [
    (losses_with_their_graph, KEPT, "the graph of `losses`", True),
    (losses_of_steps, KEPT, "`losses`", False),
    (logits_of_an_evaluation, KEPT, "`logits`", True),
    (average_in_a_dict, KEPT, "`average['0.weight']`", False),
    (average_in_a_module, "parameter", "", False),
    (scaler, "gradient", "", False),
    (cache_of_an_object, KEPT, "`cache.keys`", True),
    (replay_buffer, "constant", "`buffer`", False),
    (closed_over, KEPT, "`features`", True),
    (target_built_in_place, "updated in place", "`target`", False),
    (statistics, "running statistics", "", False),
    (solutions_of_least_squares, "not replayable", "`solutions`", False),
]
"""Programs with the label of what they keep, its name, and whether less of it could be kept."""


@pytest.mark.parametrize(("keeping", "label", "name", "accused"), KEEPING)
def test_what_a_program_keeps_has_a_name(keeping, label, name, accused):
    """The name is that of the variable, and a hint accuses only what holds such values."""
    noted = []

    def note(values):
        with pytest.raises(dtrrun.BudgetError):
            refuse()
        noted.append(nbytes(session, tensors_in(values)))

    with dtrrun.budget(3_500_000) as session:
        trainer = Trainer(lambda parameters: torch.optim.SGD(parameters, 0.01))
        with pytest.raises(dtrrun.BudgetError) as caught:
            keeping(trainer, note)
    error = caught.value
    assert error.pinned[label] >= noted[0] > 0
    assert bool(name) == (label in error.held_by)
    if name:
        assert error.held_by[label].startswith(f"{name} in {keeping.__name__} at test_labels.py:")
        assert f" [{name} in {keeping.__name__} at " in str(error)
    assert bool(accused) == bool(error.hint)
    assert not accused or error.hint.startswith(f"{name.removeprefix('the graph of ')} in {keeping.__name__}")


def test_a_search_leaves_no_trace():
    """Looking at a function's variables keeps none of them alive, and takes nothing from its `locals()`."""

    def program():
        values = torch.tensor([2.0] * 1000)
        died = weakref.ref(values)
        with pytest.raises(dtrrun.BudgetError, match="`values` in program"):
            refuse()
        del values
        assert died() is None

    def with_locals():
        values = torch.tensor([2.0] * 1000)
        mine = locals()
        with pytest.raises(dtrrun.BudgetError, match="`values` in with_locals"):
            refuse()
        assert mine["values"] is values

    def in_a_trace_function():
        values, again = torch.tensor([2.0] * 1000), []

        def trace(frame, event, argument):
            if frame.f_code is in_a_trace_function.__code__ and event == "line" and not again:
                again.append(True)
                with pytest.raises(dtrrun.BudgetError):
                    refuse()
            return trace

        sys.settrace(trace)
        sys._getframe().f_trace = trace
        try:
            again.append(False)
        finally:
            sys.settrace(None)
        assert again == [True, False]
        assert values.sum() == 2000

    with dtrrun.budget(BUDGET):
        program()
        with_locals()
        in_a_trace_function()


def of_an_optimizer():
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(8)]
    return weights, torch.optim.AdamW(weights)


def of_a_module():
    module = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(8))
    return [*module.parameters()], module


def of_a_converted_module():
    module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(8)]).double()
    return [*module.parameters()], torch.optim.SGD(module.parameters(), 0.1)


@pytest.mark.parametrize("made", [of_an_optimizer, of_a_module, of_a_converted_module])
def test_weights_stay_from_the_start(made):
    """A weight that an operator has made could be computed again, but is needed all the time."""
    with dtrrun.budget(BUDGET):
        weights, _holder = made()
        with pytest.raises(dtrrun.BudgetError) as caught:
            refuse()
    assert caught.value.pinned == {"parameter": sum(one.nbytes for one in weights)}
