"""Finds the variables, attributes and containers of a program that refer to storages.

The search starts at the variables of running functions and of the program's modules, and follows containers,
attributes and what autograd has saved. It only looks: it runs no code of the program, and its time is
bounded. Made when an error or the last table is written, so nothing is tracked for it.
"""

from __future__ import annotations

import gc
import inspect
import sys
import sysconfig
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from os.path import basename
from time import thread_time_ns as now_ns
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType, TracebackType
from typing import Any, NamedTuple

import torch

from dtrrun.runtime.compiled.generated import MET
from dtrrun.runtime.guards import below
from dtrrun.runtime.observe.training_memory import BUFFER, PARAMETER, has_graph
from dtrrun.runtime.storage import instances, storage_of

LONGEST_NS = 50_000_000
"""Processor time that a search may take."""
MOST_ITEMS = 10_000
"""How many items of one container are looked at."""
SEQUENCES = (list, tuple, set, frozenset, deque)
ATOMS = frozenset(
    {int, float, complex, str, bytes, bytearray, bool, type(None), ModuleType, torch.dtype, torch.device}
)
CONTAINERS = frozenset({dict, OrderedDict, list, tuple, set, frozenset, deque})
TRACERS = sys.gettrace, sys.getprofile, threading.gettrace, threading.getprofile
OPTIMIZERS = "torch.optim"
OURS = "dtrrun"
LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
ATTRIBUTES = {"_parameters": PARAMETER, "_buffers": BUFFER, "_modules": ""}
"""The dicts in which `nn.Module` keeps what the program sees as attributes, and what these are for it."""
NEAR_BY = 2
"""How deep containers in a function's variables are searched for tensors with a graph."""


class Holder(NamedTuple):
    """What refers to a storage. variable: as the program would write it. place: where that is."""

    variable: str
    place: str
    container: bool  # a list, a dict or the like holds the tensor
    by_graph: bool = False  # only what autograd has saved for the variable's backward pass
    of_optimizer: bool = False  # a variable of an optimizer's step
    of_library: bool = False  # a variable of a function that is not the program's
    generated: bool = False  # by torch.compile
    role: str = ""  # of a module's tensor

    def __str__(self) -> str:
        graph = "the graph of " if self.by_graph else ""
        return f"{graph}`{self.variable}` {self.place}"


_NOBODY = Holder("", "", container=False)


class _Found(NamedTuple):
    value: Any
    holder: Holder


class Search:
    """Finds holders of the storages with the keys `wanted`; `holders` has them by key."""

    def __init__(
        self, wanted: Collection[int], key_of: Callable[[Any], int], longest_ns: int = LONGEST_NS
    ) -> None:
        self.holders: dict[int, Holder] = {}
        self._wanted, self._key_of, self._longest_ns = wanted, key_of, longest_ns
        self._until_ns = 0
        self._seen: set[int] = set()
        self._roots: list[tuple[torch.Tensor, Holder]] = []
        self._nodes: list[Any] = []  # kept meanwhile, so that no other object gets the id of one of them

    def run(self, traceback: TracebackType | None = None) -> dict[int, Holder]:
        """Return the holders. traceback: of an error, whose functions may have ended."""
        self._until_ns = now_ns() + self._longest_ns
        with (guard := below()), guard, torch._C.DisableTorchFunction():
            own, of_libraries = _frames(traceback)
            for start in (own, _modules(), of_libraries):
                if self._done():
                    break
                self._follow(start)
                self._follow_graphs()
        self._nodes.clear()
        return self.holders

    def _done(self) -> bool:
        return len(self.holders) == len(self._wanted) or now_ns() > self._until_ns

    def _follow(self, start: Iterable[_Found]) -> None:
        """Search breadth first, so that a storage gets its shortest name."""
        pending = deque(start)
        count = 0
        while pending:
            count += 1
            if not count & 127 and self._done():
                return
            value, holder = pending.popleft()
            cls = type(value)
            if cls in ATOMS or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            if issubclass(cls, torch.Tensor):
                self._note(value, holder)
            pending += _inside(value, cls, holder)

    def _note(self, tensor: torch.Tensor, holder: Holder) -> None:
        try:
            key = self._key_of(storage_of(tensor))
            if tensor.grad_fn is not None:
                self._roots.append((tensor, holder))
        except (RuntimeError, NotImplementedError):  # it has no plain storage
            return
        if key in self._wanted:
            self.holders.setdefault(key, holder)

    def _follow_graphs(self) -> None:
        """Search the graphs of the tensors found. What only containers keep is found through them."""
        for tensor, holder in sorted(self._roots, key=lambda root: root[1].container):
            self._follow_graph(tensor, holder._replace(by_graph=True))
        self._roots.clear()

    def _follow_graph(self, tensor: torch.Tensor, holder: Holder) -> None:
        pending = [tensor.grad_fn]
        while pending:
            node = pending.pop()
            if node is None or id(node) in self._seen:
                continue
            if not len(self._nodes) & 127 and self._done():
                return
            self._seen.add(id(node))
            self._nodes.append(node)
            for saved in _saved(node):
                try:
                    key = self._key_of(storage_of(saved))
                except (RuntimeError, NotImplementedError):
                    continue
                if key in self._wanted:
                    self.holders.setdefault(key, holder)
            pending += [one for one, _ in node.next_functions]


