"""Detects that a program mostly recomputes, and warns or stops.

What is judged is a step; a step that has not ended, once it has recomputed for `GRACE_NS`; and in a program
without an optimizer, which has no steps, each `SPAN_NS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dtrrun.runtime.observe.ending import end_script
from dtrrun.runtime.observe.steps import MOST, overhead_ns, own_ns
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.times import effective

THRASHING = 10.0  # the slowdown that causes a warning by default
GRACE_NS = 5_000_000_000  # of overhead in an unfinished step
WINDOW_NS = 500_000_000  # by default, short steps are judged together: each optimizer's step counts as one
SPAN_NS = 5_000_000_000  # a program without steps is judged by what it does in this time
NEVER = float("inf")
THRASHED = 1  # exit status of --on-thrash stop


class Thrashing:
    """Judges steps. Before the program is ended, `alert` is called with the reason, then `publish`."""

    def __init__(
        self,
        settings: RuntimeSettings,
        warn: Callable[[str], None],
        alert: Callable[[str], None],
        publish: Callable[[], None],
        remedy: Callable[[], str] = str,
    ) -> None:
        """remedy: returns what else would help, or ""."""
        self._settings, self._warn, self._alert, self._publish = settings, warn, alert, publish
        self._remedy, self._warning = remedy, ""
        self._next = THRASHING  # the slowdown of an unfinished step at which it is mentioned again
        self._mark: dict[str, int] | None = None  # totals at the end of the last span of `watch_time`
        self._stopped = False  # the program is being ended
        self._window: dict[str, int] = {}  # sums over the steps since the last judgement

    def watch(self, step: dict[str, int], grace_ns: int = 0) -> None:
        """Warn, or raise SystemExit, if a step (possibly unfinished) is mostly recomputation."""
        steps = f"step {step['index']}"
        if self._settings.max_slowdown is None and not grace_ns:
            first = self._add(step)
            if self._window["wall_ns"] < WINDOW_NS:
                return
            if first != step["index"]:
                steps = f"steps {first} to {step['index']}"
            step, self._window = self._window, {}
        found = self._judge(step, grace_ns)
        if not found:
            return
        why = f"step {step['index']} takes {found:.1f} times as long as its own work"
        self._stop(why, again=not grace_ns)
        if grace_ns:
            self._goes_on(step, found)
        if not self._warning:
            self._warning = (
                f"steps take more than {self._most:g} times as long as their own work ({steps}: "
                f"{found:.1f} times), because they {_doing(step)} so much; {self._help()}"
            )
        self._warn(self._warning)

    def watch_time(self, totals: dict[str, int]) -> None:
        """Judge a program that has no steps by what it does in `SPAN_NS`. Called periodically."""
        if self._mark is None:
            self._mark = totals
        span = {name: value - self._mark[name] for name, value in totals.items()}
        if span["wall_ns"] < SPAN_NS:
            return
        self._mark, span = totals, effective(span)
        found = self._judge(span)
        if not found:
            return
        seconds = span["wall_ns"] / 1e9
        self._stop(f"{seconds:.0f} s have taken {found:.1f} times as long as the program's own work in them")
        self._warn(
            f"the program takes more than {self._most:g} times as long as its own work, because it "
            f"has to {_doing(span)} so much; {self._help()}"
        )

    @property
    def _most(self) -> float:
        return self._settings.max_slowdown or THRASHING

    def _judge(self, figures: dict[str, int], grace_ns: int = 0) -> float:
        """Return by what factor recomputing has made this longer, or 0 if that is acceptable."""
        # Bookkeeping does not count: a larger budget has it, too, and in the first steps it includes imports.
        recomputing = overhead_ns(figures) - figures["bookkeeping_ns"]
        if recomputing <= grace_ns or not (figures["evictions"] or figures["rematerializations"]):
            return 0  # without evictions the budget is not the cause
        found = min(1 + recomputing / own_ns(figures), MOST)
        return found if found > self._most else 0

    def _stop(self, why: str, *, again: bool = False) -> None:
        """again: even if the program is being ended, which may compute: its `finally` saves a model."""
        if self._settings.max_slowdown is None or self._settings.on_thrash != "stop":
            return
        if self._stopped and not again:
            return
        self._stopped = True
        self._alert(f"{why}: stopped (--on-thrash stop); {self._help()}")
        self._publish()
        end_script(THRASHED)

    def _help(self) -> str:
        return ". ".join(filter(None, ("a larger budget would help", self._remedy())))

    def _goes_on(self, step: dict[str, int], found: float) -> None:
        """Say how far a step that has not ended is from its own work, whenever that has become ten times as
        much."""
        if found < self._next or self._settings.max_slowdown is not None:
            return
        if self._next > THRASHING:
            more = "more than " if found == MOST else ""
            self._warn(
                f"step {step['index']} has run {step['rematerializations']:,} operators again in "
                f"{step['wall_ns'] / 1e9:.0f} s, {more}{found:.0f} times its own work so far. It may not end "
                "inside this budget: --max-slowdown 100 --on-thrash stop ends such a run"
            )
        self._next = min(10 * self._next, MOST) if self._next < MOST else NEVER

    def _add(self, step: dict[str, int]) -> int:
        """Add a step to the window. Return the index of the window's first step."""
        window = self._window
        first = window.get("index", step["index"])
        self._window = {name: value + window.get(name, 0) for name, value in step.items()} | {"index": first}
        return first


def _doing(times: Mapping[str, int]) -> str:
    """Return what takes the time of a step that thrashes."""
    copies = times.get("host_ns", 0) > times.get("rematerialization_ns", 0)
    return "copy to the host and back" if copies else "recompute"
