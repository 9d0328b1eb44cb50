"""runtime.observe.tracing: the trace has what the runtime does; without a trace nothing is slowed down."""

from collections import Counter

import torch

from dtrrun.runtime import Session
from dtrrun.runtime.observe.tracing import Tracing
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.events import EVICT, LEAVE, MODULE, REMATERIALIZE, RETURN, SEARCH, STEP, read_events

BUDGET = 3_000_000


def train(steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256), torch.nn.Tanh()] * 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(256, 256)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(folder, **options):
    settings = RuntimeSettings(budget_bytes=BUDGET, device="cpu", cost="model", **options)
    session = Session(settings)
    session.start()
    try:
        losses = train()
    finally:
        session.stop()
    return session, losses


def test_every_eviction_search_and_rematerialization_is_there(tmp_path):
    session, losses = run(tmp_path, record_dir=str(tmp_path), trace_events=True)
    (events,) = read_events(str(tmp_path))
    found = list(events)
    kinds = Counter(event.kind for event in found)
    assert session.dtr.eviction.evictions > 20
    assert kinds[EVICT] == session.dtr.eviction.evictions
    assert kinds[SEARCH] >= kinds[EVICT]
    assert kinds[STEP] == 3
    runs = {name: count for name, (count, _, _) in session.dtr.rematerializer.by_operator.items()}
    assert Counter(event.name for event in found if event.kind == REMATERIALIZE) == runs
    evicted = Counter(event.name for event in found if event.kind == EVICT)
    assert evicted == session.dtr.eviction.evicted_by
    assert sum(e.nbytes for e in found if e.kind == EVICT) == session.dtr.eviction.evicted_bytes_total
    assert max(event.resident_bytes for event in found) <= BUDGET
    assert losses == train()


def test_every_copy_to_the_host_and_back_is_there(tmp_path):
    options = {"trace_events": True, "host_budget": f"100MB:{tmp_path}"}
    session = Session(RuntimeSettings(600_000, device="cpu", record_dir=str(tmp_path), **options))
    session.start()
    try:
        model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(16, 128)).square().mean().backward()
            optimizer.step()
        copies = session.report()["copies_out"], session.report()["copies_in"]
    finally:
        session.stop()
    (events,) = read_events(str(tmp_path))
    found = [event for event in events if event.kind in (LEAVE, RETURN)]
    kinds = Counter(event.kind for event in found)
    assert kinds[LEAVE] >= copies[0] > 10  # what has a copy already needs no other
    assert kinds[RETURN] >= copies[1] > 10
    assert {event.name for event in found} >= {"parameter", "gradient"}
    assert max(event.resident_bytes for event in found if event.kind == LEAVE) <= 600_000


def test_modules_where_they_are_known(tmp_path):
    session, _ = run(tmp_path, record_dir=str(tmp_path), trace_events=True, where=True)
    (events,) = read_events(str(tmp_path))
    found = [event for event in events if event.kind == REMATERIALIZE]
    told = Counter(tuple(event.name.partition(MODULE)[::2]) for event in found)
    wanted = Counter()
    for (module, _line, operator), (count, *_) in session._where.tallies.items():
        wanted[operator, module] += count
    assert told == wanted
    assert any(module for _, module in told)


def test_it_decides_as_without_a_trace(tmp_path):
    traced, _ = run(tmp_path, record_dir=str(tmp_path), trace_events=True)
    plain, _ = run(tmp_path)
    assert traced.dtr.eviction.evictions == plain.dtr.eviction.evictions
    assert traced.dtr.rematerializer.rematerializations == plain.dtr.rematerializer.rematerializations
    assert traced.ledger.peak_bytes == plain.ledger.peak_bytes


def test_without_one_no_method_is_replaced(tmp_path):
    session = Session(RuntimeSettings(budget_bytes=BUDGET, record_dir=str(tmp_path)))
    assert not any(isinstance(part, Tracing) for part in session._parts)
    session.start()
    try:
        for owner, name in ((session.ledger, "evict"), (session.dtr.rematerializer, "execute")):
            assert name not in vars(owner)
    finally:
        session.stop()
    assert list(read_events(str(tmp_path))) == []


def test_nothing_of_it_stays(tmp_path):
    session, _ = run(tmp_path, record_dir=str(tmp_path), trace_events=True)
    assert "evict" not in vars(session.ledger)
    assert "execute" not in vars(session.dtr.rematerializer)
