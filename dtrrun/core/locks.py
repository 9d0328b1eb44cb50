"""Locks that are released whatever happens, including an interrupt at any moment.

Python checks for signals when a function begins, after a call, and when a loop repeats. So steps that belong
together have none of these in between, and releasing can be repeated.
"""

from __future__ import annotations

from collections.abc import Iterable

from dtrrun.core.graph import Version


class Locks(list[Version]):
    """Keeps the versions that it takes locked until it is called, its context ends, or it dies.

    An interrupt may prevent a `with` or `finally` from running; then nothing refers to the object any longer.
    It is a list itself, because an interrupt may also prevent an `__init__` from setting what dies with it.
    """

    __slots__ = ()

    def take(self, versions: Iterable[Version]) -> None:
        """Lock each of these once more."""
        for version in versions:
            version.locks += 1
            self.append(version)

    def __call__(self) -> None:
        unlock(self)

    def __enter__(self) -> Locks:
        return self

    def __exit__(self, *exc: object) -> None:
        unlock(self)

    def __del__(self) -> None:
        # It is nearly always empty. Python drops an interrupt that arrives here, so this is kept short.
        if self:
            unlock(self)


def unlock(taken: list[Version]) -> None:
    """Unlock each of these once, and empty the list. May be called again after an interrupt."""
    while taken:
        taken[-1].locks -= 1
        del taken[-1]
