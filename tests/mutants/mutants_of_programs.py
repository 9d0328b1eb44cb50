"""What programs do besides: compile, collectives, threads, forks, long chains, errors, thrashing."""

from __future__ import annotations

from contextlib import nullcontext

from mutant import no, nothing, only_in, row

# What is switched off, and how; below it, who must notice. A table, whose lines no formatter shall break.
# fmt: off

row(
    "torch.compile",
    ("kernels are no operators", "runtime.compiled.compiler:Compiler._operator", lambda _, __, plain: plain,
     "compiled::a_compiled_program_computes_the_same_bits[inference]"),
    ("nobody is told what an opaque graph writes to", "runtime.compiled.compiler:Compiler._compiled",
     staticmethod(lambda original: original),
     "compiled::what_nobody_can_look_into_runs_with_its_inputs_in_memory"),
    ("guards see our key when they are made", "runtime.compiled.compiler:_unseen", lambda original: original,
     "compiled::a_graph_serves_in_a_session_and_outside[inside]"),
    ("the compiler sees what is replaced", "runtime.compiled.compiler:paused", nullcontext,
     "compiled::what_the_compiler_looks_at_is_not_handed_out"),
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
    ("what a kernel in Python reads is never state", "runtime.dispatch.kernels:_Reader._require",
     staticmethod(nothing),
     "operators_that_read_state::a_replay_sees_what_the_kernel_saw_or_the_results_stay"),
    ("what such a kernel has read is not put back", "runtime.dispatch.kernels:Reading.put_back",
     lambda _: nullcontext(),
     "operators_that_read_state::a_replay_sees_what_the_kernel_saw_or_the_results_stay"),
)
row(
    "DDP and FSDP",
    ("a reducer's buckets are evicted", "runtime.patches.reducers:MAKE", (),
     "hazards_reducers::a_reducers_buckets_stay"),
)
row(
    "threads",
    ("nobody waits for others", "runtime.dispatch.callbacks:Callbacks.others_end", no,
     "hazards_room::who_finds_no_room_waits_for_the_others"),
    ("kernels of the program run again under the lock", "runtime.dispatch.interposer:Interposer.given_up",
     lambda *_: nullcontext(),
     "program_code::no_code_of_the_program_runs_under_our_lock"),
    ("code of the program runs under the lock", "runtime.dispatch.turns:Turns.given_up",
     lambda *_: nullcontext(), "program_code::no_code_of_the_program_runs_under_our_lock"),
    ("what a replay reads is written to", "runtime.dispatch.turns:Turns.wait_for_replays", no,
     "program_code::what_a_replay_reads_is_not_written_to_meanwhile"),
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
)
row(
    "thrashing",
    ("a step that is mostly recomputation goes unnoticed",
     "runtime.observe.thrashing:Thrashing.watch", nothing,
     "hazards_process::thrashing_is_said_once_and_can_stop"),
)
