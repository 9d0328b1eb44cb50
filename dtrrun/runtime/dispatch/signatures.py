"""What is known about calls before they run: their costs and allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtrrun.core.graph import Signature
from dtrrun.core.ledger import Ledger
from dtrrun.runtime import shapes
from dtrrun.runtime.costs import Costs, identity

LIMIT_BYTES = 16 << 20  # if a program's shapes never repeat, start over rather than grow forever
SIGNATURE_BYTES, GEOMETRY_BYTES = 300, 220  # what one takes with its keys, and more for each tensor


class Signatures:
    """Signatures, by what calls have in common."""

    def __init__(
        self,
        ledger: Ledger,
        device: Any,
        *,
        costs: Costs | None = None,
        modelled: bool = False,
        asks_sizes: bool = False,
    ) -> None:
        """device: the session's, if it is a GPU: it does its own measurements.

        costs: known before the program runs. modelled: costs are computed, not measured. asks_sizes: predict
        the sizes of results before the first call even without a budget.
        """
        self._ledger, self._device, self._costs = ledger, device, costs or {}
        self.modelled = modelled
        self.asks_sizes = asks_sizes
        self.made: list[Signature] = []
        """All, in order of first calls."""
        self._foretold: set[int] = set()  # ids of those whose costs are known from an earlier run
        self._by_name: dict[str, Signature] | None = None  # in a program with several ranks
        self._unsettled: dict[str, Signature] = {}  # of these, those whose costs are still measured
        self.nbytes = 0  # about what the signatures take
        self.on_forget: Callable[[], None] = _nothing

    def forget(self) -> None:
        """Start over, since signatures made without a budget have no result sizes."""
        self.made.clear()
        self._foretold.clear()
        if self._by_name is not None:
            self._by_name.clear()
            self._unsettled.clear()
        self.nbytes = 0
        self.on_forget()

    def add(self, signature: Signature) -> None:
        """Add one that is used from now on. Starts over if all of them have come to take `LIMIT_BYTES`."""
        if self.nbytes >= LIMIT_BYTES:
            self.forget()
        self.nbytes += SIGNATURE_BYTES + GEOMETRY_BYTES * len(signature.geometries)
        self.made.append(signature)

    def all(self) -> list[Signature]:
        """Return the signatures of the calls so far, in order of their first calls."""
        return list(self.made)

    def measure_again(self) -> None:
        """Time the next calls of each operator as well, because those of the first step use fresh pages."""
        if self._device is not None or self.modelled:
            return
        for signature in self.made:
            if signature.calls and id(signature) not in self._foretold:
                signature.calls = 1

    def expect(self, costs: Costs) -> None:
        """Use these costs, known from an earlier run. Call it before the program runs."""
        self._costs = self._costs or costs

    def keep_names(self) -> None:
        """Know signatures by their identity from now on. Call it before the program runs."""
        self._by_name = {}

    def settle(self) -> dict[str, tuple[int, int]]:
        """Fix the costs of calls so far. Returns those that this has fixed, by the signature's identity."""
        found = {}
        for name, one in list(self._unsettled.items()):
            # On a GPU, a cost is the model's until a call has been timed, which may take several.
            if one.calls and (self._device is None or one.timed or one.calls >= Signature.SETTLED):
                found[name] = one.cost, one.output_bytes
                self._fix(name, one, one.cost)
        return found

    def take_over(self, costs: Costs) -> None:
        """Use these costs, which another rank has fixed, from now on."""
        self._costs = {**self._costs, **costs}
        for name, one in (self._by_name or {}).items():
            if name in costs:
                self._fix(name, one, costs[name][0])

    def _fix(self, name: str, signature: Signature, cost: int) -> None:
        self._unsettled.pop(name, None)
        signature.cost, signature.calls = cost, Signature.SETTLED
        if signature.replayed_as is not None:
            signature.replayed_as.cost = cost
        self._foretold.add(id(signature))

    @property
    def has_costs(self) -> bool:
        """Return whether costs are known before the program runs, or may be told by another rank."""
        return bool(self._costs) or self._by_name is not None

    @property
    def needs_sizes(self) -> bool:
        """Return whether allocations must be predicted."""
        return self.asks_sizes or self._ledger.budget_bytes is not None

    def foretell(
        self,
        signature: Signature,
        key: tuple[Any, ...],
        func: Any,
        template: list[Any],
        kwargs: dict[str, Any],
        nbytes: int,
        by_formula: Callable[[], int | None],
        *,
        elsewhere: bool,
    ) -> None:
        """Enter what is known of calls with this signature before the first one.

        nbytes: of its tensors. by_formula: returns what it allocates by a formula, None if there is none.
        elsewhere: its results are not on the session's device.
        """
        name = identity(key) if self._costs or self._by_name is not None else ""
        known = self._costs.get(name)
        if self._by_name is not None:
            self._by_name[name] = signature
            if known is None:
                self._unsettled[name] = signature
        if known is not None:
            signature.cost, signature.output_bytes = known
            signature.calls = Signature.SETTLED
            self._foretold.add(id(signature))
        elif self.needs_sizes and not elsewhere:
            operator, geometries = signature.operator, list(signature.geometries)
            predicted = shapes.predict(func, operator, template, kwargs, geometries, by_formula)
            # If it is unknown before the first call, the size of the inputs is the best guess.
            signature.output_bytes, signature.guessed = nbytes if predicted is None else predicted, True


def _nothing() -> None:
    pass
