"""The ledger under any order of events, compared with twins: the same tensors, computed by PyTorch alone.

Every tensor of the session has a twin, made and mutated by the same operators below the dispatch mode, with
the same views of the same storages. After each event the session's own data is consistent, and everything in
memory has its twin's bytes; what is evicted is compared whenever it is read, and at the end.
"""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

import dtrrun
from dtrrun.core.graph import Version
from dtrrun.runtime.guards import below
from tests.programs import amount, invariants
from tests.programs.amount import search, seeded
from tests.programs.drawing import HEURISTICS
from tests.programs.running import settle

NUMBER = amount.NUMBER // 5
HELD = 12
SIDE = 8
PLACES = st.integers(0, 5)
MATRIX = SIDE * SIDE * 4  # bytes

MAKE: dict[str, Callable[[], torch.Tensor]] = {
    "full": lambda: torch.full((SIDE, SIDE), 0.5),
    "arange": lambda: torch.arange(float(SIDE * SIDE)).view(SIDE, SIDE),
    "eye": lambda: torch.eye(SIDE),
    "random": lambda: torch.rand(SIDE, SIDE),
    "filled": lambda: torch.empty(SIDE, SIDE).normal_(),
}

COMPUTE: dict[str, Callable[..., Any]] = {
    "sin": lambda x, y: x.sin(),
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "matmul": lambda x, y: x @ y,
    "cat": lambda x, y: torch.cat([x, y, x])[:SIDE],
    "dropout": lambda x, y: torch.nn.functional.dropout(x, 0.5),
    "max": lambda x, y: x.max(1, keepdim=True).values.expand(SIDE, SIDE).contiguous(),
    "sort": lambda x, y: x.sort()[0],
    "both": lambda x, y: torch.aminmax(x, dim=0),
    "out": lambda x, y: torch.add(x, y, out=torch.empty(0)),
    "foreach": lambda x, y: torch._foreach_add([x, y], 1.0),
    "clone": lambda x, y: x.clone(),
}

VIEW: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.t(),
    "flip": lambda x: x.view(-1).view(SIDE, SIDE) if x.is_contiguous() else x.mT,
    "detach": lambda x: x.detach(),
    "same": lambda x: x[:],
}

MUTATE: dict[str, Callable[..., Any]] = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(0.5),
    "copy_": lambda x, y: x.copy_(y),
    "zero_": lambda x, y: x.zero_(),
    "sin_": lambda x, y: x.sin_(),
    "self": lambda x, y: x.add_(x.t()) if x is not y else x.mul_(x),
    "row": lambda x, y: x[2].copy_(y[3]),
    "columns": lambda x, y: x[:, ::2].mul_(2),
    "diagonal": lambda x, y: x.diagonal().fill_(1),
    "masked": lambda x, y: x.masked_fill_(x > 0.5, 0.25),
    "index": lambda x, y: x.index_add_(0, torch.tensor([1, 0, 1]), y[:3]),
    "bernoulli_": lambda x, y: x.bernoulli_(0.5),
    "out": lambda x, y: torch.mul(x, y, out=x),
    "foreach_": lambda x, y: torch._foreach_mul_([x[:4], x[4:]], 0.5),
    "failing": lambda x, y: x.add_(torch.ones(3)),
}

UNPATCHED = {name: getattr(torch.Tensor, name) for name in ("numpy", "apply_", "tolist")}
"""For the twins, which the session must not notice."""

