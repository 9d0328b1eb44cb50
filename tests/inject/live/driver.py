"""A minimal launcher: runs a script under the live table, or without it (`plain`), for test_live.py.

driver.py {live|plain} FOLDER SCRIPT [ARGS…]; FOLDER is where the script keeps its record.
"""

import contextlib
import signal
import subprocess
import sys

from dtrrun.launch.pty import Terminal
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.record import read_all
from dtrrun.views.final import print_final
from dtrrun.views.live import LiveTable
from dtrrun.views.report import build_report

mode, folder, *command = sys.argv[1:]
signal.signal(signal.SIGINT, signal.SIG_IGN)


def forget_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


if mode == "plain":
    code = subprocess.run([sys.executable, *command], preexec_fn=forget_ignored).returncode
else:
    settings = RuntimeSettings(budget_bytes=200_000_000, record_dir=folder)
    live = LiveTable(settings, sys.stderr)
    with contextlib.ExitStack() as stack:
        terminal = stack.enter_context(Terminal(live.write, rows_taken=lambda: live.rows))
        stack.callback(live.close)
        live.start()
        child = subprocess.Popen(
            [sys.executable, *command],
            preexec_fn=forget_ignored,
            **terminal.child_fds(),  # type: ignore[call-overload]
        )
        while child.poll() is None:
            terminal.pump(0.05)
            live.update(read_all(folder))
        terminal.drain()
    code = child.returncode
    print_final(build_report(read_all(folder), settings, code, command, 1.0), sys.stderr)
print(f"[exit {code}]", file=sys.stderr)
