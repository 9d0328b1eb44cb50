"""The numbers of a training process's record, in the order in which they lie in its file.

All are signed 64-bit integers; bytes are bytes, times are nanoseconds, the rest are counts.
"""

COUNTERS = (
    "budget_bytes",  # -1: no budget, counting only
    "resident_bytes",  # tensor memory held now, as the allocator rounds it
    "peak_bytes",  # the most that was ever held at once
    "evictable_bytes",  # of resident: what could be evicted
    "pinned_bytes",  # of resident: what can't be evicted (constants, gradients, escapes, ...)
    "evicted_bytes",  # reachable by the program, but not in memory now
    "live_storages",
    "evictions",
    "evicted_bytes_total",
    "rematerializations",
    "rematerialized_bytes",
    "operators",  # operators that the program itself ran
    "steps",  # optimizer steps
    "over_budget",  # times that the budget was exceeded although warned only
    "verified",  # storages whose fingerprint was compared after rematerialization
    "verify_mismatches",
    "score_evaluations",
    "wall_ns",
    "operators_ns",  # the program's own operators
    "rematerialization_ns",  # operators run again
    "scoring_ns",  # computing scores
    "search_ns",  # comparing scores, keeping the heap
    "bookkeeping_ns",  # the rest of what DTR itself does
    "least_budget_bytes",  # when a budget was too small: what would have done; 0 otherwise
    "reserved_bytes",  # held by the CUDA caching allocator from the driver; 0 on the CPU
    "reserved_peak_bytes",
    "overhead_bytes",  # what the driver shows beyond that: context, libraries; as last measured
    "guard_bytes",  # kept free below the budget for what is not foreseen
    "cap_bytes",  # the allocator's own limit
    "device_index",  # the CUDA device, -1: the CPU
    "oom_retries",  # operators tried again after an out-of-memory error
    "fragmented_bytes",  # reserved, but in blocks too small to be of use when last looked at
    "process_peak_bytes",  # the most that the process had in memory, everything included; 0: not known
    "dispatch_ns",  # an estimate: what PyTorch takes to hand operators to us, outside of the other times
)

PARTS = ("operators", "rematerialization", "scoring", "search", "bookkeeping")
"""Of the time in a training process, as in the paper's Fig. 4; what is left of `wall` is `other`.

`dispatch_ns` is a part of what is left, and of `operators_ns`: see `telemetry.times`."""
OVERHEADS = tuple(f"{part}_ns" for part in PARTS[1:])
"""The counters of what a budget adds: recomputation, and our own work. No budget changes `dispatch_ns`."""
