"""What tests/bench/gpu/parts.py runs, and with which budgets; the child processes are fake."""

from dataclasses import replace

import pytest

from tests.bench.gpu import parts
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.children import Run, Setting
from tests.bench.gpu.parts import Clock, largest, measure_batch, measure_bits, measure_time, names
from tests.bench.gpu.store import load, save

GB = 10**9
UNET = BY_NAME["unet"]


def ended(kind="plain", status="ok", allocated=8 * GB, **more):
    run = Run(status, kind, 5.0, steps_ms=[100.0, 110.0, 900.0], losses=["0x1p+0"], parameters="abc")
    given = {"allocated": allocated, "reserved": 9 * GB, "driver": 10 * GB, "overhead": GB}
    return replace(run, **(given | more))


@pytest.fixture
def children(monkeypatch):
    """All calls of `run`, answered by `answer[0]`."""
    calls, answer = [], [lambda **options: ended(capped=options.get("budget"))]

    def run(setting, model, patience, **options):
        calls.append(options)
        return answer[0](**options)

    monkeypatch.setattr(parts, "run", run)
    return calls, answer


def measure(part, case=UNET, seconds=600.0, **options):
    kept = []
    result = part(
        case, Setting(), Clock(seconds), lambda now: kept.append(dict(now)), lambda _: None, **options
    )
    return result, kept


def test_budgets_are_shares_of_the_allocated_peak_and_the_overhead(children):
    calls, _ = children
    result, kept = measure(measure_time)
    budgets = [call["budget"] for call in calls if "budget" in call]
    assert budgets[:4] == [int(share * 8 * GB) + GB for share in (0.99, 0.98, 0.82, 0.75)]
    assert budgets[4] == 8 * GB + GB  # at the peak of the checkpointed run
    assert [call.get("checkpoint", False) for call in calls].count(True) == 1
    assert "budget" not in calls[0]
    assert "budget" not in calls[-1]
    assert len(result["plain"]) == 2
    assert len(kept) == 8  # after every run, except that the first two are kept together


def test_nothing_is_run_after_a_plain_run_that_failed(children):
    calls, answer = children
    answer[0] = lambda **_: ended(status="out of memory")
    result, kept = measure(measure_time)
    assert len(calls) == 1
    assert [run.status for run in kept[-1]["plain"]] == ["out of memory"]
    assert result["shares"] == []


def test_what_there_is_no_time_for_is_named(children):
    calls, _ = children
    result, kept = measure(measure_time, seconds=1.0)
    assert calls == []
    assert result["left_out"] == ["plain"]
    assert kept[-1]["left_out"] == ["plain"]


def test_without_blocks_nothing_is_checkpointed(children):
    calls, _ = children
    result, _ = measure(measure_time, BY_NAME["lstm"])
    assert not any(call.get("checkpoint") for call in calls)
    assert "checkpointed" not in result


def test_bits_are_compared_at_the_least_share_that_does(children):
    calls, answer = children
    enough = int(0.8 * 8 * GB) + GB
    answer[0] = lambda **options: ended(status="ok" if options.get("budget", enough) >= enough else "budget")
    result, _ = measure(measure_bits)
    assert [one["share"] for one in result["tried"]] == [0.75, 0.82]
    assert all(call["deterministic"] for call in calls)
    assert [call.get("verify", False) for call in calls] == [False] * 4 + [True]
    assert calls[-1]["budget"] == int(0.82 * 8 * GB) + GB


def test_the_largest_batch_inside_the_budget(children):
    calls, answer = children

    def answered(size=None, budget=None, cap=0, **_):
        most = 23 if budget else 9
        return ended(
            status="ok" if size["batch_size"] <= most else "out of memory", driver=budget or cap + GB
        )

    answer[0] = answered
    result, _ = measure(measure_batch)
    assert (result["plain_largest"], result["dtrrun_largest"]) == (9, 23)
    assert {call["cap"] for call in calls if call.get("cap")} == {11 * GB}  # 12 GB less the overhead
    assert {call["budget"] for call in calls if call.get("budget")} == {12 * GB}
    assert result["incomplete"] == []


def test_a_batch_that_the_driver_shows_over_budget_does_not_fit(children):
    _, answer = children
    answer[0] = lambda size=None, **_: ended(driver=12 * GB + (size["batch_size"] > 5))
    result, _ = measure(measure_batch)
    assert result["plain_largest"] == 5


@pytest.mark.parametrize("most", range(41))
@pytest.mark.parametrize("first", [1, 7, 10, 33, 40])
def test_bisection_finds_the_largest_and_tries_no_size_twice(most, first):
    tried = []

    def fits(size):
        tried.append(size)
        return size <= most

    assert largest(range(1, 41), first, fits) == (most or None)
    assert len(tried) == len(set(tried))
    assert len(tried) < 16


def test_a_search_that_ends_early_says_what_it_knows():
    answers = {10: True, 12: True, 16: None}
    assert largest(range(1, 100), 10, lambda size: answers[size]) == 12
    assert largest(range(1, 100), 10, lambda size: None) is None


def test_every_part_has_a_measure():
    assert {name.partition("-")[2] or "time" for name in names()} == set(parts.MEASURES)
    assert len(names()) == len(set(names())) == 9 + 9 + 4


def test_results_come_back_as_they_were(tmp_path):
    result = {"case": "unet", "shares": [{"share": 0.5, "run": ended()}], "plain": [ended()], "left_out": []}
    save(tmp_path, "unet", result)
    assert load(tmp_path) == {"unet": result}
    assert [path.name for path in tmp_path.iterdir()] == ["unet.json"]


def test_a_result_of_a_later_version_can_be_read(tmp_path):
    save(tmp_path, "unet", {"run": ended().to_json() | {"not_known_yet": 1}})
    assert load(tmp_path)["unet"]["run"] == ended()
