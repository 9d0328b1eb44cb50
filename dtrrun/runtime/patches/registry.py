"""Installs and undoes what a session replaces in PyTorch in Python, and knows what could not be replaced.

C++ replaces what is below Python: docs/design/native.md, "What is replaced in PyTorch". `lack` also notes
what can't be replaced there.

PyTorch and programs keep tables of functions: TorchScript's builtins, what `__torch_function__` may override,
names in pickles, dictionaries filled when a module was imported. A replacement must be found in all of them,
before, during and after the session. So a Python function stays the same object, and only its code is
swapped. A C function gets a stand-in, which is equal to it and has its hash, name, documentation and
signature. The originals see the program's frame as their caller's, not ours: PyTorch's warnings name the line
of the program, and filters by module match them (`native/entries.h`).

Before adding a patch here, consider a hook, or a kernel registered with the dispatcher (`composites`), which
replace nothing that Python sees.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ClassMethodDescriptorType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, cast

import torch
from torch import overrides
from torch.jit import _builtins

from dtrrun.runtime.tracebacks import hide

Function = Callable[..., Any]
Make = Callable[[Function], Function]
"""Given the original, returns the function to be called instead."""

_MISSING = object()


def _entry(make: Make, original: Function, hide: Callable[..., None] | None, skips: bool) -> Function:
    """Return what calls make(original), such that the original sees none of our frames (native/entries.h)."""
    return _extension.entry(make, original, hide, skips)  # type: ignore[no-any-return]


def replacement(make: Make, original: Function) -> Function:
    """Return what to call in place of a function, which calls make(original)."""
    return _entry(make, original, hide, False)


_extension: Any = None


def use_extension(native: Any) -> None:
    """Make the following replacements with this extension."""
    global _extension
    _extension = native


LACKS = "PyTorch {} has no {}: {}; use another version of PyTorch or dtrrun, and report this"
UNSEEN = "dtrrun does not see what it does, and results may differ"

_lacked: list[str] = []


def lack(what: str, so: str) -> None:
    """Note that something could not be replaced, and what that means."""
    _lacked.append(LACKS.format(torch.__version__, what, so))


def lacked() -> list[str]:
    """Return a line for each thing that could not be replaced since the last call."""
    lines = list(_lacked)
    _lacked.clear()
    return lines


class Patches:
    """The replacements of one part of a session. `undo` reverts them, the last one first."""

    def __init__(self, *, lasting: bool = False) -> None:
        """lasting: `paused` leaves them in place."""
        self._layers: list[_Code | _Attribute] = []
        self._lasting = lasting

    def wrap(
        self,
        owner: Any,
        name: str,
        make: Make,
        *aliases: tuple[Any, str],
        optional: bool = False,
        assigns: Make | None = None,
    ) -> None:
        """Replace the attribute `name` of `owner` by `make(original)`. If it does not exist, `lack` notes it.

        aliases: other places where PyTorch keeps the same C function. A Python function needs none: all
        references to it are affected, including older ones. optional: not every PyTorch that we support has
        the attribute. assigns: of an attribute that C computes, likewise for what sets it.
        """
        found = inspect.getattr_static(owner, name, None)
        if found is None:
            if not optional:
                lack(f"{getattr(owner, '__name__', owner)}.{name}", UNSEEN)
            return
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        layer: _Code | _Attribute
        if isinstance(function, FunctionType):
            layer = _Code(owner, name, function, make)
        elif inspect.isgetsetdescriptor(found):
            read = _entry(make, found.__get__, hide, False)
            write = found.__set__ if assigns is None else _entry(assigns, found.__set__, hide, False)
            stand_in = property(read, write, found.__delete__, found.__doc__)
            layer = _Attribute(found, stand_in, ((owner, name),))
        else:
            kind: type[StandIn] = MethodStandIn if hasattr(type(found), "__get__") else StandIn
            if isinstance(found, ClassMethodDescriptorType):
                kind = ClassMethodStandIn
            layer = _Attribute(found, kind(found, owner, name, make), ((owner, name), *aliases))
        layer.lasting = self._lasting
        self._layers.append(layer)

    def put(self, owner: type, name: str, function: Function) -> None:
        """Replace an attribute of a class, but not the function itself: other references are unaffected."""
        layer = _Attribute(vars(owner)[name], function, ((owner, name),))
        layer.lasting = self._lasting
        self._layers.append(layer)

    def undo(self) -> None:
        """Restore everything, except what other code has replaced meanwhile."""
        while self._layers:
            self._layers.pop().remove()


def installed() -> list[tuple[Any, str]]:
    """Return the owner and name of everything currently replaced, including aliases."""
    stacks: list[list[Any]] = [*_Code._installed.values(), *_Attribute._installed.values()]
    return list(dict.fromkeys(place for layers in stacks for layer in layers for place in layer.places))


_pausing = threading.Lock()
_pauses: list[None] = []
"""One entry for each `paused` block that a thread is in."""


@contextmanager
def paused(but: Callable[[Function], bool] = lambda _: False) -> Iterator[None]:
    """Context: restore PyTorch's own functions temporarily, in all threads.

    For PyTorch's compiler, which inspects what a program calls and should see the same as without us.

    but: called with a Python function's original; returns whether the function stays replaced.
    """
    with _pausing:
        _pauses.append(None)
        if len(_pauses) == 1:
            for layer in _all_layers():
                if not (isinstance(layer, _Code) and but(layer.original)):
                    layer.step_aside()
    try:
        yield
    finally:
        with _pausing:
            _pauses.pop()
            if not _pauses:
                for layer in reversed(_all_layers()):
                    layer.step_in()


def _all_layers() -> list[_Code | _Attribute]:
    """Return all replacements, the last one first."""
    layers: list[_Code | _Attribute] = []
    stacks: list[list[Any]] = [*_Code._installed.values(), *_Attribute._installed.values()]
    for stack in stacks:
        layers += (layer for layer in reversed(stack) if not layer.lasting)
    return list(dict.fromkeys(layers))


def caller() -> FrameType:
    """Return the frame that called the replaced function. Called from a replacement."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    assert frame is not None
    return frame


