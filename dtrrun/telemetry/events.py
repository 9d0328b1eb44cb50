"""Timed events of a training process: the source of `--trace`. Standard library only.

A process appends to its own file next to its record, in batches, up to `LIMIT_BYTES`; further events are only
counted. The file contains

    header    magic, process id, number of events left out
    events    fixed size; an event of kind NAME is followed by the text of a name

All times are on the system's monotonic clock, which all processes share.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from dtrrun.telemetry.private import open_private

SUFFIX = ".events"
LIMIT_BYTES = 16 * 1024 * 1024
BATCH_BYTES = 64 * 1024
BATCH_NS = 200_000_000
MAGIC = b"dtrrunE\x01"  # the last byte is the format's version
HEADER = struct.Struct("<8sqq")
LEFT_OUT_AT, LEFT_OUT = 16, struct.Struct("<q")
EVENT = struct.Struct("<BxHIqqqqq")

NAME, REMATERIALIZE, EVICT, SEARCH, STEP, LEAVE, RETURN = range(7)
MOST_NAMES, LONGEST_NAME, NO_NAME = 4096, 200, 0xFFFF
MOST_WITH_MODULE = MOST_NAMES - 1024
"""Beyond this many, names omit the module: a model with very many modules must not use up the names."""
MODULE = "\x1f"
"""In a name, separates the operator from the module that called it, if known."""


class Event(NamedTuple):
    """One of `REMATERIALIZE`, `EVICT`, `SEARCH`, `STEP`, `LEAVE`, `RETURN`, recorded when it ends; ns, bytes.

    name: the operator that was run again, or whose output was evicted or found ("" for none), see MODULE; of
    what leaves for the host and returns without one, what it is, such as a parameter.
    nbytes: size of that output; for a STEP, its number from 1. resident_bytes, evicted_bytes: all tensors.
    """

    kind: int
    name: str
    thread: int
    start_ns: int
    duration_ns: int
    nbytes: int
    resident_bytes: int
    evicted_bytes: int


class EventWriter:
    """Appends this process's events. Writes nothing in a forked child or on a full disk. Raises OSError."""

    def __init__(self, directory: str) -> None:
        self._pid = os.getpid()
        path = os.path.join(directory, f"{self._pid}-{time.time_ns()}{SUFFIX}")
        self._file = open_private(path, "wb")
        self._buffer = bytearray(HEADER.pack(MAGIC, self._pid, 0))
        self._room = LIMIT_BYTES - HEADER.size
        self._left_out = 0
        self._flushed_ns = 0
        self._names: dict[str, int] = {}
        self._lock = threading.RLock()  # reentrant: a signal handler may interrupt `add`

    def add(
        self, kind: int, name: str, start_ns: int, nbytes: int, resident_bytes: int, evicted_bytes: int
    ) -> None:
        """Add an event that began at `start_ns` and ends now."""
        if os.getpid() != self._pid:
            return
        now = time.monotonic_ns()
        with self._lock:
            if self._room < 2 * EVENT.size + 4 * LONGEST_NAME:
                self._left_out += 1
            else:
                number = self._number(name)
                event = (kind, number, threading.get_native_id(), start_ns, now - start_ns)
                self._append(EVENT.pack(*event, nbytes, resident_bytes, evicted_bytes))
            if len(self._buffer) >= BATCH_BYTES or now - self._flushed_ns > BATCH_NS:
                self._flushed_ns = now
                self.flush()

    def flush(self) -> None:
        if os.getpid() != self._pid or self._file.closed:
            return
        with self._lock, suppress(OSError):
            data, self._buffer = bytes(self._buffer), bytearray()
            self._file.write(data)
            self._file.flush()
            if self._left_out:
                os.pwrite(self._file.fileno(), LEFT_OUT.pack(self._left_out), LEFT_OUT_AT)

    def close(self) -> None:
        self.flush()
        if os.getpid() == self._pid:
            with suppress(OSError):
                self._file.close()

    def _number(self, name: str) -> int:
        number = self._names.get(name)
        if number is None:
            if len(self._names) >= MOST_NAMES:
                return NO_NAME
            operator, separator, _ = name.partition(MODULE)
            if separator and len(self._names) >= MOST_WITH_MODULE:
                return self._number(operator)
            text = name[:LONGEST_NAME].encode(errors="replace")
            number = self._names[name] = len(self._names)
            self._append(EVENT.pack(NAME, number, len(text), 0, 0, 0, 0, 0) + text)
        return number

    def _append(self, data: bytes) -> None:
        self._room -= len(data)
        self._buffer += data


@dataclass(frozen=True)
class Events:
    """The events of one process. left_out: number of events lost once its file was full."""

    pid: int
    left_out: int
    data: bytes

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in the order in which they ended, ignoring a torn one at the end."""
        names: dict[int, str] = {}
        at = 0
        while at + EVENT.size <= len(self.data):
            kind, number, thread, *figures = EVENT.unpack_from(self.data, at)
            at += EVENT.size
            if kind == NAME:
                names[number] = self.data[at : at + thread].decode(errors="replace")
                at += thread
            else:
                yield Event(kind, names.get(number, ""), thread, *figures)


def read_events(directory: str) -> Iterator[Events]:
    """Yield the events of each process in `directory`. Other files are skipped."""
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(SUFFIX))
    except OSError:
        return
    for name in names:
        events = None
        with suppress(OSError, struct.error):
            events = _read(os.path.join(directory, name))
        if events is not None:
            yield events


def _read(path: str) -> Events | None:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with os.fdopen(os.open(path, flags), "rb") as file:
        data = file.read(2 * LIMIT_BYTES)
    magic, pid, left_out = HEADER.unpack_from(data)
    return Events(pid, left_out, data[HEADER.size :]) if magic == MAGIC else None
