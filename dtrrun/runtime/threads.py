"""A dispatch mode belongs to one thread: new threads get it at their start.

`threading.Thread._bootstrap_inner` is the first Python that runs in a new thread; there is no public
hook that can enter a context there. Threads that PyTorch's autograd engine starts carry the mode themselves.

The mode's short cut takes no lock. Most threads of a program never touch a tensor of the session: a data
loader's feeder and the one that pins its batches, progress bars, writers of logs. So a thread gets a guest in
the mode's place, which sees to it that the short cut is taken no more once the thread does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from time import monotonic, sleep
from types import CodeType, FrameType
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime import compiler

PATIENCE_SECONDS = 30.0  # for an operator that does not return
LOOK_SECONDS = 20e-6

_here = threading.local()


class Guest(TorchDispatchMode):
    """Hands a thread's operators to the session's mode."""

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
        """This thread is about to touch what the session keeps."""
        if not self._joined and self._threads.installed:
            self._threads.noticed()
            self._joined = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._joined or not self._threads.installed:
            if not self._threads.installed or not self.mode.concerns(args, kwargs):
                return func(*args, **(kwargs or {}))
            self.join()
        return self.mode.__torch_dispatch__(func, types, args, kwargs)


if compiler.CAN_MARK:
    compiler.keep_off(Guest.__torch_dispatch__)


class Threads:
    """Enters a guest of `mode()` in every thread that starts while installed.

    `noticed` is called in each of them, before it touches a tensor of the session for the first time.
    """

    def __init__(self, mode: Callable[[], Any], noticed: Callable[[], None]) -> None:
        self._mode = mode
        self.noticed = noticed
        self.installed = False  # threads outlive a session, and their guests then do nothing

    def install(self) -> None:
        self._original = original = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]
        self.installed = True
        current, threads = self._mode, self

        def bootstrap(thread: threading.Thread) -> None:
            mode = current()
            if mode is None:
                original(thread)
                return
            _here.guest = guest = Guest(mode, threads)
            with guest:
                original(thread)

        threading.Thread._bootstrap_inner = bootstrap  # type: ignore[attr-defined]

    def remove(self) -> None:
        self.installed = False
        threading.Thread._bootstrap_inner = self._original  # type: ignore[attr-defined]


def joins() -> None:
    """What is no operator is about to touch what the session keeps."""
    guest = getattr(_here, "guest", None)
    if guest is not None:
        guest.join()


def mode_of(entered: Any) -> Any:
    """The session's mode, of what a thread has on its stack of modes."""
    return entered.mode if type(entered) is Guest else entered


def wait_outside(short_cut: CodeType, careful: CodeType) -> None:
    """Until no other thread is in the function `short_cut`, but for one that has gone on to `careful`."""
    ends = monotonic() + PATIENCE_SECONDS
    own = threading.get_ident()
    while any(_is_inside(frame, short_cut, careful) for thread, frame in _frames().items() if thread != own):
        if monotonic() > ends:
            return
        sleep(LOOK_SECONDS)


def _frames() -> dict[int, FrameType]:
    return sys._current_frames()


def _is_inside(frame: FrameType | None, short_cut: CodeType, careful: CodeType) -> bool:
    while frame is not None:
        if frame.f_code is careful:
            return False
        if frame.f_code is short_cut:
            return True
        frame = frame.f_back
    return False
