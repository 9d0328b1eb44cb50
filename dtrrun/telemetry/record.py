"""A training process's record: a small memory-mapped file that it writes and others read.

Standard library only, and cheap: a counter is one store into shared memory, so a process that dies by SIGKILL
leaves its last numbers behind. The file contains

    header      magic, status, sequence number of the tables
    counters    int64, in the order of `fields.COUNTERS`
    block 0     what the process is (JSON, written once)
    blocks 1, 2 its tables (JSON, written in turn)

Each block has a sequence number, length and checksum. A reader takes the newest intact block, so it never
sees a partial write, even if the writer was killed.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import sys
import time
import zlib
from array import array
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

from dtrrun.telemetry.driver import DriverUse
from dtrrun.telemetry.fields import COUNTERS

SUFFIX = ".record"
MAGIC = b"dtrrun\x00\x01"  # the last byte is the format's version
STATUS_AT, STATUS_BYTES = 16, 48
ENDED, TOO_SMALL = "ended", "budget too small"
"""Statuses that a process gives itself; `TOO_SMALL`: an error about the budget has ended it."""
COUNTERS_AT, COUNTERS_BYTES = 64, 8 * len(COUNTERS)
BLOCK = struct.Struct("<qII")  # sequence number (0: never written), length, checksum
BLOCK_BYTES = 256 * 1024
BLOCKS_AT = 4096
FILE_BYTES = BLOCKS_AT + 3 * BLOCK_BYTES
WALL = COUNTERS.index("wall_ns")

assert COUNTERS_AT + COUNTERS_BYTES <= BLOCKS_AT


class Writer:
    """The record of this process. Not thread-safe: the runtime calls it under the ledger's lock.

    `meta` describes the process (torch, device, heuristic, settings ...); pid, ppid, rank, argv and start
    (seconds since the epoch) are added. `counters[i]` may be read and written directly; references to it must
    be dropped after `forked`. Raises OSError if the file can't be created.
    """

    counters: memoryview[int] | array[int]

    def __init__(self, directory: str, meta: dict[str, Any]) -> None:
        self.path = os.path.join(directory, f"{os.getpid()}-{time.time_ns()}{SUFFIX}")
        self._map: mmap.mmap | None = _create(self.path)
        self._bytes = memoryview(self._map)
        self.counters = self._bytes[COUNTERS_AT : COUNTERS_AT + COUNTERS_BYTES].cast("q")
        self._start_ns = time.monotonic_ns()
        self._sequence = 0
        self._write_block(0, 1, this_process() | meta)
        self._map[: len(MAGIC)] = MAGIC  # last, since a reader skips the file until it is complete

    def publish(self, tables: dict[str, Any]) -> None:
        """Replace the tables (JSON values), and update wall_ns."""
        if self._map is None:
            return
        self._sequence += 1
        self.counters[WALL] = time.monotonic_ns() - self._start_ns
        self._write_block(1 + self._sequence % 2, self._sequence, tables)

    def close(self, status: str = ENDED) -> None:
        """End the record with a status given by the process itself. The file stays."""
        if self._map is None:
            return
        self.counters[WALL] = time.monotonic_ns() - self._start_ns
        text = (status or ENDED).encode()[:STATUS_BYTES]
        self._map[STATUS_AT : STATUS_AT + len(text)] = text
        self._let_go()

    def discard(self) -> None:
        """Remove the record: this process turned out not to be a training process."""
        if self._map is None:
            return
        self._let_go()
        with suppress(OSError):
            os.unlink(self.path)

    def forked(self) -> None:
        """In a forked child: release the parent's record. All further calls here do nothing."""
        if self._map is not None:
            self._let_go()

    def _let_go(self) -> None:
        assert self._map is not None
        shared, self.counters = self.counters, array("q", self.counters)
        # Remaining references must fail rather than keep counting in the file.
        with suppress(BufferError):
            if isinstance(shared, memoryview):
                shared.release()
            self._bytes.release()
            self._map.close()
        self._map = None

    def _write_block(self, index: int, sequence: int, value: dict[str, Any]) -> None:
        assert self._map is not None
        data = _encode(value, BLOCK_BYTES - BLOCK.size)
        at = BLOCKS_AT + index * BLOCK_BYTES
        self._map[at + BLOCK.size : at + BLOCK.size + len(data)] = data
        BLOCK.pack_into(self._map, at, sequence, len(data), zlib.crc32(data))