# -- functions written in Python -----------------------------------------------------------------------------


class _Code:
    """A function whose code calls `call`, during one session. It remains the same object."""

    lasting = False
    _installed: dict[FunctionType, list[_Code]] = {}  # noqa: RUF012 - by function, the first one first
    hide = staticmethod(hide)

    def __init__(self, owner: Any, name: str, function: FunctionType, make: Make) -> None:
        self.places = ((owner, name),)
        self._function = function
        self._before = function.__code__
        self._active = True
        self.original = _copy(function)
        self.call = _entry(make, self.original, None, True)
        self._marked = "__wrapped__" not in function.__dict__
        if self._marked:  # signatures and sources are looked up there
            function.__dict__["__wrapped__"] = self.original
        self._installed.setdefault(function, []).append(self)
        self._after = function.__code__ = self._code()

    def _code(self) -> CodeType:
        before = self._before
        code = _calling(before.co_freevars)
        constants = tuple(self if constant == _LAYER else constant for constant in code.co_consts)
        code = code.replace(co_consts=constants, co_name=before.co_name)
        return code.replace(co_qualname=before.co_qualname) if hasattr(code, "co_qualname") else code

    def step_aside(self) -> None:
        if self._function.__code__ is self._after:
            self._function.__code__ = self._before
            if self._marked:
                del self._function.__dict__["__wrapped__"]

    def step_in(self) -> None:
        if self._function.__code__ is self._before:
            self._function.__code__ = self._after
            if self._marked:
                self._function.__dict__["__wrapped__"] = self.original

    def remove(self) -> None:
        self._active = False
        self.call = self.original
        layers = self._installed[self._function]
        while layers and not layers[-1]._active:
            layer = layers.pop()
            self._function.__code__ = layer._before
            if layer._marked:
                self._function.__dict__.pop("__wrapped__", None)
        if not layers:
            del self._installed[self._function]


def _copy(function: FunctionType) -> FunctionType:
    """Return a copy of the function with its current code."""
    twin = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__dict__.update(function.__dict__)
    _dress(twin, function)
    return twin


def _dress(function: Any, original: Any) -> None:
    """Copy the name, the documentation and other attributes of a function."""
    for attribute in functools.WRAPPER_ASSIGNMENTS:
        if hasattr(original, attribute):
            setattr(function, attribute, getattr(original, attribute))


_LAYER = "the layer, as a constant of the code"


@functools.cache
def _calling(free: tuple[str, ...]) -> CodeType:
    """Return code that calls a layer.

    A function only accepts code with as many free variables as it has cells.
    """
    names = ", ".join(free)
    source = f"""
def make({names}):
    def replaced(*args, **kwargs):
        if 0:
            {names or None}
        layer = {_LAYER!r}
        try:
            return layer.call(*args, **kwargs)
        except BaseException as error:
            layer.hide(error)
            raise
    return replaced
"""
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), made)
    code: CodeType = made["make"](*free).__code__
    return code


# -- functions written in C ----------------------------------------------------------------------------------


