"""Ends the script, in whichever of its threads that is decided."""

from __future__ import annotations

import ctypes
import threading
from typing import NoReturn

_ended: set[int] = set()
"""Identifiers of the main threads that have been ended: one, unless the process has been forked."""


def end_script(status: int) -> NoReturn:
    """Raise SystemExit, which ends the script with this exit status.

    In a thread that the program has started, it would end that thread only. So it is raised in the main
    thread as well, as soon as that runs Python code: if it waits for this thread, at once.
    """

    class Ended(SystemExit):
        def __init__(self) -> None:
            super().__init__(status)

    here, main = threading.current_thread(), threading.main_thread()
    started = here is not main and not isinstance(here, threading._DummyThread)
    if started and main.is_alive() and main.ident is not None and main.ident not in _ended:
        _ended.add(main.ident)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main.ident), ctypes.py_object(Ended))
    raise SystemExit(status)
