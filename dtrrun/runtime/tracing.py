"""Trick: `--trace` puts its own methods before those of the ledger, the replay and the policy.

On the instances, and only where a trace is wanted: else nothing of it is in the way of an operator, not even
a check. Needed no more when somebody else wants to see these events, and hooks are worth their cost.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable
from time import monotonic_ns as now_ns
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dtrrun.telemetry.events import EVICT, MODULE, REMATERIALIZE, SEARCH, STEP, EventWriter


class Tracing:
    """Writes what is evicted, searched and run again into a file in `folder`, on and off as a session's part.

    Times are the host's: on a GPU an operator's is what it took to launch it. module_of: a record's, under
    `--where`.
    """

    def __init__(
        self, ledger: Any, replay: Any, folder: str, module_of: Callable[[Any], str] | None = None
    ) -> None:
        self._ledger = ledger
        self._replay = replay
        self._folder = folder
        self._module_of = module_of
        self._shadowed: list[tuple[Any, str]] = []
        self._steps = 0

    def install(self) -> None:
        """Raises OSError where the file can't be made."""
        self._writer = EventWriter(self._folder)
        atexit.register(self._writer.close)
        self._stepped_ns = now_ns()
        self._handle = register_optimizer_step_post_hook(self._stepped)
        ledger, replay = self._ledger, self._replay
        evict, execute, select = ledger.evict, replay.execute, ledger.policy.select
        run, name_of, wanted = replay._run, self._name_of, None

        def traced_evict(record: Any) -> None:
            started, name, nbytes = now_ns(), name_of(record, record.op), record.nbytes
            evict(record)
            self._add(EVICT, name, started, nbytes)

        def traced_run(record: Any, op: Any) -> None:
            nonlocal wanted
            wanted = record
            run(record, op)

        def traced_execute(op: Any, mutated: Any, stolen: Any) -> Any:
            started = now_ns()
            result = execute(op, mutated, stolen)
            self._add(REMATERIALIZE, name_of(wanted, op), started, op.signature.output_bytes or 0)
            return result

        def traced_select(now: int, evictable: Any) -> Any:
            started = now_ns()
            victim = select(now, evictable)
            name, nbytes = ("", 0) if victim is None else (name_of(victim, victim.op), victim.nbytes)
            self._add(SEARCH, name, started, nbytes)
            return victim

        self._shadow(ledger, "evict", traced_evict)
        self._shadow(replay, "execute", traced_execute)
        if self._module_of is not None:
            self._shadow(replay, "_run", traced_run)
        self._shadow(ledger.policy, "select", traced_select)

    def remove(self) -> None:
        for owner, name in self._shadowed:
            delattr(owner, name)
        self._shadowed.clear()
        self._handle.remove()
        atexit.unregister(self._writer.close)
        self._writer.close()

    def _shadow(self, owner: Any, name: str, method: Any) -> None:
        setattr(owner, name, method)
        self._shadowed.append((owner, name))

    def _stepped(self, _optimizer: Any, _args: Any, _kwargs: Any) -> None:
        self._steps += 1
        self._add(STEP, "", self._stepped_ns, self._steps)
        self._stepped_ns = now_ns()

    def _name_of(self, record: Any, op: Any) -> str:
        """Of the operator that makes it, and of its module."""
        name: str = op.signature.operator.name
        module = self._module_of(record) if self._module_of is not None else ""
        return f"{name}{MODULE}{module}" if module else name

    def _add(self, kind: int, name: str, started: int, nbytes: int) -> None:
        ledger = self._ledger
        self._writer.add(kind, name, started, nbytes, ledger.resident_bytes, ledger.evicted_bytes)
