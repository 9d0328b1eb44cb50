"""`observe.learning`: when it searches for rules, what becomes of an answer, and that the bits stay."""

import errno
import gzip
import json
import os
from pathlib import Path

import pytest
import torch
from faults import check_accounts
from torch import nn

import dtrrun
from dtrrun.core.heuristics import INITIAL, STEADY
from dtrrun.runtime import session as session_module
from dtrrun.runtime.observe import learning
from dtrrun.runtime.observe.learning import kinds_of
from dtrrun.runtime.observe.remembered import Remembered
from dtrrun.simulator.costs import costs_of
from dtrrun.simulator.learn import Wanted, search
from dtrrun.simulator.live import watched_steps
from dtrrun.simulator.log import read_log

pytestmark = pytest.mark.learns

WIDTH, ROWS, STEPS = 64, 256, 24
BUDGET = 700_000
BETTER = "h_chain(c=ancestors,s=0.2,next=1,released=alike)"


def train(steps, depths=(8,)):
    """Train networks with each of `depths` in turn."""
    models = [
        nn.Sequential(*[part for _ in range(depth) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        for depth in depths
    ]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    for step in range(steps):
        model, optimizer = models[step % len(models)], optimizers[step % len(models)]
        optimizer.zero_grad()
        loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


def losses_of(budget=BUDGET, steps=STEPS, depths=(8,), heuristic="auto", program=train, **options):
    torch.manual_seed(0)
    with dtrrun.budget(budget, heuristic=heuristic, **options) as session:
        losses = list(program(steps, depths))
    return losses, session


def train_varying(steps, _depths, alike=0):
    """Train a recurrent network on sequences of other lengths in each step.

    alike: this step, counted from 0, is like the one before.
    """
    cell = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(cell.parameters(), 0.1)
    for step in range(steps):
        state = torch.randn(ROWS, WIDTH)
        for _ in range(10 + 7 * (step - 1 if step and step == alike else step) % 13):
            state = cell(state).tanh()
        loss = state.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()


def train_alike_at_first(steps, depths):
    return train_varying(steps, depths, alike=2)


class Answers(learning.Search):
    """A search that has its answers at once, one for each time it is polled."""

    wanted = None

    def __init__(self, folder, known):
        super().__init__(folder, known)
        self.left = list(self.given)

    def start(self, budget_bytes, present, seconds):
        type(self).wanted = budget_bytes, present, self._known
        type(self).seconds = seconds
        type(self).lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        steps = search_steps(self.log, self._known) if self.left else []
        for answer in self.left:
            answer["steps"] = steps if "next=1" in answer.get("heuristic", "") else []
            answer["costs"] = costs_of(read_log(self.log))

    def answer(self):
        found = self.left.pop(0) if self.left else None
        self.whole = found is not None and found["ended"]
        return found

    def running(self):
        return len(self.left) > 1


def search_steps(log, known):
    return [step.to_values() for step in watched_steps(read_log(log))[known : 2 * known]]


@pytest.fixture
def answers(monkeypatch):
    def given(*found):
        monkeypatch.setattr(Answers, "given", found, raising=False)
        monkeypatch.setattr(learning, "Search", Answers)
        return Answers

    return given


@pytest.fixture
def shares(monkeypatch):
    """Recomputation by heuristic, in place of the measurements."""
    table = {}

    def note(self, step):
        if self._recorder is None:
            self._shares.append(table.get(self._found["heuristic"], 0.3))
            self._recomputed += self._shares[-1]

    monkeypatch.setattr(learning.Learning, "_note", note)
    monkeypatch.setattr(learning.Learning, "_recomputes", lambda *_: 0.0)  # so that STEADY stays
    return table


def answer(heuristic, overhead, present=1.3, ended=True):
    return {
        "heuristic": heuristic,
        "overhead": overhead,
        "present_overhead": present,
        "ended": ended,
        "costs": {},
    }


def test_a_better_rule_takes_over(answers, shares):
    plain, _ = losses_of(None)
    shares[BETTER] = 0.1
    chosen = answers(answer(BETTER, 1.1))
    losses, session = losses_of()
    assert losses == plain
    assert session.ledger.peak_bytes <= BUDGET
    assert session.dtr.eviction.evictions > 100
    assert session.rule["heuristic"] == session.ledger.policy.heuristic.name == BETTER
    assert session.rule["source"] == "searched"
    assert (session.rule["share"], session.rule["share_before"]) == pytest.approx((0.1, 0.3))
    assert chosen.wanted == (BUDGET, STEADY, 1)
    assert not session.ledger.observers
    assert not session.warnings


def test_the_log_has_as_many_steps_as_alternate_twice(answers, shares):
    chosen = answers(answer(INITIAL, 1.3))
    losses_of(900_000, depths=(8, 6))
    assert chosen.wanted == (900_000, INITIAL, 2)
    ends = [line for line in chosen.lines if line.get("ANNOTATION") == "STEP"]
    assert len(ends) == 4


@pytest.mark.parametrize("longest", [20, 1e6])
def test_a_search_may_take_as_long_as_some_steps(answers, shares, monkeypatch, longest):
    monkeypatch.setattr(learning, "LONGEST", longest)
    chosen = answers(answer(STEADY, 1.3))
    losses_of()
    assert chosen.seconds == learning.SECONDS if longest == 20 else chosen.seconds > learning.SECONDS


def test_what_it_knows_is_used(answers, shares):
    shares[BETTER] = 0.1
    answers(answer(BETTER, 1.1))
    _, session = losses_of()
    foresight = session.ledger.policy.foresight
    assert foresight.steps
    assert foresight.lost == 0


def test_a_rule_that_is_worse_is_given_up(answers, shares):
    shares["size"] = 0.5
    answers(answer("size", 1.1))
    plain, _ = losses_of(None)
    losses, session = losses_of()
    assert losses == plain
    assert session.rule["heuristic"] == session.ledger.policy.heuristic.name == STEADY
    assert session.rule["source"] == "worse"


def test_a_rule_that_saves_next_to_nothing_is_not_taken(answers, shares):
    answers(answer(BETTER, 1.29))
    _, session = losses_of()
    assert session.rule["heuristic"] == STEADY
    assert session.rule["share"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("operators", "rule"),
    [
        ((50, 40, 40), (STEADY, "repeating")),
        ((50, 40, 41), (INITIAL, "first")),
        ((40, 40, 41, 41), (INITIAL, "first")),
    ],
)
def test_the_third_step_shows_whether_steps_repeat(operators, rule):
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for count in operators:
            session.ledger.age += count
            session._learning.step_ended()
        assert (session.rule["heuristic"], session.rule["source"]) == rule
        assert session.ledger.policy.heuristic.name == rule[0]


@pytest.mark.parametrize(("program", "source"), [(train_varying, "first"), (train_alike_at_first, "varying")])
def test_steps_of_which_none_is_like_another(answers, shares, program, source):
    """A rule found on some of them is no good for the others."""
    chosen = answers(answer(BETTER, 1.1))
    chosen.wanted = None
    plain, _ = losses_of(None, program=program)
    shares[INITIAL] = 0.2
    losses, session = losses_of(program=program)
    assert session.dtr.eviction.evictions > 100
    assert losses == plain
    assert chosen.wanted is None
    assert session.rule["source"] == source
    assert session.rule["heuristic"] == session.ledger.policy.heuristic.name == INITIAL
    if source == "varying":
        assert (session.rule["share"], session.rule["share_before"]) == pytest.approx((0.2, 0.3))


def test_steps_of_which_none_is_like_another_keep_what_is_better(answers, shares):
    shares[INITIAL] = 0.5
    _, session = losses_of(program=train_alike_at_first)
    assert (session.rule["heuristic"], session.rule["source"]) == (STEADY, "worse")


def step_with(session, share, operators=40):
    """Let a step end that recomputes `share` of its own operators."""
    session.ledger.age += operators
    session.ledger.recomputed_cost += int(1000 * share)
    session.ledger.clock += 1000 + int(1000 * share)
    session._learning.step_ended()


@pytest.mark.parametrize(
    ("follows", "later", "rule"),
    [
        (False, [0.29], (STEADY, "repeating")),
        (False, [0.3], (INITIAL, "worse")),
        (False, [0.1, 0.4], (STEADY, "repeating")),
        (False, [0.1, 0.4, 0.4], (INITIAL, "worse")),
        (True, [0.3], (STEADY, "repeating")),  # until the first rank returns
    ],
)
def test_where_steps_repeat_the_better_of_two_rules_stays(follows, later, rule):
    """The latest step with the first one is compared with the mean of those with the other."""
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning.follows = follows
        for share in (0.1, 0.4, 0.3, *later):
            step_with(session, share)
        assert (session.rule["heuristic"], session.rule["source"]) == rule
        assert session.ledger.policy.heuristic.name == rule[0]


@pytest.mark.parametrize(
    ("third", "fourth", "returns"),
    [(0.5, 0.5, True), (0.6, 0.4, True), (0.4, 0.5, False), (0.7, 0.7, False)],
)
def test_a_rule_that_one_step_has_thrashed_with_returns_once_if_it_was_better(third, fourth, returns):
    """It is compared by the mean of its steps, that one among them."""
    too_much = 2 * learning.TOO_MUCH_NS
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        step_with(session, 0.2, operators=50)
        session._learning.step_goes_on(figures(2, 0, too_much))
        step_with(session, 0.8, operators=60)
        step_with(session, third, operators=70)
        assert (session.rule["heuristic"], session.rule["source"]) == (STEADY, "thrashing")
        step_with(session, fourth, operators=80)
        assert session.rule["heuristic"] == (INITIAL if returns else STEADY)
        session._learning.step_goes_on(figures(5, 0, too_much))
        for operators in (90, 100, 110, 120):
            step_with(session, 9.0, operators)
        assert session.rule["heuristic"] == session.ledger.policy.heuristic.name == STEADY


def test_a_step_is_compared_with_what_is_usual():
    second = 1_000_000_000
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        step_with(session, 0.5, operators=50)
        step_with(session, 0.7, operators=60)
        enough = learning.UNUSUAL * 0.6 * second
        session._learning.step_goes_on(figures(3, second, enough - second / 1000))
        assert session.rule["source"] == "first"
        session._learning.step_goes_on(figures(3, second, enough))
        assert session.rule["source"] == "thrashing"


def test_a_rule_that_was_left_because_a_step_thrashed_does_not_return_because_steps_vary(answers, shares):
    torch.manual_seed(0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._fled = True  # in an earlier step
        session._learning.step_goes_on(figures(1, 0, 2 * learning.TOO_MUCH_NS))
        list(train_varying(STEPS, ()))
    assert (session.rule["heuristic"], session.rule["source"]) == (STEADY, "thrashing")


def test_a_search_has_to_be_worth_its_price(answers, shares):
    """Nothing is logged until recomputation has cost as much as a search would."""
    shares[INITIAL] = shares[STEADY] = 0.05
    chosen = answers(answer(BETTER, 1.01))
    chosen.wanted = None
    losses_of(steps=38)
    assert chosen.wanted is None
    losses_of(steps=44)
    assert chosen.wanted is not None


@pytest.mark.parametrize(("later", "searches"), [(0.5, 2), (0.15, 1)])
def test_steps_that_have_become_others_are_searched_anew(answers, shares, later, searches):
    """A new search pays off once recomputation has doubled."""
    shares[BETTER], shares["size"] = 0.1, 0.2
    answers(answer(BETTER, 1.1))
    judged = []
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for step, _ in enumerate(train(40)):
            if not judged and "share" in session.rule:
                judged.append(step)
                shares[BETTER] = later
                answers(answer("size", 1.2, present=1.5))
    sources = ("size", later, 0.2) if searches == 2 else (BETTER, 0.3, 0.1)
    found = session.rule["heuristic"], session.rule["share_before"], session.rule["share"]
    assert found == pytest.approx(sources)
    if searches == 2:
        assert session.rule["since_step"] > judged[0] + 2 * learning.PAID / later


def test_a_slow_step_makes_no_promise(answers, shares):
    """Shares are measured on a machine that others use, too."""
    answers(answer("size", 1.1))
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for _ in train(STEPS):
            learning = session._learning
            if session.rule["heuristic"] == "size" and len(learning._shares) == 2:
                learning._shares[-1] = 9.0
    assert session.rule["share"] == pytest.approx(0.3)


def test_what_is_found_later_may_be_better_still(answers, shares):
    shares[BETTER] = 0.1
    answers(answer("lru", 1.2, ended=False), answer(BETTER, 1.1))
    _, session = losses_of()
    assert session.rule["heuristic"] == BETTER
    assert session.rule["share_before"] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"budget": 1 << 30}, "nothing is evicted"),
        ({"heuristic": STEADY}, "a rule is named"),
        ({"cost": "model"}, "two runs shall evict alike"),
    ],
)
def test_where_nothing_is_searched(answers, options, why):
    chosen = answers(answer(BETTER, 1.1))
    chosen.wanted = None
    _, session = losses_of(**options)
    assert chosen.wanted is None, why
    assert session.ledger.policy.heuristic.name == STEADY


