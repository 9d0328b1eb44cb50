"""The random state that an operator saw, restored for its replay only.

On a CPU the state of a generator is 5 kB, often more than was drawn from it. Consecutive small draws share a
state: each recipe keeps how far the generator has advanced since, and a replay advances a spare generator
equally far. (The generator is a Mersenne twister. Its state is a block of 624 words and a position in it;
when a block is used up, the next one is computed from it.)

On CUDA a replay draws from a separate state, which temporarily replaces the program's
(`graphsafe_set_state`). Setting the program's seed or offset and restoring them would not be equivalent:
either makes cuDNN's recurrent dropout start over, with a seed that it draws (`reset_rnn_state` in ATen's
CUDAGeneratorImpl and native/cudnn/RNN.cpp). `put_back` sets them through a generator that shares the state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from dtrrun.runtime import storage
from dtrrun.runtime.guards import below
from dtrrun.runtime.storage import storage_of, type_of

Captured = tuple[tuple[Any, Any], ...]
"""Generators with their captured states."""

# The layout of a CPU generator's state, as in ATen's CPUGeneratorImpl.
STATE_BYTES = 5056
WORDS = 624
BLOCK = slice(24, 24 + 8 * WORDS)
LONGEST = 52  # maximum number of blocks from a shared state to a recipe's: about 0.1 ms
SEARCHED = 16  # maximum number of blocks between draws that share a state


def capture(device: torch.device, generator: torch.Generator | None, nbytes: int = 0) -> Captured:
    """Return the generator that a random operator will use, with its state before the call.

    nbytes: bytes of the operator's results, which bound how far the next state can be.
    """
    if generator is None:
        generator = _default_cuda(device.index) if type_of(device) == "cuda" else torch.default_generator
    return ((generator, _state_of(generator, nbytes)),)


def capture_all(cuda: bool, generators: Sequence[torch.Generator], nbytes: int = 0) -> Captured:
    """Like `capture`, for an operator that may draw from any of its arguments or a default generator.

    cuda: whether the session's device is a GPU.
    """
    found = [torch.default_generator, *(map(_default_cuda, storage.OURS) if cuda else ()), *generators]
    return tuple([(generator, _state_of(generator, nbytes)) for generator in found])


def moved(captured: Captured) -> bool:
    """Return whether any of the generators has been drawn from since."""
    return any(_state_of(generator, 0) != state for generator, state in captured)


class replaying(list[tuple[Any, Any]]):
    """Context: captured generators are in the captured states, and afterwards in the program's again.

    The object itself is the list of generators with the program's states: it exists even if an interrupt
    comes before `__init__`, so `__del__` can rely on it.
    """

    __slots__ = ("_captured",)

    def __init__(self, captured: Captured) -> None:
        self._captured = captured

    def __enter__(self) -> None:
        try:
            for generator, state in self._captured:
                self._give(generator, state)
        except BaseException:
            self.__exit__()
            raise

    def _give(self, generator: Any, state: Any) -> None:
        if type_of(generator.device) == "cuda":
            spare = _spare(generator.device)
            _set(spare, state)
            self.append((generator, generator.graphsafe_get_state()))
            generator.graphsafe_set_state(spare)
        else:
            wanted = state.whole()
            self.append((generator, generator.get_state()))
            generator.set_state(wanted)

    def __exit__(self, *exc: Any) -> None:
        while self:  # last first: a generator may occur twice
            generator, state = self[-1]
            if type_of(generator.device) == "cuda":
                generator.graphsafe_set_state(state)
            else:
                generator.set_state(state)
            del self[-1]  # only now: after an interrupt the state is set again

    __del__ = __exit__  # an interrupt can prevent a `with` from exiting


class unmoved:
    """Context: draws from the CPU's default generator have no effect outside."""

    __slots__ = ("_state",)

    def __enter__(self) -> None:
        self._state = torch.default_generator.get_state()

    def __exit__(self, *exc: Any) -> None:
        torch.default_generator.set_state(self._state)


def put_back(captured: Captured) -> None:
    """Restore generators to their captured states, so that the program repeats the draws since then."""
    for generator, state in captured:
        if type_of(generator.device) != "cuda" or (generator.initial_seed(), generator.get_offset()) != state:
            _set(generator, state)


