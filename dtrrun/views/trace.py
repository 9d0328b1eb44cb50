"""A run's events as JSON in Chrome's Trace Event Format, which Perfetto and chrome://tracing open.

Spans (ph X) for operators run again, evictions, searches and copies to the host and back on the threads that
they ran on, and for steps on a separate track; counters (C) of tensor memory; names of processes and threads
(M); one instant (i) when a process stopped writing. Times are in µs since the run's start. There is no
`displayTimeUnit`, since Perfetto of 2021 took it for the unit of the times (google/perfetto#106).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dtrrun.telemetry.events import (
    EVICT,
    LEAVE,
    MODULE,
    REMATERIALIZE,
    RETURN,
    SEARCH,
    STEP,
    Event,
    Events,
)
from dtrrun.telemetry.record import Snapshot
from dtrrun.views.text import plain

STEPS_TRACK = 1 << 30
"""Added to a process id for the track of its steps, which is not a thread. Linux ids are smaller."""
COUNTER_EVERY_US = 500.0
KINDS = {
    REMATERIALIZE: "rematerialization",
    EVICT: "eviction",
    SEARCH: "search",
    STEP: "step",
    LEAVE: "copy out",
    RETURN: "copy in",
}
LONGEST = 200

Json = dict[str, Any]


def chrome_trace(
    found: Iterable[Events],
    snapshots: Sequence[Snapshot],
    started_ns: int,
    about: Mapping[str, Any],
    timeline: Mapping[str, Any] | None = None,
) -> Iterator[bytes]:
    """Yield the file in pieces.

    started_ns: the run's start, on the monotonic clock. about: its description.
    """
    by_pid = {snapshot.pid: snapshot for snapshot in snapshots}
    separator = b'{"traceEvents":[\n'
    left_out = 0
    for events in found:
        left_out += events.left_out
        for event in _process(events, by_pid.get(events.pid), started_ns):
            yield separator + _encoded(event)
            separator = b",\n"
    for event in _sampled(timeline or {}):
        yield separator + _encoded(event)
        separator = b",\n"
    other = dict(about) | {"events_left_out": left_out}
    yield (separator if separator[:1] == b"{" else b"\n") + b'],"otherData":'
    yield _encoded(other) + b"}\n"


def compressed(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Compress to a gzip file, which Perfetto also opens."""
    packer = zlib.compressobj(6, zlib.DEFLATED, 31)
    for piece in pieces:
        yield packer.compress(piece)
    yield packer.flush()


def _process(events: Events, snapshot: Snapshot | None, started_ns: int) -> Iterator[Json]:
    pid, threads, ended = events.pid, set(), 0.0
    yield from _named(pid, snapshot)
    shown = -COUNTER_EVERY_US
    for event in events:
        kind = KINDS.get(event.kind)
        if kind is None:
            continue
        thread = pid + STEPS_TRACK if event.kind == STEP else event.thread
        if thread not in threads:
            threads.add(thread)
            name = "steps" if event.kind == STEP else "main thread" if thread == pid else f"thread {thread}"
            yield _meta("thread_name", pid, thread, name=name)
            if event.kind == STEP:
                yield _meta("thread_sort_index", pid, thread, sort_index=-1)
        began = (event.start_ns - started_ns) / 1e3
        lasted = max(event.duration_ns, 0) / 1e3
        ended = began + lasted
        common = {"pid": pid, "tid": thread, "ts": round(began, 3)}
        yield {"ph": "X", "cat": kind, **common, "dur": round(lasted, 3), **_told(event)}
        if event.kind != SEARCH and ended - shown >= COUNTER_EVERY_US:
            shown = ended
            sizes = {"resident": event.resident_bytes, "evicted": event.evicted_bytes}
            yield _counter(pid, "tensor memory", ended, sizes)
    if events.left_out:
        told = {"name": "the trace was cut here", "args": {"events left out": events.left_out}}
        yield {"ph": "i", "cat": "trace", "s": "p", "pid": pid, "tid": pid, "ts": round(ended, 3), **told}


def _told(event: Event) -> Json:
    """Return the event's name and arguments."""
    name, _, module = event.name.partition(MODULE)
    name = plain(name, LONGEST)
    known = {"bytes": event.nbytes} | ({"module": plain(module, LONGEST)} if module else {})
    if event.kind == REMATERIALIZE:
        return {"name": name, "args": known}
    if event.kind == STEP:
        return {"name": f"step {event.nbytes}", "args": {"index": event.nbytes}}
    if event.kind in (LEAVE, RETURN):
        return {"name": KINDS[event.kind], "args": {"of": name or None} | known}
    verb = "evict" if event.kind == EVICT else "search"
    return {"name": verb, "args": {"output of": name or None} | known}


def _named(pid: int, snapshot: Snapshot | None) -> Iterator[Json]:
    meta = snapshot.meta if snapshot is not None else {}
    argv, rank = meta.get("argv"), meta.get("rank")
    target = os.path.basename(str(argv[0])) if isinstance(argv, list) and argv else "training process"
    name = plain(target, LONGEST) if rank is None else f"rank {plain(rank, 8)}: {plain(target, LONGEST)}"
    yield _meta("process_name", pid, pid, name=name)
    if isinstance(rank, int):
        yield _meta("process_sort_index", pid, pid, sort_index=rank)


def _sampled(timeline: Mapping[str, Any]) -> Iterator[Json]:
    """Yield the launcher's samples: evictable and pinned memory."""
    for process in timeline.get("processes", ()):
        samples = process["samples"]
        rows = zip(*(samples.get(n, ()) for n in ("seconds", "evictable_bytes", "pinned_bytes")), strict=True)
        for seconds, evictable, pinned in rows:
            sizes = {"evictable": evictable, "pinned": pinned}
            yield _counter(process["pid"], "resident memory", seconds * 1e6, sizes)


def _meta(kind: str, pid: int, tid: int, **args: Any) -> Json:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _counter(pid: int, name: str, at: float, sizes: Json) -> Json:
    return {"ph": "C", "name": name, "pid": pid, "tid": pid, "ts": round(at, 3), "args": sizes}


def _encoded(value: Json) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
