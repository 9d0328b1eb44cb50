"""Logs the operators of a program on an absent GPU, as `observe.recorder` does those of a session.

Every storage's birth and death is logged from the program's start, rounded as CUDA's caching allocator
rounds. What an operator costs is not known here: the log has what it computes and moves (`WORK`), from which
`dtrrun.profiling.cards` computes its time on any card.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from dtrrun.runtime.dispatch.arguments import covers, is_leaf, outputs_of
from dtrrun.runtime.observe.step_log import FORMAT, Facts, StepLog, open_log
from dtrrun.runtime.observe.training_memory import GRADIENT
from dtrrun.runtime.operators import Operator, operator_of
from dtrrun.runtime.storage import CUDA_ROUNDING, own_storage_of
from dtrrun.simulator.log import NOTE, WORK

BATCH = "loaded or copied"
"""The pin of what comes from the CPU (`core/pin.h`): nothing can compute it again."""
WATCHED = "_dtrrun_watched"
FP32, TF32, HALF = "fp32", "tf32", "bf16"


class Recorder:
    """Writes the log, and counts what is allocated. now, most: bytes."""

    def __init__(self, path: str | None) -> None:
        """path: of the log; None: only count."""
        self._log = None if path is None else open_log(path)
        self._numbers: dict[int, int] = {}  # by address of the storage
        self._computed: set[int] = set()
        self._last = 0
        self._died: deque[int] = deque()
        self._sizes: dict[int, int] = {}
        self._values: dict[int, float] = {}
        self._notes: set[str] = set()
        self.now = self.most = 0
        if self._log is not None:
            zeros = dict.fromkeys(("clock", "age", "step_age", "former_step_age", "step_work"), 0)
            about = {"format": FORMAT, "step": 1, "last": None, "cost": "card", "torch": torch.__version__}
            self._log.annotate("START", {**about, "device": "cuda", **zeros})
            self._log.annotate("STATE", {"records": [], "ops": [], "small": []})

    # -- storages --------------------------------------------------------------------------------

    def _number_of(self, tensor: torch.Tensor) -> int | None:
        return self._numbers.get(own_storage_of(tensor)._cdata)

    def _born(self, tensor: torch.Tensor) -> int:
        storage = own_storage_of(tensor)
        self._last += 1
        number, address = self._last, storage._cdata
        nbytes = -(-storage.nbytes() // CUDA_ROUNDING) * CUDA_ROUNDING
        self._numbers[address], self._sizes[number] = number, nbytes
        weakref.finalize(storage, self._dies, address, number).atexit = False
        self.now += nbytes
        self.most = max(self.most, self.now)
        return number

    def _dies(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self.now -= self._sizes[number]
        self._values.pop(number, None)
        self._computed.discard(number)
        self._died.append(number)

    def _flush(self) -> StepLog | None:
        while self._died:
            number = self._died.popleft()
            del self._sizes[number]
            if self._log is not None:
                self._log.released(number)
        return self._log

    def value_of(self, tensor: torch.Tensor) -> float | None:
        """Return what all elements of a tensor are, if it has been filled and not been written to since."""
        number = self._number_of(tensor)
        return None if number is None else self._values.get(number)

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Note that all elements of a tensor have this value."""
        number = self._number_of(tensor)
        if number is not None:
            self._values[number] = value

    def arrives(self, tensor: torch.Tensor) -> None:
        """Note a tensor that comes from the CPU."""
        number = self._born(tensor)
        if (log := self._flush()) is not None:
            nbytes = self._sizes[number]
            log.constant(number, nbytes, {"pin": BATCH, "exposed": False, "storage": number})

    def note(self, text: str) -> None:
        """Note, once, why what is counted may differ from what there will be."""
        if text not in self._notes:
            self._notes.add(text)
            if (log := self._flush()) is not None:
                log.annotate(f"{NOTE}{text}")

    def step_ended(self, count: int) -> None:
        if (log := self._flush()) is not None:
            log.annotate("STEP", {"step": count})

    def close(self) -> None:
        """Complete the log. Raises OSError."""
        log = self._flush()
        self._log = None
        if log is not None:
            log.close()

    def discard(self) -> None:
        if self._log is not None:
            self._log.discard()
            self._log = None

    # -- operators -------------------------------------------------------------------------------

    def ran(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, is_here: Here) -> None:
        """Log an operator that has run. is_here: whether a tensor is on the GPU."""
        operator = operator_of(func)
        holes, places = _holes(args, kwargs, is_here)
        for tensor in holes:
            if self._number_of(tensor) is None:  # made where nobody saw it
                self.arrives(tensor)
            if tensor.requires_grad and is_leaf(tensor):
                self._watch_gradient(tensor)
        numbers = [self._numbers[own_storage_of(one)._cdata] for one in holes]
        written = _written(operator, places, numbers)
        self._flush()  # what died before, and is not an input
        facts: Facts = {
            "in": numbers,
            "signature": operator.name,
            WORK: _work(func, args, kwargs, result, holes),
        }
        made: list[tuple[int, int, Any]] = []
        views: list[tuple[int, Any]] = []
        out: list[Any] = []
        for where, one in enumerate(outputs_of(result, [])):
            if not is_here(one):
                continue
            number = self._number_of(one)
            if number is not None:
                views.append((number, _geometry(one)))
                continue
            number = self._born(one)
            made.append((number, self._sizes[number], _geometry(one)))
            out.append([where, number, self._sizes[number], ""])
        facts["bytes"] = sum(nbytes for _, nbytes, _ in made) + facts[WORK][3]
        if out:
            facts["out"] = out
        facts |= _flags(operator, bool(made))
        if leaves := [hole for hole, one in enumerate(holes) if one.requires_grad and is_leaf(one)]:
            facts["leaves"] = leaves
        if written:
            facts["written"] = written
            whole = [
                [place, self._sizes[numbers[its[0]]]]
                for place, its in enumerate(written)
                if operator.overwrites and covers(holes[its[0]]) and numbers.count(numbers[its[0]]) == 1
            ]
            if whole:
                facts["overwritten"] = whole
        if (split := _list_places(operator, args, kwargs, is_here)) is not None:
            facts["places"] = split
        if statistics := _statistics(operator, args, places):
            facts["statistics"] = statistics
            facts["updates"] = True
        changed = [numbers[its[0]] for its in written]
        for number in changed:
            self._values.pop(number, None)
        if self._log is not None:
            self._log.call(
                operator.name,
                [(number, _geometry(one)) for number, one in zip(numbers, holes, strict=True)],
                made,
                [view for view in views if view[0] not in changed],
                [number for number in changed if number in self._computed],
                0,
                facts,
            )
        self._computed.update(number for number, _, _ in made)

    def _watch_gradient(self, leaf: torch.Tensor) -> None:
        if torch.is_grad_enabled() and leaf.__dict__.get(WATCHED) != id(leaf):  # a copy has the entry, too
            leaf.__dict__[WATCHED] = id(leaf)
            leaf.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, leaf: torch.Tensor) -> None:
        number = None if leaf.grad is None else self._number_of(leaf.grad)
        if number is not None and (log := self._flush()) is not None:
            log.annotate("PIN", {"storage": number, "why": GRADIENT})


