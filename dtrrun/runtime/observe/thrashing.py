"""Detects steps that consist mostly of recomputation, and warns or stops."""

from __future__ import annotations

from collections.abc import Callable

from dtrrun.runtime.observe.ending import end_script
from dtrrun.runtime.observe.steps import MOST, overhead_ns, own_ns
from dtrrun.settings import RuntimeSettings

THRASHING = 10.0  # the slowdown that causes a warning by default
GRACE_NS = 5_000_000_000  # of overhead in an unfinished step
WINDOW_NS = 500_000_000  # by default, short steps are judged together: each optimizer's step counts as one
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
        self._window: dict[str, int] = {}  # sums over the steps since the last judgement

    def watch(self, step: dict[str, int], grace_ns: int = 0) -> None:
        """Warn, or raise SystemExit, if a step (possibly unfinished) is mostly recomputation."""
        most = self._settings.max_slowdown
        steps = f"step {step['index']}"
        if most is None and not grace_ns:
            first = self._add(step)
            if self._window["wall_ns"] < WINDOW_NS:
                return
            if first != step["index"]:
                steps = f"steps {first} to {step['index']}"
            step, self._window = self._window, {}
        # Bookkeeping does not count: a larger budget has it, too, and in the first steps it includes imports.
        recomputing = overhead_ns(step) - step["bookkeeping_ns"]
        if recomputing <= grace_ns or not (step["evictions"] or step["rematerializations"]):
            return  # without evictions the budget is not the cause
        found = min(1 + recomputing / own_ns(step), MOST)
        if found <= (most or THRASHING):
            return
        if most is not None and self._settings.on_thrash == "stop":
            self._alert(
                f"step {step['index']} takes {found:.1f} times as long as its own work: stopped "
                f"(--on-thrash stop); {self._help()}"
            )
            self._publish()
            end_script(THRASHED)
        if not self._warning:
            self._warning = (
                f"steps take more than {most or THRASHING:g} times as long as their own work ({steps}: "
                f"{found:.1f} times), because they recompute so much; {self._help()}"
            )
        self._warn(self._warning)

    def _help(self) -> str:
        return ". ".join(filter(None, ("a larger budget would help", self._remedy())))

    def _add(self, step: dict[str, int]) -> int:
        """Add a step to the window. Return the index of the window's first step."""
        window = self._window
        first = window.get("index", step["index"])
        self._window = {name: value + window.get(name, 0) for name, value in step.items()} | {"index": first}
        return first
