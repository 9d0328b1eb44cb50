"""Brings back what TorchScript's `tolist` reads: it reads a tensor by address, without an operator.

Compiled functions read everything else through operators. A function with a `tolist` is replaced by a copy
whose graph has an operator before each `tolist`: a view, which brings the storage back. The program's
function modes see nothing of what compiled code does, and must not see how we inspect its tensors.

The tracer names a tensor after the variable that holds it in the innermost frame, which may be one of ours.
"""

from __future__ import annotations

import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.jit

from dtrrun.runtime.patches.registry import Function, Patches

_C: Any = torch._C
_OURS = "dtrrun.runtime."


class Scripts:
    """Patches calls of compiled functions while installed."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._twins: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def install(self) -> None:
        self._patches.wrap(_C.ScriptFunction, "__call__", self._calling)
        self._patches.wrap(_C.ScriptMethod, "__call__", self._calling)
        self._patches.wrap(torch.jit._trace, "_create_interpreter_name_lookup_fn", _naming)

    def remove(self) -> None:
        self._patches.undo()
        self._twins.clear()

    def _calling(self, original: Function) -> Function:
        def call(script: Any, *args: Any, **kwargs: Any) -> Any:
            twin = self._twin(script)
            if twin is not None:
                args, kwargs = _completed(script, args, kwargs)
                return twin(*args, **kwargs)
            if not _C._len_torch_function_stack():
                return original(script, *args, **kwargs)
            with _C.DisableTorchFunction():
                return original(script, *args, **kwargs)

        return call

    def _twin(self, script: Any) -> Any:
        """Return the function to call instead of a compiled one; None to call the original."""
        try:
            return self._twins[script]
        except KeyError:
            pass
        graph = script.inlined_graph
        reads = graph.findAllNodes("prim::tolist")
        for node in reads:
            tensor = node.inputsAt(0)
            view = graph.create("aten::expand_as", [tensor, tensor], 1)
            view.insertBefore(node)
            view.output().setType(tensor.type())
            node.replaceInput(0, view.output())
        twin = _C._create_function_from_graph(script.name, graph) if reads else None
        self._twins[script] = twin
        if twin is not None:
            self._twins[twin] = None
        return twin


def _naming(original: Function) -> Function:
    def create(frames_up: int = 1) -> Function:
        def name_of(tensor: torch.Tensor) -> Any:
            ours, frame = 0, sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
                ours, frame = ours + 1, frame.f_back
            return original(frames_up + 1 + ours)(tensor)

        return name_of

    return create


def _completed(script: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments for a copy, which has no defaults, and takes a method's module first."""
    if isinstance(script, _C.ScriptMethod):
        args = (script.owner, *args)
    missing = {
        argument.name: argument.default_value
        for argument in script.schema.arguments[len(args) :]
        if argument.name not in kwargs and argument.has_default_value()
    }
    return args, kwargs | missing
