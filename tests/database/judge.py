"""Runs one program plain and under dtrrun, with everything evicted that can be, and reports the outcome."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dtrrun.runtime.storage import storage_of
from tests.care import budget
from tests.conformance.programs import bits, difference
from tests.database.admitted import watched
from tests.database.replicas import tensors

EQUAL, PINNED, NONDETERMINISTIC, FAILED, CRASHED = "equal", "pinned", "nondeterministic", "failed", "crashed"
RANK = [EQUAL, PINNED, NONDETERMINISTIC, FAILED, CRASHED]

PINS = {
    "not replayable": "run once, never again (the table in `dtrrun/runtime/operators.py`)",
    "input exposed": "computed from memory that other code can reach, or from a tensor without plain storage",
    "updated in place": "written in place by an operator that also writes to memory nobody has set",
    "written outside": "by a composite operator, unseen (`dtrrun/runtime/patches/composites.py`)",
    "input lost": "made from a constant that the program let go of before memory ran short",
    "uninitialised": "memory that nothing has been written to yet",
    "read unseen": "small, and looked into by PyTorch before any operator reads it",
    "read by address": "brought back for native code that reads it without an operator",
    "no plain storage": "sparse, nested and quantized tensors: more than a geometry over a storage",
    "shared with a tensor without plain storage": "what such a tensor was made from",
}
"""The rules by which a result may stay in memory; any other reason is a failure."""


class Way(NamedTuple):
    """How a session runs: in which budget, and whether with care (`tests.care`)."""

    name: str
    budget_bytes: int | None = 1
    careful: bool = False


WAYS = (Way("inside 1 B, with care", careful=True), Way("inside 1 B"))
"""Everything is evicted, and what comes back is compared."""


@dataclass
class Verdict:
    """The outcome of one program: the status, why, and how many storages were evicted."""

    status: str = EQUAL
    reasons: list[str] = field(default_factory=list)
    evicted: int = 0


class Probe:
    """Passed to a program, which calls it between its parts; inspects what they leave behind."""

    def __init__(self, session: Any = None) -> None:
        self.session = session
        self.pins: set[str] = set()
        self.unevicted: set[str] = set()
        self.evicted = 0

    def __call__(self, *results: Any) -> None:
        """Evict everything that can be, and note which of `results` stayed, and why."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # a program's own mode must not see this
            torch.ones(1).add(1)
            if self.session is None:
                return
            self.session.ledger.collect_dead()
            for tensor in tensors(list(results)):
                self._look_at(tensor)

    def _look_at(self, tensor: torch.Tensor) -> None:
        if tensor._is_zerotensor():
            return  # has no memory
        try:
            found = storage_of(tensor)
        except (NotImplementedError, RuntimeError):
            self.pins.add("no plain storage")
            return
        record = self.session.ledger.version_of(found)
        if record is None or not record.nbytes:
            return  # no operator has made or seen the storage, or it is empty
        if not record.resident:
            self.evicted += 1
        elif tensor.is_nested or tensor.is_quantized:
            self.pins.add("no plain storage")
        elif record.operation is not None:
            self.unevicted.add("left in memory although it can be evicted")
        elif record.pin in PINS:
            self.pins.add(record.pin)
        else:
            self.unevicted.add(f"pinned: {record.pin}")


RAISED = "raised"
AGAIN = 100  # plain runs after a difference was found

Program = Callable[[Probe], Any]


def plain(program: Program) -> list[Any]:
    """Return the bits of a run without a session."""
    _scramble()
    return attempt(program, Probe())[1]


def attempt(program: Program, probe: Probe) -> tuple[Any, list[Any]]:
    """Return the result of a fresh run and its bits; an exception is a result, too."""
    torch.manual_seed(7)
    try:
        result = program(probe)
    except Exception as error:
        result = _told(error)
    try:
        return result, bits([result, torch.get_rng_state()])
    except RuntimeError as error:
        return None, bits(_told(error))


def _told(error: Exception) -> list[str]:
    return [RAISED, type(error).__name__, re.sub(r"0x[0-9a-f]+", "0x", str(error))]


def _scramble() -> None:
    """Fill free memory with other bytes than last time: reads of uninitialised memory then differ."""
    blocks = [
        torch.frombuffer(bytearray(_noise.randbytes(_noise.choice(SIZES))), dtype=torch.uint8).clone()
        for _ in range(_noise.randrange(1, 60))
    ]
    _noise.shuffle(blocks)
    del blocks[::3]


_noise = random.Random(1)
SIZES = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 192, 256, 320, 384, 512, 1024, 2048, 4096)  # bytes


def judge(case: Any) -> Verdict:
    """Compare a plain run of a case (`operators.Case`) with each of `WAYS`, and watch its operators."""
    program = case.program
    expected = plain(program)
    repeats = case.repeats and not difference(expected, plain(program))
    with watched() as unadmitted:
        plain(program)
    verdict = Verdict(reasons=unadmitted)
    pins: set[str] = set()
    for way in WAYS:
        found, probe, report = inside(program, way)
        verdict.evicted += probe.evicted
        told = difference(expected, found)
        if told and repeats:
            repeats = always_repeats(program, expected)
        if told and repeats:
            verdict.reasons.append(f"{way.name}: {told}{raised(found)}")
        verdict.reasons += [f"{way.name}: {text}" for text in sorted(probe.unevicted)]
        if repeats and report["mismatches"]:
            verdict.reasons.append(f"{way.name}: other bits after rematerialization: {report['mismatches']}")
        if verdict.reasons:
            verdict.status = FAILED
            return verdict
        pins |= probe.pins
        if report["native"]["read_by_address"]:
            pins.add("read by address")
    if not repeats:
        return Verdict(NONDETERMINISTIC, ["other bits each time"], verdict.evicted)
    if pins:
        verdict.status, verdict.reasons = PINNED, sorted(pins)
    return verdict


def always_repeats(program: Program, expected: list[Any]) -> bool:
    """Return whether plain runs always agree, since two could have agreed by chance."""
    return not any(difference(expected, plain(program)) for _ in range(AGAIN))


def raised(found: list[Any]) -> str:
    """Return the exception that a run ended with, as text; empty if none."""
    return f" {' '.join(found[1:3])}" if found[0] == repr(RAISED) else ""


def inside(program: Program, way: Way) -> tuple[list[Any], Probe, dict[str, Any]]:
    """Return a program's bits in a session, unchanged after its end; the probe; and the report."""
    _scramble()
    with budget(way.budget_bytes, "cpu", careful=way.careful, over_budget="evict", verify=True) as session:
        session._native.spoil_evicted(True)
        # Marks the program as training: otherwise all gradients would stay in memory, and none be recomputed.
        torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        probe = Probe(session)
        result, found = attempt(program, probe)
        report = session.report()
        generator = torch.get_rng_state()
    told = "" if result is None else difference(found, bits([result, generator]))
    return ([f"after the session's end: {told}"] if told else found), probe, report
