"""A dispatch mode belongs to one thread: new threads get it at their start.

`threading.Thread._bootstrap_inner` is the first Python that runs in a new thread; there is no public
hook that can enter a context there. Threads that PyTorch's autograd engine starts carry the mode themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Threads:
    """Enters `mode()` in every thread that starts while installed; `noticed` is told of the first."""

    def __init__(self, mode: Callable[[], Any], noticed: Callable[[], None]) -> None:
        self._mode = mode
        self._noticed = noticed

    def install(self) -> None:
        self._original = original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        current, noticed = self._mode, self._noticed

        def bootstrap(thread: threading.Thread) -> None:
            mode = current()
            if mode is None:
                original(thread)
                return
            noticed()
            with mode:
                original(thread)

        threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]

    def remove(self) -> None:
        threading.Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]