@dataclass(frozen=True)
class Snapshot:
    """The content of one training process's record when it was read."""

    pid: int
    meta: dict[str, Any]
    counters: dict[str, int]
    tables: dict[str, Any] = field(default_factory=dict)
    ended: bool = False
    """Whether the process closed its record itself; False if it was killed."""
    status: str = ""
    alive: bool = True
    """Whether a process with that id existed at that moment."""
    read_ns: int = 0
    """When it was read, on the monotonic clock: two snapshots give a rate."""
    driver: DriverUse | None = None
    """What the driver shows for the process. Not in the record: the launcher adds it."""

    def values(self, name: str) -> dict[str, Any] | None:
        """Return a published table of values by name; None if there is none."""
        found = self.tables.get(name)
        return found if isinstance(found, dict) else None

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of a published table, which may have been truncated."""
        found = self.tables.get(name)
        return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def by_rank(rank: Any) -> float:
    """Return the place of a process of this rank among others: those without a rank come last."""
    return rank if isinstance(rank, int) else inf


def read_all(directory: str, tables: bool = True) -> list[Snapshot]:
    """Return the records in `directory`, oldest process first. Other and incomplete files are skipped.

    Without `tables`, fast enough to be called many times a second.
    """
    try:
        names = [name for name in os.listdir(directory) if name.endswith(SUFFIX)]
    except OSError:
        return []
    found = [snapshot for name in names if (snapshot := _read(os.path.join(directory, name), tables))]
    return sorted(found, key=lambda snapshot: (_number(snapshot.meta.get("start")), snapshot.pid))


def this_process() -> dict[str, Any]:
    """Return what any process knows about itself.

    rank and world are None outside torchrun and the like. Then `_read` takes those of the process's group.
    """
    rank = os.environ.get("RANK", "")
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "rank": int(rank) if rank.isdecimal() else None,
        "world": world(),
        "argv": list(getattr(sys, "argv", ())),
        "start": time.time(),
        # A script may set it before CUDA is initialised, and it determines the numbering of devices.
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "pid_namespace": pid_namespace(),
    }


WORLD = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""The variables that are the same in all ranks that wait for one another, and differ from those of others."""


def world() -> str | None:
    """Return what the ranks have in common that wait for one another; None for a process alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or "RANK" not in os.environ:
        return None
    return " ".join(os.environ.get(name, "-") for name in WORLD)


def pid_namespace() -> str | None:
    """Return the PID namespace of this process: a container has its own. None if not on Linux."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _create(path: str) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Written, not truncated to size: a store into a sparse file on a full disk would raise SIGBUS.
        zeros = memoryview(bytes(FILE_BYTES))
        while zeros:
            zeros = zeros[os.write(descriptor, zeros) :]
        return mmap.mmap(descriptor, FILE_BYTES)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _encode(value: dict[str, Any], limit: int) -> bytes:
    """Encode JSON in at most `limit` bytes, by truncating its lists and strings."""
    for longest in (None, 4096, 256, 64, 16, 4, 1, 0):
        text = json.dumps(value if longest is None else _shorten(value, longest), default=str)
        if len(text) <= limit:  # json.dumps escapes: one byte per character
            return text.encode()
    return b"{}"


def _shorten(value: Any, longest: int) -> Any:
    if isinstance(value, str):
        return value[: max(longest, 16)]
    if isinstance(value, (list, tuple)):
        return [_shorten(item, longest) for item in value[:longest]]
    if isinstance(value, dict):
        return {key: _shorten(item, longest) for key, item in value.items()}
    return value


def _read(path: str, with_tables: bool) -> Snapshot | None:
    try:
        # Neither follow a link nor block on a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        head = os.pread(descriptor, COUNTERS_AT + COUNTERS_BYTES, 0)
        if len(head) < COUNTERS_AT + COUNTERS_BYTES or not head.startswith(MAGIC):
            return None
        meta = _read_block(descriptor, 0)
        if meta is None or not isinstance(meta[1].get("pid"), int):
            return None
        tables = _newest_tables(descriptor) if with_tables else {}
    except OSError:
        return None
    finally:
        os.close(descriptor)
    about, group = meta[1], tables.get("group")
    if isinstance(group, dict) and about.get("rank") is None:
        about = about | {name: group.get(name) for name in ("rank", "world")}
    status = head[STATUS_AT : STATUS_AT + STATUS_BYTES].rstrip(b"\0").decode(errors="replace")
    numbers = array("q", head[COUNTERS_AT:])
    return Snapshot(
        pid=about["pid"],
        meta=about,
        counters=dict(zip(COUNTERS, numbers, strict=True)),
        tables=tables,
        ended=bool(status),
        status=status,
        alive=exists(about["pid"]),
        read_ns=time.monotonic_ns(),
    )


def _newest_tables(descriptor: int) -> dict[str, Any]:
    newest: tuple[int, dict[str, Any]] = (0, {})
    for _ in range(8):
        blocks = [_read_block(descriptor, index) for index in (1, 2)]
        newest = max([newest, *filter(None, blocks)], key=lambda block: block[0])
        if None not in blocks:
            break
        # A torn block may be newer than the intact one, which may have been replaced since: read again. If
        # the writer died while writing it, the intact one is final.
    return newest[1]


def _read_block(descriptor: int, index: int) -> tuple[int, dict[str, Any]] | None:
    """Return the block's sequence number and content; None if it is torn."""
    at = BLOCKS_AT + index * BLOCK_BYTES
    head = os.pread(descriptor, BLOCK.size, at)
    if len(head) < BLOCK.size:
        return None
    sequence, length, checksum = BLOCK.unpack(head)
    if sequence == 0:
        return 0, {}
    if sequence < 1 or length > BLOCK_BYTES - BLOCK.size:
        return None
    data = os.pread(descriptor, length, at + BLOCK.size)
    if zlib.crc32(data) != checksum:
        return None
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return (sequence, value) if isinstance(value, dict) else None


def exists(pid: int) -> bool:
    """Return whether there is a process with this id."""
    try:
        os.kill(pid, 0)  # /proc may hide what belongs to other users
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass
    return True


def _number(value: Any) -> float:
    return value if isinstance(value, (int, float)) else 0.0
