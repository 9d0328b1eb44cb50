"""The numbers of a training process's record, in the order of its file.

All are signed 64-bit integers; sizes are in bytes, times in nanoseconds, the rest are counts.
"""

COUNTERS = (
    "budget_bytes",  # -1: no budget, counting only
    "resident_bytes",  # tensor memory held now, as rounded by the allocator
    "peak_bytes",  # maximum held at once
    "evictable_bytes",  # part of resident that could be evicted
    "pinned_bytes",  # part of resident that can't be evicted (constants, gradients, escapes, ...)
    "evicted_bytes",  # reachable by the program, but not in memory now
    "live_storages",
    "evictions",
    "evicted_bytes_total",
    "rematerializations",
    "rematerialized_bytes",
    "operators",  # operators that the program itself ran
    "steps",  # optimizer steps
    "over_budget",  # times the budget was exceeded: in warn-only mode, or by tensors from outside
    "exceeded_bytes",  # by how much at most; 0 if unknown
    "verified",  # storages whose fingerprint was compared after rematerialization
    "verify_mismatches",
    "score_evaluations",
    "wall_ns",
    "operators_ns",  # the program's own operators
    "rematerialization_ns",  # operators run again
    "scoring_ns",  # computing scores
    "search_ns",  # comparing scores, keeping the heap
    "bookkeeping_ns",  # dtrrun's remaining work
    "least_budget_bytes",  # if a budget was too small: one enough at that point; 0 otherwise
    "reserved_bytes",  # held by the CUDA caching allocator from the driver; 0 on the CPU
    "reserved_peak_bytes",
    "overhead_bytes",  # what the driver shows beyond reserved: context, libraries; as last measured
    "footprint_peak_bytes",  # peak of reserved plus overhead
    "guard_bytes",  # kept free below the budget for unpredicted memory
    "cap_bytes",  # the allocator's own limit
    "device_index",  # the CUDA device; -1: the CPU
    "oom_retries",  # operators tried again after an out-of-memory error
    "fragmented_bytes",  # reserved, but in blocks too small to be useful at the last check
    "process_peak_bytes",  # the process's peak memory, everything included; 0: unknown
    "device_operators_ns",  # on a GPU: what the program's own operators take there; 0 on the CPU
    "device_rematerialization_ns",  # and those run again
    "allocator_ns",  # on a GPU: what flushes of its allocator take, an estimate; 0 on the CPU
    "host_ns",  # copies of constants to the host and back; on a GPU an estimate
    "host_budget_bytes",  # what they may take there; 0: constants stay
    "host_bytes",  # what they take there now
    "host_peak_bytes",
    "left_bytes",  # constants that are on the host, and not in memory now; part of evicted
    "left_peak_bytes",
    "copies_out",
    "copied_out_bytes",
    "copies_in",
    "copied_in_bytes",
)

ENOUGH_STEPS = 5
"""With fewer steps, nothing is said about how much longer they take: in the first ones, operators are new."""

PARTS = ("operators", "rematerialization", "scoring", "search", "bookkeeping", "allocator", "host")
"""Parts of a training process's time, as in the paper's Fig. 4, `allocator`: waiting for a GPU's caching
allocator, and `host`: copying constants to the host and back. The rest of `wall` is `other`."""
SOMETIMES = ("allocator", "host")
"""Parts that are shown only if they took time. Reports of older versions lack them."""
OVERHEADS = tuple(f"{part}_ns" for part in PARTS[1:])
"""The counters that make up a budget's overhead: recomputation and dtrrun's work."""
