"""Refuses Python flags that would disable our hook in the target, rather than run without a budget."""

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
    """Raise LaunchError if `words`, a Python command line, contains a flag that disables us."""
    for letter in _flags(words[1:]):
        if letter in WHY:
            raise LaunchError(f"{WHY[letter]}, which dtrrun needs; leave -{letter} out")


def _flags(words: Sequence[str]) -> Iterator[str]:
    """Yield Python's own one-letter flags, as its command-line parser sees them."""
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
