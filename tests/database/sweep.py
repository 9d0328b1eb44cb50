"""Distributes units over worker processes; if one dies, only the unit it was working on is lost."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.database.judge import CRASHED

UNIT_S = 1500.0  # per unit, before its worker is killed


def sweep(units: list[tuple[str, str]], jobs: int) -> Iterator[dict[str, Any]]:
    """Judge all units (kind, name) with `jobs` processes; yield results as they arrive."""
    waiting: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for one in units:
        waiting.put(one)
    results: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for _ in range(jobs):
        threading.Thread(target=_work, args=(waiting, results), daemon=True).start()
    for _ in units:
        yield results.get()


def _work(waiting: queue.SimpleQueue[Any], results: queue.SimpleQueue[Any]) -> None:
    worker = None
    while True:
        try:
            kind, name = waiting.get_nowait()
        except queue.Empty:
            break
        if worker is None or worker.poll() is not None:
            worker = _start()
        results.put({"kind": kind, **_judged(worker, kind, name)})
    if worker is not None:
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait()


def _start() -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.database.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )


def _judged(worker: subprocess.Popen[str], kind: str, name: str) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    at, started = "its start", time.monotonic()
    timer = threading.Timer(UNIT_S, worker.kill)
    timer.start()
    try:
        worker.stdin.write(f"{kind} {name}\n")
        worker.stdin.flush()
        for line in worker.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "at" not in answer:
                return answer
            at = answer["at"]
    except BrokenPipeError:
        pass
    finally:
        timer.cancel()
    status = worker.wait()
    return {
        "name": name,
        "status": CRASHED,
        "cases": {},
        "evicted": 0,
        "seconds": time.monotonic() - started,
        "reasons": [f"{at}: exit status {status}"],
    }
