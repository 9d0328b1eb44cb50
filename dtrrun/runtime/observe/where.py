"""`--where`: from which module and which line of the program a recomputed operator was called.

Operators are numbered: a storage's age is the number of its maker. So it is enough to note at which numbers
the program entered and left modules, and the line of each operator; both are looked up only when an operator
is replayed. Lines are found in the frames below an operator. None of this is active unless requested.

Modules are observed where they are called, not by PyTorch's global module hooks: with those, `torch.compile`
would compile a different program, which computes different bits.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from bisect import bisect_right
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from dtrrun.core.graph import Operation, Version
from dtrrun.core.observer import DecisionObserver
from dtrrun.runtime.compiled.generated import MET
from dtrrun.runtime.dispatch.slow_path import SlowPath
from dtrrun.runtime.patches.registry import Patches
from dtrrun.runtime.tracebacks import hide

OURS = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders of PyTorch and of dtrrun: lines in them are not the program's."""
BACKWARD = "backward"
"""Used instead of a module for operators called by autograd."""


def is_the_programs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(OURS) and MET not in frame.f_globals


class Marks:
    """Values, each with the operator number from which on it holds."""

    def __init__(self) -> None:
        self._ages: list[int] = []
        self._values: list[str] = []

    def set(self, age: int, value: str) -> None:
        if self._ages and self._ages[-1] == age:
            self._values[-1] = value
        elif not self._values or self._values[-1] != value:
            self._ages.append(age)
            self._values.append(value)

    def at(self, age: int) -> str:
        place = bisect_right(self._ages, age) - 1
        return self._values[place] if place >= 0 else ""

    def forget(self, age: int) -> None:
        """Drop values that held only before `age`."""
        place = bisect_right(self._ages, age) - 1
        if place > 0:
            del self._ages[:place], self._values[:place]


class Where(DecisionObserver):
    """Adds up replays by module, line and operator."""

    def __init__(self, slow_path: SlowPath) -> None:
        self._slow_path, self._ledger = slow_path, slow_path.ledger
        self._modules, self._lines = Marks(), Marks()
        self._patches = Patches()
        self._stack: list[str] = []
        self._names: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
        self._root: Any = None
        self._thread = threading.get_ident()
        self._steps = [0, 0]
        self.tallies: dict[tuple[str, str, str], list[int]] = {}  # count, ns, bytes

    def install(self) -> None:
        global _current
        _current = self
        self._patches.put(nn.Module, "__call__", call_module)
        self._slow_path.called = self._called
        self._ledger.decision_observers.append(self)

    def remove(self) -> None:
        self._patches.undo()
        self._slow_path.called = None
        self._ledger.decision_observers.remove(self)

    def step_ended(self) -> None:
        """Forget old marks: even long-lived storages keep their recipes only for a step or two."""
        self._steps = [*self._steps[1:], self._ledger.age]
        for marks in (self._modules, self._lines):
            marks.forget(self._steps[0])

    # -- modules ---------------------------------------------------------------------------------

    def enter(self, module: nn.Module) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack:
            self._root = module
        self._stack.append(self._name_of(module))
        self._modules.set(self._ledger.age, self._stack[-1])

    def leave(self) -> None:
        if threading.get_ident() != self._thread or not self._stack:
            return
        self._stack.pop()
        self._modules.set(self._ledger.age, self._stack[-1] if self._stack else "")

    def _name_of(self, module: Any) -> str:
        names = self._names.get(self._root)
        if names is None or id(module) not in names:
            names = {id(part): name for name, part in self._root.named_modules()}
            names.setdefault(id(module), type(module).__name__)  # the root module
            self._names[self._root] = names
        return names[id(module)] or type(module).__name__

    # -- lines -----------------------------------------------------------------------------------

    def _called(self) -> None:
        """Note the line and module of an operator (not a view) that has been called."""
        frame = sys._getframe().f_back  # None in a thread of the autograd engine, which C++ has started
        while frame is not None and not is_the_programs(frame):
            frame = frame.f_back
        line = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        age = self._ledger.age
        self._lines.set(age - 1, line)
        if torch._C._current_graph_task_id() != -1 and not self._stack:
            self._modules.set(age - 1, BACKWARD)
            self._modules.set(age, "")

    def module_of(self, version: Version) -> str:
        """Return the module that called the operator that made the version, or "" if unknown."""
        return self._modules.at(version.age - 1)

    # -- replays ---------------------------------------------------------------------------------

    def rematerialized(self, version: Version, operation: Operation, started_ns: int, cost_ns: int) -> None:
        age = version.age - 1
        key = self._modules.at(age), self._lines.at(age), operation.signature.operator.name
        tally = self.tallies.setdefault(key, [0, 0, 0])
        tally[0] += 1
        tally[1] += cost_ns
        tally[2] += version.nbytes


_current: Where
_call_module = nn.Module.__call__


def call_module(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces `nn.Module.__call__` while a `Where` is installed."""
    where = _current
    where.enter(self)
    try:
        return _call_module(self, *args, **kwargs)
    except BaseException as error:
        hide(error)
        raise
    finally:
        where.leave()
