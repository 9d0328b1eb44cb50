"""Parses option values from every source.

Standard library only: the training process also uses these readers, for the options of `dtrrun.budget`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from dtrrun.core.heuristics import ABLATION_NAMES, AUTO, HEURISTIC_NAMES, check_heuristic
from dtrrun.sizes import AUTO_HOST, NO_HOST, parse_size

PAPER = ("h_dtr", "h_dtr_eq", "h_dtr_local", "lru", "size", "msps", "random")
"""The heuristics of the paper's Fig. 2."""

GROUPS = {"paper": PAPER, "ablations": ABLATION_NAMES, "portfolio": ("portfolio",)}
"""Names for several heuristics; the simulator defines what the portfolio tries."""

OUTSIDE_BRACKETS = re.compile(r",(?![^(]*\))")


@dataclass(frozen=True)
class Reader:
    """Parses the text of a value. Raises ValueError with a message for the user.

    `word` is the placeholder for the value in the help, such as `PATH`; it is empty for a switch. `file`:
    whether the value is the path of a file to read; in a profile, it is relative to the profile.
    """

    word: str
    read: Callable[[str], Any]
    file: bool = False

    def __call__(self, text: str) -> Any:
        return self.read(text)


def reader(word: str, file: bool = False) -> Callable[[Callable[[str], Any]], Reader]:
    """Turn a function into a `Reader` whose placeholder in the help is `word`."""
    return lambda read: Reader(word, read, file)


def meant(name: str, known: Iterable[str], otherwise: str = "", cutoff: float = 0.6) -> str:
    """Return the end of a message about an unknown name: which was meant, or else `otherwise`."""
    from difflib import get_close_matches  # not needed by every training process

    near = get_close_matches(name, list(known), 1, cutoff)
    return f"; did you mean {near[0]}?" if near else otherwise


YES, NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0")


@reader("")
def flag(text: str) -> bool:
    """Yes or no."""
    if text.lower() not in YES + NO:
        raise ValueError(f"{text!r} is neither yes nor no")
    return text.lower() in YES


def choice(*names: str) -> Reader:
    """One of `names`."""

    @reader("|".join(names))
    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"{text!r} is not one of {', '.join(names)}")
        return text

    return read


def whole_number(least: int | None = None) -> Reader:
    """A whole number, at least `least` if given."""

    @reader("N")
    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if least is not None and value < least:
            raise ValueError(f"{text} is less than {least}")
        return value

    return read


@reader("X")
def slowdown(text: str) -> float:
    """A multiple of the plain run's time, such as `3` or `1.5x`."""
    value = number(text.removesuffix("x"))
    if value <= 1:
        raise ValueError(f"{text!r} is not above 1; give a multiple of the time without a budget")
    return value


@reader("SHARE")
def share(text: str) -> float:
    """A share of the mean storage size, such as `0.01` or `1%`."""
    value = number(text[:-1]) / 100 if text.endswith("%") else number(text)
    if not 0 <= value <= 1:
        raise ValueError(f"{text!r} is not between 0 and 1 (or 0% and 100%); give a share of the mean size")
    return value


@reader("DEVICE")
def device(text: str) -> str:
    """The name of a device, or `auto`. Its existence is checked later."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", text):
        raise ValueError(f"{text!r} is not one of auto, cpu, cuda, cuda:N")
    return text


@reader("NAME")
def heuristic(text: str) -> str:
    """auto, a name from the paper, an h'(…), or `module:function`, which only the target can import."""
    return text if text == AUTO else named_heuristic(text)


def named_heuristic(text: str) -> str:
    """Check the name of one heuristic. Raises ValueError."""
    if text in GROUPS:
        raise ValueError(
            f"{text} stands for several heuristics, and a run uses one; dtrrun simulate compares several"
        )
    try:
        check_heuristic(text)
    except ValueError:
        near = meant(text, HEURISTIC_NAMES, cutoff=0.7)
        if near and "(" not in text:
            raise ValueError(f"unknown heuristic {text!r}{near}") from None
        raise
    return text


