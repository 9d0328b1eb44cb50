"""Ranks that wait for one whose budget was too small are ended."""

import signal
from dataclasses import replace

from fake_records import snapshot

from dtrrun.launch.ranks import Ranks
from dtrrun.telemetry.record import TOO_SMALL
from dtrrun.telemetry.run import tell_of_another_node, told_of_another_node


def rank(number, *, world="one", operators=100, **changes):
    found = snapshot(pid=100 + number, rank=number, operators=operators)
    return replace(found, meta=found.meta | {"world": world}, **changes)


def test_those_that_wait_and_no_others():
    sent, told = [], []
    ranks = Ranks("", told.append, send=lambda one, number: sent.append((one.meta["rank"], number)))
    failed = rank(1, ended=True, status=TOO_SMALL)
    elsewhere, single = rank(4, world="other"), rank(5, world=None)
    for second in range(14):  # the third goes on for seven seconds
        busy = rank(2, operators=100 + min(second, 7))
        ranks.look([rank(0), failed, busy, rank(3, ended=True), elsewhere, single], float(second))
    assert {number for number, _ in sent} == {0}
    assert [number for _, number in sent] == [signal.SIGTERM] * 4
    for second in range(14, 18):
        ranks.look([rank(0, alive=False), failed, rank(2, operators=107)], float(second))
    assert sent[4:] == [(2, signal.SIGTERM)]
    ranks.look([failed, rank(2, operators=107)], 22.0)
    assert sent[5:] == [(2, signal.SIGKILL)]
    assert told == [
        f"error: the budget of rank 1 was too small; rank {number} waited for it, and is ended now"
        for number in (0, 2)
    ]


def test_the_budget_of_a_rank_on_another_node_was_too_small(tmp_path):
    sent, told = [], []
    ranks = Ranks("", told.append, send=lambda one, number: sent.append(one.meta["rank"]))
    tell_of_another_node(str(tmp_path), "3", "one")
    for second in range(11):
        ranks.look([rank(0), rank(1, world="other")], float(second), told_of_another_node(str(tmp_path)))
    assert sent == [0]
    assert told == [
        "error: the budget of rank 3 (on another node) was too small; rank 0 waited for it, and is ended now"
    ]


def test_nobody_is_ended_if_one_ends_otherwise():
    sent = []
    ranks = Ranks("", send=lambda *one: sent.append(one))
    for second in range(30):
        ranks.look([rank(0), rank(1, ended=True, status="ended"), rank(2, alive=False)], float(second))
    assert not sent
