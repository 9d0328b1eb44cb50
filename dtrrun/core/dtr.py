"""Dynamic Tensor Rematerialization, put together.

    dtr = DTR(policy, graph, memory, executor, budget_bytes=6 << 30, budget_error=BudgetError)
    dtr.operators.admit(call)      # before an operator of the program runs
    dtr.operators.finish(call, outputs)

Each part refers only to parts made before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from dtrrun.core.backend import Executor, Fingerprints, Heap, Memory, Policy
from dtrrun.core.deallocation import Deallocation
from dtrrun.core.eviction import Eviction
from dtrrun.core.garbage import Garbage
from dtrrun.core.graph import Graph
from dtrrun.core.history import History
from dtrrun.core.ledger import Ledger
from dtrrun.core.mutation import Mutation
from dtrrun.core.operator import Operators
from dtrrun.core.recipes import Recipes
from dtrrun.core.rematerialize import Rematerializer


class Classes(NamedTuple):
    """The classes of the parts that are implemented in C++, with what Python adds to them."""

    ledger: type[Ledger]
    recipes: type[Recipes]
    deallocation: type[Deallocation]
    eviction: type[Eviction]
    rematerializer: type[Rematerializer]
    mutation: type[Mutation]
    operators: type[Operators]


@cache
def _classes(extension: Any) -> Classes:
    own = Classes(Ledger, Recipes, Deallocation, Eviction, Rematerializer, Mutation, Operators)
    made: Any = [type(one.__name__, (one, getattr(extension, one.__name__)), {}) for one in own]
    return Classes(*made)


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
        adapts: bool = False,
        collect_garbage: Callable[..., Any] | None = gc.collect,
        modelled: bool = False,
        fingerprints: Fingerprints | None = None,
        heap: Heap | None = None,
        met_device: Callable[[str], None] | None = None,
        room_given_back: Callable[[], None] | None = None,
    ) -> None:
        """The arguments are described in the parts that use them."""
        self.executor = executor
        classes = _classes(graph.extension)
        self.ledger = classes.ledger(
            policy,
            memory,
            graph,
            budget_bytes=budget_bytes,
            device_type=device_type,
            fingerprints=fingerprints,
            heap=heap,
        )
        self.ledger.dtr = self
        self.recipes = classes.recipes(self.ledger)
        self.deallocation = classes.deallocation(self.ledger)
        self.garbage = Garbage(self.ledger, collect_garbage, modelled=modelled)
        self.eviction = classes.eviction(
            self.ledger,
            budget_error=budget_error,
            warn_only=warn_only,
            adapts=adapts,
            garbage=self.garbage,
        )
        self.rematerializer = classes.rematerializer(
            self.ledger, self.recipes, self.eviction, executor, out_of_memory=out_of_memory
        )
        self.mutation = classes.mutation(self.ledger, self.recipes, self.rematerializer)
        self.history = History(self.ledger, self.recipes, self.deallocation, self.rematerializer)
        self.operators = classes.operators(
            self.ledger, met_device=met_device, room_given_back=room_given_back
        )

    @property
    def policy(self) -> Policy:
        """The present policy, which `Ledger.change_policy` replaces."""
        return self.ledger.policy
