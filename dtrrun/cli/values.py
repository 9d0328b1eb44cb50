"""What each option's text means: one reader of values for the command line, the environment and the profiles.

A reader takes the text and returns the value, or raises ValueError with a text for the person who wrote it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Callable
from difflib import get_close_matches

from dtrrun.launch.devices import DEVICE
from dtrrun.policy.heuristics import ABLATION_NAMES, HEURISTIC_NAMES, check_heuristic
from dtrrun.simulator import PORTFOLIO
from dtrrun.sizes import parse_size

PAPER = ("h_dtr", "h_dtr_eq", "h_dtr_local", "lru", "size", "msps", "random")
"""The heuristics of the paper's Fig. 2."""

GROUPS = {"paper": PAPER, "ablations": ABLATION_NAMES}
OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")

YES, NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


def flag(text: str) -> bool:
    if text.lower() not in YES + NO:
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in YES


def choice(*names: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def whole_number(least: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if least is not None and value < least:
            raise ValueError(f"{text} is less than {least}")
        return value

    return read


def slowdown(text: str) -> float:
    """A multiple of the plain run's time, such as `3` or `1.5x`."""
    value = _number(text.removesuffix("x"))
    if value <= 1:
        raise ValueError(f"{text!r} is not above 1; give a multiple of the time without a budget")
    return value


def share(text: str) -> float:
    """A share of the mean storage size, such as `0.01` or `1%`."""
    value = _number(text[:-1]) / 100 if text.endswith("%") else _number(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1 (or 0% and 100%); give a share of the mean size")
    return value


def device(text: str) -> str:
    if not DEVICE.fullmatch(text):
        raise ValueError(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


def heuristic(text: str) -> str:
    """A name of the paper's, an h'(…), or `module:function`, which only the target's process can import."""
    if text == PORTFOLIO or text in GROUPS:
        raise ValueError(f"{text} means several heuristics, and a run has one: dtrrun simulate tries several")
    try:
        check_heuristic(text)
    except ValueError:
        near = get_close_matches(text, HEURISTIC_NAMES, 1)
        if near and "(" not in text:
            raise ValueError(f"unknown heuristic {text!r}; did you mean {near[0]}?") from None
        raise
    return text


def heuristics(text: str) -> list[str]:
    """Names with commas between them; `paper` and `ablations` are several, `portfolio` the best of many."""
    names: list[str] = []
    for name in map(str.strip, OUTSIDE_BRACKETS.split(text)):
        names += GROUPS.get(name) or ([name] if name == PORTFOLIO else [heuristic(name)])
    return list(dict.fromkeys(names))


def budgets(text: str) -> list[float | int]:
    """Shares of a peak (`0.5`, `50%`: float) and sizes (`2GB`: int, bytes), with commas between them."""
    return list(dict.fromkeys(_budget(one.strip()) for one in text.split(",")))


def _budget(text: str) -> float | int:
    if not re.fullmatch(r"[\d.]+%?", text):
        return parse_size(text)
    value = _number(text[:-1]) / 100 if text.endswith("%") else _number(text)
    if not 0 < value <= 1:
        raise ValueError(
            f"{text!r} is neither a share of the peak, above 0 and at most 1, nor a size like 2GB"
        )
    return value


def choices(*names: str) -> Callable[[str], list[str]]:
    """Several of `names`, with commas between them."""
    one = choice(*names)
    return lambda text: list(dict.fromkeys(one(word.strip()) for word in text.split(",")))


def whole_numbers(least: int) -> Callable[[str], list[int]]:
    """Several, with commas between them, in order."""
    one = whole_number(least)
    return lambda text: sorted({one(word.strip()) for word in text.split(",")})


def deallocation(text: str) -> str:
    if choice("eager", "banish", "ignore")(text) != "eager":
        raise ValueError(f"{text} works in the simulator only; use eager")
    return text


def existing_file(text: str) -> str:
    """Its whole path: the target may go to another folder."""
    if not text:
        raise ValueError("the path is empty")
    path = os.path.abspath(os.path.expanduser(text))
    if os.path.isdir(path):
        raise ValueError(f"{text!r} is a folder, not a file")
    if not os.path.exists(path):
        raise ValueError(f"no such file: {text!r}")
    if not os.path.isfile(path):
        raise ValueError(f"{text!r} is not a regular file")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{text!r} cannot be read: Permission denied")
    return path


def costs(text: str) -> str:
    """The whole path of a file of costs; what it says is for the training process, which knows its device."""
    path = existing_file(text)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        if error.strerror is not None:
            raise ValueError(f"{text!r} cannot be read: {error.strerror}") from None
        found = None  # no gzip file
    except (EOFError, zlib.error, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("signatures"), dict):
        raise ValueError(f"{text!r} is not a complete file of costs written by dtrrun profile")
    return path


def path(text: str) -> str:
    if not text:
        raise ValueError("the path is empty")
    return text


def anything(text: str) -> str:
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value
