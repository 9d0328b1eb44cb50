"""Ends the session in forked children (data-loader workers), which inherit the interposer and the patches."""

from __future__ import annotations

import os
from collections.abc import Callable

Callback = Callable[[], None]

_callbacks: tuple[Callback, Callback, Callback] | None = None
_registered = False


def watch(before: Callback, after_in_parent: Callback, after_in_child: Callback) -> None:
    """Call these around every fork until `unwatch`.

    Handlers cannot be removed from `os`, so they are registered only once.
    """
    global _callbacks, _registered
    _callbacks = before, after_in_parent, after_in_child
    if not _registered and hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=lambda: _call(0), after_in_parent=lambda: _call(1), after_in_child=lambda: _call(2)
        )
        _registered = True


def _call(which: int) -> None:
    if _callbacks is not None:
        _callbacks[which]()


def is_watched() -> bool:
    """Return whether a session runs in this process."""
    return _callbacks is not None


def unwatch() -> None:
    global _callbacks
    _callbacks = None
