"""Which bits a storage has: versions, constants, gradients, random numbers, uninitialised memory, views."""

from __future__ import annotations

from contextlib import nullcontext

from mutant import around, nothing, row

# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "mutated constants",
    ("a constant that is about to change is not copied but shared",
     "runtime.execute:Executor.copy", lambda self, storage: storage,
     "hazards_constants::a_graph_that_is_held_while_its_weights_change_stays_recomputable"),
    ("history is never forgotten", "core.history:History._forget_mutated", nothing,
     "hazards_mutation::kept_losses_do_not_pile_up_records"),
)
row(
    "gradients",
    ("those that no leaf accumulates may be evicted", "runtime.patches.backwards:Backwards._arrived", nothing,
     "hazards_loops::inside_a_budget_a_step_is_recomputed_and_not_the_program"),
    ("gradients are not pinned", "runtime.patches.gradients:Gradients._arrived", nothing,
     "hazards_gradients::gradients_stay_in_memory"),
)
row(
    "schemas that lie",
    ("batch norm is believed", "runtime.operators:_STATISTICS", {},
     "hazards_functions::running_statistics_are_updated_once"),
)
row(
    "randomness",
    ("what is not PyTorch's draws nothing unless it says so",
     "runtime.operators:OWN_NAMESPACES", ("aten", "dtrrun_test_draws_cpu"),
     "hazards_draws::an_operator_that_is_not_pytorchs"),
    ("a shape function's draws count", "runtime.shapes:unmoved", nullcontext,
     "hazards_draws::an_operator_that_is_not_pytorchs"),
    ("a shared state is not moved on",
     "runtime.rng:Position.whole", around(lambda whole, self: whole(type(self)(self.start, 0, self.rest))),
     "hazards_draws::draws_that_share_a_state_come_back"),
    ("a replay draws anew", "runtime.dispatch.interposer:Interposer.replaying", lambda _: nullcontext(),
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
)
