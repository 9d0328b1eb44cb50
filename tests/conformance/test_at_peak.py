"""What is said to hold the peak (`--peak`, `dtrrun peak`) is what holds it."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.profiler._memory_profiler import _CATEGORY_TO_INDEX, MemoryProfileTimeline
from torch.utils.checkpoint import checkpoint

import dtrrun
from dtrrun.runtime.observe import holding
from dtrrun.runtime.observe.training_memory import find_training
from dtrrun.telemetry.holding import CLASSES

HERE = Path(__file__).name
WIDTH, BATCH, COLUMNS = 64, 32, 256
NEAR = 0.02


class Block(nn.Module):
    def __init__(self, frugal=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)
        self.frugal = frugal

    def forward(self, x):
        if self.frugal:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, columns=COLUMNS, frugal=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(frugal) for _ in range(4))
        self.head = nn.Linear(WIDTH, columns)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Steps:
    """A program: steps of a net. `kept` gets a result of each."""

    def __init__(self, columns=COLUMNS, frugal=False):
        torch.manual_seed(0)
        self.net, self.columns = Net(columns, frugal), columns
        self.optimizer = torch.optim.AdamW(self.net.parameters())
        self.kept = []

    def step(self, batch=BATCH):
        x, y = torch.randn(batch, 16, WIDTH), torch.randint(0, self.columns, (batch * 16,))
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits.view(-1, self.columns), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.kept.append(logits.detach()[:4].clone())

    def run(self, steps=4):
        for _ in range(steps):
            self.step()


def found_in(program, *, steps=4, budget=None, **options):
    with dtrrun.budget(budget, "cpu", peak=True, **options) as session:
        program.run(steps)
        report = session.report()
    return report["holds"]["found"]


def by_class(found):
    return {row["name"]: row["bytes"] for row in found["classes"]}


def profiled(program):
    """Bytes by category at the peak of the last of three steps, as torch.profiler tells."""
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as prof:
        program.run(3)
    times, sizes = MemoryProfileTimeline(prof._memory_profile())._coalesce_timeline("cpu")
    late = (times[0] + 2 * times[-1]) / 3  # optimizer's state is there
    most = max((size for time, size in zip(times, sizes, strict=True) if time > late), key=sum)
    return {getattr(category, "name", ""): most[index + 1] for category, index in _CATEGORY_TO_INDEX.items()}


def near(one, other):
    return one == pytest.approx(other, rel=NEAR, abs=5_000)


def test_classes_are_those_of_pytorchs_profiler():
    classes, plain = by_class(found_in(Steps())), profiled(Steps())
    assert near(classes["parameters"], plain["PARAMETER"])
    assert near(classes["optimizer state"], plain["OPTIMIZER_STATE"])
    logits = BATCH * 16 * COLUMNS * 4  # which is on no list: only a variable keeps it
    kept = 3 * 4 * 16 * COLUMNS * 4
    assert near(classes["kept by the program"], logits + kept - 4 * 16 * COLUMNS * 4)
    assert near(
        classes["saved for backward"] + classes["batch"] + logits, plain["ACTIVATION"] + plain["INPUT"]
    )
    assert near(classes["temporaries"], plain["AUTOGRAD_DETAIL"] + plain["TEMPORARY"])


def test_the_tables_of_a_step():
    found = found_in(Steps())
    assert found["bytes"] == found["step_bytes"] == sum(by_class(found).values())
    assert (found["step"], found["phase"]) == (3, "backward")
    assert found["operator"] == "aten._log_softmax_backward_data"
    assert set(by_class(found)) <= set(CLASSES)
    saved = [row for row in found["places"] if row["class"] == "saved for backward"]
    lines = {re.sub(r".*/", "", row["line"]) for row in saved}
    assert all(line.startswith(HERE) for line in lines)
    up = next(row for row in saved if row["module"] == "blocks.*.up")
    assert (up["alike"], up["storages"]) == (4, 4)
    assert up["bytes"] == up["evictable_bytes"] == 4 * BATCH * 16 * 256 * 4
    assert up["recompute_seconds"] > 0
    names = {row["name"]: row for row in found["variables"]}
    assert "in step at" in names["logits"]["place"]
    assert names["logits"]["how"] == "variable"
    assert any(name.endswith("kept") and row["how"] == "container" for name, row in names.items())
    # The course of the step: as much at the look, and less before and after.
    layers = found["layers"]
    totals = [sum(values) for values in zip(*layers["classes"].values(), strict=True)]
    assert max(totals) == totals[layers["operators"].index(layers["peak"])] == found["bytes"]
    assert layers["backward"] < layers["peak"] < layers["optimizer"]
    assert layers["classes"]["gradients"][-1] == by_class(found)["parameters"]
    place, nbytes = layers["top"][layers["operators"].index(layers["peak"])][0]
    sums = {}
    for row in found["places"]:
        key = row["class"], row["module"], row["line"]
        sums[key] = sums.get(key, 0) + row["bytes"]
    assert nbytes == max(sums.values()) == sums[tuple(layers["places"][place].values())]


def test_the_plan_saves_what_it_says():
    plan = next(one for one in found_in(Steps())["plans"] if one["modules"] == "blocks.0-3")
    assert plan["count"] == 4
    with dtrrun.budget(None, "cpu") as session:
        Steps(frugal=True).run()
        peak = session.report()["peak_bytes"]
    assert peak == pytest.approx(plan["peak_bytes"], rel=0.05)


def test_the_logits_of_a_vocabulary_are_named():
    found = found_in(Steps(columns=4000))
    largest = found["largest"]
    assert largest["logits"] == [BATCH * 16, 4000]
    # The logits, their softmax, and the gradients of both.
    assert (largest["storages"], largest["bytes"]) == (4, 4 * BATCH * 16 * 4000 * 4)


def test_inside_a_budget_what_is_evicted_counts():
    plain = found_in(Steps())
    found = found_in(Steps(), budget=int(0.7 * plain["bytes"]), cost="model")
    assert found["bytes"] == pytest.approx(plain["bytes"], rel=NEAR)
    assert found["resident_bytes"] <= 0.7 * plain["bytes"]
    assert near(by_class(found)["saved for backward"], by_class(plain)["saved for backward"])


def test_steps_that_vary_and_two_kinds_of_steps():
    class Varying(Steps):
        def run(self, steps):
            for batch in (32, 24, 30, 20, 28, 31, 22, 29)[:steps]:
                self.step(batch)

    class Two:
        def __init__(self):
            self.one, self.other = Steps(), Steps(columns=32)

        def run(self, steps):
            for _ in range(steps):
                self.one.step()
                self.other.step()

    varying = found_in(Varying(), steps=8)
    assert varying["bytes"] >= 0.98 * varying["step_bytes"] > 0
    two = found_in(Two())
    assert two["operator"] == "aten._log_softmax_backward_data"
    assert two["step"] % 2 == 1  # that of the first, which is larger


def test_a_program_without_an_optimizer():
    class Plain(Steps):
        def step(self):
            self.net(torch.randn(BATCH, 16, WIDTH)).square().mean().backward()
            for parameter in self.net.parameters():
                parameter.grad = None

    found = found_in(Plain())
    assert found["phase"] in ("forward", "backward")
    assert by_class(found)["saved for backward"] > 0.5 * found["bytes"]


def test_a_peak_that_comes_once_is_told_to_the_next_run():
    class Once:
        def run(self, _):
            with torch.no_grad():
                Net()(torch.randn(BATCH, 16, WIDTH))

    with dtrrun.budget(None, "cpu", peak=True) as session:
        Once().run(1)
        table = session.report()["holds"]
    assert table["found"] is None
    found = found_in(Once(), peak_bytes=table["most_bytes"])
    assert found["bytes"] == table["most_bytes"]
    assert by_class(found)["temporaries"] > 0


def test_a_budget_error_has_the_table():
    program = Steps()
    with dtrrun.budget(None, "cpu") as session:
        program.run(2)
        peak = session.report()["peak_bytes"]
        session.set_budget(peak)
        logits = program.net(torch.randn(BATCH, 16, WIDTH))
        with pytest.raises(dtrrun.BudgetError) as caught:
            torch.ones(peak // 4)
        error = caught.value
    classes = by_class(error.holds)
    assert classes["parameters"] == sum(-(-one.nbytes // 64) * 64 for one in program.net.parameters())
    assert classes["saved for backward"] > classes["gradients"] > 0
    assert {row["name"] for row in error.holds["variables"]} >= {"logits"}
    assert "\n" not in error.args[0]
    lines = str(error).splitlines()[1:]
    assert lines[0].split() == ["held", "bytes", "share", "what", "to", "do"]
    assert any(line.strip().startswith("saved for backward") for line in lines)
    del logits


def test_nothing_is_noted_before_and_after():
    with dtrrun.budget(None, "cpu") as session:
        assert session.callbacks.calls is None
    call = nn.Module.__call__
    with dtrrun.budget(None, "cpu", peak=True) as session:
        program = Steps()
        program.run(2)
        assert session.callbacks.calls.mode != 0
        program.run(2)
        assert session.callbacks.calls.mode == 0
        assert nn.Module.__call__ is call


@pytest.mark.parametrize("hidden", [False, True])
def test_all_objects_are_searched_only_for_what_nothing_explains(monkeypatch, hidden):
    """The search takes most of a look's time. A graph that no variable leads to is found by it alone."""
    searches = []

    def counted(*args):
        searches.append(args)
        return find_training(*args)

    monkeypatch.setattr(holding, "find_training", counted)

    class Hiding(Steps):
        def step(self, batch=BATCH):
            if hidden:
                # Variables within a partial are not looked at.
                self.ahead = partial(print, self.net(torch.randn(4 * batch, 16, WIDTH)).sum())
            super().step(batch)

    classes = by_class(found_in(Hiding()))
    assert bool(searches) == hidden
    assert classes["temporaries"] < classes["saved for backward"]