Here = Callable[[torch.Tensor], bool]


def _holes(
    args: Sequence[Any], kwargs: dict[str, Any], is_here: Here
) -> tuple[list[torch.Tensor], dict[int | str, list[int]]]:
    """Return the tensors on the GPU among the arguments, and the numbers of those in each argument."""
    holes: list[torch.Tensor] = []
    places: dict[int | str, list[int]] = {}
    given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for place, value in given:
        own = [one for one in outputs_of(value, []) if is_here(one)]
        if own:
            places[place] = [*range(len(holes), len(holes) + len(own))]
            holes += own
    return holes, places


def _list_places(
    operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], is_here: Here
) -> list[int] | None:
    """Return `core.operator.Call.places` of a call."""
    if not operator.splits:
        return None
    return _places_in_lists(
        (
            [one for one in outputs_of(value, []) if is_here(one)],
            len(value) if isinstance(value, (list, tuple)) else 0,
        )
        for value in (*args, *kwargs.values())
    )


def _written(operator: Operator, places: dict[int | str, list[int]], numbers: list[int]) -> list[list[int]]:
    """Return the holes of each storage that an operator writes to."""
    found: dict[int, list[int]] = {}
    for place in operator.mutates:
        for hole in places.get(place, ()):
            found.setdefault(numbers[hole], []).append(hole)
    return [*found.values()]