class StandIn:
    # No docstring here: it would hide the original's.
    __slots__ = ("__wrapped__", "_name", "_owner", "call")

    def __init__(self, original: Any, owner: Any, name: str, make: Make) -> None:
        self.__wrapped__ = original
        self._owner = owner
        self._name = name
        self.call = call = _entry(make, original, hide, False)
        _dress(call, original)  # tensors' bound methods are made from `call`

    def __eq__(self, other: object) -> bool:
        if issubclass(type(other), StandIn):  # isinstance() would ask for __class__
            other = other.__wrapped__  # type: ignore[attr-defined]
        return bool(self.__wrapped__ == other)

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __dir__(self) -> list[str]:
        return dir(self.__wrapped__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self._owner, type):
            return getattr, (self._owner, self._name)
        return self.__wrapped__.__reduce_ex__(protocol)  # its name, by which pickle finds this object

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # `inspect` asks for it
        return type(self.__wrapped__)

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        doc: str | None = self.__wrapped__.__doc__
        return doc

    @property
    def __module__(self) -> str:  # type: ignore[override]
        module: str = self.__wrapped__.__module__
        return module


setattr(StandIn, "__call__", vars(StandIn)["call"])  # noqa: B010 - a function would have a frame


class MethodStandIn(StandIn):
    __slots__ = ()
    __doc__ = vars(StandIn)["__doc__"]  # otherwise the class would get its own
    __module__ = vars(StandIn)["__module__"]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self.call, instance)


class ClassMethodStandIn(MethodStandIn):
    __slots__ = ()
    __doc__ = vars(StandIn)["__doc__"]
    __module__ = vars(StandIn)["__module__"]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        cls = type(instance) if owner is None else owner
        bound = StandIn.__new__(StandIn)
        bound.__wrapped__ = self.__wrapped__.__get__(None, cls)
        bound._owner, bound._name = cls, self._name
        bound.call = functools.partial(cast(Function, self), cls)
        return bound


class _Attribute:
    """An attribute in one or several places that holds `stand_in`."""

    lasting = False
    _installed: dict[tuple[int, str], list[_Attribute]] = {}  # noqa: RUF012 - by place, the first one first

    def __init__(self, original: Any, stand_in: Any, places: tuple[tuple[Any, str], ...]) -> None:
        self.places = tuple(
            (owner, name) for owner, name in places if inspect.getattr_static(owner, name, None) is original
        )
        self._original = original
        self._stand_in = stand_in
        self._before = [vars(owner).get(name, _MISSING) for owner, name in self.places]
        self._active = True
        self._fills = _fills()
        for owner, name in self.places:
            self._installed.setdefault((id(owner), name), []).append(self)
            setattr(owner, name, stand_in)
        _enter_builtin(original, stand_in)

    def remove(self) -> None:
        self._active = False
        if isinstance(self._stand_in, StandIn):
            self._stand_in.call = self._original  # references kept elsewhere then call the original
        for owner, name in self.places:
            layers = self._installed[id(owner), name]
            while layers and not layers[-1]._active:
                layers.pop()._restore(owner, name)
            if not layers:
                del self._installed[id(owner), name]
        _leave_builtin(self._original, self._stand_in)
        _forget(self._fills)

    def step_aside(self) -> None:
        for owner, name in self.places:
            self._restore(owner, name)

    def step_in(self) -> None:
        for (owner, name), before in zip(self.places, self._before, strict=True):
            if vars(owner).get(name, _MISSING) is before:
                setattr(owner, name, self._stand_in)

    def _restore(self, owner: Any, name: str) -> None:
        if vars(owner).get(name) is not self._stand_in:
            return  # replaced by other code since
        before = self._before[self.places.index((owner, name))]
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


# -- PyTorch's tables ----------------------------------------------------------------------------------------


_CACHES: list[Any] = [found for found in vars(overrides).values() if hasattr(found, "cache_clear")]
"""Caches of `torch.overrides`, filled on demand with whatever is then found under each name."""


def _fills() -> list[int]:
    return [cache.cache_info().misses for cache in _CACHES]


def _forget(fills: list[int]) -> None:
    """Clear the caches that have been filled since. They are refilled on demand."""
    for cache, before in zip(_CACHES, fills, strict=True):
        if cache.cache_info().misses != before:
            cache.cache_clear()


def _enter_builtin(original: Any, stand_in: Any) -> None:
    """Add the stand-in to TorchScript's table, which finds builtin functions by identity."""
    table = _builtins._builtin_table
    if table is not None and id(original) in table:
        table[id(stand_in)] = table[id(original)]


def _leave_builtin(original: Any, stand_in: Any) -> None:
    table = _builtins._builtin_table
    if table is not None and id(stand_in) in table:
        table[id(original)] = table.pop(id(stand_in))