def graphs_near_by() -> list[torch.Tensor]:
    """Return the tensors with a graph that are new, or in variables of functions under way, or in containers
    there.

    What else the present step has computed is in the graphs of these, as a rule. New ones may be arguments
    that no variable has. The collector's two young generations are small.
    """
    young = instances([*gc.get_objects(0), *gc.get_objects(1)], (torch.Tensor,))
    found: list[torch.Tensor] = [one for one in young if has_graph(one)]
    seen: set[int] = set()

    def collect(value: Any, depth: int) -> None:
        cls = type(value)
        if cls in ATOMS or id(value) in seen:
            return
        seen.add(id(value))
        if issubclass(cls, torch.Tensor):
            if has_graph(value):
                found.append(value)
        elif depth and issubclass(cls, (dict, *SEQUENCES)):
            inside = dict.values(value) if issubclass(cls, dict) else _members(value, cls)
            for one in list(islice(inside, MOST_ITEMS)):
                collect(one, depth - 1)
        elif depth == NEAR_BY:
            with suppress(AttributeError):
                collect(object.__getattribute__(value, "__dict__"), depth - 1)

    with (guard := below()), guard, torch._C.DisableTorchFunction():
        for frame in _running(None):
            for value, _ in _locals(frame, _NOBODY):
                collect(value, NEAR_BY)
    return found


def saved_by_graphs(tensors: Iterable[torch.Tensor], key_of: Callable[[Any], int]) -> dict[int, list[int]]:
    """Return what autograd has saved in the graphs of these tensors: by storage, the numbers of the nodes."""
    found: dict[int, list[int]] = {}
    with (guard := below()), guard, torch._C.DisableTorchFunction():
        pending: list[Any] = []
        for tensor in tensors:
            with suppress(RuntimeError, NotImplementedError):
                pending.append(tensor.grad_fn)
        seen: dict[int, Any] = {}
        while pending:
            node = pending.pop()
            if node is None or id(node) in seen:
                continue
            seen[id(node)] = node  # kept, so that no other object gets its id
            for saved in _saved(node):
                with suppress(RuntimeError, NotImplementedError):  # it has no plain storage
                    found.setdefault(key_of(storage_of(saved)), []).append(node._sequence_nr())
            pending += [one for one, _ in node.next_functions]
    return found


def _saved(node: Any) -> Iterator[torch.Tensor]:
    """Yield what autograd has saved for a node, without calling the program's hooks."""
    for name in _names_of_saved(type(node)):
        try:
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                data = getattr(one, "data", None)  # from PyTorch 2.10 on
                if isinstance(data, torch.Tensor):
                    yield data
        except RuntimeError:  # freed by a backward pass
            continue


_by_class: dict[type, list[str]] = {}


def _names_of_saved(cls: type) -> list[str]:
    names = _by_class.get(cls)
    if names is None:
        names = _by_class[cls] = [name for name in dir(cls) if name.startswith("_raw_saved_")]
    return names


def _inside(value: Any, cls: type, holder: Holder) -> Iterator[_Found]:
    """Yield what a value refers to. Uses built-in methods only: those of the program may do anything."""
    name = holder.variable
    if issubclass(cls, dict):
        inside = holder._replace(container=True)
        for key, one in list(islice(dict.items(value), MOST_ITEMS)):
            if _is_nothing(one):
                continue
            shown = f"{name}[{key!r}]" if type(key) in (str, int) else name
            yield _Found(one, inside._replace(variable=shown))
    elif issubclass(cls, SEQUENCES):
        inside = holder._replace(container=True)
        for one in list(islice(_members(value, cls), MOST_ITEMS)):
            if not _is_nothing(one):
                yield _Found(one, inside)
    elif cls is FunctionType:
        yield from _cells(value, holder)
    elif cls is MethodType:
        yield _Found(value.__self__, holder)
    elif cls is GeneratorType:
        if value.gi_frame is not None:
            yield from _locals(value.gi_frame, holder)
    elif issubclass(cls, type):
        module = type.__getattribute__(value, "__module__")
        if type(module) is str and _is_programs(sys.modules.get(module)):
            for attribute, one in list(type.__getattribute__(value, "__dict__").items()):
                yield _Found(one, holder._replace(variable=f"{name}.{attribute}"))
    else:
        yield from _attributes(value, cls, holder)


def _is_nothing(value: Any) -> bool:
    """Return whether a value refers to nothing: a number, a text, an empty container."""
    cls = type(value)
    return cls in ATOMS or (cls in CONTAINERS and not value)


