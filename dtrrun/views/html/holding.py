"""What holds the peak, for the page: tables, and a flame graph of bytes by module and line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from dtrrun.sizes import format_size
from dtrrun.telemetry import holding as words
from dtrrun.views.holding import by_module, headline, line_of, lines_of, remarks
from dtrrun.views.text import duration, plain, share

Json = dict[str, Any]
Row = Mapping[str, Any]

ROW = 22
"""The height of a flame's row."""
LEAST = 0.1
"""Narrower parts of a flame graph, in percent, are not drawn."""
LONGEST = 120


def holding(holds: Row | None) -> Json | None:
    """Return the variables of the page's section about the peak; None without one."""
    if holds is None:
        return None
    flames = [*_flames(holds)]
    return {
        "headline": headline(holds),
        "classes": [
            {"name": name, "key": key_of(name), "bytes": size, "share": of_all, "remedy": remedy}
            for name, size, of_all, remedy in words.rows_of(holds)
        ],
        "modules": [
            (
                plain(row["module"], LONGEST) or "–",
                f"{row['alike']:,}",
                format_size(row["bytes"]),
                lines_of(row["lines"]),
                duration(row["seconds"]) if row["seconds"] else "–",
            )
            for row in by_module(holds)
        ],
        "variables": [
            (
                plain(row["name"], LONGEST),
                plain(row["place"], LONGEST),
                format_size(int(row["bytes"])),
                plain(words.variable_remedy(row), 2 * LONGEST),
            )
            for row in holds["variables"]
        ],
        "remarks": [plain(one, 4 * LONGEST) for one in remarks(holds)],
        "flames": flames,
        "height": ROW * (1 + max((flame.depth for flame in flames), default=0)),
    }


def key_of(name: str) -> str:
    """Return the name of a class's colour."""
    return f"held-{words.CLASSES.index(name)}" if name in words.CLASSES else "held-none"


class Flame(NamedTuple):
    """A part of the flame graph. x, width: in percent. label: empty if it does not fit."""

    depth: int
    x: str
    width: str
    y: int
    label: str
    tip: str
    key: str


class _Node:
    """Bytes of a module, or of a line in one."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.key = ""
        self.parts: dict[str, _Node] = {}

    def add(self, path: list[str], nbytes: int, key: str) -> None:
        self.nbytes += nbytes
        if path:
            self.parts.setdefault(path[0], _Node()).add(path[1:], nbytes, key)
        else:
            self.key = key


def _flames(holds: Row) -> Iterator[Flame]:
    root = _Node()
    for row in holds["places"]:
        name = str(row["class"])
        module = [part for part in str(row["module"]).split(".") if part]
        line = " ".join(filter(None, (line_of(row["line"]), plain(row["operator"], LONGEST))))
        root.add([name, *_joined(module), line or "unknown"], int(row["bytes"]), key_of(name))
    placed = {str(row["class"]) for row in holds["places"]}
    for row in holds["classes"]:  # those that are not told by place
        if str(row["name"]) not in placed:
            root.add([str(row["name"])], int(row["bytes"]), key_of(str(row["name"])))
    if root.nbytes > 0:
        yield from _below(root, "peak", 0, 0.0, 100 / root.nbytes, "", root.nbytes)


def _joined(module: list[str]) -> list[str]:
    """Return the parts of a module's name, `*` together with what is before it."""
    found: list[str] = []
    for part in module:
        if part == "*" and found:
            found[-1] += ".*"
        else:
            found.append(part)
    return found


def _below(
    node: _Node, name: str, depth: int, x: float, scale: float, key: str, whole: int
) -> Iterator[Flame]:
    width = node.nbytes * scale
    if width < LEAST:
        return
    shown = plain(name, LONGEST)
    size = format_size(node.nbytes)
    tip = f"{shown}: {size}, {share(node.nbytes, whole)}"
    label = shown if width > 0.7 * len(shown) + 1 else ""
    yield Flame(depth, f"{x:.3f}", f"{width:.3f}", ROW * depth, label, tip, key or "held-root")
    at = x
    for part, one in sorted(node.parts.items(), key=lambda item: -item[1].nbytes):
        yield from _below(one, part, depth + 1, at, scale, key or _key(one), whole)
        at += one.nbytes * scale


def _key(node: _Node) -> str:
    while not node.key and node.parts:
        node = next(iter(node.parts.values()))
    return node.key
