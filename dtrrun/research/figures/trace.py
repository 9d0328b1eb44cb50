"""Pictures of what is in memory at each time of a run (as in the figure of App. A)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from dtrrun.simulator.replay import Replay
from dtrrun.simulator.schedule import Schedule

from .style import COLOURS, grid, legend, save, styled

ACROSS, DOWN = 900, 300
"""Maximum width and height of the picture, in cells."""
NOT, FIRST, AGAIN = 0, 1, 2
"""States: not in memory, in memory since its first computation, in memory after a rematerialization."""


@dataclass
class Trace:
    """Times in ns. spans: storage, from, to, and whether it had been evicted before.

    Constants and storages without memory are omitted.
    """

    end: int = 0
    storages: int = 0
    spans: list[tuple[int, int, int, bool]] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)


def trace(
    schedule: Schedule,
    budget_bytes: int,
    heuristic: str,
    deallocation: str = "eager",
    limit: float = 2.0,
) -> Trace:
    """Trace one run, as far as it gets. limit: as for `prepare`."""
    found, seen = Trace(), set[int]()
    since: dict[int, int] = {}

    def watch(what: str, place: int) -> None:
        if what == "run":
            return
        now = replay.core.clock
        if what == "compute":
            since[place] = now
        elif place in since:
            found.spans.append((place, since.pop(place), now, place in seen))
            seen.add(place)
        found.memory.append((now, replay.core.memory))

    replay = Replay(schedule, budget_bytes, heuristic, deallocation=deallocation, limit=limit, observer=watch)
    replay.run()
    found.end = replay.core.clock
    found.spans += [(place, begin, found.end, place in seen) for place, begin in since.items()]
    constants = schedule.constants
    shown = [place for place, nbytes in enumerate(schedule.nbytes) if nbytes and place not in constants]
    lines = {place: line for line, place in enumerate(shown)}
    found.spans = [(lines[one[0]], *one[1:]) for one in found.spans if one[0] in lines]
    found.storages = len(shown)
    return found


def draw_trace(
    schedule: Schedule, budget_bytes: int, heuristic: str, title: str, folder: Path, name: str, format: str
) -> Path:
    """Draw memory over time above; below, each storage as a line, coloured while it is resident.

    Raises OSError.
    """
    import numpy as np

    found = trace(schedule, budget_bytes, heuristic)
    end, count = max(found.end, 1), max(found.storages, 1)
    across, down = min(ACROSS, max(end, 1)), min(DOWN, count)
    picture = np.full((down, across), NOT)
    for again in (False, True):
        for place, begin, until, came_back in found.spans:
            if came_back is again:
                left, right = begin * across // end, max(until * across // end, begin * across // end + 1)
                picture[place * down // count, left:right] = AGAIN if again else FIRST
    with styled():
        from matplotlib.colors import ListedColormap
        from matplotlib.patches import Patch

        colours = ["#ffffff", COLOURS[0], COLOURS[1]]
        figure, (above, below) = grid(2, title)
        figure.clear()
        figure.set_size_inches(7, 4.6)
        figure.suptitle(title, fontsize=10)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
        above.step(*_thinned(found.memory), where="post", color="#0072b2", linewidth=0.8)
        above.axhline(budget_bytes / 1e9, color="#000000", linestyle="--", linewidth=0.9, label="budget")
        above.set(ylabel="memory, GB", ylim=(0, None))
        below.imshow(
            picture,
            cmap=ListedColormap(colours),
            vmin=NOT,
            vmax=AGAIN,
            aspect="auto",
            interpolation="nearest",
            extent=(0, end / 1e6, count, 0),
            origin="upper",
        )
        below.grid(visible=False)
        below.set(xlabel="time of operators, ms", ylabel="storage, by its first use")
        in_memory = [Patch(color=colours[FIRST], label="in memory since its first computation")]
        in_memory += [Patch(color=colours[AGAIN], label="in memory after a rematerialization")]
        legend(figure, [above], extra=in_memory)
        return save(figure, folder, name, format)


def _thinned(points: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Keep only the maximum of points drawn in the same place."""
    if not points:
        return [0.0], [0.0]
    most: dict[int, tuple[int, int]] = {}
    width = max(points[-1][0] // (2 * ACROSS), 1)
    for time, nbytes in points:
        place = time // width
        if place not in most or nbytes > most[place][1]:
            most[place] = time, nbytes
    return [time / 1e6 for time, _ in most.values()], [nbytes / 1e9 for _, nbytes in most.values()]
