"""Writes operator logs that tests make up, in the format of `dtrrun.simulator.log`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import IO, Any

from dtrrun.simulator.log import START, Annotate, Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release


def write_log(instructions: Iterable[Instruction], file: IO[str]) -> None:
    """Write a log that `read_log` reads, beginning with the START annotation."""
    first = True
    for one in instructions:
        if first and not (isinstance(one, Annotate) and one.text == START):
            _write(Annotate(START), file)
        first = False
        _write(one, file)


def _write(one: Instruction, file: IO[str]) -> None:
    facts = None if isinstance(one, (Copy, CopyFrom)) else one.facts
    for fields in _lines_of(one):
        if facts is not None:
            fields, facts = {**fields, "DTRRUN": facts}, None
        file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def _lines_of(one: Instruction) -> Iterator[dict[str, Any]]:
    if isinstance(one, Constant):
        yield {"INSTRUCTION": "CONSTANT", "NAME": one.name}
        yield {"INSTRUCTION": "MEMORY", "NAME": one.name, "MEMORY": str(one.nbytes)}
    elif isinstance(one, Call):
        yield {
            "INSTRUCTION": "CALL",
            "NAME": one.operator,
            "ARGS": list(one.inputs),
            "RESULT": list(one.outputs),
            "TIME": str(one.cost),
        }
        for name, nbytes, alias in zip(one.outputs, one.nbytes, one.aliases, strict=True):
            yield {"INSTRUCTION": "MEMORY", "NAME": name, "MEMORY": str(nbytes)}
            yield {"INSTRUCTION": "ALIAS", "NAME": name, "ALIAS": str(alias)}
    elif isinstance(one, Mutate):
        yield {
            "INSTRUCTION": "MUTATE",
            "NAME": one.operator,
            "ARGS": list(one.inputs),
            "MUTATE": list(one.mutated),
            "TIME": str(one.cost),
        }
    elif isinstance(one, Copy):
        yield {"INSTRUCTION": "COPY", "DST": one.target, "SRC": one.source}
    elif isinstance(one, CopyFrom):
        yield {"INSTRUCTION": "COPY_FROM", "DST": one.target, "SRC": one.source}
    elif isinstance(one, Release):
        yield {"INSTRUCTION": "RELEASE", "NAME": one.name}
    else:
        yield {"INSTRUCTION": "ANNOTATE", "ANNOTATION": one.text}
