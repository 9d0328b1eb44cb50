"""Has a test see each kernel that a session runs, in Python (`Interposer.model`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dtrrun.runtime.dispatch.interposer import Interposer

Replay = Callable[[str, Callable[[], Any]], Any]


class Kernels:
    """Runs each kernel as it is, and has `replay` run what runs again."""

    def __init__(self, replay: Replay) -> None:
        self.replay = replay

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        compute: Callable[[], Any],
        *,
        again: bool,
    ) -> None:
        if again:
            self.replay(func._schema.name.replace("::", "."), compute)
        else:
            compute()


def use_replays(patch: pytest.MonkeyPatch, replay: Replay) -> None:
    """Have a function run the operators that run again in new sessions: replay(name, compute)."""
    patch.setattr(Interposer, "model", Kernels(replay))
