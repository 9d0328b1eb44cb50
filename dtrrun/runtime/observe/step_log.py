"""The log of a step: operators in the paper's format (App. C.6), with additions for dtrrun's runtime.

Readers of the paper's format can read every line. Additional facts are in the field DTRRUN (see
`docs/design/logs.md`), and events without an instruction in the format are annotations with such a field.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from dtrrun.core.graph import Geometry
from dtrrun.telemetry.private import open_private

FORMAT = 1

Facts = dict[str, Any]

AT_ONCE = 256
"""How many lines are written together."""

_to_json = json.JSONEncoder(separators=(",", ":")).encode


class Names:
    """The names of one storage's tensors in the log: the first is its number, views have a suffix."""

    __slots__ = ("_views", "all", "by_geometry", "root")

    def __init__(self, root: str, geometry: Geometry | None) -> None:
        self.root = root
        self.all = [root]
        self._views = 0
        self.by_geometry: dict[Geometry | None, str] = {geometry: root}

    def of(self, geometry: Geometry) -> str:
        return self.by_geometry.get(geometry, self.root)

    def new_view(self, geometry: Geometry) -> str:
        self._views += 1
        name = f"{self.root}v{self._views}"
        self.all.append(name)
        self.by_geometry[geometry] = name
        return name

    def only_root(self) -> list[str]:
        """Forget the views, whose names are invalid after a mutation, and return their names."""
        views, self.all = self.all[1:], [self.root]
        self.by_geometry.clear()
        return views


class StepLog:
    """An open log file. Raises OSError if it cannot be opened or completed.

    A write error in between must not fail the recorded operator: `close` raises it.
    """

    def __init__(self, path: str) -> None:
        self._error: OSError | None = None
        self._lines: list[str] = []
        self._path = path
        self._names: dict[int, Names] = {}
        self._fresh = 0
        self._pid = os.getpid()
        self._part = f"{path}.part"
        raw = self._raw = open_private(self._part, "wb")
        # No name or time in the header, so that the same step gives the same bytes.
        compressed: Any = gzip.GzipFile("", "wb", 9, raw, 0) if path.endswith(".gz") else raw
        self._file: Any = compressed

    def close(self) -> None:
        """Complete the log, and give it its final name."""
        self._write_lines()
        try:
            if self._error is not None:
                raise self._error
            self._file.close()
            self._raw.close()
            os.replace(self._part, self._path)
        except OSError:
            self.discard()
            raise

    def discard(self) -> None:
        """Discard the log. A forked child only drops its copy, whose buffers hold incomplete output."""
        if os.getpid() != self._pid:
            nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
            os.dup2(nowhere, self._raw.fileno(), inheritable=False)
            os.close(nowhere)
            return
        for file in (self._file, self._raw):  # each has unwritten data
            with suppress(OSError):
                file.close()
        with suppress(OSError):
            os.unlink(self._part)

    def line(self, instruction: str, facts: Facts | None = None, **fields: Any) -> None:
        fields = {"INSTRUCTION": instruction, **fields}
        if facts is not None:
            fields["DTRRUN"] = facts
        self._write(_to_json(fields))

    def _write(self, text: str) -> None:
        self._lines.append(text)
        if len(self._lines) == AT_ONCE:
            self._write_lines()

    def _write_lines(self) -> None:
        text = "".join(f"{line}\n" for line in self._lines)
        self._lines.clear()
        if self._error is not None or os.getpid() != self._pid:
            return  # a forked child ends its session, which is not an event of the step
        try:
            self._file.write(text.encode())
        except OSError as error:
            self._error = error

    # Most lines are of these kinds. Encoding them as JSON would take most of the time, so they are formatted.

    def _memory(self, name: str, nbytes: int) -> None:
        self._write(f'{{"INSTRUCTION":"MEMORY","NAME":"{name}","MEMORY":"{nbytes}"}}')

    def _alias(self, name: str, place: int) -> None:
        self._write(f'{{"INSTRUCTION":"ALIAS","NAME":"{name}","ALIAS":"{place}"}}')

    def _release(self, name: str, more: str = "") -> None:
        self._write(f'{{"INSTRUCTION":"RELEASE","NAME":"{name}"{more}}}')

    def annotate(self, text: str, facts: Facts | None = None) -> None:
        self.line("ANNOTATE", facts, ANNOTATION=text)

    def constant(self, number: int, nbytes: int, facts: Facts) -> None:
        names = self._names[number] = Names(f"t{number}", None)
        self.line("CONSTANT", facts, NAME=names.root)
        self._memory(names.root, nbytes)

    def released(self, number: int) -> None:
        """Log that the program has released a storage: all tensors over it, the first one last."""
        *views, root = reversed(self._names.pop(number).all)
        for name in views:
            self._release(name)
        self._release(root, f',"DTRRUN":{{"storage":{number}}}')

    def call(
        self,
        operator: str,
        inputs: Sequence[tuple[int, Geometry]],
        made: Sequence[tuple[int, int, Geometry]],
        views: Sequence[tuple[int, Geometry]],
        written: Sequence[int],
        cost: int,
        facts: Facts,
    ) -> None:
        """Log one operator.

        inputs: storage number and geometry of each tensor argument. made: number, bytes and geometry of new
        storages. views: storage number and geometry of results over its inputs' storages. written: numbers of
        storages of which it makes a new version.
        """
        names = self._names
        args = [
            names[number].root if number in written else names[number].of(geometry)
            for number, geometry in inputs
        ]
        results: list[tuple[str, int, int]] = []
        for number, nbytes, geometry in made:
            names[number] = Names(f"t{number}", geometry)
            results.append((names[number].root, nbytes, -1))
        given = [number for number, _ in inputs]
        for number, geometry in views:
            if number in given and number not in written:
                results.append((names[number].new_view(geometry), 0, given.index(number)))
        if results or not written:
            self._call(operator, args, results, cost, facts)
            cost, facts = 0, {}
        if written:
            for number in written:
                for view in names[number].only_root():
                    self._release(view)
            places = [given.index(number) for number in written]
            self.line("MUTATE", facts or None, NAME=operator, ARGS=args, MUTATE=places, TIME=str(cost))

    def _call(
        self, operator: str, args: list[str], results: list[tuple[str, int, int]], cost: int, facts: Facts
    ) -> None:
        nothing = not results
        if nothing:  # the format requires a result: write one of zero bytes, released at once
            self._fresh += 1
            results = [(f"n{self._fresh}", 0, -1)]
        named = [name for name, _, _ in results]
        self.line("CALL", facts, NAME=operator, ARGS=args, RESULT=named, TIME=str(cost))
        for name, nbytes, alias in results:
            self._memory(name, nbytes)
            self._alias(name, alias)
        if nothing:
            self._release(named[0])


def open_log(path: str) -> StepLog | None:
    """Open the log. Return None if another process of the program writes it."""
    try:
        return StepLog(path)
    except FileExistsError:
        return None
