"""Makes a running thread call a function of ours before its next step.

Python has no public way to do this so far. Since 3.12 `sys.monitoring` can watch the code that a thread is
executing; before that, `_PyEval_SetTrace` gives another thread a tracing function. Either way, our
function is called at the thread's next instruction, and once only. A thread waiting in C is reached when it
returns to Python. Obsolete once an interposer sees the operators of all threads.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

Visit = Callable[[], None]

_awaited: dict[int, tuple[list[Visit], CodeType]] = {}
"""By thread: the pending calls, in order, and the code in which the thread is expected."""


def visit(threads: Iterable[int], call: Visit) -> list[int]:
    """Make each of these other threads call `call` before its next step.

    Returns those that can't be reached.
    """
    frames = sys._current_frames()
    unreached = []
    for thread in threads:
        frame = frames.get(thread)
        if frame is None:  # it has ended, or not begun
            continue
        if thread in _awaited:
            _awaited[thread][0].append(call)
            continue
        _awaited[thread] = [call], frame.f_code
        if not _watch(frame) and _awaited.pop(thread, None) is not None:  # unless it has arrived meanwhile
            unreached.append(thread)
    return unreached


def cancel(thread: int, call: Visit) -> bool:
    """Cancel a call in a thread. Returns whether it had not been made yet."""
    calls, code = _awaited.get(thread, ([], None))
    if call not in calls:
        return False
    calls.remove(call)
    if not calls:
        del _awaited[thread]
        _unwatch(code)
    return True


def _arrived() -> None:
    """Make this thread's pending calls: it has taken a step."""
    found = _awaited.pop(threading.get_ident(), None)
    if found is not None:
        calls, code = found
        _unwatch(code)
        for call in calls:
            call()


if sys.version_info >= (3, 12):
    _TOOLS = (4, 3)  # the other four are reserved by convention
    _monitoring: Any = sys.monitoring
    _tool: int | None = None

    def _watch(frame: FrameType) -> bool:
        global _tool
        if _tool is None:
            _tool = next((tool for tool in _TOOLS if _monitoring.get_tool(tool) is None), None)
            if _tool is None:
                return False
            _monitoring.use_tool_id(_tool, "dtrrun")
            _monitoring.register_callback(_tool, _monitoring.events.INSTRUCTION, _stepped)
        _monitoring.set_local_events(_tool, frame.f_code, _monitoring.events.INSTRUCTION)
        return True

    def _unwatch(code: CodeType | None) -> None:
        global _tool
        if all(other is not code for _, other in _awaited.values()):
            _monitoring.set_local_events(_tool, code, 0)
        if not _awaited:
            _monitoring.free_tool_id(_tool)
            _tool = None

    def _stepped(_code: CodeType, _offset: int) -> None:
        _arrived()

else:
    _python: Any = ctypes.pythonapi
    _Tracer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)

    def _declared(name: str, result: Any, *arguments: Any) -> Any:
        function = getattr(_python, name, None)
        if function is not None:
            function.restype, function.argtypes = result, arguments
        return function

    _interpreter = _declared("PyInterpreterState_Get", ctypes.c_void_p)
    _first_state = _declared("PyInterpreterState_ThreadHead", ctypes.c_void_p, ctypes.c_void_p)
    _next_state = _declared("PyThreadState_Next", ctypes.c_void_p, ctypes.c_void_p)
    _frame_of = _declared("PyThreadState_GetFrame", ctypes.c_void_p, ctypes.c_void_p)  # a new reference
    _released = _declared("Py_DecRef", None, ctypes.c_void_p)
    _set_trace = _declared("_PyEval_SetTrace", ctypes.c_int, ctypes.c_void_p, _Tracer, ctypes.py_object)
    _set_profile = _declared("_PyEval_SetProfile", ctypes.c_int, ctypes.c_void_p, _Tracer, ctypes.py_object)

    def _watch(frame: FrameType) -> bool:
        if None in (_interpreter, _first_state, _next_state, _frame_of, _set_trace, _set_profile):
            return False
        state = _first_state(_interpreter())
        while state:
            top = _frame_of(state)
            if top is not None:
                _released(top)
                if top == id(frame):
                    if _is_traced(frame):  # by a debugger: use the profiler's calls and returns instead
                        _set_profile(state, _profiler, None)
                    else:
                        frame.f_trace_opcodes = True
                        _set_trace(state, _tracer, None)
                    return True
            state = _next_state(state)
        return False

    def _is_traced(frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_trace is not None:
                return True
            frame = frame.f_back
        return False

    def _unwatch(code: CodeType | None) -> None:
        """The thread itself removes the function when it gets there."""

    def _traced(_argument: Any, frame: int, _event: int, _value: Any) -> int:
        sys.settrace(None)
        ctypes.cast(frame, ctypes.py_object).value.f_trace_opcodes = False
        _arrived()
        return 0

    def _profiled(_argument: Any, _frame: int, _event: int, _value: Any) -> int:
        sys.setprofile(None)
        _arrived()
        return 0

    _tracer, _profiler = _Tracer(_traced), _Tracer(_profiled)
