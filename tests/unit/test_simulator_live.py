"""dtrrun.simulator.live, on the kept logs of the examples (tests/conformance has it against live runs)."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from dtrrun.bindings import make_policy
from dtrrun.core.heuristics import STEADY
from dtrrun.simulator.live import _Run, compiled, predict
from dtrrun.simulator.log import START, Annotate, Call, Constant, LogError, Release, read_log
from dtrrun.simulator.schedule import schedule_of
from dtrrun.simulator.sweep import Budget, Cell, run_cell
from tests.bench.replays import PARTS, beginning, without

LOGS = sorted(Path(__file__).parents[1].joinpath("logs").glob("*.log.gz"))
HEAD = {"format": 1, "step": 1, "clock": 0, "age": 0, "step_age": 0, "refill_copies": False}
EMPTY = {"records": [], "ops": [], "small": []}


def test_there_is_a_log_of_each_example():
    examples = Path(__file__).parents[2].joinpath("docs", "examples").glob("*.py")
    assert {path.name.removesuffix(".log.gz") for path in LOGS} == {path.stem for path in examples}
    assert sum(path.stat().st_size for path in LOGS) < 1_000_000


@pytest.fixture(scope="module", params=LOGS, ids=lambda path: path.name.partition(".")[0])
def log(request):
    return read_log(request.param)


def test_a_kept_log_inside_its_peak(log):
    plain = predict(log, None)
    assert (plain.status, plain.evictions, plain.rematerializations) == ("ok", 0, 0)
    assert plain.time == plain.plain_time == sum(step.plain_time for step in plain.steps)
    whole = predict(log, plain.peak_bytes * 11 // 10)  # the size of a result is sometimes only an upper bound
    assert (whole.status, whole.evictions, whole.overhead) == ("ok", 0, 1.0)
    tight = predict(log, plain.peak_bytes * 7 // 10)
    assert tight.status == "ok"
    assert tight.peak_bytes <= plain.peak_bytes * 7 // 10
    assert tight.evictions > 0
    assert tight.evictions == sum(step.evictions for step in tight.steps)
    assert tight.rematerializations == sum(step.rematerializations for step in tight.steps)
    assert plain.time < tight.time == sum(step.time for step in tight.steps) < 2 * plain.time
    little = predict(log, plain.peak_bytes // 50)
    assert little.status == "oom"
    assert little.least_budget_bytes > plain.peak_bytes // 50


@pytest.mark.parametrize("heuristic", ["h_dtr_eq", "size"])
def test_what_needs_most_of_a_step_is_evicted_last(heuristic):
    """A gradient of DenseNet's, evicted for its score, takes three times a step's own work to come back."""
    log = read_log(LOGS[0].with_name("densenet.log.gz"))
    budget = predict(log, None).peak_bytes // 5
    assert predict(log, budget, heuristic, limit=1.4).status == "ok"
    with beginning(without(PARTS["dear ones by their score"])):
        assert predict(log, budget, heuristic, limit=3).status == "thrash"


@pytest.mark.parametrize(
    ("name", "heuristic", "percent"),
    [("resnet", "h_dtr_eq", 40), ("unet", STEADY, 40), ("lstm", STEADY, 20)],
)
def test_a_step_ends_though_something_dear_looked_cheap(name, heuristic, percent):
    """The cost of rematerializing a gradient is remembered, so that it is not evicted again and again."""
    log = read_log(LOGS[0].with_name(f"{name}.log.gz"))
    budget = predict(log, None).peak_bytes * percent // 100
    assert predict(log, budget, heuristic, limit=4).status == "ok"


@pytest.mark.parametrize(("heuristic", "percent"), [("h_dtr_eq", 40), ("lru", 45)])
def test_inputs_fit_in_another_order(heuristic, percent):
    """Another rule takes over within the step, since a slow step is better than none."""
    log = read_log(LOGS[0].with_name("unet.log.gz"))
    budget = predict(log, None).peak_bytes * percent // 100
    assert predict(log, budget, heuristic, limit=20).status == "ok"


def test_a_kept_log_reads_as_one_of_the_papers_format(log):
    """Operators and sizes are equal; only views have a cost in the paper's format."""
    schedule, ours = schedule_of(log, "kept"), predict(log, None)
    assert schedule.backward is not None
    views = sum(one.cost for one in log if isinstance(one, Call) and one.facts and one.facts.get("view"))
    assert schedule.cost == ours.plain_time + views
    assert schedule.peak_bytes == pytest.approx(ours.peak_bytes, rel=0.03)


def test_the_search_of_the_policy_makes_no_difference():
    log = read_log(next(path for path in LOGS if path.name.startswith("resnet")))
    budget = predict(log, None).peak_bytes // 2
    by_heap, by_scan = predict(log, budget), predict(log, budget, scan=True)
    assert by_heap.steps == by_scan.steps
    assert by_heap.evaluations < by_scan.evaluations
    assert predict(log, budget, "lru").steps != by_heap.steps


def test_foresight_spares_what_the_program_holds_until_the_weights_change():
    """The U-Net's result stays: recomputing it would take the whole forward pass."""
    log = read_log(next(path for path in LOGS if path.name.startswith("unet.")))
    budget = predict(log, None).peak_bytes * 7 // 10
    assert predict(log, budget, "h_chain(c=ancestors,s=0,next=1,released=alike)").overhead < 1.1


