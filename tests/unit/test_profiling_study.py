"""dtrrun.profiling.study, with runs that the simulator derives from a log, and some deviations."""

import shutil
from functools import cache
from pathlib import Path

import pytest

from dtrrun.core.host import FILE, expected_host
from dtrrun.profiling import curve
from dtrrun.profiling import study as module
from dtrrun.profiling.room import budget_for, room_in
from dtrrun.profiling.search import below
from dtrrun.profiling.study import NothingToProfile, ScriptFailed, Study
from dtrrun.profiling.trial import MeasuredStep, Trial
from dtrrun.settings import RuntimeSettings
from dtrrun.simulator.live import predict
from dtrrun.simulator.log import read_log
from dtrrun.sizes import parse_size

PATH = Path(__file__).parents[1] / "logs" / "vae.log.gz"
LOG = read_log(PATH)
PLAIN = predict(LOG, None)
SECONDS = 10.0


@cache
def simulated(budget, heuristic, limit, host=None):
    return predict(LOG, budget, heuristic, limit=limit, host=host)


class Machine:
    """Runs go as predicted, but recompute `slower` times as long; `fails` says which budgets fail anyway."""

    def __init__(self, fails=lambda budget: False, slower=1.0, peak=PLAIN.peak_bytes, overhead=None):
        self.fails, self.slower, self.peak, self.overhead = fails, slower, peak, overhead
        self.settings = []
        self.seconds = 0.0

    def __call__(self, settings, command, patience, attend):
        attend()
        self.settings.append(settings)
        assert settings.max_steps == 1
        if settings.log is not None:
            shutil.copy(PATH, settings.log)
        status, again, evictions = "ok", 0.0, 0
        if (budget := settings.budget_bytes) is not None:
            assert Path(settings.costs).exists()
            host = None
            if settings.host_budget != "auto":
                host = expected_host(parse_size(settings.host_budget), "cpu")
            found = simulated(room_in(budget, self.overhead), settings.heuristic, settings.max_slowdown, host)
            status = {"ok": "ok", "oom": "too small", "thrash": "thrash"}[found.status]
            if self.fails(budget):
                status = "too small"
            again = min(found.overhead - 1, settings.max_slowdown) * self.slower  # copies may come first
            evictions = found.evictions
        own = 10**9
        step = MeasuredStep(
            PLAIN.steps[0].index, int(own * (1 + again)), int(own * again), own, 0, evictions, evictions
        )
        self.seconds += SECONDS * (1 + again)
        seconds = SECONDS * (1 + again)
        host_bytes = found.host_peak_bytes if budget is not None else 0
        how = "tail", 1, self.overhead
        return Trial(status, 0, seconds, self.peak, (step,), None, *how, host_bytes=host_bytes)

    @property
    def budgets(self):
        return [settings.budget_bytes for settings in self.settings if settings.budget_bytes]


@pytest.fixture
def run(tmp_path, monkeypatch):
    def run(machine, **options):
        monkeypatch.setattr(module, "run_trial", machine)
        monkeypatch.setattr(module, "write_costs", lambda path, log, costs, host: path.touch())
        monkeypatch.setattr(module, "file_costs", lambda folder: FILE)
        monkeypatch.setattr(
            curve, "predict", lambda log, *given, limit, host, **_: simulated(*given, limit, host)
        )
        monkeypatch.setattr(module.time, "monotonic", lambda: machine.seconds)
        settings = RuntimeSettings(host_budget=options.pop("host_budget", "auto"))
        found = Study(["python"], settings, tmp_path, steps=1, **options)
        found.started = 0.0
        found.run()
        return found

    return run


def check(study):
    """Check that the minimum meets its definition, and that the recommendation was run and works."""
    assert study.complete
    assert study.certified
    assert study.worked[study.minimum]
    assert max(budget for budget, works in study.worked.items() if not works) >= below(study.minimum)
    assert all(works for budget, works in study.worked.items() if budget >= study.minimum)
    assert study.minimum <= study.recommended < study.peak
    assert study.worked[study.recommended]


def test_where_all_goes_as_predicted(run):
    machine = Machine()
    study = run(machine)
    check(study)
    assert len(machine.settings) <= 9
    assert study.seconds < 20 * SECONDS
    for point in study.points.values():
        if point.trial is not None and point.trial.status == "ok":
            assert abs(point.predicted.slowdown - point.trial.slowdown) < 0.1
    assert study.minimum < 0.25 * study.peak


