"""How long a call takes without the time in which others had this thread's core.

On a busy machine, an operator may be interrupted for several times as long as it runs. What suits a program
would then be chosen by chance, and in the first step, in which nothing has been timed twice, so badly that
the step may not fit into the budget. A call that was not interrupted counts with all that it has waited for,
such as threads of its own. Only Linux tells this of a thread; elsewhere all of the time counts.
"""

from __future__ import annotations

import sys
from typing import Any

IS_TOLD = sys.platform == "linux"
if IS_TOLD:
    from resource import RUSAGE_THREAD, getrusage


def usage() -> Any:
    """Return what `own_ns` needs to know of the moment before a call, None if that is not known."""
    return getrusage(RUSAGE_THREAD) if IS_TOLD else None


def own_ns(ns: int, before: Any) -> int:
    """Return the part of `ns`, which have passed since `before`, in which this thread was not interrupted.

    before: from `usage`; None: all of it.
    """
    if before is None:
        return ns
    now = getrusage(RUSAGE_THREAD)
    if now.ru_nivcsw == before.ru_nivcsw:
        return ns
    used: float = now.ru_utime - before.ru_utime + now.ru_stime - before.ru_stime
    return min(ns, round(used * 1e9))