def test_a_sweep_asks_for_it():
    path = str(next(path for path in LOGS if path.name.startswith("vae")))
    row = run_cell(Cell(path, "vae", "h_dtr", Budget(ratio=0.5), semantics="dtrrun"))
    outcome = predict(path, predict(path, None).peak_bytes // 2, "h_dtr")
    assert (row.status, row.overhead, row.evictions) == ("ok", outcome.overhead, outcome.evictions)
    assert row.evictions > 0


def call(operator, cost, inputs, out, **facts):
    """Return a call. `inputs`: storages. `out`: (storage, bytes) of each result."""
    made = [[where, number, nbytes, ""] for where, (number, nbytes) in enumerate(out)]
    total = sum(nbytes for _, nbytes in out)
    told = {"in": inputs, "bytes": total, "out": made, "shrinks": True, **facts}
    names = tuple(f"t{number}" for number, _ in out)
    return Call(operator, (), names, (0,) * len(out), (-1,) * len(out), cost, told)


def head(*instructions):
    return [Annotate(START, HEAD), Annotate("STATE", EMPTY), *instructions]


def chain(length, nbytes=1000, cost=5_000):
    """A chain of calls from a constant, and back."""
    pin = {"storage": 0, "pin": "constant", "exposed": False}
    there = [call("f", cost, [i], [(i + 1, nbytes)]) for i in range(length)]
    back = [call("g", cost, [i], [(100 + i, 0)]) for i in range(length, 0, -1)]
    return head(Constant("x", nbytes, pin), *there, *back)


def test_a_chain_without_room_for_all_of_it():
    plain = predict(chain(8), None)
    assert (plain.peak_bytes, plain.plain_time) == (9_000, 80_000)
    tight = predict(chain(8), 5_000, "lru", limit=math.inf)
    assert (tight.status, tight.peak_bytes) == ("ok", 5_000)
    assert tight.time - tight.plain_time == 5_000 * tight.rematerializations > 0
    assert predict(chain(8), 5_000, "lru", limit=1.01).status == "thrash"
    least = predict(chain(8), 1_500)
    assert (least.status, least.least_budget_bytes) == ("oom", 2_000)


def test_released_storages_go_at_once():
    releases = [Release(f"t{i}", {"storage": i}) for i in range(8)]
    log = head(Constant("x", 1000, {"storage": 0, "pin": "constant", "exposed": False}))
    for i in range(8):
        log += [call("f", 10, [i], [(i + 1, 1000)]), releases[i]]
    assert predict(log, 2_000).evictions == 0
    assert predict(log, None).peak_bytes == 2_000


@pytest.mark.parametrize(
    ("log", "message"),
    [
        ([], "needs a log that dtrrun record has written"),
        ([Constant("x", 1)], "needs a log that dtrrun record has written"),
        ([Annotate(START, HEAD | {"format": 99})], "has format 99"),
        (head(call("f", 1, [7], [])), "instruction 3: facts that do not fit"),
        (head(Release("x", {"storage": 7})), "instruction 3: facts that do not fit"),
        (head(Annotate("SURPRISE", {"storage": 7})), "instruction 3: facts that do not fit"),
    ],
)
def test_logs_that_are_none_of_ours(log, message):
    with pytest.raises(LogError, match=message):
        predict(log, None)


def test_nothing_of_torch_is_imported():
    """The simulator must also run where torch is not installed."""
    code = "import sys; sys.modules['torch'] = None; import dtrrun.simulator.live, dtrrun.simulator.schedule"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def two_stages(length, nbytes=1000, cost=5_000):
    """A chain whose second half is on another device, and back."""
    pin = {"storage": 0, "pin": "constant", "exposed": False}
    there = [
        call("f", cost, [i], [(i + 1, nbytes)], **({"device": 1} if i >= length // 2 else {}))
        for i in range(length)
    ]
    back = [
        call("g", cost, [i], [(100 + i, 0)], **({"device": 1} if i > length // 2 else {}))
        for i in range(length, 0, -1)
    ]
    return head(Constant("x", nbytes, pin), *there, *back)


def of_devices(log, budget, heuristic="lru"):
    """Return the outcome of a log, and the peak and the evicted bytes of each device."""
    run = _Run(compiled(log, "log"), budget, make_policy(heuristic), math.inf, warn_only=False)
    found = run.go()
    peaks = []
    for device in range(run.ledger.devices):
        with run.ledger.on(device):
            peaks.append((run.ledger.peak_bytes, run.ledger.evicted_bytes))
    assert run.ledger.device == 0
    return found, peaks


@pytest.mark.parametrize("heuristic", ["lru", "h_dtr", "h_dtr_eq"])
def test_each_device_has_a_budget_of_its_own(heuristic):
    plain, peaks = of_devices(two_stages(16), None, heuristic)
    assert peaks == [(9_000, 0), (8_000, 0)]
    assert plain.peak_bytes == 9_000
    tight, peaks = of_devices(two_stages(16), 4_000, heuristic)
    assert tight.status == "ok"
    assert [peak for peak, _ in peaks] == [4_000, 4_000]
    alone, peaks = of_devices(two_stages(16), 8_000, heuristic)  # enough for the second one
    assert alone.rematerializations < tight.rematerializations
    assert peaks == [(8_000, 1_000), (8_000, 0)]


def test_a_replay_makes_room_on_the_devices_of_its_operators():
    """Of three devices' results, each computed from that of the one before."""
    pin = {"storage": 0, "pin": "constant", "exposed": False}
    calls = [call("f", 5, [i], [(i + 1, 1000)], device=i % 3) for i in range(30)]
    last = call("g", 5, list(range(8, 2, -1)), [(99, 0)], device=2)
    found, peaks = of_devices(head(Constant("x", 1000, pin), *calls, last), 3_000)
    assert found.status == "ok"
    assert found.rematerializations > 0
    assert [peak for peak, _ in peaks] == [3_000] * 3
    needs_more, _ = of_devices(head(Constant("x", 1000, pin), *calls, last), 1_500)
    assert (needs_more.status, needs_more.least_budget_bytes) == ("oom", 2_000)
