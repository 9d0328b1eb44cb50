"""How long a call takes without the time in which others had this thread's core.

On a busy machine, an operator may be interrupted for several times as long as it runs. What suits a program
would then be chosen by chance, and in the first step, in which nothing has been timed twice, so badly that
the step may not fit into the budget. A call that was not interrupted counts with all that it has waited for,
such as threads of its own.
"""

from __future__ import annotations

from resource import RUSAGE_THREAD, getrusage, struct_rusage


def usage() -> struct_rusage:
    """Return what `own_ns` needs to know of the moment before a call."""
    return getrusage(RUSAGE_THREAD)


def own_ns(ns: int, before: struct_rusage) -> int:
    """Return the part of `ns`, which have passed since `before`, in which this thread was not interrupted."""
    now = getrusage(RUSAGE_THREAD)
    if now.ru_nivcsw == before.ru_nivcsw:
        return ns
    used = now.ru_utime - before.ru_utime + now.ru_stime - before.ru_stime
    return min(ns, round(used * 1e9))