def _members(value: Any, cls: type) -> Iterator[Any]:
    base: Any = next(one for one in SEQUENCES if issubclass(cls, one))
    return iter(base.__iter__(value))


def _attributes(value: Any, cls: type, holder: Holder) -> Iterator[_Found]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if type(attributes) is dict:
        for attribute, one in list(islice(attributes.items(), MOST_ITEMS)):
            if _is_nothing(one):  # as most attributes of a module are
                continue
            if attribute in ATTRIBUTES and type(one) is dict:
                role = ATTRIBUTES[attribute]
                for inner, two in list(one.items()):
                    yield _Found(two, holder._replace(variable=f"{holder.variable}.{inner}", role=role))
            elif type(attribute) is str:
                yield _Found(one, holder._replace(variable=f"{holder.variable}.{attribute}"))
    for base in cls.__mro__:
        for attribute, slot in list(base.__dict__.items()) if "__slots__" in base.__dict__ else ():
            if inspect.ismemberdescriptor(slot):
                try:
                    one = slot.__get__(value)
                except AttributeError:  # not set
                    continue
                yield _Found(one, holder._replace(variable=f"{holder.variable}.{attribute}"))


def _cells(function: FunctionType, holder: Holder) -> Iterator[_Found]:
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield _Found(cell.cell_contents, holder._replace(variable=variable))
        except ValueError:  # empty
            continue


def _locals(frame: FrameType, holder: Holder) -> list[_Found]:
    """Return a frame's variables.

    Before Python 3.13, `f_locals` is a copy that stays with the frame and would keep the tensors alive, so it
    is emptied, unless the program has it from `locals()`. After a call of a trace function, Python copies it
    back into the variables, so it is left alone if there may be one.
    """
    copied = frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13)
    if copied and any(get() is not None for get in TRACERS):
        return []
    values = frame.f_locals
    found = [
        _Found(one, holder._replace(variable=variable))
        for variable, one in list(values.items())
        if type(variable) is str and not variable.startswith((".", "__"))
    ]
    if copied and sys.getrefcount(values) <= 3:  # the frame, this variable and the argument
        values.clear()
    return found


def _frames(traceback: TracebackType | None) -> tuple[list[_Found], list[_Found]]:
    """Return the variables of running functions of the program, and of libraries; the outermost first.

    Those of an uncaught error count as running: Python keeps them for its traceback until the process ends.
    """
    own: list[_Found] = []
    of_libraries: list[_Found] = []
    for frame in _running(traceback):
        module = str(frame.f_globals.get("__name__", ""))
        code = frame.f_code
        function = "" if code.co_name == "<module>" else f"in {code.co_name} "
        place = f"{function}at {basename(code.co_filename)}:{frame.f_lineno}"
        generated = MET in frame.f_globals
        foreign = generated or _is_library(code.co_filename)
        holder = Holder(
            "",
            place,
            container=False,
            of_optimizer=module.startswith(OPTIMIZERS),
            of_library=foreign,
            generated=generated,
        )
        (of_libraries if foreign else own).extend(_locals(frame, holder))
    return own, of_libraries


def _running(traceback: TracebackType | None) -> Iterator[FrameType]:
    traceback = traceback or getattr(sys, "last_traceback", None)
    while traceback is not None:
        if not _is_ours(traceback.tb_frame):
            yield traceback.tb_frame
        traceback = traceback.tb_next
    main = threading.main_thread().ident
    stacks = sys._current_frames()
    del stacks[threading.get_ident()]  # ours, and no frame may refer to itself: that would be garbage
    tops = {ident: _programs(frame) for ident, frame in stacks.items()}
    tops[threading.get_ident()] = _programs(sys._getframe())
    for thread in sorted(tops, key=lambda ident: ident != main):
        frames = []
        next_one = tops[thread]
        while next_one is not None:
            frames.append(next_one)
            next_one = _programs(next_one.f_back)
        yield from reversed(frames)


def _programs(frame: FrameType | None) -> FrameType | None:
    """Return the first of a frame and its callers that is not dtrrun's."""
    while frame is not None and _is_ours(frame):
        frame = frame.f_back
    return frame


def _is_ours(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == OURS


def _modules() -> Iterator[_Found]:
    for name, module in list(sys.modules.items()):
        if _is_programs(module):
            holder = Holder("", f"in {basename(vars(module).get('__file__') or name)}", container=False)
            for variable, value in list(vars(module).items()):
                if not variable.startswith("__"):
                    yield _Found(value, holder._replace(variable=variable))


def _is_programs(module: Any) -> bool:
    """Return whether a module is a file of the program, rather than an installed package."""
    if type(module) is not ModuleType:
        return False
    names = vars(module)
    path, name = names.get("__file__"), str(names.get("__name__"))
    if name == "__main__":
        return True
    return type(path) is str and not _is_library(path) and name.partition(".")[0] not in (OURS, "torch")


def _is_library(path: str) -> bool:
    return path.startswith(LIBRARIES) or path.startswith("<frozen")
