"""Switches the interposer on in all threads of the program: when they start, or when the session starts.

Every Python thread is started by `_thread`, in any library. Its functions are replaced in all modules that
have imported them by name, since no public hook can enter a context when a thread starts. Running threads are
visited (`visits`). Threads started by PyTorch's autograd engine inherit the interposer.

Most threads of a program never touch a tensor of the session: a data loader's feeder and pinning thread,
progress bars, log writers. As long as none of them does, operators of the training thread take no lock.
So each of the others notifies the session before its first access (`SecondaryThread`).
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from threading import get_ident
from types import ModuleType
from typing import Any

from dtrrun.runtime.dispatch import visits

STARTERS = ("start_new_thread", "start_joinable_thread")  # of `_thread`; the second since Python 3.13

UNREACHED = (
    "dtrrun cannot see the operators of {} that ran before it: pin the tensors that are written to there "
    "(session.pin), or what is written may be lost"
)

_here = threading.local()
"""`secondary`: this thread's `SecondaryThread`, if it has one."""


class SecondaryThread:
    """A thread other than the training thread; reports when it first touches a tensor of the session."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        self._noticed = noticed
        self._joined = False

    def join(self) -> None:
        if not self._joined:
            self._noticed()
            self._joined = True


class Started(functools.partial):  # type: ignore[type-arg]
    """The first call of a thread: switches the interposer on, then calls the program's function.

    This leaves none of our frames beneath the program's, and error reports name the program's function.
    """

    function: Any

    def __new__(cls, enter: Callable[[], None], function: Any, args: Any, kwargs: Any) -> Started:
        calls = (functools.partial(enter), functools.partial(function, *args, **kwargs))
        started: Started = super().__new__(cls, any, map(functools.partial.__call__, calls))
        started.function = function
        return started

    def __repr__(self) -> str:
        return repr(self.function)


class Threads:
    """Switches the interposer on in every thread, from `begin` until `end`."""

    def __init__(self, native: Any, noticed: Callable[[], None], alert: Callable[[str], None]) -> None:
        """native: the extension. noticed: called in each secondary thread, before it first touches a tensor
        of the session. alert: called with a line about threads that cannot be reached."""
        self._native = native
        self._noticed = noticed
        self._alert = alert
        self._entered: set[int] = set()
        self.entering = threading.RLock()
        """Held while a thread is switched on, and by a thread that forks. A visit may find a thread in it."""
        self.running = False  # threads that start after the session has ended are left alone
        self.forked = False  # this process is a child of the session's

    # -- future threads ----------------------------------------------------------------------------

    def install(self) -> None:
        self._replaced: list[tuple[Any, Any]] = []
        for name in STARTERS:
            original = getattr(_thread, name, None)
            if original is not None:
                ours = self._starter(original)
                self._replaced.append((original, ours))
                _rename(original, ours)

    def remove(self) -> None:
        if self.forked:
            return  # searching all modules takes longer than starting a data loader's worker
        for original, ours in self._replaced:
            _rename(ours, original)

    def _starter(self, original: Any) -> Any:
        enter = self.enter
        takes_arguments = original.__name__ == "start_new_thread"

        @functools.wraps(original)
        def start(function: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.running and callable(function)):
                return original(function, *args, **kwargs)  # which may raise an error
            if not takes_arguments:
                return original(Started(enter, function, (), {}), *args, **kwargs)
            positional, *rest = args or (None,)
            if not isinstance(positional, tuple) or len(rest) > 1 or not isinstance((*rest, {})[0], dict):
                return original(function, *args, **kwargs)
            return original(Started(enter, function, positional, (*rest, {})[0]), (), **kwargs)

        return start

    # -- existing threads ----------------------------------------------------------------------------

    def begin(self) -> None:
        """Switch the interposer on in this thread and all others.

        A thread may do nothing but import torch first. So this one also counts as a secondary thread if it is
        not the main thread: the first operator shows which thread trains.
        """
        self.running = True
        if threading.current_thread() is threading.main_thread():
            self._native.switch(True)
        else:
            self.enter()
        self.look()

    def look(self) -> None:
        """Visit threads that have not been entered. Called repeatedly: not only Python starts threads."""
        self._entered.add(get_ident())  # its operators already come here: perhaps one of autograd's threads
        strangers = sys._current_frames().keys() - self._entered
        if strangers:
            self._entered.update(strangers)
            unreached = visits.visit(strangers, self.enter)
            if unreached:
                count = len(unreached)
                self._alert(UNREACHED.format("a thread" if count == 1 else f"{count} threads"))

    def end(self) -> None:
        """Switch the interposer off in this thread, and soon in all others."""
        self.running = False
        self._leave()
        others = self._entered - {get_ident()}
        visits.visit([one for one in others if not visits.cancel(one, self.enter)], self._leave)

    def enter(self) -> None:
        """Pass this thread's operators to the session from now on."""
        if not self.running:
            return
        self._entered.add(get_ident())
        if not self._native.is_on():
            _here.secondary = SecondaryThread(self._noticed)
            with self.entering:
                self._native.switch(True)

    def _leave(self) -> None:
        _here.secondary = None
        self._native.switch(False)


_without: dict[str, dict[str, int]] = {}
"""By function name: modules that did not have it, with their number of names at that time.

There are thousands of modules, too many to search whenever a session begins or ends.
"""


def _rename(one: Any, other: Any) -> None:
    """Replace `one` by `other`, which has the same function name, in every module that has it."""
    known = _without.setdefault(one.__name__, {})
    changed = [
        (place, module.__dict__)
        for place, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and known.get(place) != len(module.__dict__)
    ]
    for place, module in changed:
        names = [name for name, value in list(module.items()) if value is one]
        for name in names:
            module[name] = other
        if not names:
            known[place] = len(module)


def joins() -> None:
    """Report that this thread is about to touch a tensor of the session, if it is a secondary thread."""
    secondary = getattr(_here, "secondary", None)
    if secondary is not None:
        secondary.join()
