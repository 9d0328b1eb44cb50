"""What the driver shows for a training process, passed to it by the launcher, which can query NVML.

Standard library only. Next to a process's record is `<pid>.driver`, which the launcher writes and the process
reads: two slots, written alternately, each with a checksum. A reader takes the newest intact slot, so it
never sees a partial write.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

SOURCES = ("nvml_pid", "kfd_pid", "nvml_new_pid", "device_delta", "reserved_overhead")
"""Sources of a figure, most direct first: NVML's list of processes, by process id; the same from KFD, AMD's
kernel driver; NVML's only entry that is new since the launch (a container's ids are not the host's); growth
of the device's use, if it was idle; the process's own figures (allocator plus measured overhead)."""
PER_PROCESS = SOURCES[:3]

SUFFIX = ".driver"
SLOT = struct.Struct("<qqqI4x")  # monotonic nanoseconds (0: never written), bytes, source, checksum
BODY = struct.Struct("<qqq")


class Figure(NamedTuple):
    """One reading. `monotonic_ns` is on the system's monotonic clock, which all processes share."""

    nbytes: int
    monotonic_ns: int
    source: str


@dataclass(frozen=True)
class DriverUse:
    """What the driver has shown for one process so far, in bytes."""

    device: str
    """The device's UUID, or `cuda:N` without NVML."""
    nbytes: int
    """In the last reading."""
    peak_bytes: int
    source: str
    """Of the last reading: one of SOURCES."""
    violations: int = 0
    """How often the process exceeded the budget."""
    most_over_bytes: int = 0
    """The largest excess."""


def read_figure(record_dir: str, pid: int) -> Figure | None:
    """Return the last reading for process `pid`, whatever its source; None if there is none."""
    try:
        descriptor = os.open(_path(record_dir, pid), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        for _ in range(8):  # both slots are torn only if two writes occur during a read
            slots = _slots(descriptor)
            if whole := [figure for figure in slots if figure]:
                return max(whole, key=lambda figure: figure.monotonic_ns)
        return None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def write(record_dir: str, pid: int, figure: Figure) -> None:
    """Pass `figure` to process `pid`. Only one writer at a time; raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(_path(record_dir, pid), flags, 0o600)
    try:
        times = [slot.monotonic_ns if slot else 0 for slot in _slots(descriptor)]
        body = BODY.pack(figure.monotonic_ns, figure.nbytes, SOURCES.index(figure.source))
        slot = SLOT.pack(*BODY.unpack(body), zlib.crc32(body))
        os.pwrite(descriptor, slot, SLOT.size * times.index(min(times)))
    finally:
        os.close(descriptor)


def _path(record_dir: str, pid: int) -> str:
    return os.path.join(record_dir, f"{pid}{SUFFIX}")


def _slots(descriptor: int) -> list[Figure | None]:
    data = os.pread(descriptor, 2 * SLOT.size, 0).ljust(2 * SLOT.size, b"\0")
    return [_figure(data[at : at + SLOT.size]) for at in (0, SLOT.size)]


def _figure(slot: bytes) -> Figure | None:
    monotonic_ns, nbytes, source, checksum = SLOT.unpack(slot)
    if monotonic_ns <= 0 or zlib.crc32(slot[: BODY.size]) != checksum or not 0 <= source < len(SOURCES):
        return None
    return Figure(nbytes, monotonic_ns, SOURCES[source])
