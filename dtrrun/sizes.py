"""Amounts of memory as people write them: `6GB`, `6 GB`, `6G`, `1.5GiB`, `50%`. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable

UNITS = {"b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("", 1000), ("b", 1000), ("i", 1024), ("ib", 1024))
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+|%)?", re.IGNORECASE)


def parse_size(text: str, whole: Callable[[], int] | None = None) -> int:
    """Parse a size: a number with a unit, or a percentage of `whole()` bytes (of the device's memory).

    G and GB are 10^9 bytes, Gi and GiB 2^30, in upper or lower case, with or without a space before them.
    Fractions of a byte are dropped. Raises ValueError with a message for the user.
    """
    from decimal import Decimal  # not needed by every training process

    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write one like 6GB, 1.5GiB, 512MB or 50%")
    number, unit = Decimal(match[1]), (match[2] or "").lower()
    if not unit and number:
        raise ValueError(
            f"{text!r} has no unit; write {match[1]}MB, {match[1]}GB or {match[1]}B, as one word"
        )
    if unit == "%":
        if whole is None:
            raise ValueError(f"{text!r}: a percentage is not possible here; write a size like 6GB")
        size = int(number / 100 * whole())
    elif not unit or unit in UNITS:
        size = int(number * UNITS.get(unit, 1))
    else:
        raise ValueError(
            f"{text!r} has an unknown unit; known are B, kB, MB, GB, TB, KiB, MiB, GiB, TiB and %"
        )
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte")
    return size


AUTO_HOST, NO_HOST = "auto", "none"
"""Values of `--host-budget` that are no size."""


def parse_host(text: str) -> tuple[int, str]:
    """Return the bytes and the folder, perhaps "", of another value of `--host-budget`."""
    size, _, folder = text.partition(":")
    return parse_size(size), folder


def as_bytes(size: int | str | None) -> int | None:
    """Parse a budget given to a function: bytes, text such as "200MB", or None for no limit.

    Raises ValueError for anything else.
    """
    if isinstance(size, str):
        return parse_size(size)
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ValueError(f'{size!r} is not a budget; give bytes, or text such as "200MB"')
    return size


def format_size(size: int) -> str:
    """Format bytes in the largest decimal unit with a value of at least 1, to three digits: `1.5 GB`."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if abs(size) >= 1000**power:
            return (
                f"{size / 1000**power:.3g} {unit}"
                if size < 999.5 * 1000**power
                else f"{size // 1000**power} {unit}"
            )
    return f"{size} B"


def format_size_up(size: int) -> str:
    """Like `format_size`, but rounded up, so that the result is at least `size`."""
    step = 10 ** max(len(str(size)) - 3, 0)
    return format_size(-(-size // step) * step)
