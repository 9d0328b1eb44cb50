"""Python's flags that would keep our hook out of the target: refused, rather than run without a budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dtrrun.launch.errors import LaunchError

WHY = {
    "I": "-I (isolated mode) makes Python ignore PYTHONPATH",
    "E": "-E makes Python ignore PYTHONPATH",
    "S": "-S keeps Python from importing sitecustomize",
}
_WITH_VALUE = "WX"  # the value is the rest of the word, or the next word
_LAST = "cm"  # what follows belongs to the program


def refuse_flags(words: Sequence[str]) -> None:
    """Raise LaunchError where `words`, a Python command line, holds a flag that switches us off."""
    for letter in _flags(words[1:]):
        if letter in WHY:
            raise LaunchError(f"{WHY[letter]}, which dtrrun needs; leave -{letter} out")


def _flags(words: Sequence[str]) -> Iterator[str]:
    """The one-letter flags of Python itself, as its own command-line parser sees them."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--check-hash-based-pycs":
            rest = rest[1:]
        if word.startswith("--") and len(word) > 2:
            continue
        if not word.startswith("-") or word in ("-", "--"):
            return
        for place, letter in enumerate(word[1:], start=2):
            if letter in _LAST:
                return
            if letter in _WITH_VALUE:
                rest = rest if word[place:] else rest[1:]
                break
            yield letter
