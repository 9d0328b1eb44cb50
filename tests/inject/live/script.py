"""A script that keeps a record as the runtime would, without using dtrrun otherwise: script.py FOLDER WHAT.

Partway through it waits for the file `FOLDER/seen`, which the watcher creates after seeing the live table,
so that the table is seen on however busy a machine.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tqdm import tqdm

from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer

folder, what = sys.argv[1:]
writer = Writer(folder, {"device": "cpu", "torch": "2.13.0"})


def work(index: int, seconds: float = 0.03) -> None:
    values = {
        "budget_bytes": 200_000_000,
        "resident_bytes": 150_000_000,
        "peak_bytes": 190_000_000,
        "evictable_bytes": 100_000_000,
        "pinned_bytes": 50_000_000,
        "evicted_bytes": 75_000_000,
        "evictions": 20 * index,
        "rematerializations": 10 * index,
        "steps": index,
        "operators_ns": 10_000_000 * index,
        "rematerialization_ns": 2_000_000 * index,
    }
    for name, value in values.items():
        writer.counters[COUNTERS.index(name)] = value
    row = {
        "name": "aten.[red]mm[/]\x1b[2J",
        "rematerializations": 10 * index,
        "seconds": 0.002 * index,
        "bytes": 1000,
    }
    writer.publish({"operators": [row], "warnings": [], "error": None})
    time.sleep(seconds)


def wait_until_seen() -> None:
    end = time.monotonic() + 20
    while not Path(folder, "seen").exists():
        if time.monotonic() > end:
            sys.exit("nobody has seen the table")
        time.sleep(0.01)


match what:
    case "bar":
        for index in tqdm(range(30), desc="épochs ░", ncols=60):
            work(index)
            if index % 10 == 0:
                tqdm.write(f"\x1b[32mloss\x1b[0m {index} 損失")
            if index == 15:
                wait_until_seen()
        print("done")
    case "nested":
        outer = tqdm(range(3), desc="outer", position=0, ncols=60)
        for index in outer:
            for step in tqdm(range(8), desc="inner", position=1, leave=False, ncols=60):
                work(8 * index + step)
                if (index, step) == (1, 4):
                    wait_until_seen()
        outer.close()
        print("done")
    case "lines":
        for index in range(60):
            print(f"line {index}", flush=True)
            work(index, 0.02)
            if index == 30:
                wait_until_seen()
        print("no end of line", end="")
    case "halves":  # sequences and characters that arrive in pieces
        for index in range(12):
            for byte in f"\x1b[1;3{index % 7}mrow {index} 損é\x1b[0m\n".encode():
                os.write(1, bytes([byte]))
                time.sleep(0.005)
            work(index, 0)
            if index == 6:
                wait_until_seen()
    case "ask":
        work(1, 0.6)
        name = input("name? ")
        work(2, 0.6)
        print("hello", name)
        work(2, 0.6)
    case "wait":
        print("waiting", os.get_terminal_size(2).lines, flush=True)
        signal.signal(signal.SIGWINCH, lambda *_: print("now", os.get_terminal_size(2), flush=True))
        for index in range(200):
            work(index, 0.05)
    case "files":
        sys.stdout.write("to\tthe file\n")
        sys.stderr.write("to the terminal\n")
        print(sys.stdout.isatty(), sys.stderr.isatty(), sys.stdin.isatty())
        work(1)
        wait_until_seen()
        os.kill(os.getpid(), signal.SIGKILL)
writer.close("ended")
