"""Locks that are released whatever happens, including an interrupt at any moment.

Python checks for signals when a function begins, after a call, and when a loop repeats. So steps that belong
together have none of these in between, and releasing can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrrun.core.graph import Version


class Locks:
    """The versions it takes stay locked until it is called, its context ends, or it dies.

    An interrupt may prevent a `with` or `finally` from running; then nothing refers to the object any longer.
    """

    __slots__ = ("taken",)

    def __init__(self) -> None:
        self.taken: list[Version] = []

    def take(self, versions: Iterable[Version]) -> None:
        """Lock each of these once more."""
        taken = self.taken
        for version in versions:
            version.locks += 1
            taken.append(version)

    def __call__(self) -> None:
        unlock(self.taken)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *exc: object) -> None:
        unlock(self.taken)

    def __del__(self) -> None:
        unlock(self.taken)


def unlock(taken: list[Version]) -> None:
    """Unlock each of these once, and empty the list. May be called again after an interrupt."""
    while taken:
        taken[-1].locks -= 1
        del taken[-1]
