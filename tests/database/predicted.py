"""The bytes that operators are expected to take, and what they take: `python -m tests.database.predicted`.

Samples of PyTorch's operator database run in a session with room for everything. For each operator that they
call, forward and backward, the prediction by which room would have been made is compared with the new memory.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

import dtrrun
from dtrrun.core.observer import Observer
from dtrrun.runtime.storage import size_of
from tests.database import operators
from tests.database.judge import Probe
from tests.database.operators import Case

AMPLE = 1 << 50
SLACK = 1024  # bytes that a prediction may be too high whatever the factor

FACTORIES = "factories"
"""A unit besides those of the database, which calls few of them with a generator."""

DATA = "how much it makes depends on the data, of which the most is expected, or nothing is known"
UNKNOWN = "PyTorch has no shape function for it: as much as the inputs is expected of the first call"
RESERVED = "its shape function gives no sizes for `out=`, which has its memory already"

EXCEPTIONS = {
    "aten.bincount": DATA,
    "aten.nonzero": DATA,
    "aten.unique_dim": DATA,
    "aten.unique_consecutive": DATA,
    "aten.masked_select": DATA,
    "aten.linalg_lstsq": DATA,
    "aten._ctc_loss": DATA,
    "aten._ctc_loss_backward": UNKNOWN,
    "aten.geqrf": UNKNOWN,
    "aten.histogram": UNKNOWN,
    "aten._histogramdd_bin_edges": UNKNOWN,
    "aten._histogramdd_from_bin_cts": UNKNOWN,
    "aten._histogramdd_from_bin_tensors": UNKNOWN,
    "aten._native_batch_norm_legit.out": RESERVED,
    "aten._native_batch_norm_legit.no_stats_out": RESERVED,
    "aten._scaled_mm.out": RESERVED,
    "aten._scaled_mm_v2.out": RESERVED,
    "aten.addbmm_": "writes in place, but allocates memory anew where the inputs are broadcast",
}
"""Operators, or single overloads, whose predictions are known to be wrong, and why."""


class Prediction(NamedTuple):
    """For one call: its operator, predicted and actual new bytes."""

    operator: str
    predicted: int
    real: int
    case: str

    @property
    def wrong(self) -> str:
        if self.real > self.predicted:
            return "too low"
        if self.predicted > 2 * self.real + SLACK:
            return "too high"
        return ""


@contextmanager
def watched(found: list[Prediction], case: str) -> Iterator[None]:
    """Watch every operator inside, and add predictions to `found`."""
    with dtrrun.budget(AMPLE, device="cpu") as session:
        session.ledger.observers.append(Watch(session.ledger, found, case))
        yield


class Watch(Observer):
    """Compares what was reserved for each operator with what it has made."""

    def __init__(self, ledger: Any, found: list[Prediction], case: str) -> None:
        self.ledger, self.found, self.case = ledger, found, case
        self.admitted_calls: dict[int, tuple[int, dict[int, int], list[int]]] = {}

    def admitted(self, call: Any) -> None:
        # A composite may have resized its `out=` without an operator: room was made for that (`outside.py`).
        before = {version.key: max(version.nbytes, size_of(version())) for version in call.versions}
        written = [call.versions[holes[0]].key for holes in call.written.values()]
        self.admitted_calls[id(call)] = call.signature.output_bytes, before, written

    def finished(self, call: Any, outputs: Any) -> None:
        predicted, before, written = self.admitted_calls.pop(id(call))
        plain = not call.opaque and None not in call.results
        if plain:  # for others, only the size of the inputs is known
            real = made(self.ledger, call, before, written)
            self.found.append(Prediction(str(call.operator.overload), predicted, real, self.case))


def made(ledger: Any, call: Any, before: dict[int, int], written: list[int]) -> int:
    """Return the bytes of new storages, and those by which others have grown that were written to."""
    new = {ledger.key_of(storage): storage for storage, _ in call.results}
    fresh = [
        size_of(one)
        for key, one in new.items()
        if key not in before and one.device.type == ledger.device_type
    ]
    grown = 0
    for key in written:
        storage = ledger.versions[key]()
        if storage is not None and storage.device.type == ledger.device_type:
            grown += max(size_of(storage) - before[key], 0)
    return sum(fresh) + grown


def names() -> list[str]:
    return [FACTORIES, *operators.names()]


def cases(name: str) -> Iterator[Case]:
    yield from factories() if name == FACTORIES else operators.cases(name)


def factories() -> Iterator[Case]:
    """Yield factories that draw, with and without a generator, in the forms that programs use."""
    drawn: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.rand, (40, 30)),
        (torch.randn, (40, 30)),
        (torch.randint, (9, (40, 30))),
        (torch.randint, (2, 9, (40, 30))),
        (torch.randperm, (900,)),
        (torch.normal, (0.0, 1.0, (40, 30))),
    ]
    options: list[dict[str, Any]] = [{}, {"device": "cpu"}, {"dtype": torch.float64}, {"out": (0,)}]
    for (factory, args), given, option in itertools.product(drawn, (False, True), options):
        yield Case(
            f"{factory.__name__} {args} {option} generator={given}",
            partial(_draw, factory, args, given, option),
        )


def _draw(factory: Any, args: tuple[Any, ...], given: bool, option: dict[str, Any], probe: Probe) -> Any:
    named: dict[str, Any] = {"generator": torch.Generator().manual_seed(1)} if given else {}
    for name, value in option.items():
        whole = factory in (torch.randint, torch.randperm)
        named[name] = torch.empty(value, dtype=torch.int64 if whole else None) if name == "out" else value
    return factory(*args, **named)


def unit(name: str) -> list[Prediction]:
    """Return the predictions of all calls of one unit."""
    found: list[Prediction] = []
    for case in cases(name):
        torch.manual_seed(7)
        with watched(found, case.name):
            try:
                case.program(Probe())
            except Exception as error:  # some samples raise, also without dtrrun
                if str(error).startswith("dtrrun: internal error"):
                    raise
    return found


def worst(found: list[Prediction]) -> list[Prediction]:
    """Return the worst call of each operator that was predicted wrong and is not an exception."""
    bad: dict[tuple[str, str], Prediction] = {}
    for one in found:
        key = one.operator, one.wrong
        name = one.operator.rpartition(".")[0]
        if not one.wrong or name in EXCEPTIONS or one.operator in EXCEPTIONS:
            continue
        if key not in bad or abs(one.real - one.predicted) > abs(bad[key].real - bad[key].predicted):
            bad[key] = one
    return list(bad.values())


def told(one: Prediction) -> str:
    return f"{one.operator}: {one.predicted} bytes predicted, {one.real} made: {one.wrong} ({one.case})"


def chosen(share: float, seed: int) -> list[str]:
    """Return the factories, and a share of the database."""
    rest = operators.names()
    random.Random(seed).shuffle(rest)
    return [FACTORIES, *rest[: round(len(rest) * share)]]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.database.predicted", description=__doc__)
    parser.add_argument("names", nargs="*", help="units to judge (default: all)")
    parser.add_argument("--share", type=float, default=1.0, help="a random share of all units")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    calls, called, bad = 0, set(), set()
    for name in options.names or chosen(options.share, options.seed):
        found = unit(name)
        calls += len(found)
        called |= {one.operator for one in found}
        for one in worst(found):
            if (one.operator, one.wrong) not in bad:
                bad.add((one.operator, one.wrong))
                print(
                    f"{one.operator}: {one.predicted} predicted, {one.real} made: {one.wrong} ({one.case})",
                    flush=True,
                )
    print(f"{calls} calls of {len(called)} operators; predicted wrong: {len(bad)}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
