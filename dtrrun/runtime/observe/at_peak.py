"""`--peak`: what holds memory when the program's tensors take the most.

How much they take at most is learned in one step. In the next, operators are noted with their lines and
modules, and when as much memory is taken again, there is one look at the program's objects
(`observe.holding`). Before and after these steps, an operator costs a comparison.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dtrrun.runtime.observe import holding, plan
from dtrrun.runtime.observe.callers import LINES, MEMORY, STORAGES, Call, Callers
from dtrrun.runtime.observe.holders import graphs_near_by
from dtrrun.runtime.observe.holding import Facts, Held, Now, Program
from dtrrun.runtime.observe.layers import Seen, Step
from dtrrun.runtime.observe.training_memory import in_backward, in_optimizer, training_of

if TYPE_CHECKING:
    from dtrrun.runtime.session import Session

NEAR = 0.98
"""A look at this share of a step's peak is near enough."""
MORE = 1.02
"""When the program takes so much more than at the last look, there is another one."""
LOOKS = 8
"""So many in a step at most."""
UNEXPLAINED = 0.01
"""The share of the peak from which all of Python's objects are searched for what nothing else explains. That
takes most of a look's time."""
STEPS = 6
"""In so many steps at most, a look is tried."""
TOGETHER = 4
"""After how many steps several processes of a program end."""
PLACES = 150
"""How many places the report has."""
WHO = "peak"
UNKNOWN = "what holds the peak could not be found out ({:.200})"


class AtPeak:
    """Learns when the program takes the most memory, and looks once at what holds it."""

    def __init__(self, session: Session, callers: Callers, target: int | None) -> None:
        """target: the most bytes, if an earlier run has told."""
        self._session, self._callers, self._ledger = session, callers, session.ledger
        self._given = target
        self._tries = 0
        self._peaks: list[int] = []  # of the steps so far
        self._starts: list[int] = []  # bytes at their ends
        self._began = 0  # the first operator of the step that is looked at, 0: none is
        self._looks = 0
        self._seen: Seen | None = None
        self.done = False
        self.found: Facts | None = None

    @property
    def table(self) -> Facts:
        """What the report has: without a look, only how much memory was taken at most."""
        return {"most_bytes": max([*self._peaks, self._callers.notes.most]), "found": self.found}

    @property
    def over(self) -> bool:
        """Whether the script may end: not before what it takes is known.

        Processes that wait for each other have to end at the same step, whatever each has seen.
        """
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return self.done
        return self._session.steps.count >= TOGETHER * max(len(self._session.optimizers()), 1)

    def install(self) -> None:
        self._callers.notes.look = self._look
        self._callers.want(WHO, MEMORY)
        if self._given is not None:
            self._arm(self._given)

    def remove(self) -> None:
        if self._began and self._seen is not None:
            self._end()
        self._callers.want(WHO, 0)
        self._callers.notes.look = None

    def step_ended(self) -> None:
        """Called at the end of each step."""
        if self.done:
            return
        notes = self._callers.notes
        self._peaks.append(notes.most)
        self._starts.append(self._taken())
        if self._began and self._seen is not None:
            near = self._seen.nbytes >= NEAR * notes.most
            self._end()
            if near or self._tries >= STEPS:
                self._finish()
                return
        # A program with several optimizers has as many kinds of steps.
        kinds = max(len(self._session.optimizers()), 1)
        if len(self._peaks) > kinds or self._given is not None:
            if self._tries >= STEPS:
                self._finish()
                return
            growth = max(self._starts[-1] - self._starts[-2], 0) if len(self._starts) > 1 else 0
            # What has not been reached again may not be reached any more: then a little less will do.
            less = 1.0 if self._tries < 2 else NEAR**self._tries
            self._arm(int((max(self._peaks[-kinds:]) + growth) * less))
        notes.most = 0

    def _taken(self) -> int:
        ledger = self._ledger
        ledger.collect_dead()
        return ledger.plain_bytes

    def _arm(self, target: int) -> None:
        notes = self._callers.notes
        self._callers.want(WHO, MEMORY)  # storages are noted anew
        notes.forget(self._ledger.age)
        self._callers.inputs.clear()
        self._callers.want(WHO, LINES | MEMORY | STORAGES)
        self._callers.entered = 0
        self._began, self._looks, self._seen = self._ledger.age + 1, 0, None
        notes.target = target
        self._tries += 1

    def _finish(self) -> None:
        self.done = True
        self._callers.want(WHO, 0)

    # -- the look --------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at what holds memory. Called by an operator that has just run."""
        with self._session.callbacks.own(is_long=True):
            self._look_now()

    def _look_now(self) -> None:
        ledger, callers = self._ledger, self._callers
        inputs = [one for reference in callers.inputs if (one := reference()) is not None]
        now = Now(ledger.age, self._began, inputs, self._is_backward, self._in_module, callers.entered)
        try:
            known = training_of(self._session.optimizers(), callers.modules, ledger.device_type)
            held = holding.hold(ledger, now, Program(known, graphs_near_by(), set()))
            if held.unexplained > UNEXPLAINED * held.nbytes:
                held = holding.hold(ledger, now, Program.look(ledger.device_type))
            self.found = self._told(held)
            plans = plan.plans(held, self._origin, callers.maker_of)
            self._seen = Seen(ledger.age, held.nbytes, held.classes, plans)
        except Exception as why:  # optimizers and tensors may be of any class
            self._session.warn(UNKNOWN.format(f"{type(why).__name__}: {' '.join(str(why).split())}"))
        self._looks += 1
        if self._looks < LOOKS:
            callers.notes.target = int(
                MORE * (callers.notes.most if self._seen is None else self._seen.nbytes)
            )

    def _told(self, held: Held) -> Facts:
        age = self._ledger.age
        called = self._origin_of(age)
        last = [one for one in held.versions if one.age == age and one.operation is not None]
        phase = "backward" if in_backward() else "optimizer" if in_optimizer() else "forward"
        return {
            "bytes": held.nbytes,
            "resident_bytes": sum(one.nbytes for one in held.versions if one.resident),
            "step_bytes": held.nbytes,
            "step": self._session.steps.count + 1,
            "operator": last[0].operation.signature.operator.name if last else "",
            "phase": phase,
            "module": called.module,
            "line": called.line,
            "classes": holding.class_rows(held),
            "places": holding.place_rows(held, self._origin, PLACES),
            "variables": holding.variable_rows(held),
            "largest": holding.largest(held, self._origin),
            "plans": [],
            "layers": None,
        }

    def _end(self) -> None:
        """Complete what was found with what is known at the end of the step."""
        assert self._seen is not None
        assert self.found is not None
        notes = self._callers.notes
        step = Step(notes.storages(), self._seen, self._began, self._ledger.age, *notes.backward())
        self.found["step_bytes"] = max(notes.most, self.found["bytes"])
        self.found["layers"] = step.layers(self._origin_of)
        self.found["plans"] = step.plans()
        self._began, self._seen = 0, None

    def _origin(self, version: Any) -> Call:
        return self._origin_of(version.age)

    def _origin_of(self, age: int) -> Call:
        return self._callers.origin(age) if age >= self._began else Call("", "", False)

    def _in_module(self, version: Any) -> bool:
        return self._origin_of(version.age).module != ""

    def _is_backward(self, version: Any) -> bool:
        return bool(version.age >= self._began and self._callers.at(version.age).backward)
