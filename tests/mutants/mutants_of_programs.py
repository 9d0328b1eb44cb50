"""What programs do besides: compile, collectives, threads, forks, long chains, errors, thrashing."""

from __future__ import annotations

from typing import Any

from mutant import around, no, nothing, only_in, row


@around
def by_recursion(secure: Any, self: Any, version: Any) -> bool:
    for source in version.inputs:
        if source.operation is not None and not source.operation.secured:
            self.secure(source)
    return secure(self, version)


# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "torch.compile",
    ("nothing is said", "runtime.patches.compiler:CompileNotice.install", nothing,
     "hazards_process::compile_says_once_that_nothing_is_compiled"),
)
row(
    "opaque operators",
    ("the workspace is not told from the results", "runtime.operators:_OPAQUE_OUTPUT", {},
     "hazards_layers::lstm_inference_uses_one_opaque_operator"),
)
row(
    "operators that are not replayed",
    ("collectives are replayed", "runtime.operators:_COLLECTIVE_NAMESPACES", (),
     "hazards_reducers::collectives_run_once"),
    ("what is in the table is replayed", "runtime.operators:_UNREPLAYABLE", (),
     "hazards_escapes::composite_operators_that_read_lengths"),
)
row(
    "DDP and FSDP",
    ("a reducer's buckets are evicted", "runtime.patches.reducers:MAKE", (),
     "hazards_reducers::a_reducers_buckets_stay"),
)
row(
    "threads",
    ("room is promised to several at once", "core.ledger:Ledger.reserved_bytes", 0,
     "hazards_room::what_one_has_been_promised_is_not_anothers_room"),
    ("nobody waits for others", "runtime.dispatch.slow_path:SlowPath.others_end", no,
     "hazards_room::who_finds_no_room_waits_for_the_others"),
)
row(
    "fork",
    ("the session goes on in a forked child", "runtime.patches.fork:_call", nothing,
     "hazards_threads::forked_child_has_every_tensor"),
)
row(
    "long chains",
    ("the history of a loop is never cut", "core.history:History.cut", nothing,
     "hazards_loops::the_records_of_a_loop_without_gradients_do_not_pile_up"),
    ("what is evicted at a step's end keeps all history",
     "core.rematerialize:Rematerializer.restore", only_in("core.history", no),
     "hazards_loops::what_is_carried_over_comes_back_before_its_history_goes"),
    ("a program without an optimizer has no steps", "runtime.session:Session._backward_ended", nothing,
     "hazards_loops::what_is_carried_over_comes_back_before_its_history_goes"),
    ("a chain of recipes is searched by recursion", "core.recipes:Recipes.secure", by_recursion,
     "faults_chains::read_from_the_end"),
)
row(
    "failing operators",
    ("locks are not released", "core.operator:Operators.fail", nothing,
     "hazards_process::failing_operators_leave_no_locks"),
    ("a half-written storage keeps its recipe", "core.recipes:Recipes.half_written", nothing,
     "hazards_mutation::mutation_that_fails_half_way"),
)
row(
    "thrashing",
    ("a step that is mostly recomputation goes unnoticed",
     "runtime.observe.thrashing:Thrashing.watch", nothing,
     "hazards_process::thrashing_is_said_once_and_can_stop"),
)
