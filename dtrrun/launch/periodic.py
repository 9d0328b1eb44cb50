"""What the launcher does every so often while the target runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress


class Periodic:
    """Calls a function every so many seconds in a thread; never if the system has no more threads."""

    def __init__(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._seconds, self._call = seconds, call
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"dtrrun-{name}", daemon=True)

    def start(self) -> None:
        with suppress(RuntimeError):
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._seconds):
            self._call()