@reader("eager")
def deallocation(text: str) -> str:
    """A policy from the paper; the runtime supports only `eager`."""
    if choice("eager", "banish", "ignore")(text) != "eager":
        raise ValueError(f"{text} works in the simulator only; use eager")
    return text


def existing_file(text: str) -> str:
    """Return a readable file's absolute path: the target may change its folder. Raises ValueError."""
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


@reader("PATH", file=True)
def costs(text: str) -> str:
    """The absolute path of a file of costs.

    The content is checked in the training process, which knows its device.
    """
    import gzip
    import json
    import zlib

    path = existing_file(text)
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except OSError as error:
        if error.strerror is not None:
            raise ValueError(f"{text!r} cannot be read: {error.strerror}") from None
        found = None  # not a gzip file
    except (EOFError, zlib.error, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("signatures"), dict):
        raise ValueError(f"{text!r} is not a complete file of costs written by dtrrun profile")
    return path


@reader("PATH")
def path(text: str) -> str:
    """A path, unchanged."""
    if not text:
        raise ValueError("the path is empty")
    return text


@reader("NAME")
def anything(text: str) -> str:
    """The text itself."""
    return text


@reader("SIZE")
def amount(text: str) -> str:
    """A size, or a percentage of an amount known only later. Returns the text unchanged."""
    parse_size(text, lambda: 1 << 40)
    return text


@reader("SIZE[:FOLDER]")
def host_budget(text: str) -> str:
    """auto, none, or a size with or without a folder. Returns the text with the folder's absolute path."""
    if text in (AUTO_HOST, NO_HOST):
        return text
    size, colon, folder = text.partition(":")
    parse_size(size)
    if not colon:
        return size
    if not folder:
        raise ValueError(f"{text!r} names no folder after the colon")
    path = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise ValueError(f"{folder!r} is not a folder")
    return f"{size}:{path}"


@reader("SIZE/s")
def bandwidth(text: str) -> int:
    """Bytes in a second."""
    size, slash, unit = text.partition("/")
    if not slash or unit.strip() != "s":
        raise ValueError(f"{text!r} is not a bandwidth; write one like 25GB/s")
    return parse_size(size)


@reader("NAME[,NAME...]")
def heuristics(text: str) -> list[str]:
    """Names; `paper` and `ablations` stand for several heuristics, `portfolio` for the best of many."""
    names: list[str] = []
    for name in map(str.strip, OUTSIDE_BRACKETS.split(text)):
        names += GROUPS.get(name) or [named_heuristic(name)]
    return list(dict.fromkeys(names))


@reader("B[,B...]")
def budgets(text: str) -> list[float | int]:
    """Shares of a peak (`0.5`, `50%`: float) and sizes (`2GB`: int, bytes)."""
    return list(dict.fromkeys(map(_budget, _parts(text))))


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _budget(text: str) -> float | int:
    if not re.fullmatch(r"[\d.]+\s*%?", text):
        return parse_size(text)
    value = number(text[:-1]) / 100 if text.endswith("%") else number(text)
    if not 0 < value <= 1:
        raise ValueError(
            f"{text!r} is neither a share of the peak, above 0 and at most 1, nor a size like 2GB"
        )
    return value


def choices(*names: str) -> Reader:
    """One or more of `names`."""
    one = choice(*names)
    return Reader("NAME[,NAME...]", lambda text: list(dict.fromkeys(map(one, _parts(text)))))


def whole_numbers(least: int) -> Reader:
    """One or more whole numbers, sorted."""
    one = whole_number(least)
    return Reader("N[,N...]", lambda text: sorted(set(map(one, _parts(text)))))


def reader_of(hint: Any) -> Reader:
    """Return the reader for a field's type: a switch, a choice, a whole number from 1 on, else a path."""
    if get_origin(hint) is Literal:
        return choice(*get_args(hint))
    return flag if hint is bool else whole_number(least=1) if hint in (int, int | None) else path


def number(text: str) -> float:
    """A finite number. Raises ValueError."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a number")
    return value
