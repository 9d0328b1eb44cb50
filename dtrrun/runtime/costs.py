"""Costs of operators that are known before the program runs: the file that `dtrrun profile` writes.

Gzipped JSON: the version of torch and the device of the measurement, and by signature identity the cost in
ns, the bytes allocated, and the temporary bytes needed while the operator runs (0 if unknown). Operators in
the file are not measured again, so decisions depend neither on the first calls nor on the machine's load. The
same holds for copies to the host and back, if the file says what a byte takes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

FORMAT = 1

Costs = Mapping[str, tuple[int, int]]
"""Cost in ns and bytes of results, by the identity of a signature."""


class Known(NamedTuple):
    """What such a file says. host: ns for each byte that is copied to the host, and back."""

    costs: Costs
    host: tuple[float, float] | None


UNKNOWN = Known({}, None)


def identity(key: tuple[Any, ...]) -> str:
    """Return a name for a signature's key (operator, other arguments, geometries), equal in every process."""
    return hashlib.blake2b(repr(key).encode(), digest_size=6).hexdigest()


def costs_from(rows: Mapping[str, Sequence[Any]]) -> Costs:
    """Return the costs in a file's rows.

    Raises TypeError, ValueError, IndexError or AttributeError if they are malformed.
    """
    return {name: (int(row[0]), int(row[1])) for name, row in rows.items()}


def read_costs(path: str, device: str, warn: Callable[[str], None]) -> Known:
    """Read the costs in a file. Warn and return none if they cannot be read or do not apply here."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
        if found["format"] != FORMAT:
            raise ValueError(f"its format is {found['format']}, not {FORMAT}")
        if (found["torch"], found["device"]) != (torch.__version__, device):
            warn(
                f"{path} is ignored: its costs are of torch {found['torch']} on {found['device']}, and this "
                f"is torch {torch.__version__} on {device}"
            )
            return UNKNOWN
        host = found.get("host")
        if host is not None:
            host = float(host[0]), float(host[1])
        return Known(costs_from(found["signatures"]), host)
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        RecursionError,
    ) as error:
        warn(f"{path} is ignored: its costs cannot be read ({error})")
        return UNKNOWN
