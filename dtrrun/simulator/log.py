"""Operator logs in the paper's format (App. C.6): one JSON object per line.

    {"INSTRUCTION": "CONSTANT", "NAME": "x1"}                     followed by one MEMORY
    {"INSTRUCTION": "CALL", "NAME": "mm", "ARGS": ["x1", "x2"], "RESULT": ["x3"], "TIME": "9118"}
                                                                  followed by MEMORY and ALIAS for each result
    {"INSTRUCTION": "MEMORY", "NAME": "x3", "MEMORY": "4096"}
    {"INSTRUCTION": "ALIAS", "NAME": "x3", "ALIAS": "-1"}         index of the argument, -1: none
    {"INSTRUCTION": "MUTATE", "NAME": "add_", "ARGS": ["x3"], "MUTATE": [0], "TIME": "73429"}
    {"INSTRUCTION": "COPY", "DST": "x4", "SRC": "x3"}             another reference
    {"INSTRUCTION": "COPY_FROM", "DST": "x4", "SRC": "x1"}        x4 now refers to x1
    {"INSTRUCTION": "RELEASE", "NAME": "x4"}
    {"INSTRUCTION": "ANNOTATE", "ANNOTATION": "START"}            everything before it is skipped

TIME is in nanoseconds, MEMORY in bytes; numbers may be written as numbers or as text. Other fields are
ignored, except DTRRUN, which contains facts for `simulator.live` in logs of `dtrrun record`. A file may be
gzip-compressed.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

START = "START"
BACKWARD = "BACKWARD"
STEP = "STEP"
NOTE = "NOTE "
"""Begins an annotation that is for the user of `dtrrun estimate`."""
WORK = "work"
"""Key of the fact, in its logs, with an operator's (floating-point operations, precision, bytes read and
written, bytes of its workspace)."""


Facts = dict[str, Any] | None


class LogError(ValueError):
    """A log that cannot be read. The message names the file, the line and the problem."""


class Constant(NamedTuple):
    name: str
    nbytes: int
    facts: Facts = None


class Call(NamedTuple):
    """`aliases`: for each output, the index of the input whose storage it views, or -1."""

    operator: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nbytes: tuple[int, ...]
    aliases: tuple[int, ...]
    cost: int
    facts: Facts = None


class Mutate(NamedTuple):
    """`mutated`: indices of the inputs that it writes to."""

    operator: str
    inputs: tuple[str, ...]
    mutated: tuple[int, ...]
    cost: int
    facts: Facts = None


class Copy(NamedTuple):
    target: str
    source: str


class CopyFrom(NamedTuple):
    target: str
    source: str


class Release(NamedTuple):
    name: str
    facts: Facts = None


class Annotate(NamedTuple):
    text: str
    facts: Facts = None


Instruction = Constant | Call | Mutate | Copy | CopyFrom | Release | Annotate


def read_log(path: str | Path) -> list[Instruction]:
    """Return the instructions of a log file, from its START annotation (or from the beginning without one).

    The annotation is omitted unless it has facts. Raises OSError, and LogError, also for an empty log or a
    truncated one of `dtrrun record`.
    """
    reader = _Lines((), path)
    try:
        with _opened(path) as file:
            reader = _Lines(file, path)
            found = _from_start(_instructions(reader))
            _check_whole(found, reader)
            return found
    except UnicodeDecodeError as error:
        raise LogError(f"{path}: not a text file ({error.reason} at byte {error.start})") from None
    except EOFError:
        cut = f"the log was cut off after line {reader.place}"
        raise LogError(f"{path}: not a complete gzip file: {cut}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise LogError(f"{path}: not a complete gzip file ({error})") from None


def _opened(path: str | Path) -> IO[str]:
    with open(path, "rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rt", encoding="utf-8") if compressed else open(path, encoding="utf-8")


def _from_start(instructions: Iterable[Instruction]) -> list[Instruction]:
    found = list(instructions)
    for place, one in enumerate(found):
        if isinstance(one, Annotate) and one.text == START:
            return found[place + (one.facts is None) :]
    return found


def _check_whole(found: Sequence[Instruction], reader: _Lines) -> None:
    """Raise LogError for an incomplete log. The paper's own logs have no end marker."""
    if not found:
        raise LogError(f"{reader.name}: the log is empty")
    head, last = found[0], found[-1]
    if not (isinstance(head, Annotate) and head.facts and "step" in head.facts):
        return
    if not (isinstance(last, Annotate) and last.text == STEP and last.facts):
        raise reader.error("the log was cut off: it ends in the middle of a step")
    ended, wanted = last.facts.get("step"), head.facts.get("last")
    if wanted is not None and ended != wanted:
        raise reader.error(f"the log was cut off: it ends with step {ended}, not {wanted}")