TALLY: Counter[str] = Counter()


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from((1, 8 * MATRIX, 20 * MATRIX, 1 << 20)),
        heuristic=st.sampled_from(HEURISTICS),
    )
    def begin(self, budget: int, heuristic: str) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.arrays: list[tuple[Any, Any]] = []
        self.draws = 0
        over = "evict" if budget == 1 else "error"
        options: dict[str, Any] = {
            "over_budget": over,
            "heuristic": heuristic,
            "verify": True,
            "cost": "model",
        }
        self.context = dtrrun.budget(budget, **options)
        self.session = self.context.__enter__()
        self.dtr, self.ledger = self.session.dtr, self.session.ledger
        self.do(MAKE["arange"])

    def do(self, function: Callable[..., Any], *operands: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Run on tensors, then on their twins; keep the results. Return False if the budget is too small."""
        self.draws += 1
        torch.manual_seed(self.draws)
        try:
            made = self.attempt(function, [x for x, _ in operands])
        except dtrrun.BudgetError:
            TALLY["over"] += 1
            return False
        torch.manual_seed(self.draws)
        with below():
            twins = self.attempt(function, [twin for _, twin in operands])
        known = {id(x) for x, _ in self.pairs}
        self.pairs += [(x, twin) for x, twin in zip(made, twins, strict=True) if id(x) not in known]
        del self.pairs[:-HELD]
        return True

    @staticmethod
    def attempt(function: Callable[..., Any], operands: list[torch.Tensor]) -> list[torch.Tensor]:
        try:
            made = function(*operands)
        except dtrrun.BudgetError:
            raise
        except RuntimeError:
            return []
        return [made] if isinstance(made, torch.Tensor) else list(made or [])

    def pick(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pairs[-1 - place % len(self.pairs)]

    def version(self, place: int) -> Version:
        version = self.session.callbacks.version_of(self.pick(place)[0])
        assert version is not None
        return version

    # -- what a program does ---------------------------------------------------------------------

    @rule(name=st.sampled_from(sorted(MAKE)))
    def make(self, name: str) -> None:
        self.do(MAKE[name])

    @rule(name=st.sampled_from(sorted(MAKE)))
    def make_outside(self, name: str) -> None:
        """Make a constant: no operator that the session has seen makes it."""
        with below():
            x = MAKE[name]()
            self.pairs.append((x, x.clone()))
        del self.pairs[:-HELD]

    @rule(a=PLACES, b=PLACES, name=st.sampled_from(sorted(COMPUTE)))
    def compute(self, a: int, b: int, name: str) -> None:
        self.do(COMPUTE[name], self.wide(a), self.wide(b))

    compute_more = compute

    @rule(a=PLACES, length=st.integers(3, 8))
    def chain(self, a: int, length: int) -> None:
        pair = self.wide(a)
        for _ in range(length):
            if not self.do(torch.sin, pair):
                return
            pair = self.pairs[-1]

    @rule(a=PLACES, name=st.sampled_from(sorted(VIEW)))
    def view(self, a: int, name: str) -> None:
        self.do(VIEW[name], self.wide(a))

    @rule(a=PLACES, b=PLACES, name=st.sampled_from(sorted(MUTATE)))
    def mutate(self, a: int, b: int, name: str) -> None:
        self.do(lambda x, y: MUTATE[name](x, y) is None, self.wide(a), self.wide(b))

    def wide(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor whose elements do not overlap, so that it can be written to."""
        found = [pair for pair in self.pairs if pair[0].shape == (SIDE, SIDE) and 0 not in pair[0].stride()]
        if not found:
            self.make_outside("eye")
            found = self.pairs[-1:]
        return found[-1 - place % len(found)]

    @rule(a=PLACES)
    def release(self, a: int) -> None:
        if len(self.pairs) > 1:
            del self.pairs[-1 - a % len(self.pairs)]

    @rule(a=PLACES)
    def read(self, a: int) -> None:
        x, twin = self.pick(a)
        try:
            found = x.tolist()
        except dtrrun.BudgetError:
            return
        with below():
            assert found == UNPATCHED["tolist"](twin)

    # -- what happens besides ----------------------------------------------------------------------

    @rule(a=PLACES, all_of_them=st.booleans())
    def evict(self, a: int, all_of_them: bool) -> None:
        """Evict, whatever a heuristic would say."""
        self.ledger.collect_dead()
        self.ledger.begin_pressure()
        for place in range(len(self.pairs)) if all_of_them else (a,):
            version = self.version(place)
            TALLY["evicted"] += self.dtr.eviction.evict_if_possible(version)

    @rule(a=PLACES)
    def rematerialize(self, a: int) -> None:
        version = self.version(a)
        try:
            self.session.dtr.rematerializer.lock([version])
        except dtrrun.BudgetError:
            return
        assert version.resident
        version.locks -= 1

    @rule(a=PLACES, how=st.sampled_from(("pin", "array", "write", "apply_")))
    def reach(self, a: int, how: str) -> None:
        """Access memory past the operators."""
        x, twin = self.wide(a)
        try:
            if how == "pin":
                self.session.pin(x)
                version = self.session.callbacks.version_of(x)
                assert version is not None
                assert version.resident
            elif how == "array":
                self.arrays.append((x.detach().numpy(), UNPATCHED["numpy"](twin)))
            elif how == "apply_":
                x.apply_(lambda one: one + 0.125)
                with below():
                    UNPATCHED["apply_"](twin, lambda one: one + 0.125)
            elif self.arrays:
                for array in self.arrays[-1]:
                    array[0] = 3.0
        except dtrrun.BudgetError:
            TALLY["over"] += 1

    @rule(budget=st.sampled_from((4 * MATRIX, 8 * MATRIX, 16 * MATRIX)))
    def set_budget(self, budget: int) -> None:
        if self.dtr.eviction.warn_only:
            return
        try:
            self.session.set_budget(budget)
        except dtrrun.BudgetError:
            self.session.set_budget(None)

    @rule(what=st.sampled_from(("step", "compact", "garbage")))
    def keep_house(self, what: str) -> None:
        if what == "step":
            self.session.steps.last = self.session.steps.under_way()
            self.session._step_ended()
        elif what == "compact":
            self.session._compact()
        else:
            gc.collect()

    # -- what must hold ----------------------------------------------------------------------------

    @invariant()
    def consistent(self) -> None:
        invariants.check(self.session)
        for x, twin in self.pairs:
            version = self.ledger.version_of(torch._C.TensorBase.untyped_storage(x))
            if version is not None and version.resident:
                assert content(x) == content(twin)

    def teardown(self) -> None:
        if not hasattr(self, "context"):
            return
        self.session.set_budget(None)
        TALLY["rematerialized"] += self.session.dtr.rematerializer.rematerializations > 0
        TALLY["machines"] += 1
        invariants.check(self.session)
        self.context.__exit__(None, None, None)
        assert self.session.report()["mismatches"] == []
        for x, twin in self.pairs:
            assert content(x) == content(twin)
        settle()


def content(x: torch.Tensor) -> bytes:
    """Return the bytes of a whole storage, read past every patch: an evicted one has none."""
    storage = torch._C.TensorBase.untyped_storage(x)
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


def test_ledger_machine() -> None:
    TALLY.clear()
    run_state_machine_as_test(seeded(LedgerMachine), settings=search(NUMBER, stateful_step_count=40))
    print(dict(TALLY))
    if NUMBER >= 50:
        check_that_it_bites()


def check_that_it_bites() -> None:
    assert TALLY["rematerialized"] >= 0.3 * TALLY["machines"], TALLY
    assert TALLY["evicted"] >= 0.2 * TALLY["machines"], TALLY  # 15 to 350 of 60, depending on the draw
