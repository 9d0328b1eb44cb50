"""Writes operator logs that tests make up, in the format of `dtrrun.simulator.log`."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtrrun.simulator.log import START, Annotate, Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release


def write_log(log: Sequence[Instruction], path: str | Path) -> None:
    """Write a log that `read_log` reads, beginning with the START annotation; compressed if for a `.gz`."""
    if log and not (isinstance(log[0], Annotate) and log[0].text == START):
        log = [Annotate(START), *log]
    lines = (json.dumps(line, separators=(",", ":")) for one in log for line in _with_facts(one))
    text = "".join(f"{line}\n" for line in lines).encode()
    Path(path).write_bytes(gzip.compress(text) if Path(path).suffix == ".gz" else text)


def _with_facts(one: Instruction) -> Iterator[dict[str, Any]]:
    first, *others = ({"INSTRUCTION": kind, **fields} for kind, fields in _lines_of(one))
    yield first if getattr(one, "facts", None) is None else {**first, "DTRRUN": one.facts}
    yield from others


def _lines_of(one: Instruction) -> Iterator[tuple[str, dict[str, Any]]]:
    match one:
        case Constant(name, nbytes):
            yield "CONSTANT", {"NAME": name}
            yield "MEMORY", {"NAME": name, "MEMORY": str(nbytes)}
        case Call(operator, inputs, outputs, sizes, aliases, cost):
            yield "CALL", {"NAME": operator, "ARGS": inputs, "RESULT": outputs, "TIME": str(cost)}
            for name, nbytes, alias in zip(outputs, sizes, aliases, strict=True):
                yield "MEMORY", {"NAME": name, "MEMORY": str(nbytes)}
                yield "ALIAS", {"NAME": name, "ALIAS": str(alias)}
        case Mutate(operator, inputs, mutated, cost):
            yield "MUTATE", {"NAME": operator, "ARGS": inputs, "MUTATE": mutated, "TIME": str(cost)}
        case Copy(target, source):
            yield "COPY", {"DST": target, "SRC": source}
        case CopyFrom(target, source):
            yield "COPY_FROM", {"DST": target, "SRC": source}
        case Release(name):
            yield "RELEASE", {"NAME": name}
        case Annotate(text):
            yield "ANNOTATE", {"ANNOTATION": text}
