"""dtrrun.settings"""

from dataclasses import dataclass, fields

import pytest

import dtrrun
from dtrrun.settings import Option, RuntimeSettings, option, rows
from dtrrun.values import slowdown


def test_a_field_says_all_of_an_option():
    @dataclass
    class Table:
        counted: int = option("Count.", "Panel", 3)
        slower: float | None = option("Be slow.", read=slowdown)
        other: str = "no option"
        fast: bool = option("Be fast.", short="-f", key="quick")

    counted, slower, fast = rows(Table)
    assert (counted.key, counted.field, counted.panel, counted.word) == ("counted", "counted", "Panel", "N")
    assert (counted.names, counted.variable, counted.default_text) == (["--counted"], "DTRRUN_COUNTED", "3")
    assert (slower.word, slower.read("3x"), slower.default_text) == ("X", 3.0, "")
    assert (fast.names, fast.field, fast.word) == (["--quick", "-f", "--no-quick"], "fast", "")


@pytest.mark.parametrize(
    ("default", "text"),
    [(None, ""), (False, ""), (True, "yes"), (0, "0"), (0.0, "0"), (1.5, "1.5"), (("a", "b"), "a,b")],
)
def test_a_default_as_text(default, text):
    assert Option("key", "field", default, "", "", slowdown, "N").default_text == text


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"max_slowdown": "3x"}, "max_slowdown", 3.0),
        ({"ignore_small": "1%"}, "ignore_small", 0.01),
        ({"verify": "yes"}, "verify", True),
        ({"verify": True}, "verify", True),
        ({"budget_bytes": 10, "device": "cuda:1"}, "budget_bytes", 10),
        ({"log": "step.log"}, "log", "step.log"),
    ],
)
def test_text_is_read_as_on_the_command_line(given, field, value):
    assert getattr(RuntimeSettings.of(**given), field) == value


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"over_budget": "explode"}, ValueError, "over_budget: 'explode' is not one of error, raise"),
        ({"max_slowdown": "1"}, ValueError, "max_slowdown: '1' is not above 1"),
        ({"device": "gpu"}, ValueError, "device: 'gpu' is not one of auto, cpu, cuda, cuda:N"),
        ({"heuristic": "portfolio"}, ValueError, "heuristic: portfolio stands for several heuristics"),
        ({"max_slowdown": 0.5}, ValueError, "max_slowdown: '0.5' is not above 1"),
        ({"max_steps": 0}, ValueError, "max_steps: 0 is less than 1"),
        ({"bugdet": "1GB"}, TypeError, "^there is no option 'bugdet'$"),
        ({"heuristc": "lru"}, TypeError, "there is no option 'heuristc'; did you mean heuristic?"),
    ],
)
def test_a_bad_option_of_a_block_is_told(options, error, message):
    with pytest.raises(error, match=message), dtrrun.budget("1GB", **options):
        pass


def test_every_default_is_one_that_could_be_written():
    """The default shown in the help and in the site's tables can be given as the option's value."""
    read = {row.field: row.read(row.default_text) for row in rows(RuntimeSettings) if row.default_text}
    defaults = {one.name: one.default for one in fields(RuntimeSettings)}
    assert read == {name: defaults[name] for name in read}
