"""A measurement as a table: on the terminal, and as a section of docs/measurements.md."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table


@dataclass
class Section:
    """`missed` lists, in words, what the measurement should have shown but did not."""

    title: str
    text: str
    headers: list[str]
    rows: list[list[str]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def print(self, console: Console) -> None:
        table = Table(title=self.title, title_justify="left")
        for i, header in enumerate(self.headers):
            table.add_column(header, justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)
        for line in self.missed:
            console.print(f"[red]missed:[/] {line}")

    def markdown(self, command: str) -> str:
        return self.table(f"`{command}` on {machine()}.")

    def table(self, source: str) -> str:
        """Return Markdown with `source`, which says where the figures are from, between text and table."""
        lines = [self.text, "", source, ""]
        lines += [row(self.headers), "|---" + "|---:" * (len(self.headers) - 1) + "|"]
        lines += [row(cells) for cells in self.rows]
        lines += ["", *(f"- Missed: {line}" for line in self.missed)]
        return "\n".join(lines).strip() + "\n"


def row(cells: Sequence[str]) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """Return the machine in one line."""
    import torch  # here, since it takes a second or two, and tables do not need it

    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":")[1].strip() for line in info.open() if line.startswith("model name")), cpu)
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, OMP_NUM_THREADS=1"
    )


INTRODUCTION = """# Measurements

`make bench` (`python -m tests.bench`), `make bench-simulator` and `make bench-gpu` repeat all of these
measurements and replace the sections below. Ratios compare runs that took turns on the same machine. "Plain"
means without dtrrun. "Peak" means the most bytes of tensors that were held at once.
"""


def replace_marked(path: Path, target: str, text: str) -> None:
    """Write `text` between the two marks of `make target` in the page; the rest stays."""
    begin, end = f"<!-- written by make {target} -->", f"<!-- end of what make {target} writes -->"
    before, rest = path.read_text().split(begin)
    _, after = rest.split(end)
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def replace_sections(path: Path, sections: dict[str, str]) -> None:
    """Write `sections` (title to Markdown) into the page; its other sections stay."""
    kept = {}
    if path.exists():
        for block in path.read_text().split("\n## ")[1:]:
            title, _, body = block.partition("\n")
            kept[title] = body.strip() + "\n"
    blocks = [f"## {title}\n\n{body}" for title, body in sorted((kept | sections).items(), key=_number)]
    path.write_text("\n".join([INTRODUCTION, *blocks]))


def _number(section: tuple[str, str]) -> int:
    """Return the number in a title like `12. Speed`."""
    return int(section[0].partition(".")[0])