def test_a_search_that_was_killed_is_said_in_one_line(answers, shares):
    answers()
    _, session = losses_of()
    (warning,) = session.warnings
    assert warning == f"cannot search for a better heuristic (the search was killed): the run keeps {STEADY}"


def test_a_log_that_cannot_be_written_is_said_in_one_line(answers, shares, monkeypatch):
    class Nowhere(Answers):
        def __init__(self, folder, known):
            super().__init__(folder, known)
            self.log = folder / "there" / "is" / "none"

    answers(answer(BETTER, 1.1))
    monkeypatch.setattr(learning, "Search", Nowhere)
    plain, _ = losses_of(None)
    losses, session = losses_of()
    assert losses == plain
    (warning,) = session.warnings
    assert "(No such file or directory)" in warning
    assert session.ledger.policy.heuristic.name == STEADY


def test_a_forked_child_leaves_the_search_and_the_log_alone(answers, shares):
    shares[BETTER] = 0.1
    answers(answer(BETTER, 1.1))
    torch.manual_seed(0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for step, _ in enumerate(train(STEPS)):
            if step == 7:
                assert session._learning._recorder is not None
                if (child := os.fork()) == 0:
                    os._exit(0)
                assert os.waitpid(child, 0)[1] == 0
    assert session.rule["heuristic"] == BETTER


# -- the search itself ---------------------------------------------------------------------------------


def test_the_search_finds_what_the_simulator_finds(tmp_path, shares, monkeypatch):
    logs = []

    class Kept(Answers):
        given = ()

        def start(self, budget_bytes, present, seconds):
            logs.append(self.log.read_bytes())

    monkeypatch.setattr(learning, "Search", Kept)
    losses_of()
    log, file = tmp_path / "steps.log", tmp_path / "answer.json"
    log.write_bytes(logs[0])
    search(Wanted(str(log), str(file), BUDGET, 1, STEADY, 60.0, 1 << 34))
    found = json.loads(file.read_text())
    assert found["ended"]
    assert found["tried"] > 10
    assert found["present_overhead"] > 1
    assert found["overhead"] <= found["present_overhead"]


def test_a_real_search_ends_and_leaves_nothing(tmp_path, monkeypatch):
    """Whether it finds a better rule depends on the machine's relative speeds."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    torch.manual_seed(0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for _ in train(3000):
            if "share" in session.rule:
                break
    assert "share" in session.rule
    assert not session.warnings
    assert not list(tmp_path.iterdir())


def test_a_search_that_takes_too_long_says_so(tmp_path, monkeypatch, shares):
    monkeypatch.setattr(learning, "SECONDS", 0.001)
    monkeypatch.setattr(learning, "LONGEST", 0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        for _ in train(3000):
            if session.warnings:
                break
    (warning,) = session.warnings
    assert "(the logged steps are too long)" in warning


# -- what is remembered --------------------------------------------------------------------------------


@pytest.fixture
def remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    warnings = []
    return lambda budget=BUDGET: Remembered(budget, "cpu", warnings.append), warnings


def test_what_was_found_is_remembered_for_this_budget_alone(remembered):
    make, warnings = remembered
    found = answer(BETTER, 1.1) | {"steps": []}
    assert make().read() is None
    make().write(found)
    assert make().read() == found
    assert make(BUDGET + 1).read() is None
    assert not warnings


def test_it_goes_on_with_the_costs_by_which_it_was_found(remembered, answers, shares):
    make, _ = remembered
    shares[BETTER] = 0.1
    answers(answer(BETTER, 1.1))
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        list(train(STEPS))
    found = make().read()
    assert len(found["costs"]) > 10
    made_up = {name: [10_000_000 + place, row[1]] for place, (name, row) in enumerate(found["costs"].items())}
    make().write(found | {"costs": made_up})
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        session._learning.install()
        list(train(STEPS))
        costs = {one.cost for one in session.callbacks.signatures.all()}
    used = costs & {cost for cost, _ in made_up.values()}
    assert len(used) > len(made_up) // 2


def test_what_led_to_a_budget_that_is_too_small_is_forgotten(remembered):
    make, _ = remembered
    make().write(answer(BETTER, 1.1) | {"steps": []})
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        with pytest.raises(dtrrun.BudgetError):
            torch.ones(BUDGET)
    assert make().read() is None


@pytest.mark.parametrize(("overhead", "searches"), [(1.3, 0), (1.05, 1)])
def test_a_promise_that_is_broken_is_searched_anew_once(remembered, answers, shares, overhead, searches):
    make, _ = remembered
    make().write(answer("size", overhead) | {"steps": []})
    shares["size"], shares[BETTER] = 0.3, 0.1
    chosen = answers(answer(BETTER, 1.1))
    chosen.wanted = None
    torch.manual_seed(0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        session._learning.install()
        assert session.rule["source"] == "remembered"
        list(train(40))
    assert (chosen.wanted is not None) == bool(searches)
    assert session.rule["heuristic"] == (BETTER if searches else "size")
    assert make().read()["overhead"] == pytest.approx(1.1 if searches else 1.3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"overhead": None},
        {"heuristic": "os:getcwd"},
        {"heuristic": "nonsense"},
        {"steps": [{}]},
        {"steps": 3},
        {"costs": 3},
        {"costs": {"a": [1]}},
        {"heuristic": None},
    ],
)
def test_what_another_has_written_is_ignored(remembered, wrong):
    make, _ = remembered
    make().write(answer(BETTER, 1.1) | {"steps": []} | wrong)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        session._learning.install()
        assert session.rule["source"] == "first"
        assert session.ledger.policy.heuristic.name == INITIAL


@pytest.mark.parametrize(
    "content", [b"", b"no gzip", b"\x1f\x8b\x08", gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20]
)
def test_what_cannot_be_read_is_forgotten(remembered, content):
    make, _ = remembered
    make().write(answer(BETTER, 1.1) | {"steps": []})
    make()._path.write_bytes(content)
    assert make().read() is None


def test_what_can_only_be_read_is_used(remembered, monkeypatch):
    make, _ = remembered
    make().write(answer(BETTER, 1.1) | {"steps": []})

    def refuse(path):
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "utime", refuse)
    assert make().read()["heuristic"] == BETTER


def test_other_users_cannot_read_what_is_remembered(remembered, tmp_path):
    make, _ = remembered
    before = os.umask(0)
    try:
        make().write(answer(BETTER, 1.1) | {"steps": []})
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o077 for path in (make()._path, make()._path.parent)] == [0, 0]


def test_another_process_may_remove_what_is_old_at_the_same_time(remembered, monkeypatch):
    make, warnings = remembered
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda folder: [*iterdir(folder), folder / "removed.json.gz"])
    make().write(answer(BETTER, 1.1) | {"steps": []})
    assert make().read()["heuristic"] == BETTER
    assert not warnings


def test_a_working_directory_that_has_been_removed(remembered, tmp_path, monkeypatch):
    make, _ = remembered
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "there")
    (tmp_path / "there").rmdir()
    assert make().read() is None


def test_a_cache_that_cannot_be_written_is_said_in_one_line(remembered, tmp_path):
    make, warnings = remembered
    (tmp_path / "dtrrun").write_text("a file where a folder should be")
    make().write(answer(BETTER, 1.1) | {"steps": []})
    (warning,) = warnings
    assert warning.startswith("cannot keep what was learned about this program for the next run (")


def test_only_the_latest_are_kept(remembered, monkeypatch):
    make, _ = remembered
    monkeypatch.setattr("dtrrun.runtime.observe.remembered.MOST", 3)
    for budget in range(5):
        make(budget).write(answer(BETTER, 1.1) | {"steps": []})
        os.utime(make(budget)._path, (budget, budget))
    assert [budget for budget in range(5) if make(budget).read()] == [2, 3, 4]


@pytest.mark.parametrize(
    ("operators", "kinds"),
    [
        ([5, 5], None),
        ([5, 5, 5], 1),
        ([5, 7, 5], None),
        ([5, 7, 5, 7], 2),
        ([1, 2, 3, 1, 2, 3], 3),
        ([1, 2, 3, 4, 5, 6, 7], None),
        ([1, 2, 3, 4, 5, 6, 7, 8], 0),
        ([5, 5, 9, 5, 5, 5, 5], None),
        ([5, 9, 5, 5, 5, 5, 9, 5], 1),
    ],
)
def test_kinds_of_steps(operators, kinds):
    assert kinds_of(operators) == kinds


def figures(index, operators_ns, rematerialization_ns):
    return {"index": index, "operators_ns": operators_ns, "rematerialization_ns": rematerialization_ns}


def test_a_step_of_recomputation_tries_each_other_rule_once():
    second = learning.AT_ONCE_NS
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        found = session._learning
        for step, heuristic in (
            (figures(1, second / 99, learning.TOO_MUCH_NS - 1), INITIAL),  # not worth it
            (figures(1, second, learning.TOO_MUCH * second - 1), INITIAL),
            (figures(1, second, learning.TOO_MUCH * second), STEADY),
            (figures(1, second, (learning.TOO_MUCH + 2.9) * second), STEADY),  # less since then
            (figures(1, second, (learning.TOO_MUCH + 3.1) * second), "h_next"),
            (figures(1, second, (learning.TOO_MUCH + 6.2) * second), "h_dtr_eq"),
            (figures(2, second, 2.9 * second), "h_dtr_eq"),
            (figures(2, second / 9, 0.9 * second), "h_dtr_eq"),  # not worth it
            (figures(2, second, 3.1 * second), STEADY),
            (figures(2, second, 99 * second), STEADY),
            (figures(3, second, 99 * second), STEADY),
        ):
            found.step_goes_on(step)
            assert (session.rule["heuristic"], session.ledger.policy.heuristic.name) == (heuristic, heuristic)
        assert session.rule["source"] == "thrashing"


def test_a_remembered_rule_with_which_a_step_does_not_end_is_forgotten(remembered):
    make, _ = remembered
    make().write(answer(BETTER, 1.5) | {"steps": []})
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session._learning._remembered = make()
        session._learning.install()
        assert session.rule["source"] == "remembered"
        session._learning.step_goes_on(figures(1, 0, 2 * learning.AT_ONCE_NS))
        assert session.rule["source"] == "thrashing"
    assert make().read() is None


def test_the_beginning_of_a_step_is_compared_with_the_step_before():
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session.steps.last = figures(1, 10 * learning.AT_ONCE_NS, 0)
        enough = 10 * learning.TOO_MUCH * learning.AT_ONCE_NS
        session._learning.step_goes_on(figures(2, 0, enough - 1))
        assert session.rule["source"] == "first"
        session._learning.step_goes_on(figures(2, 0, enough))
        assert session.rule["source"] == "thrashing"


def test_another_rule_within_a_rematerialization(monkeypatch):
    for name, value in (("HOPELESS", 0), ("TOO_MUCH", 0), ("AT_ONCE_NS", 1), ("TOO_MUCH_NS", 1)):
        monkeypatch.setattr(learning, name, value)
    monkeypatch.setattr(session_module, "PUBLISH_NS", 0)
    changes, change = [], session_module.Session.change_heuristic

    def told(session, name):
        changes.append((name, session.dtr.eviction.replaying))
        change(session, name)

    monkeypatch.setattr(session_module.Session, "change_heuristic", told)
    expected, _ = losses_of(None, heuristic="h_dtr_eq")
    torch.manual_seed(0)
    with dtrrun.budget(BUDGET, heuristic="auto") as session:
        session.callbacks.next_tick = 0
        assert list(train(STEPS)) == expected
        check_accounts(session)
    names, replaying = zip(*changes[:5], strict=True)
    assert names == (INITIAL, STEADY, "h_next", INITIAL, STEADY)
    assert any(replaying)
