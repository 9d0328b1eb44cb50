"""What the simulator predicts of the runtime is what it does: counts, peak and clock of each step."""

import copy
import io
import json
import math
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from programs import COPYING, batch, let_copies_overlap, mlp
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import dtrrun
from dtrrun.core.heuristics import STEADY
from dtrrun.core.host import HostMemory, expected_host
from dtrrun.profiling.costs import write_costs
from dtrrun.simulator.costs import costs_of, settled
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log

STEPS = 3
AMPLE = 1 << 40
HOST = 10_000_000
AHEAD = "ahead_out", "ahead_in"


class Counts(NamedTuple):
    """Of a step. `time` includes the copies to the host and back."""

    evictions: int
    rematerializations: int
    peak_bytes: int
    time: int
    copies_out: int = 0
    copies_in: int = 0


def steps_of(program, budget, *, begin=1, prepare=None, **options):
    """Run it live; return the counts of each step. `begin`: the step from which on the budget holds."""
    torch.manual_seed(3)
    found = []
    with dtrrun.budget(budget if begin == 1 else AMPLE, **{"cost": "model"} | options) as session:
        if prepare is not None:
            prepare(session)
        dtr, ledger = session.dtr, session.ledger

        def totals():
            host = ledger.host or {}
            copies = (host.get(name, 0) for name in ("copies_out", "copies_in"))
            time = ledger.clock + session.host.ns()
            return Counts(dtr.eviction.evictions, dtr.rematerializer.rematerializations, 0, time, *copies)

        before = Counts(0, 0, 0, ledger.clock)

        def stepped(*_):
            nonlocal before
            now = totals()
            step = Counts(*(a - b for a, b in zip(now, before, strict=True)))
            found.append(step._replace(peak_bytes=session.steps.last["peak_bytes"]))
            before = now
            if begin > 1 and len(found) == begin - 1:
                session.callbacks.signatures.forget = lambda: None  # the log has these costs
                session.set_budget(budget)
                del session.callbacks.signatures.forget

        handle = register_optimizer_step_post_hook(stepped)
        try:
            program()
        except (dtrrun.BudgetError, AssertionError):  # the latter if a `pytest.raises` has met it
            assert session.error is not None
            found.append("oom")
        finally:
            handle.remove()
    return found


def recorded(program, path, first, last, **options):
    steps_of(program, None, log=str(path), log_first=first, log_last=last, **options)
    return read_log(path)


def predicted(log, budget, **options):
    outcome = predict(log, budget, **{"limit": math.inf, "heuristic": STEADY} | options)
    names = Counts._fields
    found = [Counts(*(getattr(step, name) for name in names)) for step in outcome.steps]
    return [*found, *(["oom"] if outcome.status == "oom" else [])]


def train(model, optimizer, loss, make=batch):
    def program():
        for _ in range(STEPS):
            x, y = make()
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()

    program()


def plain_mlp():
    model = mlp()
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), nn.functional.mse_loss)


def loaded_weights():
    """Memory that PyTorch does not own: tracked when made, and trusted when it is read as a parameter."""
    model = mlp()
    for module in model[::2]:
        array = module.weight.detach().numpy().copy()
        module.weight = nn.Parameter(torch.from_numpy(array).view(array.shape))
    train(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), nn.functional.mse_loss)


def in_place_and_dropout():
    model = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.2),
        nn.Linear(64, 64), nn.SiLU(inplace=True), nn.LayerNorm(64), nn.Dropout(0.1, inplace=True),
        nn.Linear(64, 32), nn.BatchNorm1d(32),
    )  # fmt: skip
    train(model, torch.optim.Adam(model.parameters()), nn.functional.mse_loss)


