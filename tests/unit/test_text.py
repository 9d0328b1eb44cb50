"""`views.text`: numbers, and names from outside."""

import pytest
from fake_records import EVIL

from dtrrun.views import text


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (-1, "0 s"),
        (0.00034, "340 µs"),
        (0.0123, "12.3 ms"),
        (0.9996, "1.00 s"),
        (4.214, "4.21 s"),
        (83.04, "83 s"),
        (99.96, "1:40"),
        (754, "12:34"),
        (10921, "3:02:01"),
    ],
)
def test_duration(seconds: float, shown: str) -> None:
    assert text.duration(seconds) == shown


def test_share() -> None:
    assert text.share(71, 100) == "71 %"
    assert text.share(0.4, 100) == "0.4 %"
    assert text.share(0, 100) == "0 %"
    assert text.share(1, 0) == "–"


def test_rate() -> None:
    assert [text.rate(x) for x in (0, 0.423, 3.14, 56.2, 1234)] == [
        "0/s",
        "0.42/s",
        "3.1/s",
        "56/s",
        "1,234/s",
    ]


def test_times() -> None:
    assert text.times(1, "step") == "1 step"
    assert text.times(1234, "step") == "1,234 steps"


def test_plain_leaves_nothing_that_moves_a_cursor() -> None:
    shown = text.plain(EVIL)
    assert shown.isprintable()
    assert shown.startswith("[bold red]mine[/]")
    assert text.plain("é損") == "é損"


def test_plain_is_not_too_long() -> None:
    assert text.plain("x" * 30, 10) == "x" * 9 + "…"
    assert text.plain("x" * 10, 10) == "x" * 10


def test_for_encoding() -> None:
    assert text.for_encoding("1.2 × …", "utf-8") == "1.2 × …"
    assert text.for_encoding("1.2 × … 損", "ascii") == "1.2 x ~ ?"
    assert text.for_encoding("é", "latin-1") == "é"
    assert text.for_encoding("×", "no-such-encoding") == "x"
