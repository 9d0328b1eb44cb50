"""Out-of-memory observers: the program's are called only for errors that reach the program.

PyTorch's allocator calls them at each refusal, even if the operator is then retried after evictions. They
usually write a snapshot of the allocator to a file, which takes seconds. So calls are deferred until the
error reaches the program, or it is clear that none does. Observers cannot be detached from the allocator:
those attached before the session are called as before, and those attached during it keep working after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from dtrrun.runtime.patches.registry import Function, Patches

NAMES = ("_cuda_attach_out_of_memory_observer", "_cuda_attachOutOfMemoryObserver")
"""PyTorch has renamed this function."""

Observer = Callable[..., Any]


class OomObservers:
    """Defers calls of observers that are attached while installed."""

    def __init__(self) -> None:
        self._waiting: dict[int, Callable[[], Any]] = {}  # each observer's last call
        self._patches = Patches()
        self._installed = False

    def install(self) -> None:
        self._installed = True
        for name in NAMES:
            self._patches.wrap(torch._C, name, self._attaching, optional=True)

    def remove(self) -> None:
        self._installed = False
        self._patches.undo()
        self._waiting.clear()

    def _attaching(self, original: Function) -> Function:
        def attach(observer: Observer) -> Any:
            def refused(*args: Any) -> None:
                if self._installed:
                    self._waiting[id(refused)] = functools.partial(observer, *args)
                else:
                    observer(*args)

            return original(refused)

        return attach

    def survived(self) -> None:
        """Drop deferred calls: the operator got its memory after all."""
        self._waiting.clear()

    def reached_program(self) -> None:
        """Make deferred calls: the error of the last refusal reaches the program."""
        waiting, self._waiting = self._waiting, {}
        for call in waiting.values():
            call()
