"""The random state that an operator saw, given back to it for its replay only.

On CUDA a replay draws from a state of its own, which takes the place of the program's for that long
(`graphsafe_set_state`). To set the program's seed or offset and put them back would not be the same: either
tells cuDNN's recurrent dropout to begin anew, with a seed that it draws (`reset_rnn_state` in ATen's
CUDAGeneratorImpl and native/cudnn/RNN.cpp).
"""

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
        generator = self._generator
        if generator.device.type == "cuda":
            spare = _spare(generator)
            _set(spare, self._state)
            self._before = generator.graphsafe_get_state()
            generator.graphsafe_set_state(spare)
        else:
            self._before = generator.get_state()
            generator.set_state(self._state)

    def __exit__(self, *exc: Any) -> None:
        if self._generator.device.type == "cuda":
            self._generator.graphsafe_set_state(self._before)
        else:
            self._generator.set_state(self._before)


def put_back(captured: tuple[Any, Any]) -> None:
    """Give a generator the state that it was captured in: what drew from it since is done again."""
    generator, state = captured
    if generator.device.type != "cuda" or (generator.initial_seed(), generator.get_offset()) != state:
        _set(generator, state)


_spares: dict[torch.device, Any] = {}


def _spare(generator: Any) -> Any:
    """A generator on the same device that nobody draws from, for replays: they run one at a time."""
    spare = _spares.get(generator.device)
    if spare is None:
        spare = _spares[generator.device] = torch.Generator(generator.device)
    return spare


def _set(generator: Any, state: Any) -> None:
    if generator.device.type == "cuda":
        generator.manual_seed(state[0])
        generator.set_offset(state[1])
    else:
        generator.set_state(state)