def views_and_several_outputs():
    """Also has a chain that is released and kept, an escape, and own state that is updated in place."""
    weight = nn.Parameter(torch.randn(32, 32) / 6)
    optimizer = torch.optim.RMSprop([weight], 1e-3, foreach=True)
    average = torch.zeros(32)
    kept = []
    for _ in range(STEPS):
        x = torch.randn(64, 32)
        for place in range(6):
            first, second = (x @ weight).chunk(2, 1)
            values, places = torch.cat([first.sigmoid(), second.tanh()], 1).sort(1)
            x = values + x[:, torch.randperm(32)].t().contiguous().t()
            x[:, place] *= 0.5
            kept.append(places[0].clone())
        average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        average.numpy()
        loss = x.square().mean() + x.std()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(loss)


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x**2


def recurrent_with_functions_of_its_own():
    cell, head = nn.LSTMCell(16, 32), nn.Linear(32, 4)
    parameters = [*cell.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    out = torch.empty(0)
    for step in range(STEPS):
        h = c = torch.zeros(48, 32)
        for x in torch.randn(5 + step, 48, 16):
            h, c = cell(Cubed.apply(x), (h, c))
            h = nn.functional.gelu(h)
        torch.mul(h.detach(), 2, out=out)
        loss = nn.functional.cross_entropy(head(h), torch.randint(4, (48,)))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        assert loss.item() > 0


def errors_on_the_way():
    """An operator that raises, pointers that are handed out, a gradient written to as an array."""
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        x, y = batch()
        middle = model[:4](x)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            torch.mm(middle, y[:5])
        loss = (model[4:](middle) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        middle.detach().data_ptr()
        middle.tolist()
        next(model.parameters()).grad.numpy()[0] = 0
        optimizer.step()


def checkpoints_on_the_way():
    model = mlp(6)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(STEPS):
        x, y = batch()
        middle = model[:6](x)
        file = io.BytesIO()
        torch.save([model.state_dict(), middle.detach()], file)
        copies = copy.deepcopy(model.state_dict())
        file.seek(0)
        copies |= torch.load(file)[0]
        loss = (model[6:](middle) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def held_over_steps():
    """Graphs of evaluations that take more than their weights, to which other code writes, too."""
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(STEPS):
        held = []
        x = torch.randn(512, 32)
        for layer in model:
            held.append(x := layer(x))
        if step == 1:
            model[0].weight.detach().numpy()[0] = 0
        x, y = batch(256)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        for one in held:
            assert one.mean().item() is not None


PROGRAMS = [
    plain_mlp,
    held_over_steps,
    loaded_weights,
    in_place_and_dropout,
    views_and_several_outputs,
    recurrent_with_functions_of_its_own,
    errors_on_the_way,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run_under_a_budget_is_predicted(program, tmp_path: Path):
    log = recorded(program, tmp_path / "log.gz", 1, STEPS)
    plain = steps_of(program, AMPLE)
    assert predicted(log, AMPLE) == plain
    peak = max(step.peak_bytes for step in plain)
    evictions = 0
    for share in (0.8, 0.6, 0.45, 0.3):
        live = steps_of(program, int(peak * share))
        assert predicted(log, int(peak * share)) == live, share
        evictions += sum(step.evictions for step in live if step != "oom")
    assert evictions > 5


def lists_of_weights_and_states():
    """An optimizer's lists, clipping's norms and averages are split where they do not fit."""
    model = mlp(6)
    parameters = list(model.parameters())
    averages = [one.detach().clone() for one in parameters]
    optimizer = torch.optim.Adam(parameters, amsgrad=True, foreach=True)
    for _ in range(STEPS):
        x, y = batch()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(averages, parameters, 0.1)


WITH_STATE = [
    plain_mlp,
    loaded_weights,
    in_place_and_dropout,
    recurrent_with_functions_of_its_own,
    errors_on_the_way,
    lists_of_weights_and_states,
]


@pytest.mark.parametrize("program", WITH_STATE)
def test_what_leaves_for_the_host_is_predicted(program, tmp_path: Path):
    log = recorded(program, tmp_path / "log.gz", 1, STEPS)
    peak = max(step.peak_bytes for step in steps_of(program, AMPLE))
    copies = 0
    for share in (0.7, 0.4, 0.2):
        budget = int(peak * share)
        for host in (HOST, HOST // 100) if share == 0.2 else (HOST,):
            live = steps_of(program, budget, host_budget=f"{host}B:{tmp_path}")
            assert predicted(log, budget, host=expected_host(host, "cpu")) == live, (share, host)
            copies += sum(step.copies_in for step in live if step != "oom")
    assert copies > 10


@pytest.mark.parametrize("program", [plain_mlp, lists_of_weights_and_states])
def test_copies_ahead_are_predicted(program, tmp_path: Path):
    log = recorded(program, tmp_path / "log.gz", 1, STEPS)
    peak = max(step.peak_bytes for step in steps_of(program, AMPLE))
    ahead = [0, 0]

    def prepare(session):
        let_copies_overlap(session)
        session.on_step(lambda _: ahead.__setitem__(slice(None), map(session.ledger.host.get, AHEAD)))

    host = HostMemory(HOST, COPYING, COPYING, overlaps=True)
    for share in (0.7, 0.4, 0.2):
        budget = int(peak * share)
        live = steps_of(program, budget, host_budget=f"{HOST}B:{tmp_path}", prepare=prepare)
        assert predicted(log, budget, host=host) == live, share
    assert min(ahead) > 0


def test_steps_with_checkpoints_are_recorded(tmp_path: Path):
    """A copy of a storage is an operator over a tensor whose own memory dies within the next operator."""
    log = recorded(checkpoints_on_the_way, tmp_path / "log", 1, STEPS)
    live = steps_of(checkpoints_on_the_way, AMPLE)
    assert [step.peak_bytes for step in predicted(log, AMPLE)] == [step.peak_bytes for step in live]


def operators_of_many_kinds():
    """Each of them runs more than once, since a first call asks Python."""
    weight = nn.Parameter(torch.randn(8, 8))
    words, normal = nn.Embedding(20, 8), nn.BatchNorm1d(8)
    optimizer = torch.optim.Adam([weight, *words.parameters(), *normal.parameters()], foreach=True)
    for _ in range(STEPS):
        x, ones = torch.randn(8, 8), torch.ones(8, 8)
        for place in range(3):
            assert x[place, place].item() == x.view(64)[9 * place].item()
            parts = [part.clone() for part in x.chunk(4)]
            torch._foreach_add_(parts, 1.0)
            torch._foreach_mul_(parts[:2], parts[2:])
            torch._foreach_neg_([x[place], ones[place]])
            if place == 1:
                x.to_sparse().to_dense()  # from here on, other code has access to it
            torch.empty(8, 8).t().copy_(x).mul_(ones[:, :1])
            torch.zeros(1, 8, 8).expand(1, 8, 8).clone().baddbmm_(x[None], ones[None])
            x[torch.tensor([0, place])] + x[:, torch.tensor([1])].t()
            normal.train(place > 0)
            values, places = normal(nn.functional.dropout(x, 0.5)).sort(1)
            with pytest.raises(IndexError):
                words(torch.tensor([3, 25]))
            kept = x.as_strided((2, 2), (1, 8), place).mul_(3), values.detach(), places.unbind(0)[0]
            torch.full((3,), 2.5).normal_(), torch.complex(x, ones).abs(), torch.linspace(0, 1, 3 + place)
        loss = (normal(words(torch.arange(8)) @ weight) * kept[1]).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def lines_of(program, path, why=None):
    """Return the log of all steps. why: a reason for care."""

    def prepare(session):
        if why is not None:
            session.callbacks.reasons.add(why)

    steps_of(program, None, prepare=prepare, log=str(path), log_first=1, log_last=STEPS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:  # depends on which views a run handles without a signature
        line.get("DTRRUN", {}).pop("short", None)
    return lines


@pytest.mark.parametrize("program", [*PROGRAMS, checkpoints_on_the_way, operators_of_many_kinds])
def test_what_runs_without_care_is_logged_as_with_it(program, tmp_path: Path):
    found = lines_of(program, tmp_path / "fast.log")
    for ours, theirs in zip(found, lines_of(program, tmp_path / "slow.log", "a test"), strict=True):
        assert ours == theirs


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_step_alone_is_predicted_as_if_the_budget_began_with_it(program, tmp_path: Path):
    log = recorded(program, tmp_path / "log", 3, 3)
    (alone,) = predicted(log, AMPLE)
    evictions = 0
    for share in (0.9, 0.75, 0.5):
        budget = int(alone.peak_bytes * share)
        live = steps_of(program, budget, begin=3)
        assert predicted(log, budget) == live[2:3], share
        evictions += live[2].evictions if live[2] != "oom" else 0
    assert evictions > 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_measured_costs_that_are_known_make_a_run_what_was_predicted(program, tmp_path: Path):
    """This holds from the first step on, and every time."""
    log = recorded(program, tmp_path / "log", 1, STEPS, cost="measured")
    costs = costs_of(log)
    log = settled(log, costs)
    write_costs(tmp_path / "costs.gz", log, costs)
    known = {"cost": "measured", "costs": str(tmp_path / "costs.gz")}
    peak = max(step.peak_bytes for step in steps_of(program, AMPLE))
    evictions = 0
    for share in (0.8, 0.5):
        live = steps_of(program, int(peak * share), **known)
        assert predicted(log, int(peak * share)) == live, share
        assert steps_of(program, int(peak * share), **known) == live
        evictions += sum(step.evictions for step in live if step != "oom")
    assert evictions > 0
    if program in (plain_mlp, loaded_weights):  # no lists, whose parts have costs of their own
        host = HostMemory(HOST, 0.8, 0.3)
        write_costs(tmp_path / "costs.gz", log, costs, host)
        live = steps_of(program, int(peak * 0.4), host_budget=f"{HOST}B:{tmp_path}", **known)
        assert predicted(log, int(peak * 0.4), host=host) == live
        assert sum(step.copies_in for step in live) > 0


@pytest.mark.parametrize("heuristic", ["h_dtr", "lru", "msps", "random"])
def test_other_heuristics_and_over_budget(heuristic, tmp_path: Path):
    log = recorded(in_place_and_dropout, tmp_path / "log", 1, STEPS)
    for budget, warn in ((90_000, False), (70_000, True), (1, True)):
        live = steps_of(
            in_place_and_dropout, budget, heuristic=heuristic, over_budget="evict" if warn else "error"
        )
        assert predicted(log, budget, heuristic=heuristic, warn_only=warn) == live


def watched(program):
    """Return all of its steps, as a run watches them."""
    steps = []

    def prepare(session):
        lookahead = session._lookahead
        lookahead._to_watch = STEPS + 1
        session.ledger.pressure = True
        lookahead._watch(True)
        steps.append(lookahead._step)
        begins = lookahead.step_ended

        def step_ended():
            begins()
            steps.append(lookahead._step)

        lookahead.step_ended = step_ended

    steps_of(program, AMPLE, prepare=prepare, heuristic="h_next")
    return steps[:STEPS]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rule_that_knows_the_steps_decides_as_predicted(program, tmp_path: Path):
    log = recorded(program, tmp_path / "log", 1, STEPS)
    steps = watched(program)

    def prepare(session):
        session._lookahead.foresight.steps = steps
        session._lookahead.foresight.begin()
        session._lookahead._to_watch = 0

    peak = max(step.peak_bytes for step in steps_of(program, AMPLE))
    evictions = 0
    for share in (0.8, 0.6, 0.45):
        budget = int(peak * share)
        live = steps_of(program, budget, heuristic="h_next", prepare=prepare)
        assert predicted(log, budget, heuristic="h_next") == live, share
        evictions += sum(step.evictions for step in live if step != "oom")
    assert evictions > 5