def _instructions(reader: _Lines) -> Iterator[Instruction]:
    while (fields := reader.next()) is not None:
        kind, facts = reader.text("INSTRUCTION"), reader.facts()
        if kind == "CONSTANT":
            label = reader.text("NAME")
            reader.follow("MEMORY", label)
            yield Constant(label, reader.size("MEMORY"), facts)
        elif kind == "CALL":
            yield _call(reader)
        elif kind == "MUTATE":
            inputs = reader.names("ARGS")
            mutated = tuple(reader.index(one, len(inputs)) for one in reader.items("MUTATE"))
            yield Mutate(reader.text("NAME"), inputs, mutated, reader.size("TIME"), facts)
        elif kind == "COPY":
            yield Copy(reader.text("DST"), reader.text("SRC"))
        elif kind in ("COPY_FROM", "COPYFROM"):
            yield CopyFrom(reader.text("DST"), reader.text("SRC"))
        elif kind == "RELEASE":
            yield Release(reader.text("NAME"), facts)
        elif kind == "ANNOTATE":
            yield Annotate(reader.text("ANNOTATION"), facts)
        elif kind in ("MEMORY", "ALIAS"):
            raise reader.error(f"{kind} of {fields.get('NAME')!r} belongs to no CALL or CONSTANT")
        else:
            raise reader.error(f"unknown instruction {kind!r}")


def _call(reader: _Lines) -> Call:
    operator, inputs, outputs = reader.text("NAME"), reader.names("ARGS"), reader.names("RESULT")
    cost, facts = reader.size("TIME"), reader.facts()
    if not outputs:
        raise reader.error(f"{operator} has no RESULT")
    sizes: list[int] = []
    aliases: list[int] = []
    for output in outputs:
        reader.follow("MEMORY", output)
        sizes.append(reader.size("MEMORY"))
        reader.follow("ALIAS", output)
        alias = reader.number("ALIAS")
        aliases.append(-1 if alias == -1 else reader.index(alias, len(inputs)))
    return Call(operator, inputs, outputs, tuple(sizes), tuple(aliases), cost, facts)


class _Lines:
    """Reads the fields of one line at a time, and adds the line number to error messages."""

    def __init__(self, lines: Iterable[str], name: str | Path) -> None:
        self._lines = iter(lines)
        self.name = name
        self.place = 0
        self._fields: dict[str, Any] = {}

    def error(self, what: str) -> LogError:
        return LogError(f"{self.name}, line {self.place}: {what}")

    def next(self) -> dict[str, Any] | None:
        for line in self._lines:
            self.place += 1
            if line.isspace():
                continue
            try:
                fields = json.loads(line)
            except ValueError:
                raise self.error("not JSON, as in a log that dtrrun record writes") from None
            except RecursionError:
                raise self.error("JSON that is nested too deeply") from None
            if not isinstance(fields, dict):
                raise self.error(f"not an object with fields: {line.strip()[:60]}")
            self._fields = fields
            return fields
        return None

    def follow(self, kind: str, name: str) -> None:
        """Read the next line, which must be an instruction of this kind about `name`."""
        fields = self.next()
        if fields is None:
            raise self.error(f"the log ends where {kind} of {name} must follow")
        if fields.get("INSTRUCTION") != kind or fields.get("NAME") != name:
            found = f"{fields.get('INSTRUCTION')} of {fields.get('NAME')}"
            raise self.error(f"{found} stands where {kind} of {name} must follow")

    def _field(self, field: str) -> Any:
        try:
            return self._fields[field]
        except KeyError:
            raise self.error(f"no field {field}") from None

    def facts(self) -> Facts:
        value = self._fields.get("DTRRUN")
        if value is not None and not isinstance(value, dict):
            raise self.error(f"DTRRUN is {value!r}, not an object with fields")
        return value

    def text(self, field: str) -> str:
        value = self._field(field)
        if not isinstance(value, str):
            raise self.error(f"{field} is {value!r}, not text")
        return value

    def items(self, field: str) -> list[Any]:
        value = self._field(field)
        if not isinstance(value, list):
            raise self.error(f"{field} is {value!r}, not a list")
        return value

    def names(self, field: str) -> tuple[str, ...]:
        found = self.items(field)
        for one in found:
            if not isinstance(one, str):
                raise self.error(f"{field} holds {one!r}, not the name of a tensor")
        return tuple(found)

    def number(self, field: str) -> int:
        value = self._field(field)
        try:
            if isinstance(value, bool) or not isinstance(value, (int, str)):
                raise ValueError
            return int(value)
        except ValueError:
            raise self.error(f"{field} is {value!r}, not a whole number") from None

    def size(self, field: str) -> int:
        number = self.number(field)
        if number < 0:
            raise self.error(f"{field} is {number}, less than 0")
        return number

    def index(self, value: Any, count: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
            raise self.error(f"{value!r} is not the index of one of its {count} arguments")
        return value
