"""Sets an option of the program to another value."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

PLACE = "{}"


def parse_template(text: str) -> list[str]:
    """Split `--batch-size {}` into words. Raises ValueError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}") from None
    if sum(word.count(PLACE) for word in words) != 1:
        raise ValueError(
            f"{text!r} needs exactly one {{}}, which stands for the value, as in '--batch-size {{}}'"
        )
    return words


def parse_range(text: str) -> tuple[int, int]:
    """Parse `8:512`. Raises ValueError."""
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ValueError(f"{text!r} is not a range of whole numbers from 1 on, such as 8:512")
    return int(low), int(high)


def with_value(target: Sequence[str], template: Sequence[str], value: int) -> list[str]:
    """Return the target's words with the option set: replaced where it occurs, else appended."""
    given = [word.replace(PLACE, str(value)) for word in template]
    name = template[0]
    for place, word in enumerate(target):
        if len(template) == 2 and template[1] == PLACE and name.startswith("-"):
            if word == name and place + 1 < len(target):
                return [*target[:place], *given, *target[place + 2 :]]
            if word.startswith(f"{name}="):
                return [*target[:place], f"{name}={value}", *target[place + 1 :]]
        elif len(template) == 1 and not name.startswith(PLACE) and _like(word, name):
            return [*target[:place], *given, *target[place + 1 :]]
    return [*target, *given]


def _like(word: str, template: str) -> bool:
    before, _, after = template.partition(PLACE)
    return word.startswith(before) and word.endswith(after)
