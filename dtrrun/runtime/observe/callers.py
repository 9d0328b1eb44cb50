"""From which module and which line of the program operators were called, for `--where` and `--peak`.

Operators are numbered: a storage's age is the number of its maker. C++ notes the line and the module of each
operator (`native/call_notes.h`). This file says which module the program is in. None of it is active unless
requested.

Modules are observed where they are called, not by PyTorch's global module hooks: with those, `torch.compile`
would compile a different program, which computes different bits.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from dtrrun.runtime.compiled.generated import MET
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.patches.registry import Patches
from dtrrun.runtime.tracebacks import hide

OURS = tuple(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))
"""Folders of PyTorch and of dtrrun: lines in them are not the program's."""
BACKWARD = "backward"
"""Used instead of a module for operators called by autograd."""
NAMES = ["", BACKWARD]
LINES, MEMORY, STORAGES = 1, 2, 4
"""What the notes have: lines and modules, bytes after each operator, and when storages come and go."""
DEEPEST = 4
"""To which depth a call's arguments are searched for tensors."""
MOST_ITEMS = 1000


def is_the_programs(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith(OURS) and MET not in frame.f_globals


def is_program_code(code: CodeType) -> bool:
    """Return whether a function that is running is the program's."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None and is_the_programs(frame)


class Call(NamedTuple):
    """Where an operator was called; line: "file:number". Both are empty if unknown."""

    module: str
    line: str
    backward: bool


class Callers:
    """The notes of a session's operators, and the module that the program is in."""

    def __init__(self, callbacks: Callbacks, native: ModuleType) -> None:
        self.notes = callbacks.calls = native.CallNotes(callbacks.ledger, is_program_code)
        self.inputs: list[weakref.ref[torch.Tensor]] = []
        """What the outermost modules have been called with, since it was cleared last."""
        self.entered = 0
        """The first operator within a module since this was set to 0."""
        self._ledger = callbacks.ledger
        self._patches = Patches()
        self._wanted: dict[str, int] = {}
        self._stack: list[int] = []
        self._names = list(NAMES)
        self._known = {name: number for number, name in enumerate(NAMES)}
        self._numbers: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()
        self._root: Any = None
        self._thread = threading.get_ident()

    def install(self) -> None:
        global _current
        _current = self

    def remove(self) -> None:
        self._patches.undo()
        self.notes.close()

    def want(self, who: str, mode: int) -> None:
        """Note, from now on, what `who` wants: a sum of the constants above."""
        before = self.notes.mode
        self._wanted[who] = mode
        wanted = 0
        for one in self._wanted.values():
            wanted |= one
        if wanted & LINES and not before & LINES:
            self._patches.put(nn.Module, "__call__", call_module)
        elif before & LINES and not wanted & LINES:
            self._patches.undo()
            self._stack.clear()
            self.notes.module = 0
        self.notes.mode = wanted

    def at(self, age: int) -> Call:
        """Return where the operator with this number was called, or the last one before."""
        return self._told(*self.notes.at(age))

    def origin(self, age: int) -> Call:
        """Like `at`; for an operator of a backward pass, where the one was called that it belongs to."""
        return self._told(*self.notes.origin(age))

    def maker_of(self, node: int) -> Call:
        """Return where the operator was called that has made a node of autograd's graph."""
        return self._told(*self.notes.maker_of(node))

    def _told(self, module: int, line: str, backward: bool) -> Call:
        return Call(self._names[module] or (BACKWARD if backward else ""), line, backward)

    @property
    def modules(self) -> list[nn.Module]:
        """The outermost modules that have been called while lines were noted."""
        return [*self._numbers]

    # -- modules ---------------------------------------------------------------------------------

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack:
            self._root = module
            self.entered = self.entered or self._ledger.age + 1
            self.inputs += map(weakref.ref, tensors_in((args, kwargs)))
        self._stack.append(self._number_of(module))
        self.notes.module = self._stack[-1]

    def leave(self) -> None:
        if threading.get_ident() != self._thread or not self._stack:
            return
        self._stack.pop()
        self.notes.module = self._stack[-1] if self._stack else 0

    def _number_of(self, module: Any) -> int:
        numbers = self._numbers.get(self._root)
        if numbers is None or id(module) not in numbers:
            root = type(self._root).__name__
            numbers = {}
            for name, part in self._root.named_modules():
                # The name of a member of a container says nothing without its owner.
                full = f"{root}.{name}" if name[:1].isdecimal() else name or root
                numbers[id(part)] = self._number(full)
            numbers.setdefault(id(module), self._number(type(module).__name__))
            self._numbers[self._root] = numbers
        return numbers[id(module)]

    def _number(self, name: str) -> int:
        number = self._known.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        return number


def tensors_in(value: Any, depth: int = DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value and in its tuples, lists and dicts. Runs no code of the program."""
    cls = type(value)
    if issubclass(cls, torch.Tensor):
        yield value
    elif depth and (cls in (tuple, list) or issubclass(cls, dict)):
        for one in [*(dict.values(value) if issubclass(cls, dict) else value)][:MOST_ITEMS]:
            yield from tensors_in(one, depth - 1)


_current: Callers
_call_module = nn.Module.__call__


def call_module(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Replaces `nn.Module.__call__` while modules are noted."""
    callers = _current
    callers.enter(self, args, kwargs)
    try:
        return _call_module(self, *args, **kwargs)
    except BaseException as error:
        hide(error)
        raise
    finally:
        callers.leave()
