"""Defers PyTorch's import of `torch._dynamo`, the front end of its compiler, until something needs it.

Constructing an optimizer imports it, which takes as long as `import torch`. The optimizer's methods only tell
Dynamo not to compile them (`torch._disable_dynamo`), or to break the graph there (`graph_break`). Until
Dynamo is imported, nothing is compiled, so neither has any effect, and these methods run without it. When
anything else imports Dynamo, all changes made here are undone, and PyTorch behaves as usual.

PyTorch's shape functions, which the runtime calls, import Dynamo for the same reason, and are treated the
same way. Other functions are not: `checkpoint` warns with the line of its caller, which is in Dynamo. A
program sees no difference, except in `sys.modules`, and in tracebacks through an optimizer's methods, which
lack Dynamo's frame.

Depends on the code of two PyTorch functions, unchanged since 2.6. If it differs, the import is not deferred.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import CodeType, FunctionType, ModuleType
from typing import Any

from dtrrun.boot.path._dtrrun_hook import AfterImport

DYNAMO = "torch._dynamo"
CACHE = "__dynamo_disable"
"""The function attribute in which `torch._disable_dynamo` caches Dynamo's wrapper of the function."""

MODULES = ("torch.optim.optimizer", "torch._prims_common.wrappers")
"""The functions in these modules run without Dynamo."""

INSTEAD = {DYNAMO: "torch.compiler", "_dynamo": "compiler", "graph_break": "is_compiling"}
"""The names by which an optimizer's `step` finds `graph_break`, and those of a function to call instead."""

Undo = Callable[[], object]


def put_off() -> None:
    """Defer the import from now on. Call this once torch has been imported."""
    if DYNAMO in sys.modules:
        return
    undo = [*_disable_nothing(), *_break_no_graph()]

    def step_aside(_: ModuleType) -> None:
        for each in undo:
            each()

    sys.meta_path.insert(0, AfterImport(DYNAMO, step_aside))


def _disable_nothing() -> Iterator[Undo]:
    """Make `torch._disable_dynamo` call the functions of `MODULES` directly.

    It reads its cache with `getattr`, a name that Python looks up among the globals of its module first.
    """
    names = _names("torch._compile")
    code = _made_by(names.get("_disable_dynamo"), "inner")
    if code is None or "getattr" not in {*code.co_names} - {*names} or CACHE not in code.co_consts:
        return
    additions = _Additions()

    def read(function: Any, name: str, *default: Any) -> Any:
        if name == CACHE and getattr(function, "__globals__", {}).get("__name__") in MODULES:
            additions.watch()
            return functools.partial(_call, function)
        return getattr(function, name, *default)

    names["getattr"] = read
    yield lambda: names.pop("getattr", None)
    yield additions.leave


def _call(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function with one frame in between, as Dynamo does: warnings count frames."""
    from dtrrun.runtime.tracebacks import hide

    try:
        return function(*args, **kwargs)
    except BaseException as error:
        hide(error)
        raise


def _break_no_graph() -> Iterator[Undo]:
    """Make the `step` of each optimizer run without Dynamo."""
    names = _names("torch.optim.optimizer")
    code = _made_by(names.get("_use_grad_for_differentiable"), "_use_grad")
    if code is None or not INSTEAD.keys() <= {*code.co_names}:
        return
    if any(isinstance(constant, (str, tuple)) for constant in {*code.co_consts} - {"differentiable"}):
        return  # arguments, possibly of `graph_break`
    ours = code.replace(co_names=tuple(INSTEAD.get(name, name) for name in code.co_names))
    for optimizer in _names("torch.optim").values():
        step = vars(optimizer).get("step") if isinstance(optimizer, type) else None
        if isinstance(step, FunctionType) and step.__code__ is code:
            step.__code__ = ours
            yield functools.partial(_restore, step, ours, code)


def _restore(function: FunctionType, ours: CodeType, code: CodeType) -> None:
    if function.__code__ is ours:  # other code may have replaced it since
        function.__code__ = code


def _names(module: str) -> dict[str, Any]:
    return vars(sys.modules[module]) if module in sys.modules else {}


def _made_by(maker: Any, name: str) -> CodeType | None:
    """Return the code of the function of this name that is defined in `maker`."""
    for constant in maker.__code__.co_consts if isinstance(maker, FunctionType) else ():
        if isinstance(constant, CodeType) and constant.co_name == name:
            return constant
    return None


class _Additions:
    """Attributes that importing Dynamo would have added to PyTorch's packages: reading one imports Dynamo.

    After constructing an optimizer, a program may read `torch.distributed.fsdp` without importing it.
    """

    def __init__(self) -> None:
        self._packages: list[ModuleType] | None = None

    def watch(self) -> None:
        """Watch for reads from now on. Called where PyTorch would import Dynamo."""
        if self._packages is None:
            self._packages = [module for name, module in [*sys.modules.items()] if _is_package(name, module)]
            for package in self._packages:
                vars(package)["__getattr__"] = functools.partial(_add, package)

    def leave(self) -> None:
        for package in self._packages or ():
            vars(package).pop("__getattr__", None)


def _is_package(name: str, module: Any) -> bool:
    """Return whether it is a package of PyTorch that defines no `__getattr__`."""
    return (
        name.startswith("torch.")
        and type(module) is ModuleType
        and "__path__" in vars(module)
        and "__getattr__" not in vars(module)
    )


def _add(package: ModuleType, name: str) -> Any:
    """Return a missing attribute, if importing Dynamo adds it."""
    asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
    if asks not in IMPORTING and not name.startswith("__"):
        import_module(DYNAMO)
        if name in vars(package):
            return vars(package)[name]
    raise AttributeError(f"module {package.__name__!r} has no attribute {name!r}")


IMPORTING = ("importlib", "torch")
"""Packages whose code imports a missing attribute itself, or is in the middle of importing it."""
