"""Dynamic Tensor Rematerialization, put together.

    dtr = DTR(make_policy("h_dtr_eq"), memory, executor, budget_bytes=6 << 30, budget_error=BudgetError)
    dtr.operators.admit(call)      # before an operator of the program runs
    dtr.operators.finish(call, outputs)

Each part refers only to parts made before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from dtrrun.core.backend import Executor, Fingerprints, Heap, Memory, Policy, Shortcuts
from dtrrun.core.copies import Copies
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.evict import Eviction
from dtrrun.core.garbage import Garbage
from dtrrun.core.graph import Graph
from dtrrun.core.history import History
from dtrrun.core.ledger import Ledger, SlottedLedger
from dtrrun.core.mutation import Mutation
from dtrrun.core.operator import Operators
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer


class DTR:
    """The parts of one session, or of one simulated run."""

    def __init__(
        self,
        policy: Policy,
        graph: Graph,
        memory: Memory,
        executor: Executor,
        *,
        budget_bytes: int | None,
        budget_error: type[Exception],
        out_of_memory: type[Exception],
        device_type: str = "cpu",
        warn_only: bool = False,
        collect_garbage: Callable[[], Any] | None = gc.collect,
        modelled: bool = False,
        fingerprints: Fingerprints | None = None,
        heap: Heap | None = None,
        between_replays: Callable[[], None] | None = None,
        met_device: Callable[[str], None] | None = None,
        room_given_back: Callable[[], None] | None = None,
        shortcuts: Shortcuts | None = None,
        ledger_class: type[Ledger] = SlottedLedger,
    ) -> None:
        """The arguments are described in the parts that use them."""
        self.ledger = ledger_class(
            policy,
            memory,
            graph,
            budget_bytes=budget_bytes,
            device_type=device_type,
            fingerprints=fingerprints,
            heap=heap,
        )
        self.recipes = Recipes(self.ledger)
        self.deallocation = Deallocation(self.ledger)
        self.garbage = Garbage(
            self.ledger, lambda: self.rematerializer.operators_ns, collect_garbage, modelled=modelled
        )
        self.eviction = Eviction(
            self.ledger,
            self.recipes,
            self.deallocation,
            budget_error=budget_error,
            warn_only=warn_only,
            garbage=self.garbage,
            shortcuts=shortcuts,
        )
        self.rematerializer = Rematerializer(
            self.ledger,
            self.recipes,
            self.deallocation,
            self.eviction,
            executor,
            out_of_memory=out_of_memory,
            between=between_replays,
            shortcuts=shortcuts,
        )
        self.copies = Copies(self.ledger, self.eviction, executor)
        self.mutation = Mutation(self.ledger, self.recipes, self.rematerializer, self.garbage, self.copies)
        self.history = History(
            self.ledger, self.recipes, self.deallocation, self.eviction, self.rematerializer
        )
        self.operators = Operators(
            self.ledger,
            self.recipes,
            self.eviction,
            self.rematerializer,
            self.mutation,
            met_device=met_device,
            room_given_back=room_given_back,
        )

    @property
    def policy(self) -> Policy:
        """The policy, which `Ledger.change_policy` changes."""
        return self.ledger.policy
