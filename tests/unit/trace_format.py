"""The rules of Chrome's Trace Event Format, as far as our traces use it, and which of them are broken."""

import json
import re

NUMBER = (int, float)
PHASES = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": NUMBER, "dur": NUMBER},
    "C": {"name": str, "pid": int, "ts": NUMBER, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": NUMBER, "s": str},
}
METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
TOP = {"traceEvents", "otherData"}


def broken_rules(text):
    """Return one line for each rule that `text` breaks; an empty list for a valid trace."""
    trace = json.loads(text, parse_constant=lambda name: f"no JSON: {name}")
    found = [f"unknown key {key}" for key in set(trace) - TOP]
    if not isinstance(trace.get("traceEvents"), list):
        return [*found, "no list of traceEvents"]
    for place, event in enumerate(trace["traceEvents"]):
        found += [f"event {place}: {rule}" for rule in _event(event)]
    return found or [*_named(trace["traceEvents"]), *_ordered(trace["traceEvents"])]


def _event(event):
    fields = PHASES.get(event.get("ph"))
    if fields is None:
        return [f"unknown phase {event.get('ph')!r}"]
    found = [
        f"{name} is no {kind}"
        for name, kind in fields.items()
        if not isinstance(event.get(name), kind) or isinstance(event.get(name), bool)
    ]
    if found:
        return found
    if event.get("ts", 0) < 0 or event.get("dur", 0) < 0:
        found.append("a negative time")
    if event["ph"] == "C" and not (
        event["args"] and all(isinstance(value, NUMBER) for value in event["args"].values())
    ):
        found.append("a counter's series are numbers, and it has at least one")
    if event["ph"] == "i" and event["s"] not in ("g", "p", "t"):
        found.append("the scope of an instant is g, p or t")
    if event["ph"] == "M":
        wanted = METADATA.get(event["name"])
        if wanted is None:
            found.append(f"unknown metadata {event['name']}")
        elif not all(isinstance(event["args"].get(name), kind) for name, kind in wanted.items()):
            found.append(f"{event['name']} has {event['args']}")
    if re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", event["name"]):
        found.append("a name with control characters")
    return found


def _named(events):
    """Check that every process and every thread with spans has a name."""
    processes = {event["pid"] for event in events if event["name"] == "process_name"}
    threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    spans = {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"}
    found = [f"process {pid} has no name" for pid in {event["pid"] for event in events} - processes]
    return found + [f"thread {thread} has no name" for thread in spans - threads]


def _ordered(events):
    """Check that each track is in order of time, and that a thread's spans are disjoint or nested."""
    found = []
    times, open_until = {}, {}
    for place, event in enumerate(events):
        if event["ph"] == "M":
            continue
        track = (event["ph"], event["pid"], event["name"] if event["ph"] == "C" else event["tid"])
        if event["ts"] < times.get(track, 0):
            found.append(f"event {place}: before the one before it")
        times[track] = event["ts"]
        if event["ph"] == "X":
            stack = open_until.setdefault(track, [])
            while stack and stack[-1] <= event["ts"] + 0.002:  # times are rounded to ns
                stack.pop()
            end = event["ts"] + event["dur"]
            if stack and end > stack[-1] + 0.002:
                found.append(f"event {place}: reaches out of the span that it began in")
            stack.append(end)
    return found
