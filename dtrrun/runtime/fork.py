"""A forked child (a data-loader worker) inherits the mode and the patches: it must not run under them."""

from __future__ import annotations

import os
from collections.abc import Callable

_before: Callable[[], None] | None = None
_after: Callable[[], None] | None = None
_registered = False


def watch(before: Callable[[], None], after_in_child: Callable[[], None]) -> None:
    """Call these around every fork, until `unwatch` (handlers of `os` can't be taken back: there is one)."""
    global _before, _after, _registered
    _before, _after = before, after_in_child
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_call_before, after_in_child=_call_after)
        _registered = True


def _call_before() -> None:
    if _before is not None:
        _before()


def _call_after() -> None:
    if _after is not None:
        _after()


def is_watched() -> bool:
    """Whether a session runs in this process."""
    return _before is not None


def unwatch() -> None:
    global _before, _after
    _before = _after = None