def test_the_curve_is_run_from_a_safe_budget_down(run):
    machine = Machine()
    study = run(machine)
    curve = machine.budgets[:4]
    assert curve == sorted(curve, reverse=True)
    assert curve[0] > 0.7 * study.peak


def test_budgets_in_which_constants_have_to_leave(run, monkeypatch):
    """They are found if that is allowed, with what they need on the host."""
    monkeypatch.setattr(module, "PATIENCE", 40.0)
    alone, study = run(Machine()), run(Machine(), host_budget="1GB")
    check(study)
    assert study.minimum < below(alone.minimum)
    assert study.points[study.minimum].host_bytes > 0
    assert any(one.predicted.host_bytes == 0 for one in study.points.values())


def test_on_a_gpu_the_budgets_have_the_overhead_in_them(run):
    cpu = run(Machine())
    overhead = 5 * PLAIN.peak_bytes  # a small program: context and libraries take more than its tensors
    study = run(Machine(overhead=overhead))
    check(study)
    assert study.peak == budget_for(PLAIN.peak_bytes, overhead)
    assert room_in(study.minimum, overhead) < PLAIN.peak_bytes
    assert overhead < study.minimum
    measured = [one for one in study.points.values() if one.trial is not None and one.trial.status == "ok"]
    assert measured
    for point in measured:
        assert abs(point.predicted.slowdown - point.trial.slowdown) < 0.1
    assert cpu.minimum < study.minimum


def test_a_hole_above_the_minimum(run):
    plain = run(Machine())
    hole = [budget for budget in plain.worked if budget > 1.3 * plain.minimum][-1]
    study = run(Machine(lambda budget: abs(budget - hole) < 0.01 * hole))
    check(study)
    assert study.minimum > hole


def test_a_prediction_that_is_far_too_good(run):
    study = run(Machine(lambda budget: budget < 0.55 * PLAIN.peak_bytes))
    check(study)
    assert 0.55 * study.peak <= study.minimum < 0.58 * study.peak


def test_nothing_works_below_the_peak(run):
    study = run(Machine(lambda budget: True))
    assert (study.minimum, study.recommended) == (None, None)


def test_a_slowdown_that_is_asked_for(run):
    slow = run(Machine(), max_slowdown=1.05)
    check(slow)
    assert slow.points[slow.recommended].slowdown <= 1.05
    fast = run(Machine(), max_slowdown=1.4)
    check(fast)
    assert fast.recommended < slow.recommended
    none = run(Machine(slower=1e4), max_slowdown=1.0001)
    assert none.recommended is None


def test_it_stops_when_it_has_taken_long(run, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 5.0)
    study = run(Machine())
    assert not study.complete
    assert study.seconds <= 5 * SECONDS
    assert study.worked[study.recommended]
    assert study.minimum == min(study.worked)
    assert not study.certified


def test_interrupted_it_keeps_what_it_has(run, tmp_path, monkeypatch):
    machine = Machine()
    seen = []

    def attend(study):
        seen.append(study)
        if len(machine.budgets) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(machine, attend=attend)
    study = seen[-1]
    assert len(study.worked) == 2
    assert study.recommended in study.worked
    assert not study.complete


@pytest.mark.parametrize(("changed", "error"), [({"steps": ()}, "no optimizer step"), ({"peak": 999}, "999")])
def test_nothing_to_profile(run, changed, error):
    class Odd(Machine):
        def __call__(self, *args):
            trial = super().__call__(*args)
            return trial if "peak" in changed else Trial("ok", 0, 1.0, trial.peak_bytes, (), None, "")

    with pytest.raises(NothingToProfile, match=error):
        run(Odd(peak=changed.get("peak", PLAIN.peak_bytes)))


def test_a_script_that_fails(run):
    class Broken(Machine):
        def __call__(self, *args):
            return Trial("failed", 7, 1.0, 0, (), None, "its own words")

    with pytest.raises(ScriptFailed) as caught:
        run(Broken())
    assert (caught.value.trial.returncode, caught.value.trial.tail) == (7, "its own words")