def _statistics(operator: Operator, args: Sequence[Any], places: dict[int | str, list[int]]) -> list[int]:
    rule = operator.statistics
    if rule is None or not rule.updates:
        return []
    if rule.flag is not None and (rule.flag >= len(args) or not args[rule.flag]):
        return []
    return [hole for position in rule.positions for hole in places.get(position, ())]


def _flags(operator: Operator, made: bool) -> Facts:
    view = operator.only_views and not made
    flags = {
        "view": view,
        "short": view and operator.simple,
        "untouching": operator.untouching,
        "once": not operator.replayable,
        "uninitialised": operator.uninitialised,
        "reshapes": operator.reshapes_storage,
        "shrinks": not (operator.view or (operator.mutates and not operator.grows)),
    }
    return {name: True for name, value in flags.items() if value}


def _geometry(tensor: torch.Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _work(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any, holes: Sequence[torch.Tensor]
) -> list[Any]:
    """Return the value of `WORK`, as far as it is known."""
    operator = operator_of(func)
    if operator.only_views or operator.uninitialised:
        return [0, FP32, 0, 0]
    results = outputs_of(result, [])
    moved = sum(map(_touched, (*holes, *results)))
    flops, precision = 0, FP32
    count = flop_registry.get(func.overloadpacket)
    if count is not None:
        with suppress(Exception):  # a formula that does not know this call
            flops = int(count(*args, **kwargs, out_val=result))
        precision = _precision(func, holes)
    return [flops, precision, moved, _workspace(operator, holes, results)]


def _workspace(operator: Operator, holes: Sequence[torch.Tensor], results: Sequence[Any]) -> int:
    """Return the workspace of a convolution: cuDNN copies both sides into another layout, if they need it.

    So it was on an H200, to a few MB, for the convolutions of U-Net and DenseNet.
    """
    if not operator.convolves or len(holes) < 2:
        return 0
    sides = holes[:2] if "backward" in operator.name else (holes[0], *results[:1])
    if sides[0].dim() != 4 or sides[0].is_contiguous(memory_format=torch.channels_last):
        return 0
    return sum(map(_touched, sides))


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that a kernel reads, each element once."""
    return min(tensor.numel() * tensor.element_size(), own_storage_of(tensor).nbytes())


def _precision(func: Any, holes: Sequence[torch.Tensor]) -> str:
    """Return in which precision a GPU multiplies matrices for this call."""
    if holes and holes[0].dtype in (torch.float16, torch.bfloat16):
        return HALF
    convolves = "conv" in func.overloadpacket.__name__
    if convolves:
        return TF32 if torch.backends.cudnn.allow_tf32 else FP32
    return TF32 if torch.backends.cuda.matmul.allow_tf32 else FP32


def _places_in_lists(arguments: Iterable[tuple[Sequence[torch.Tensor], int]]) -> list[int] | None:
    """Return the same, for an operator that can be split.

    arguments: the tensors of each argument, and the length of the list that it is; 0 if it is none.
    """
    places: list[int] = []
    lengths = set()
    for tensors, length in arguments:
        if not length:
            places += [-1] * len(tensors)
            continue
        lengths.add(length)
        if tensors and (len(tensors) != length or not _are_alike(tensors)):
            return None
        places += range(len(tensors))
    return places if len(lengths) == 1 and max(places, default=-1) >= 0 else None


def _are_alike(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether part of a list of tensors takes the same kernel as the list (`native/split_lists.h`)."""
    first = tensors[0]
    return not first.is_cuda or all(
        (one.dtype, one.device) == (first.dtype, first.device) and one.is_contiguous() for one in tensors
    )
