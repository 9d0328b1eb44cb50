"""What kernels that are written in Python read besides their arguments.

A custom operator is not a pure function of its arguments: its kernel may read a number, a table or a lock of
the program, which may be another one when the operator runs again. So before such an operator's results may
be evicted, the code of its kernel is read, with that of the functions that it calls:

- What a name outside of the code stands for (a global variable, a variable of an enclosing function, an
  attribute of a module or of a plain object) is kept with the recipe if it is a function, a module, a class
  of a library, or a constant such as a number. A replay puts it back for as long as the kernel runs.
- If it is anything else (a list, an object with state, a file), or the code sets such names, the results stay
  in memory.

Tensors are the exception: the interposer sees which of them a kernel reads (`native/bodies.h`). Code that is
not Python's, and that of the libraries in `PURE`, is taken to compute from its arguments.
"""

from __future__ import annotations

import builtins
import dis
import enum
import functools
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import resolve_name
from inspect import getattr_static
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    EllipsisType,
    FunctionType,
    ModuleType,
    NoneType,
    NotImplementedType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import torch
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch.library import _impls as in_python

PURE = {
    *("torch", "numpy", "triton", "einops"),
    *("math", "cmath", "operator", "functools", "itertools", "collections", "contextlib", "_contextlib"),
    *(
        "typing",
        "types",
        "numbers",
        "dataclasses",
        "enum",
        "abc",
        "re",
        "string",
        "copy",
        "inspect",
        "warnings",
    ),
    *(
        "_operator",
        "_functools",
        "_collections",
        "_collections_abc",
        "_abc",
        "_warnings",
        "typing_extensions",
    ),
}
"""Libraries whose functions, other than those in `IMPURE`, depend on nothing but their arguments, the random
generators and the settings that replays restore."""

IMPURE = {
    *("numpy.random", "torch.random", "torch.distributed"),
    *("torch.initial_seed", "torch.get_rng_state", "torch.default_generator"),
}
IMPURE_BUILTINS = {"eval", "exec", "globals", "id", "input", "open", "__import__", "breakpoint"}

