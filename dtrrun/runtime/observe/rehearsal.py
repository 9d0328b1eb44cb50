"""Rehearses the rest of a backward pass in the simulator: in which budget it runs, and how long it takes.

The recorded operations are in memory when a budget turns out to be too small. The simulator starts from them,
as the session is at that moment, with the operator that did not fit. The backward pass of what has run so far
is guessed: each operator reads what autograd has kept of its inputs, and makes gradients of their size. The
decisions are those of the session's own core.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from math import inf
from time import thread_time
from typing import Any, NamedTuple

from dtrrun import bindings
from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Operation, Signature, Version
from dtrrun.runtime.observe import snapshot

MOST_OPERATIONS = 20_000
"""With more, a rehearsal would take too long."""
SECONDS = 2.0
"""No further budget is tried after this much processor time."""
LIMIT = 3.0
"""A budget is too small if the rest of the step takes more than this multiple of its own work."""
LIMIT_WITH_COPIES = inf
"""The same where all may leave for the host, and copies take what they take."""
CLOSE = 0.02
"""The budget found is at most this share above the least that runs."""
READS_NOTHING = {
    "aten.add",
    "aten.add_",
    "aten.sub",
    "aten.sub_",
    "aten.cat",
    "aten.stack",
    "aten.clone",
    "aten._to_copy",
    "aten.copy_",
    "aten.mean",
    "aten.sum",
}
"""Operators whose backward reads only the gradient of their result."""


class Found(NamedTuple):
    """nbytes: the budget. plain_bytes: the most that the tensors take together, evicted or not. slowdown_in:
    returns how many times as long as its own work the rest of the backward pass takes in a budget that was
    there from the beginning."""

    nbytes: int
    plain_bytes: int
    slowdown_in: Callable[[int], float]


class Maker(NamedTuple):
    """A recorded operation, and the versions that it has made."""

    operation: Operation
    made: list[Version]

    @property
    def is_backward(self) -> bool:
        return "backward" in self.operation.signature.operator.name


class UnderWay(NamedTuple):
    """The call that did not fit, and the number of its result in the log."""

    signature: Signature
    inputs: Sequence[Version]
    number: int

    def is_of(self, one: Maker) -> bool:
        """Return whether this is the backward of an operation, as far as names and inputs tell."""
        forward, found, _ = self.signature.operator.name.partition("_backward")
        read = set(map(id, self.inputs))
        known = {*map(id, one.made), *map(id, one.operation.inputs)}
        return bool(found) and forward == one.operation.signature.operator.name and not read.isdisjoint(known)


class Rehearsal:
    """Rehearses backward passes for `observe.expected`."""

    def __init__(self, dtr: DTR, heuristic: str, inputs: Sequence[Version]) -> None:
        """heuristic: the name of the session's own, which may have no foresight. inputs: of the call that did
        not fit."""
        self._dtr, self._heuristic, self._inputs = dtr, heuristic, inputs

    def backward(
        self,
        failed: Signature,
        trained: Container[int],
        without: Mapping[int, int],
        stays: Container[int],
        to_come: int,
    ) -> Found | None:
        """Return the least budget in which the rest of a backward pass runs; None if that is unknown.

        failed: the call that did not fit. trained: the keys of parameters that get gradients. without: the
        bytes of those that have none yet. stays: the keys of all that is going to stay in memory, even what
        could be computed again in a first step. to_come: bytes of gradients and state that do not exist yet.
        Raises what the simulator raises.
        """
        if not bindings.is_there():
            return None
        rest = _Rest(self._dtr, self._inputs, stays)
        if len(rest.makers) > MOST_OPERATIONS:
            return None
        rest.constant(to_come)
        made = rest.call(failed.operator.name, failed.cost, self._inputs, [failed.output_bytes])
        rest.backward(trained, without, UnderWay(failed, self._inputs, *made))
        return self._least(rest.log, rest.plain_peak_bytes)

    def _least(self, log: Sequence[Any], plain_bytes: int) -> Found | None:
        from dtrrun.simulator.live import predict

        started = thread_time()
        low, most = self._dtr.ledger.limit, LIMIT if self._dtr.ledger.host is None else LIMIT_WITH_COPIES
        free = predict(log, None, self._heuristic)
        high = max(free.peak_bytes, low + 1)

        def slowdown_in(nbytes: int) -> float:
            # Without a limit, too, what the smaller budget has evicted is computed again.
            return 1 + max(predict(log, nbytes, self._heuristic, limit=inf).overhead - free.overhead, 0.0)

        while high - low > CLOSE * high:
            if thread_time() - started > SECONDS:
                return None
            tried = (low + high) // 2
            told = predict(log, tried, self._heuristic, limit=most)
            if told.status == "ok":
                high = tried
            else:
                low = tried
        return Found(high, plain_bytes, slowdown_in)


class _Rest:
    """The log of the rest of a step, for the simulator."""

    def __init__(self, dtr: DTR, inputs: Sequence[Version], stays: Container[int]) -> None:
        from dtrrun.simulator.log import START, Annotate, Call, Constant, Instruction, Release

        self._annotate, self._call, self._constant, self._release = Annotate, Call, Constant, Release
        ledger = dtr.ledger
        self.numbers = {key: place + 1 for place, (key, _) in enumerate(ledger.versions.items())}
        self._last = len(self.numbers)
        self.makers = _makers([*ledger.versions.values(), *inputs])
        state = snapshot.state(dtr, self.numbers)
        for told, key in zip(state["records"], self.numbers, strict=False):  # the storages come first
            if key in stays:
                told["op"] = None
        self.log: list[Instruction] = [Annotate(START, snapshot.head(dtr, 1, 1, "measured"))]
        self.log.append(Annotate("STATE", state))
        self._ledger = ledger
        self._gradients: dict[int, tuple[int, int]] = {}  # number and bytes, by id of the version
        self._sizes = {self.numbers[key]: one.nbytes for key, one in ledger.versions.items()}
        self._plain_bytes = self.plain_peak_bytes = ledger.plain_bytes

    # -- instructions --

    def constant(self, nbytes: int) -> None:
        if nbytes:
            self._last += 1
            self._allocate(self._last, nbytes)
            self.log.append(self._constant("", nbytes, {"pin": "gradient", "storage": self._last}))

    def call(self, name: str, cost: int, read: Iterable[Version | int], made: Sequence[int]) -> list[int]:
        """Add an operator. read: versions, or numbers of storages. made: bytes. Returns their numbers."""
        numbers = [one if isinstance(one, int) else self.numbers.get(one.key, 0) for one in read]
        new = [self._last + 1 + place for place in range(len(made))]
        self._last += len(made)
        for number, nbytes in zip(new, made, strict=True):
            self._allocate(number, nbytes)
        out = [
            [place, number, nbytes, ""] for place, (number, nbytes) in enumerate(zip(new, made, strict=True))
        ]
        facts = {"in": [one for one in numbers if one], "bytes": sum(made), "out": out}
        self.log.append(self._call(name, (), (), (), (), max(cost, 1), facts))
        return new

    def release(self, numbers: Iterable[int]) -> None:
        for one in numbers:
            self.log.append(self._release("", {"storage": one}))
            self._plain_bytes -= self._sizes.pop(one)

    def _allocate(self, number: int, nbytes: int) -> None:
        self._sizes[number] = nbytes
        self._plain_bytes += nbytes
        self.plain_peak_bytes = max(self.plain_peak_bytes, self._plain_bytes)

    # -- the backward pass --

    def backward(self, trained: Container[int], without: Mapping[int, int], call: UnderWay) -> None:
        """Add the likely rest of the backward pass that is under way. The other arguments are those of
        `Rehearsal.backward`."""
        began = min(self._made_in_backward(), default=self._ledger.age)
        flows: set[int] = set()  # ids of versions that get a gradient
        passed = []
        for one in self.makers:
            if one.is_backward or one.made[0].age >= began:
                continue
            if any(made.key in trained for made in one.made):  # it has made a parameter, or filled it
                continue
            if any(source.key in trained or id(source) in flows for source in one.operation.inputs):
                flows.update(map(id, one.made))
                passed.append(one)
        # The constant that stands for what is to come is there from the beginning, but gradients are not.
        read = {source.key for one in passed for source in one.operation.inputs}
        self._coming = {key: nbytes for key, nbytes in without.items() if key in read}
        self._plain_bytes -= sum(self._coming.values())
        place = next((place for place in reversed(range(len(passed))) if call.is_of(passed[place])), None)
        if place is not None:  # autograd has been through all that came later
            self._finish(passed[place], call, trained, flows)
            del passed[place:]
        for one in reversed(passed):
            self._backward_of(one, trained, flows)

    def _finish(self, one: Maker, call: UnderWay, trained: Container[int], flows: set[int]) -> None:
        """The call that did not fit is the backward of this operation: it makes its inputs' gradients."""
        for source in dict.fromkeys(one.operation.inputs):
            if source.key in trained:
                self._allocate(0, self._coming.pop(source.key, 0))
            elif id(source) in flows:
                self._gradients[id(source)] = call.number, call.signature.output_bytes
                break
        given = [
            two for maker in self.makers if maker.is_backward for two in maker.made if two in call.inputs
        ]
        done = [two for two in (*given, *one.made) if self._is_alive(two)]
        self.release([number for two in done if (number := self.numbers.pop(two.key, 0))])

    def _made_in_backward(self) -> Iterable[int]:
        """Return the ages of what is known to have been made in this backward pass."""
        since = self._ledger.step_age
        return (made.age for one in self.makers if one.is_backward for made in one.made if made.age >= since)

    def _backward_of(self, one: Maker, trained: Container[int], flows: set[int]) -> None:
        signature = one.operation.signature
        name, cost = signature.operator.name, signature.cost
        alive = [made for made in one.made if self._is_alive(made)]
        if not alive and not any(id(made) in self._gradients for made in one.made):
            return  # its backward has run
        given = []
        for made in one.made[:1] if len(one.made) > 1 else one.made:
            number, _ = self._gradients.pop(id(made), (0, 0))
            given.append(number or self.call("gradient", 0, (), [made.nbytes])[0])
        inputs = list(dict.fromkeys(one.operation.inputs))
        kept = [] if name in READS_NOTHING else [two for two in inputs if self._is_alive(two)]
        kept += (
            []
            if name in READS_NOTHING
            else [two for two in alive if two is not one.made[0] or len(inputs) == 1]
        )
        for source in inputs:
            if source.key in trained:
                self._allocate(0, self._coming.pop(source.key, 0))
                self.release(
                    self.call(name, cost, [*given, *(two for two in kept if two is not source)], [0])
                )
            elif id(source) in flows:
                reads = [two for two in kept if two is not source or len(inputs) == 1]
                (number,) = self.call(name, cost, [*given, *reads], [source.nbytes])
                self._add(source, number)
        self.release([*given, *(number for made in alive if (number := self.numbers.pop(made.key, 0)))])

    def _add(self, source: Version, number: int) -> None:
        """Note the gradient of a version, which is a sum if it has one already."""
        before = self._gradients.get(id(source))
        if before is not None:
            (total,) = self.call("sum", 0, [before[0], number], [source.nbytes])
            self.release([before[0], number])
            number = total
        self._gradients[id(source)] = number, source.nbytes

    def _is_alive(self, one: Version) -> bool:
        return one.key in self.numbers and self._ledger.versions.get(one.key) is one


def _makers(versions: list[Version]) -> list[Maker]:
    """Return the operations behind these versions in the program's order."""
    found: dict[int, Maker] = {}
    seen: set[int] = set()
    pending = list(versions)
    while pending:
        one = pending.pop()
        if id(one) in seen or one.operation is None:
            continue
        seen.add(id(one))
        maker = found.get(id(one.operation))
        if maker is None:
            found[id(one.operation)] = maker = Maker(one.operation, [])
            pending += one.operation.inputs
        maker.made.append(one)
    for maker in found.values():
        maker.made.sort(key=lambda one: one.nbytes, reverse=True)
    return sorted(found.values(), key=lambda one: min((made.age, made.mutations) for made in one.made))
