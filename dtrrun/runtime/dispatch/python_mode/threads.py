"""Brings the dispatch mode, which belongs to one thread, to all others: when they start, or the session does.

Every Python thread is started by `_thread`, in any library. Its functions are replaced in all modules that
have them by name, since no public hook can enter a context when a thread starts. Running threads are visited
(`visits`). Threads started by PyTorch's autograd engine inherit the mode.

The mode's fast path takes no lock. Most threads of a program never touch a tensor of the session: a data
loader's feeder and pinning thread, progress bars, log writers. So other threads get a stand-in mode, which
disables the fast path once its thread does.
"""

from __future__ import annotations

import _thread
import functools
import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from types import CodeType, FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime.dispatch.python_mode import compiler, modes, visits
from dtrrun.runtime.tracebacks import hide

if TYPE_CHECKING:
    from dtrrun.runtime.dispatch.slow_path import Reasons

PATIENCE_SECONDS = 30.0  # for an operator that does not return
LOOK_SECONDS = 20e-6
STARTERS = ("start_new_thread", "start_joinable_thread")  # of `_thread`; the second since Python 3.13

UNREACHED = (
    "dtrrun cannot see the operators of {} threads that were running before it: pin the tensors that they "
    "write to (session.pin), or what they write may be lost"
)

_here = threading.local()


class Guest(TorchDispatchMode):
    """Stand-in mode of another thread: passes its operators to the session's mode."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not compiler.CAN_MARK

    def __init__(self, mode: Any, threads: Threads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self._threads = threads
        self._joined = False

    def join(self) -> None:
        """This thread is about to touch a tensor of the session."""
        if not self._joined and self._threads.running:
            self._threads.noticed()
            self._joined = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._dispatch(func, types, args, kwargs)
        except BaseException as error:
            hide(error)
            raise

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not self._joined or not self._threads.running:
            if not self._threads.running or not self.mode.concerns(args, kwargs):
                return func(*args, **(kwargs or {}))
            self.join()
        return self.mode.dispatch(func, types, args, kwargs)


if compiler.CAN_MARK:
    compiler.keep_off(Guest.__torch_dispatch__)


class Leaver:
    """Removes the mode when its thread ends. It is kept in a thread local."""

    def __init__(self, guest: Guest, left: Callable[[int], None]) -> None:
        self._guest, self._left = guest, left
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            modes.take_out(self._guest)
            self._left(self._thread)


class Started(functools.partial):  # type: ignore[type-arg]
    """What a thread calls first: it enters a stand-in mode, then calls the program's function.

    This leaves no frame of ours beneath the program's, and error reports name its function.
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
    """Enters a stand-in mode in every other thread, from `begin` until `end`.

    noticed: called in each of them, before it first touches a tensor of the session.
    """

    def __init__(self, mode: Any, noticed: Callable[[], None], alert: Callable[[str], None]) -> None:
        self._mode = mode
        self.noticed = noticed
        self._alert = alert
        self._entered: set[int] = set()
        self.running = False  # the stand-in modes of an ended session do nothing
        self.forked = False  # this process is a child of the session's

    # -- threads to come ---------------------------------------------------------------------------

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
            return  # to search all modules takes longer than a data loader's worker takes to begin
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

    # -- threads that there are ----------------------------------------------------------------------

    def begin(self) -> None:
        """Enter the mode in this thread, and stand-in modes in all others.

        Torch may have been imported first in a thread that does nothing else. So outside of the main thread
        this one gets a stand-in mode, too: the first operator shows which thread trains.
        """
        self.running = True
        self._mode.__enter__()
        if threading.current_thread() is not threading.main_thread():
            modes.take_out(self._mode)
            self.enter()
        self._entered.add(threading.get_ident())
        self.look()

    def look(self) -> None:
        """Visit threads without a stand-in mode. Repeated, since not only Python starts threads."""
        self._entered.add(threading.get_ident())  # it has brought an operator here: perhaps one of autograd's
        strangers = sys._current_frames().keys() - self._entered
        if strangers:
            self._entered.update(strangers)
            unreached = visits.visit(strangers, self.enter)
            if unreached:
                self._alert(UNREACHED.format(len(unreached)))

    def end(self) -> None:
        """Leave the mode, and make other threads leave their stand-in modes."""
        self.running = False
        self._leave()
        if not modes.leave(self._mode):  # it is in another thread, or in none
            modes.put_under(self._mode)  # PyTorch's flags count entered modes
            modes.leave(self._mode)
        others = self._entered - {threading.get_ident()}
        visits.visit([one for one in others if not visits.cancel(one, self.enter)], self._leave_other)

    def enter(self) -> None:
        """Pass this thread's operators to the session from now on."""
        if not self.running:
            return
        self._entered.add(threading.get_ident())
        if any(mode_of(mode) is self._mode for mode in modes.stacked()):
            return
        guest = Guest(self._mode, self)
        _here.leaver = Leaver(guest, self._entered.discard)  # replaces that of an earlier session
        _here.guest = guest
        modes.put_under(guest)

    def share(self, reasons: Reasons) -> None:
        """Several threads use the session from now on: none may be on the fast path, which has no lock."""
        reasons.add("threads")
        self.wait_outside()

    def wait_outside(self) -> None:
        """Wait until no other thread is on the fast path."""
        fast_path, slow_path, own = (
            self._mode.fast_path,
            self._mode.slow_path.run.__code__,
            threading.get_ident(),
        )

        def is_inside() -> bool:
            frames = _frames().items()
            return any(_is_inside(frame, fast_path, slow_path) for thread, frame in frames if thread != own)

        wait_while(is_inside)

    def _leave(self) -> None:
        guest = getattr(_here, "guest", None)
        if guest is not None and guest.mode is self._mode:
            _here.guest = _here.leaver = None

    def _leave_other(self) -> None:
        """Called in a thread other than the one that ended the session."""
        self._leave()
        modes.take_out(self._mode)


_without: dict[str, dict[str, int]] = {}
"""By function name: modules that did not have it, with their number of names at that time.

There are thousands, too many to search whenever a session begins or ends.
"""


def _rename(one: Any, other: Any) -> None:
    """Replace `one` by `other`, which has the same name, in every module that has it."""
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
    """Code that is not an operator is about to touch a tensor of the session."""
    guest = getattr(_here, "guest", None)
    if guest is not None:
        guest.join()


def mode_of(entered: Any) -> Any:
    """Return the session's mode, given an entry of a thread's stack of modes."""
    return entered.mode if type(entered) is Guest else entered


def wait_while(is_inside: Callable[[], bool]) -> None:
    """Wait for an operator of another thread to end."""
    ends = monotonic() + PATIENCE_SECONDS
    while is_inside() and monotonic() < ends:
        sleep(LOOK_SECONDS)


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()


def _is_inside(frame: FrameType | None, fast_path: CodeType, slow_path: CodeType) -> bool:
    """Return whether a thread is in the function `fast_path`, except on its way through `slow_path`."""
    while frame is not None:
        if frame.f_code is slow_path:
            return False
        if frame.f_code is fast_path:
            return True
        frame = frame.f_back
    return False
