"""`views.live`: when something is shown, and that it is removed again."""

import os
import select
from collections.abc import Iterator
from typing import TextIO

import pytest
from fake_records import SETTINGS, snapshot, stream, without_colour, written

from dtrrun.views import live
from dtrrun.views.live import LiveLines, LiveTable, live_view


class Screen:
    """A pseudo-terminal of 80×24, and what was sent to it."""

    def __init__(self) -> None:
        self.master, slave = os.openpty()
        self.stream: TextIO = os.fdopen(slave, "w")
        os.set_blocking(self.master, False)

    def sent(self) -> str:
        data = b""
        while select.select([self.master], [], [], 0)[0]:
            data += os.read(self.master, 65536)
        return without_colour(data.decode())


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Screen]:
    monkeypatch.setenv("TERM", "xterm-256color")
    made = Screen()
    yield made
    made.stream.close()
    os.close(made.master)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    return now


def test_nothing_before_there_is_a_training_process(screen: Screen) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.start()
    table.update([])
    table.close()
    assert screen.sent() == ""


def test_draws_four_times_a_second_at_most(screen: Screen, clock: list[float]) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.update([snapshot()])
    assert "tensors" in screen.sent()
    assert table.rows > 0
    clock[0] += 0.2
    table.update([snapshot(seconds=0.2)])
    assert screen.sent() == ""
    clock[0] += 0.1
    table.update([snapshot(seconds=0.3)])
    assert "tensors" in screen.sent()
    table.close()


def test_close_leaves_the_terminal_as_it_was(screen: Screen) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.update([snapshot()])
    table.write(b"50 %|####")
    screen.sent()
    table.close()
    sent = screen.sent()
    assert "\x1b[r" in sent  # the whole screen scrolls again
    assert sent.endswith("\r\n")
    assert table.rows == 0
    table.close()
    assert screen.sent() == ""


def test_the_table_does_not_jump(screen: Screen, clock: list[float]) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.update([snapshot()])
    rows = table.rows
    clock[0] += 1
    table.update([snapshot(seconds=1, tables={"operators": []})])
    assert table.rows == rows
    table.close()


def test_not_in_the_background(screen: Screen, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.update([snapshot()])
    monkeypatch.setattr(live.os, "tcgetpgrp", lambda descriptor: os.getpgrp() + 1)
    clock[0] += 1
    table.update([snapshot(seconds=1)])
    assert table.rows == 0
    monkeypatch.setattr(live.os, "tcgetpgrp", lambda descriptor: os.getpgrp())
    clock[0] += 1
    table.update([snapshot(seconds=2)])
    assert table.rows > 0
    table.close()


def test_a_line_of_ours_stands_above_the_table_by_itself(screen: Screen) -> None:
    table = LiveTable(SETTINGS, screen.stream)
    table.update([snapshot()])
    table.write(b"50 %|####")
    screen.sent()
    table.note("dtrrun: warning: x")
    assert screen.sent().replace("\r\r\n", "\r\n") == "\r\ndtrrun: warning: x\r\n"
    table.note("dtrrun: warning: y")
    assert screen.sent().replace("\r\r\n", "\r\n") == "dtrrun: warning: y\r\n"
    table.close()


def test_a_line_of_ours_among_lines() -> None:
    to = stream("ascii")
    LiveLines(to).note("dtrrun: 3 × more")
    assert written(to) == "dtrrun: 3 x more\n"


def test_lines(clock: list[float]) -> None:
    to = stream()
    lines = LiveLines(to)
    lines.start()
    for _ in range(60):  # 15 s
        lines.update([snapshot(seconds=clock[0] - 100)])
        clock[0] += 0.25
    lines.close()
    text = written(to).splitlines()
    assert len(text) == 2
    assert "tensors 187 MB of 200 MB" in text[0]
    assert "(56/s)" in text[1]
    assert lines.rows == 0


def test_a_line_for_each_process_and_bytes_as_they_are(clock: list[float]) -> None:
    to = stream()
    lines = LiveLines(to)
    lines.start()
    clock[0] += 10
    lines.write(b"its own\xff\n")
    lines.update([snapshot(1, 0), snapshot(2, 1), snapshot(3, 2, alive=False)])
    data = to.buffer.getvalue()  # type: ignore[attr-defined]
    assert data.startswith(b"its own\xff\ndtrrun rank 0: ")
    assert data.count(b"\n") == 3


@pytest.mark.parametrize(
    ("mode", "term", "kind"),
    [
        ("auto", "xterm", LiveTable),
        ("always", "xterm", LiveTable),
        ("never", "xterm", None),
        ("auto", "dumb", None),
        ("always", "dumb", LiveLines),
    ],
)
def test_which_view_on_a_terminal(
    screen: Screen, mode: str, term: str, kind: type | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    view = live_view(SETTINGS, screen.stream, mode)
    assert view is None if kind is None else isinstance(view, kind)


@pytest.mark.parametrize(("mode", "kind"), [("auto", None), ("always", LiveLines), ("never", None)])
def test_which_view_elsewhere(mode: str, kind: type | None) -> None:
    view = live_view(SETTINGS, stream(), mode)
    assert view is None if kind is None else isinstance(view, kind)
