"""The random state that an operator saw, given back to it for its replay only."""

from __future__ import annotations

from typing import Any

import torch


def capture(device: torch.device, generator: torch.Generator | None) -> tuple[Any, Any]:
    """The generator that a random operator will use, and its state before the call."""
    if generator is None:
        if device.type == "cuda":
            torch.cuda.init()
            index = torch.cuda.current_device() if device.index is None else device.index
            generator = torch.cuda.default_generators[index]
        else:
            generator = torch.default_generator
    if generator.device.type == "cuda":
        # Philox is counter-based: two integers are its whole state. They can't be read in a graph's capture.
        return generator, (generator.initial_seed(), generator.get_offset())
    return generator, generator.get_state()


class replaying:
    """Context: the captured generator is in its captured state; afterwards where the program left it."""

    __slots__ = ("_before", "_generator", "_state")

    def __init__(self, captured: tuple[Any, Any]) -> None:
        self._generator, self._state = captured

    def __enter__(self) -> None:
        self._before = _get(self._generator)
        _set(self._generator, self._state)

    def __exit__(self, *exc: Any) -> None:
        _set(self._generator, self._before)


def put_back(captured: tuple[Any, Any]) -> None:
    """Give a generator the state that it was captured in: what drew from it since is done again."""
    _set(*captured)


def _get(generator: Any) -> Any:
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _set(generator: Any, state: Any) -> None:
    if generator.device.type == "cuda":
        generator.manual_seed(state[0])
        generator.set_offset(state[1])
    else:
        generator.set_state(state)
