"""Which bits a storage has: versions, constants, gradients, random numbers, uninitialised memory, views."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from mutant import around, called_from, meanwhile, no, nothing, only_in, row, yes

SUPERSEDE = "core.recipes:Recipes.supersede"
MAKE_CONSTANT = "core.recipes:Recipes.make_constant"


def no_version(module: str, *, recorded: bool) -> around:
    """A mutation makes no version if it comes from that module, and is recorded (or is not)."""

    def supersede(original: Any, self: Any, version: Any, operation: Any, cost: int) -> Any:
        if called_from(module) and recorded == (operation is not None):
            return version
        return original(self, version, operation, cost)

    return around(supersede)


def unless(why: str, instead: Callable[[Any], None] = nothing) -> around:
    """Versions do not become constants for that reason."""
    return around(
        lambda original, self, version, pin: instead(version) if pin == why else original(self, version, pin)
    )


def found_nowhere(module: str) -> around:
    """Every storage is new to that module."""

    class Versions(dict[int, Any]):
        __contains__ = only_in(module, no).over(dict.__contains__)

    def init(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.versions = Versions()

    return around(init)


# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "in-place operators",
    ("the slow path gives a mutation no version", SUPERSEDE, no_version("core.operator", recorded=True),
     "hazards_mutation::foreach_operators hazards_mutation::out_arguments"),
    ("a replayed mutation writes into the old version",
     "runtime.execute:Executor._copy", lambda self, storage: storage,
     "hazards_mutation::chain_of_mutations_whose_old_versions_are_needed"),
)
row(
    "mutated constants",
    ("nothing is rescued before a constant changes", "core.mutation:Mutation.rescue_dependents", nothing,
     "hazards_mutation::weights_change_while_what_they_made_is_evicted"),
    ("a constant that is about to change is not copied but shared",
     "runtime.execute:Executor.copy", lambda self, storage: storage,
     "hazards_constants::a_graph_that_is_held_while_its_weights_change_stays_recomputable"),
    ("the slow path's mutated constant has no new version",
     SUPERSEDE, no_version("core.operator", recorded=False),
     "hazards_mutation::weights_change_while_what_they_made_is_evicted "
     "hazards_mutation::input_mutated_by_the_program_after_its_use"),
    ("what was computed from a constant that changes keeps its recipe",
     MAKE_CONSTANT, unless("input mutated"),
     "hazards_mutation::weights_change_while_what_they_made_is_evicted "
     "hazards_gradients::maml_inner_steps_by_functional_call"),
    ("history is never forgotten", "core.history:History._forget_mutated", nothing,
     "hazards_mutation::kept_losses_do_not_pile_up_records"),
    ("a released constant counts as there",
     MAKE_CONSTANT, unless("input lost", lambda version: setattr(version.operation, "secured", True)),
     "hazards_mutation::weights_change_while_what_they_made_is_evicted hazards_modes::autocast_in_and_out"),
)
row(
    "gradients",
    ("those that no leaf accumulates may be evicted", "runtime.patches.backwards:Backwards._arrived", nothing,
     "hazards_loops::inside_a_budget_a_step_is_recomputed_and_not_the_program"),
    ("a replay holds on to them",
     "core.recipes:Recipes.pin",
     around(lambda pin, self, version, why: pin(self, version, "pinned" if why == "gradient" else why)),
     "hazards_loops::inside_a_budget_a_step_is_recomputed_and_not_the_program"),
    ("gradients are not pinned", "runtime.patches.gradients:Gradients._arrived", nothing,
     "hazards_gradients::gradients_stay_in_memory"),
)
row(
    "schemas that lie",
    ("batch norm is believed", "runtime.operators:_STATISTICS", {},
     "hazards_functions::running_statistics_are_updated_once"),
    ("a replay updates the running statistics again",
     "runtime.dispatch.call:TensorCall.find_statistics", nothing,
     "hazards_functions::running_statistics_are_updated_once"),
    ("running statistics have no later version",
     "core.operator:Operators.finish", meanwhile(1, "updates_statistics", False),
     "hazards_constants::what_statistics_made_is_evicted_after_their_update"),
    ("what running statistics made is not rescued",
     "core.operator:Operators.admit", meanwhile(1, "updates_statistics", False),
     "hazards_constants::statistics_are_read_before_they_are_updated"),
)
row(
    "randomness",
    ("generators are found by name alone",
     "runtime.operators:Operator.generators_of",
     around(lambda generators_of, self, args, kwargs: generators_of(self, (), kwargs)),
     "hazards_draws::a_generator_that_is_given"),
    ("what is not PyTorch's draws nothing unless it says so",
     "runtime.operators:OWN_NAMESPACES", ("aten", "dtrrun_test_draws_cpu"),
     "hazards_draws::an_operator_that_is_not_pytorchs"),
    ("a shape function's draws count", "runtime.shapes:unmoved", nullcontext,
     "hazards_draws::an_operator_that_is_not_pytorchs"),
    ("a shared state is not moved on",
     "runtime.rng:Position.whole", around(lambda whole, self: whole(type(self)(self.start, 0, self.rest))),
     "hazards_draws::draws_that_share_a_state_come_back"),
    ("a replay draws anew", "runtime.execute:replaying", nullcontext,
     "hazards_values::random_operators_and_their_generators"),
    ("a replay moves the program's generator",
     "runtime.rng:replaying._give",
     around(lambda give, self, *state: (give(self, *state), self.clear())),
     "hazards_values::rematerialization_leaves_the_generator_where_the_program_put_it"),
)
row(
    "uninitialised memory",
    ("empty has a recipe", "runtime.operators:_UNINITIALISED", (),
     "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten"),
    ("an overwrite makes nothing replayable", "runtime.operators:_OVERWRITES", (),
     "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten"),
    ("a part is taken for the whole", "runtime.dispatch.call:covers", yes,
     "hazards_mutation::uninitialised_memory_becomes_replayable_when_it_is_overwritten "
     "hazards_mutation::mutation_through_views "
     "hazards_mutation::out_arguments"),
)
row(
    "views by identity",
    ("the fast path takes every result for new memory",
     "core.ledger:Ledger.__init__", found_nowhere("runtime.dispatch.mode"),
     "hazards_values::views_that_may_be_their_input"),
    ("the slow path does", "core.ledger:Ledger.__init__", found_nowhere("runtime.dispatch.outputs"),
     "hazards_values::views_that_may_be_their_input"),
)