class Position:
    """The state of a CPU generator: a number of blocks after `start`, and the part outside the block."""

    __slots__ = ("blocks", "rest", "start")

    def __init__(self, start: torch.Tensor, blocks: int, rest: bytes) -> None:
        self.start = start  # a complete state, at any position in its block
        self.blocks = blocks
        self.rest = rest

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Position)
            and self.start is other.start
            and (self.blocks, self.rest) == (other.blocks, other.rest)
        )

    __hash__ = None  # type: ignore[assignment]

    def whole(self) -> torch.Tensor:
        """Return the state that `Generator.set_state` takes."""
        if not self.rest:
            return self.start
        spare = _spare(torch.device("cpu"))
        spare.set_state(self.start)
        if self.blocks:
            _advance(spare, self.blocks)
        state: torch.Tensor = spare.get_state()
        address = storage_of(state).data_ptr()
        ctypes.memmove(address, self.rest, BLOCK.start)
        ctypes.memmove(address + BLOCK.stop, self.rest[BLOCK.start :], STATE_BYTES - BLOCK.stop)
        return state


class _Trail:
    """The last position of a generator, from which the next one is searched."""

    __slots__ = ("blocks", "content", "position", "reach", "start", "state")

    def __init__(self, state: torch.Tensor, content: bytes) -> None:
        self.start = self.state = state
        self.blocks = 0
        self.reach = 0  # blocks that the draw from here can consume
        self._arrive(content)

    def _arrive(self, content: bytes) -> None:
        self.content = content
        rest = content[: BLOCK.start] + content[BLOCK.stop :]
        self.position = Position(self.start, self.blocks, rest)

    def follow(self, state: torch.Tensor, content: bytes) -> bool:
        """Move to another state if it is close. Return False if a new trail must begin."""
        steps = 0
        block = content[BLOCK]
        if block != self.content[BLOCK]:
            if self.reach > SEARCHED:
                return False
            spare = _spare(torch.device("cpu"))
            spare.set_state(self.state)
            found = b""
            while found != block:
                steps += 1
                if steps > self.reach or self.blocks + steps > LONGEST:
                    return False
                _advance(spare, 1)
                found = _bytes(spare.get_state())[BLOCK]
        self.state = state
        self.blocks += steps
        self._arrive(content)
        return True


_trails: dict[int, _Trail] = {}  # by the generator's id; only a hint, since any state may follow
TRAILS = 16


def _state_of(generator: Any, nbytes: int) -> Any:
    if type_of(generator.device) == "cuda":
        # Philox is counter-based: two integers are its whole state. They can't be read during a graph
        # capture.
        return generator.initial_seed(), generator.get_offset()
    state = generator.get_state()
    if type_of(state.device) != "cpu" or state.numel() != STATE_BYTES:
        return Position(state, 0, b"")  # another layout: no sharing
    content = _bytes(state)
    trail = _trails.get(id(generator))
    if trail is None or (content != trail.content and not trail.follow(state, content)):
        if len(_trails) >= TRAILS:
            _trails.clear()
        trail = _trails[id(generator)] = _Trail(state, content)
    if nbytes:
        trail.reach = nbytes // (4 * WORDS) + 2  # about one word per four bytes
    return trail.position


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(storage_of(state).data_ptr(), STATE_BYTES)


def _advance(generator: torch.Generator, blocks: int) -> None:
    """Advance a CPU generator by this many blocks."""
    with below(), torch._C.DisableTorchFunction():
        torch.empty(WORDS * blocks, dtype=torch.int32, device="cpu").random_(generator=generator)


_spares: dict[torch.device, Any] = {}


def _spare(device: torch.device) -> Any:
    """Return a generator used only for replays, which run one at a time."""
    spare = _spares.get(device)
    if spare is None:
        spare = _spares[device] = torch.Generator(device)
    return spare


def _default_cuda(index: int | None) -> Any:
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if index is None else index]


def _set(generator: Any, state: Any) -> None:
    if type_of(generator.device) == "cuda":
        # Through another generator that shares the state: on the program's own, either call would make
        # cuDNN's recurrent dropout start over.
        shared = generator.graphsafe_get_state()
        shared.manual_seed(state[0])
        shared.set_offset(state[1])
    else:
        generator.set_state(state.whole())
