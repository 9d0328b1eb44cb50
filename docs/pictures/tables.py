"""The live table at two widths, the final one and that of the peak as SVG, drawn by our views from runs.json.

`python docs/pictures/tables.py [FOLDER]`. The same run gives the same bytes: pictures change when views do. A
run that lacks what the views show today has to be recorded anew: `make docs-runs`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.final import print_final
from dtrrun.views.holding import print_peak
from dtrrun.views.picture import picture
from dtrrun.views.rates import Rates

HERE = Path(__file__).parent
WIDTHS = (80, 120)
ROWS = 30
"""Of the terminal: the table takes at most half of them."""
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"

NORMAL = (
    (0x28, 0x2C, 0x34), (0xE0, 0x6C, 0x75), (0x98, 0xC3, 0x79), (0xE5, 0xC0, 0x7B),
    (0x61, 0xAF, 0xEF), (0xD6, 0x8F, 0xE6), (0x56, 0xB6, 0xC2), (0xDC, 0xDF, 0xE4),
)  # fmt: skip
THEME = TerminalTheme((0x1E, 0x21, 0x27), (0xDC, 0xDF, 0xE4), [*NORMAL], [*NORMAL])
"""Black, red, green, yellow, blue, magenta, cyan, white: bright enough to be read when dim."""

# rich's own frame begins with a font from the network.
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: FONTS; font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
""".replace("FONTS", FONTS)


class Terminal(io.StringIO):
    """Text for a terminal, so that the views have colours."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True


def main(folder: Path) -> None:
    os.environ.update(TERM="xterm-256color", COLORTERM="")
    os.environ.pop("NO_COLOR", None)
    runs = json.loads((HERE / "runs.json").read_text())
    run = runs["shown"]
    for width in WIDTHS:
        lines = [prompt(run), *run["output"], *live(run, width)]
        save(folder / f"live-{width}.svg", lines, width)
    save(folder / "final-80.svg", final(run, 80), 80)
    save(folder / "peak-80.svg", at_peak(runs["peak"], 80), 80)


def prompt(run: dict[str, Any]) -> str:
    return f"$ {' '.join(run['command'])}"


def live(run: dict[str, Any], width: int) -> list[str]:
    """The table as it stood when the newest record was read."""
    rates = Rates()
    snapshots = [snapshot(fields) for fields in run["snapshots"]]
    for one in snapshots:
        rates.add([one])
    budget = snapshots[-1].counters["budget_bytes"]
    settings = RuntimeSettings(budget_bytes=budget, heuristic=snapshots[-1].meta["heuristic"])
    return picture(snapshots[-1:], settings, rates, Terminal(), width, ROWS)


def snapshot(fields: dict[str, Any]) -> Snapshot:
    return Snapshot(**fields)


def final(run: dict[str, Any], width: int) -> list[str]:
    stream = Terminal()
    print_final(run["report"], stream, width=width)
    return stream.getvalue().splitlines()


def at_peak(report: dict[str, Any], width: int) -> list[str]:
    """What `dtrrun peak` prints."""
    stream = Terminal()
    print_peak(report, stream, width=width)
    return [f"$ dtrrun peak {report['command'][-1]}", *stream.getvalue().splitlines()]


def save(path: Path, lines: list[str], width: int) -> None:
    """Lines of ANSI text as a picture of a terminal of that width."""
    console = Console(
        record=True, width=width, file=io.StringIO(), highlight=False, emoji=False, markup=False
    )
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True, overflow="crop", crop=True)
    console.print()  # rich cuts the last line's feet off
    svg = console.export_svg(
        theme=THEME, code_format=FRAME, unique_id=path.stem, title="", font_aspect_ratio=0.61
    )
    path.write_text(svg)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
