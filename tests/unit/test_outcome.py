"""dtrrun.launch.outcome"""

import signal

import pytest

from dtrrun.launch.outcome import Marks, explained, judge, read_marks
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Snapshot

QUIET = Marks(python=True)


def snapshot(**counters):
    return Snapshot(pid=1, meta={"pid": 1}, counters=dict.fromkeys(COUNTERS, 0) | counters)


@pytest.mark.parametrize("status", [0, 1, 2, 125, 137, 255])
def test_the_targets_status_is_ours(status):
    outcome = judge(status, [snapshot()], QUIET)
    assert (outcome.exit_status, outcome.signal, outcome.error, outcome.note) == (status, None, None, None)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_signal_is_passed_on(number):
    outcome = judge(-number, [snapshot()], QUIET)
    assert (outcome.exit_status, outcome.signal) == (128 + number, number)


def test_success_without_the_runtime_is_a_failure_of_ours():
    outcome = judge(0, [], QUIET)
    assert outcome.exit_status == 125
    assert outcome.error == "no process ran under dtrrun: the program never imported torch"


@pytest.mark.parametrize("returncode", [1, -15])
def test_a_failure_of_the_target_stays_its_own_with_a_note(returncode):
    outcome = judge(returncode, [], Marks(python=True, without_torch=("/x/python",)))
    assert outcome.exit_status == (returncode if returncode > 0 else 143)
    assert outcome.error is None
    assert outcome.note.startswith("torch is not installed for /x/python")


@pytest.mark.parametrize(
    ("marks", "why"),
    [
        (Marks(), "started no Python"),
        (Marks(old_python=True), "the target's Python is too old"),
        (Marks(python=True, old_python=True), "never imported torch"),
        (Marks(python=True, without_torch=("/x/python",)), "not installed for /x/python"),
        (
            Marks(python=True, importing=True),
            "ended while it imported torch, before dtrrun had started in it",
        ),
    ],
)
def test_why_nothing_ran_under_the_budget(marks, why):
    assert why in judge(0, [], marks).error


def test_a_signal_before_python_has_started():
    outcome = judge(-signal.SIGINT, [], Marks())
    assert (outcome.exit_status, outcome.signal, outcome.note) == (130, signal.SIGINT, None)


def test_processes_that_ended_while_they_imported_torch(tmp_path):
    assert not read_marks(tmp_path).importing
    (tmp_path / "importing").write_text("12\n13\n")
    (tmp_path / "imported").write_text("13\n12\n")
    assert not read_marks(tmp_path).importing
    (tmp_path / "importing").write_text("12\n13\n14\n")
    assert read_marks(tmp_path).importing


@pytest.mark.parametrize("returncode", [0, 1, -9])
def test_a_process_that_could_not_be_put_under_the_budget(returncode):
    outcome = judge(returncode, [snapshot()], Marks(python=True, failures=("ValueError: no", "x")))
    assert (outcome.exit_status, outcome.signal) == (125, None)
    assert outcome.error == "2 processes could not be put under the budget: ValueError: no"


@pytest.mark.parametrize(("returncode", "status"), [(0, 3), (1, 1)])
def test_a_difference_that_verify_found(returncode, status):
    assert judge(returncode, [snapshot(), snapshot(verify_mismatches=2)], QUIET).exit_status == status


@pytest.mark.parametrize("returncode", [0, 1, -15, -9])
def test_a_run_that_we_stopped(returncode):
    outcome = judge(returncode, [snapshot()], QUIET, "rank 1 holds 7 GB")
    assert (outcome.exit_status, outcome.signal) == (4, None)
    assert outcome.error == "stopped: rank 1 holds 7 GB"


def test_marks(tmp_path):
    assert read_marks(tmp_path) == Marks()
    (tmp_path / "python").touch()
    (tmp_path / "no-torch").write_text("/a/python\n/b/python\n/a/python\n")
    (tmp_path / "no-accelerate.commands.launch").write_text("/a/python\n")
    (tmp_path / "failed-7").write_text("ValueError: no")
    assert read_marks(tmp_path) == Marks(
        python=True, without_torch=("/a/python", "/b/python"), failures=("ValueError: no",)
    )


def test_marks_of_starts_daemons_and_another_dtrrun(tmp_path):
    (tmp_path / "python").write_text("7 1500000000\n7 2500000000\ntorn")
    (tmp_path / "daemons").write_text("8\n")
    (tmp_path / "nested").touch()
    found = read_marks(tmp_path)
    assert (found.starts, found.daemons, found.nested) == (((7, 1.5), (7, 2.5)), {8}, True)


@pytest.mark.parametrize(
    ("pid", "start", "alive", "status"),
    [
        (7, 1.6, False, "replaced"),
        (7, 1.6, True, "replaced"),
        (7, 2.6, False, ""),
        (8, 1.6, False, "stopped"),
        (8, 1.6, True, ""),
        (9, 1.6, False, ""),
    ],
)
def test_who_did_not_say_how_it_ended(pid, start, alive, status):
    marks = Marks(starts=((7, 1.5), (7, 2.5), (8, 1.5), (9, 1.5)), daemons=frozenset({8}))
    one = Snapshot(pid=pid, meta={"pid": pid, "start": start}, counters={}, alive=alive)
    (found,) = explained([one], marks)
    assert (found.status, found.ended) == (status, bool(status))


@pytest.mark.parametrize(("returncode", "status", "number"), [(0, 0, None), (3, 3, None), (-15, 143, 15)])
def test_a_dtrrun_inside_another(returncode, status, number):
    outcome = judge(returncode, [], Marks(python=True, nested=True))
    assert (outcome.exit_status, outcome.signal, outcome.error) == (status, number, None)
    assert "ran dtrrun itself" in outcome.note
