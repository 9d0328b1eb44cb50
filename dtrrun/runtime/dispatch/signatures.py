"""What is known about calls before they run: their costs and allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtrrun.core.graph import Signature, Version
from dtrrun.core.ledger import Ledger
from dtrrun.runtime import shapes
from dtrrun.runtime.cost_model import modelled_ns
from dtrrun.runtime.costs import Costs, identity
from dtrrun.runtime.dispatch.call import TensorCall

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
        self.by_key: dict[Any, Signature] = {}
        self.made: list[Signature] = []
        """On a CPU: all, in order of first calls. The native fast path makes some, under its own keys."""
        self.nbytes = 0  # about what the signatures take
        self.known: Callable[[], Signature | None] = _nothing  # the current call's, if made natively
        self.by_formula: Callable[[], int | None] = (
            _nothing  # the bytes that the current call will allocate, if known
        )
        self.on_forget: Callable[[], None] = _nothing
        self.updates: dict[Any, Signature] = {}  # operators that update lists, by `list_key`

    def forget(self) -> None:
        """Start over, since signatures made without a budget have no result sizes."""
        self.by_key.clear()
        self.made.clear()
        self.updates.clear()
        self.nbytes = 0
        self.on_forget()

    def add(self, signature: Signature) -> None:
        """Add one that is used from now on. Starts over if all of them have come to take `LIMIT_BYTES`."""
        if self.nbytes >= LIMIT_BYTES:
            self.forget()
        self.nbytes += SIGNATURE_BYTES + GEOMETRY_BYTES * len(signature.geometries)
        if self._device is None:
            self.made.append(signature)

    def all(self) -> list[Signature]:
        """Return the signatures of the calls so far, in order of their first calls."""
        if self._device is None:
            return list(self.made)
        return [*self.by_key.values(), *self._device.young_signatures()]

    def measure_again(self) -> None:
        """Time the next calls of each operator as well, because those of the first step use fresh pages."""
        if self._device is not None or self.modelled:
            return
        costs = self._costs
        known = {id(one) for key, one in self.by_key.items() if costs and identity(key) in costs}
        for signature in self.made:
            if signature.calls and id(signature) not in known:
                signature.calls = 1

    def expect(self, costs: Costs) -> None:
        """Use these costs, known from an earlier run. Call it before the program runs."""
        self._costs = self._costs or costs

    @property
    def has_costs(self) -> bool:
        """Return whether any costs were known before the program ran."""
        return bool(self._costs)

    @property
    def needs_sizes(self) -> bool:
        """Return whether allocations must be predicted."""
        return self.asks_sizes or self._ledger.budget_bytes is not None

    def of(
        self, call: TensorCall, key: tuple[Any, ...], geometries: list[Any], *, elsewhere: bool
    ) -> Signature:
        """Return the signature of a call.

        geometries: of its tensors. elsewhere: its results are not on the session's device.
        """
        signature = self.by_key.get(key)
        if signature is None and self._device is not None:
            signature = self._device.young_signature(key)
        if signature is None:
            if self._device is None:
                signature = (call.common and self.known()) or self._new(call, key, geometries, elsewhere)
                self.by_key[key] = signature
            else:
                signature = self._new(call, key, geometries, elsewhere)
                self._device.add_signature(key, signature)
        return signature

    def _new(
        self, call: TensorCall, key: tuple[Any, ...], geometries: list[Any], elsewhere: bool
    ) -> Signature:
        signature = self._ledger.graph.signature(call.operator, tuple(geometries))
        self.add(signature)
        known = self._costs.get(identity(key)) if self._costs else None
        if known is not None:
            signature.cost, signature.output_bytes = known
            signature.calls = Signature.SETTLED
        elif self.needs_sizes and not elsewhere:
            by_formula = self.by_formula if call.common else _nothing
            predicted = shapes.predict(
                call.func, call.operator, call.template, call.kwargs, geometries, by_formula
            )
            if predicted is None:
                # Unknown before the first call: the size of the inputs is the best guess.
                predicted = sum(version.nbytes for version in call.versions) + call.unplain
            signature.output_bytes, signature.guessed = predicted, True
        return signature

    def price(self, call: TensorCall, args: Any, kwargs: dict[str, Any], ns: int) -> None:
        """Record the duration of a call: the minimum of the first few, or the cost model's value."""
        signature = call.signature
        if self.modelled and not signature.calls:
            nbytes = sum(version.nbytes for version in call.versions) + signature.output_bytes
            signature.cost = modelled_ns(call.func, args, kwargs, call.result, nbytes)
            signature.calls = Signature.SETTLED
        if signature.calls < Signature.SETTLED:
            if ns < signature.cost or not signature.calls:
                signature.cost = ns
            signature.calls += 1


def list_key(func: Any, tensors: list[torch.Tensor], versions: list[Version]) -> tuple[Any, ...]:
    """Return a key shared by calls on lists of tensors that cost about the same (`native/lists.h`).

    The dtypes distinguish complex tensors.
    """
    nbytes = sum([version.nbytes for version in versions])
    return func, len(tensors), frozenset([tensor.dtype for tensor in tensors]), nbytes


def _nothing() -> None:
    pass