CONSTANTS = (
    *(NoneType, bool, int, float, complex, str, bytes, range, EllipsisType, NotImplementedType, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
STATELESS = (re.Pattern, torch.jit.ScriptFunction, torch._ops.OpOverload, torch._ops.OpOverloadPacket)
"""Classes of objects, other than functions, that compute from their arguments."""

STATELESS_NAMES = {"ufunc", "dtype", "nb_func", "cython_function_or_method", "fused_cython_function"}
"""The same, of NumPy, nanobind and Cython."""

_CACHED = type(functools.cache(len))
_MISSING = object()
KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
"""The dispatch keys of kernels that may run beneath the interposer."""

PYTORCH = Path(torch.__file__).parent
REGISTERING = Path(torch.library.__file__)
"""Functions there register kernels for whoever calls them."""
REGISTERED = re.compile(r"^(\w+)(?:\[alias\])?: registered at (.*):\d+ ::", re.MULTILINE)

_registered: dict[str, Any] = {}
"""Kernels that have been registered during sessions, by `torch.library`'s names for them."""


def note(name: str, kernel: Any) -> None:
    """Note a kernel that is being registered. name: as in `torch.library._impls`."""
    for gone in [one for one in _registered if one not in in_python]:
        del _registered[gone]
    if name.rpartition("/")[2] in KEYS:
        _registered[name] = kernel


def has_python_kernel(func: Any) -> bool:
    """Return whether an operator's kernel is a Python function: only operators read what that keeps."""
    return any(name in in_python for name in _names_of(func))


def replaces_own_kernel(func: Any) -> bool:
    """Return whether the program has given one of PyTorch's operators a kernel in Python.

    PyTorch has some of its own, such as that of `bmm` on a GPU: the dispatcher knows the files where kernels
    have been registered.
    """
    schema = func._schema
    if not (schema.name.startswith("aten::") and has_python_kernel(func)):
        return False
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    files = {key: Path(file) for key, file in REGISTERED.findall(torch._C._dispatch_dump(name))}
    python = [files.get(one.rpartition("/")[2]) for one in _names_of(func) if one in in_python]
    return any(map(_is_programs, python))


def _is_programs(file: Path | None) -> bool:
    """Return whether a kernel in Python that was registered there, or in an unknown place, is the program's.

    If the file is not Python's, a kernel in C++ has replaced it since.
    """
    if file is None:
        return True
    return file.suffix == ".py" and not (file.is_relative_to(PYTORCH) and file != REGISTERING)


def reading_of(func: Any, known: Reading | None) -> Reading | None:
    """Return what the kernel of an operator reads now; None if the kernel is not written in Python.

    known: what it read when it was last asked for.
    """
    if known is not None and known.is_current():
        return known
    names = [name for name in _names_of(func) if name in in_python]
    return Reading(_kernels_of(func._schema.name, names)) if names else None


def _names_of(func: Any) -> list[str]:
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if schema.overload_name:
        name = f"{name}.{schema.overload_name}"
    return [f"{namespace}/{name}/{key}" for key in KEYS]


def _kernels_of(name: str, registered: list[str]) -> list[Any]:
    """Return the functions that may run as an operator's kernel. Contains None if they are not known."""
    custom = OPDEFS.get(name)
    if custom is None:
        return [_registered.get(one) for one in registered]
    given = [
        one for kernel in custom._backend_fns.values() for one in _cells_of(inspect.unwrap(kernel), "fn")
    ]
    return [custom._init_fn, *given]


def _cells_of(function: Any, name: str) -> list[Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [cell.cell_contents for free, cell in cells if free == name]


class _Outside(NamedTuple):
    """A name outside of a kernel's code, and what it stood for."""

    place: Any
    """The namespace's dict, the class, or the cell."""
    name: str
    value: Any

    def now(self) -> Any:
        if isinstance(self.place, CellType):
            return self.place.cell_contents if _is_filled(self.place) else _MISSING
        if isinstance(self.place, type):
            return vars(self.place).get(self.name, _MISSING)
        return self.place.get(self.name, _MISSING)

    def put(self, value: Any) -> None:
        if isinstance(self.place, CellType):
            self.place.cell_contents = value
        elif isinstance(self.place, type):
            setattr(self.place, self.name, value)
        else:
            self.place[self.name] = value


class _Impure(Exception):
    """The code reads or sets something that cannot be put back for a replay."""


class Reading:
    """What a kernel reads besides its arguments, at one moment.

    `pure`: whether it can be put back. If not, the results of the kernel must stay in memory.
    """

    __slots__ = ("outside", "pure", "settled")

    def __init__(self, functions: list[Any]) -> None:
        found = _Reader()
        try:
            for function in functions:
                found.kernel(function)
            self.pure = True
        except _Impure:
            self.pure = False
        self.outside = found.outside
        self.settled = found.settled

    def is_current(self) -> bool:
        """Return whether everything outside is as it was."""
        return self.settled and not self.changes()

    def changes(self) -> list[tuple[_Outside, Any]]:
        """Return what stands for something else now, and for what."""
        return [(one, now) for one in self.outside if (now := one.now()) is not one.value]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Context for a replay: what the kernel reads is as it was when the operator first ran."""
        changed = self.changes()
        try:
            for one, _ in changed:
                one.put(one.value)
            yield
        finally:
            for one, now in changed:
                if now is not _MISSING and one.now() is one.value:  # unless the kernel has set it
                    one.put(now)


class _Reader:
    """Reads the code of functions, and of those that they call. Raises _Impure."""

    def __init__(self) -> None:
        self.outside: list[_Outside] = []
        self.settled = True  # otherwise, a module that the code imports has not been imported yet
        self._seen: set[int] = set()

    def kernel(self, function: Any) -> None:
        """Look at a kernel. It is None if it was registered before any session, and so is not known."""
        self._require(function is not None)
        self.value(function)

    def value(self, value: Any) -> None:
        """Look at something that a name stands for."""
        if _is_constant(value) or isinstance(value, torch.Tensor):
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, (staticmethod, classmethod)) or type(value) is _CACHED:
            return self.value(value.__wrapped__)
        if isinstance(value, functools.partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self.value(one)
            return None
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, BuiltinFunctionType):
            return self._builtin(value)
        if isinstance(value, ModuleType):
            return self._require(_is_pure(value.__name__))
        if isinstance(value, type):
            return self._require(
                value.__module__ == "builtins"
                or _is_pure(value.__module__)
                or issubclass(value, (BaseException, enum.Enum))
            )
        if isinstance(value, CustomOpDef):
            return self.operator(value._qualname)
        kind = type(value)
        known = isinstance(value, STATELESS) or kind.__name__ in STATELESS_NAMES
        return self._require(known or kind.__module__.partition(".")[0] == "triton")

    def operator(self, name: str) -> None:
        """Look at the kernels of another operator, if they are written in Python."""
        registered = [one for one in in_python if one.startswith(f"{name.replace('::', '/')}/")]
        for kernel in _kernels_of(name, [one for one in registered if one.rpartition("/")[2] in KEYS]):
            self.kernel(kernel)

    @staticmethod
    def _require(fine: bool) -> None:
        if not fine:
            raise _Impure

    def _builtin(self, function: Any) -> None:
        owner = function.__self__
        if owner is None or owner is builtins:
            return self._require(function.__name__ not in IMPURE_BUILTINS)
        by_pybind = type(owner).__name__ == "PyCapsule" or type(owner).__module__.startswith("pybind11")
        if not (by_pybind or isinstance(owner, (ModuleType, type))):  # a method of an object
            return self._require(_is_constant(owner))
        of_class = function.__module__ or getattr(owner, "__module__", "")
        name = owner.__name__ if isinstance(owner, ModuleType) else of_class
        root = name.partition(".")[0]
        return self._require(_is_pure(name) or root not in sys.stdlib_module_names)

    def _function(self, function: FunctionType) -> None:
        pure = _is_pure(function.__globals__.get("__name__") or "")  # `wraps` changes its own
        free = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in free:
            value = cell.cell_contents if _is_filled(cell) else _MISSING
            if pure and not isinstance(value, (FunctionType, functools.partial)):
                continue  # a decorator of a library's
            self._require(value is not _MISSING)
            self.outside.append(_Outside(cell, name, value))
            self.value(value)
        if pure:
            return
        for one in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(one)
        self._code(function.__code__, function, function.__code__.co_freevars)

    def _code(self, code: CodeType, function: FunctionType, free: tuple[str, ...]) -> None:
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                self._code(constant, function, tuple(one for one in free if one in constant.co_freevars))
        instructions = list(dis.get_instructions(code))
        for place, instruction in enumerate(instructions):
            kind, name = instruction.opname, instruction.argval
            if kind in ("STORE_GLOBAL", "DELETE_GLOBAL") or (kind == "STORE_DEREF" and name in free):
                raise _Impure
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                names = [name]
                for following in instructions[place + 1 :]:
                    if following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                        break
                    names.append(following.argval)
                self._global(function, names)
            elif kind == "IMPORT_NAME":
                self._import(function, name, instructions[place - 2].argval, instructions[place - 1].argval)

    def _global(self, function: FunctionType, names: list[str]) -> None:
        """Look at what a name stands for, or its attributes if it is a module, a class or a plain object."""
        place: Any = function.__globals__ if names[0] in function.__globals__ else None
        space = vars(builtins) if place is None else place
        for name in names:
            value = space.get(name, _MISSING)
            self._require(value is not _MISSING)
            if place is not None:
                self.outside.append(_Outside(place, name, value))
            last = name is names[-1]
            if isinstance(value, ModuleType) and not last:
                if _is_pure(value.__name__):
                    return self._library(value.__name__, names)
                place = space = vars(value)
            elif _is_plain(value) and not last:
                place, space = value if isinstance(value, type) else vars(value), vars(value)
            else:
                return self.value(value)
        return None

    def _library(self, module: str, names: list[str]) -> None:
        """Look at what is read of a library."""
        self._require(not any(f"{module}.{name}" in IMPURE for name in names))
        if module == "torch" and "ops" in names[:-2]:
            space, name = names[names.index("ops") + 1 :][:2]
            self.operator(f"{space}::{name}")

    def _import(self, function: FunctionType, name: str, level: int, wanted: tuple[str, ...] | None) -> None:
        """Look at what an import inside of the code brings."""
        if level:
            name = resolve_name("." * level + name, function.__globals__.get("__package__"))
        if _is_pure(name):
            return
        module = sys.modules.get(name)
        self.settled = self.settled and module is not None
        self._require(module is not None and wanted is not None)
        for one in wanted or ():
            value = vars(module).get(one, _MISSING)
            self._require(value is not _MISSING)
            self.outside.append(_Outside(vars(module), one, value))
            self.value(value)


def _is_constant(value: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant, value))
    return isinstance(value, CONSTANTS)


def _is_plain(value: Any) -> bool:
    """Return whether an attribute of this class or object is just what its `__dict__` has, if that has it."""
    if isinstance(value, type):
        return type(value) is type and value.__module__ != "builtins" and not _is_pure(value.__module__)
    kind: Any = type(value)
    if isinstance(value, (ModuleType, *STATELESS)) or not hasattr(value, "__dict__"):
        return False
    usual = kind.__getattribute__ is object.__getattribute__ or kind in (FunctionType, SimpleNamespace)
    if not usual:
        return False
    return not any(inspect.isdatadescriptor(getattr_static(kind, name, None)) for name in vars(value))


def _is_pure(name: str) -> bool:
    parts = name.split(".")
    return parts[0] in PURE and ".".join(parts[:2]) not in IMPURE


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
