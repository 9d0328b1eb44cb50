"""`views.screen`: what is sent to the terminal, and when. tests/inject tests how it looks there."""

import os
import re
import threading
import time

import pytest

from dtrrun.views import screen
from dtrrun.views.screen import BottomRows, writer_to


class Fake:
    """A terminal that remembers what it was sent."""

    def __init__(self) -> None:
        self.size = (80, 24)
        self.sent = b""
        self.rows = BottomRows(self.write, lambda: self.size)

    def write(self, data: bytes) -> None:
        self.sent += data

    def region(self) -> int:
        """Return the last row of the scroll region."""
        found = re.findall(rb"\x1b\[(?:1;(\d+))?r", self.sent)
        return int(found[-1] or self.size[1]) if found else self.size[1]


@pytest.fixture
def fake() -> Fake:
    return Fake()


def test_rows_are_taken_and_given_back(fake: Fake) -> None:
    fake.rows.show(["a", "b", "c"])
    assert (fake.rows.taken, fake.region()) == (3, 21)
    assert b"\x1b[22;1H\x1b[2Ka" in fake.sent
    assert b"\x1b[24;1H\x1b[2Kc" in fake.sent
    fake.rows.show(["a"])
    assert (fake.rows.taken, fake.region()) == (1, 23)
    fake.rows.erase()
    assert (fake.rows.taken, fake.region()) == (0, 24)


def test_the_cursor_is_where_it_was(fake: Fake) -> None:
    """Making room moves down and up by equal rows; all else is between save and restore."""
    fake.rows.show(["a", "b", "c"])
    assert fake.sent.startswith(screen.DOWN.encode() * 3 + b"\x1b[3A\x1b7")
    assert fake.sent.endswith(b"\x1b8")
    fake.sent = b""
    fake.rows.show(["a", "b", "c"])
    assert fake.sent.startswith(b"\x1b7")  # no more room needed
    assert fake.sent.endswith(b"\x1b8")
    fake.sent = b""
    fake.rows.erase()
    assert (fake.sent[:2], fake.sent[-2:]) == (b"\x1b7", b"\x1b8")


def test_the_programs_bytes_pass_as_they_are(fake: Fake) -> None:
    fake.rows.show(["a"])
    fake.sent = b""
    fake.rows.pass_through(b"\r\x1b[31mhalf\xe6\x90 \xff\n")
    assert fake.sent == b"\r\x1b[31mhalf\xe6\x90 \xff\n"


@pytest.mark.parametrize(
    "data",
    [
        b"\x1b",
        b"\x1b[",
        b"\x1b[1;3",
        b"\x1b(",
        b"\x1b]0;title",
        b"\x1b]0;title\x1b",
        b"\x1bPq#0",
        b"\xc3",
        b"\xe6\x90",
        b"\xf0\x9f\x98",
    ],
)
def test_nothing_is_drawn_inside_a_sequence(fake: Fake, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.rows.pass_through(b"text" + data)
    fake.sent = b""
    fake.rows.show(["a"])
    assert fake.sent == b""
    monkeypatch.setattr(screen, "_PATIENCE", 0.0)  # but not forever
    fake.rows.show(["a"])
    assert fake.rows.taken == 1


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (b"\x1b[3", b"1m"),
        (b"\xe6", b"\x90\x8d"),
        (b"\x1b]0;ti", b"tle\x07"),
        (b"\x1b]0;ti", b"tle\x1b\\"),
        (b"\x1b", b"7"),
        (b"", b"plain \xc3\xa9\x1b[0m\r\n"),
        (b"\xff\xfe", b"\x80"),
    ],
)
def test_drawing_goes_on_when_it_is_whole(fake: Fake, first: bytes, rest: bytes) -> None:
    fake.rows.pass_through(first)
    fake.rows.pass_through(rest)
    fake.rows.show(["a"])
    assert fake.rows.taken == 1


def test_a_full_screen_program_has_the_screen_for_itself(fake: Fake) -> None:
    fake.rows.show(["a"])
    fake.rows.pass_through(b"\x1b[?1049")
    fake.rows.pass_through(b"h\x1b[Hall mine")  # the switch arrives in two pieces
    assert fake.rows.taken == 0
    fake.rows.show(["a"])
    assert fake.rows.taken == 0
    fake.rows.pass_through(b"\x1b[?1049l")
    fake.rows.show(["a"])
    assert fake.rows.taken == 1


def test_a_new_size_moves_the_rows(fake: Fake) -> None:
    fake.rows.show(["a", "b"])
    fake.size = (60, 10)
    fake.sent = b""
    fake.rows.pass_through(b"x")  # before the next picture
    assert fake.rows.taken == 0
    assert fake.sent.index(b"\x1b[J") < fake.sent.index(b"x")
    fake.rows.show(["a", "b"])
    assert (fake.rows.taken, fake.region()) == (2, 8)


def test_a_new_size_while_the_program_is_silent(fake: Fake) -> None:
    fake.rows.show(["a", "b"])
    fake.size = (60, 10)
    fake.sent = b""
    fake.rows.show(["c"])
    assert fake.sent.startswith(b"\x1b7\x1b[0m\x1b[r\x1b8\x1b[J")
    assert (fake.rows.taken, fake.region()) == (1, 9)


def test_a_new_size_before_the_end(fake: Fake) -> None:
    fake.rows.show(["a", "b"])
    fake.size = (60, 10)
    fake.sent = b""
    fake.rows.erase()
    assert fake.sent == b"\x1b7\x1b[0m\x1b[r\x1b8\x1b[J"


def test_never_all_rows(fake: Fake) -> None:
    fake.size = (80, 3)
    fake.rows.show(["a"] * 10)
    assert (fake.rows.taken, fake.region()) == (2, 1)


def test_knows_whether_the_cursor_begins_a_line(fake: Fake) -> None:
    assert fake.rows.at_line_start
    for data, starts in ((b"bar", False), (b"bar\r", False), (b"\n", True), (b"", True)):
        fake.rows.pass_through(data)
        assert fake.rows.at_line_start == starts


def test_writer_copes_with_a_terminal_that_is_full() -> None:
    """Every byte comes through even if a script sets the shared terminal non-blocking."""
    out, into = os.pipe()
    os.set_blocking(into, False)
    received = bytearray()

    def read_slowly() -> None:
        while data := os.read(out, 65536):
            received.extend(data)
            time.sleep(0.001)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    data = bytes(range(256)) * 4000
    writer_to(into)(data)
    os.close(into)
    reader.join()
    os.close(out)
    assert received == data


def test_writer_copes_with_a_terminal_that_is_gone() -> None:
    out, into = os.pipe()
    os.close(out)
    writer_to(into)(b"x" * 100)
    os.close(into)
