"""Watches composite operators of native libraries, which may access memory by address between operators.

`m.def("f", &f)` registers a C++ function that PyTorch runs above autograd, as in torch_scatter and
torchvision. It may fill a tensor with an operator and continue through `data_ptr()`: a recipe that knows only
the operator would compute something else. So while the function runs, what it uses stays in memory, and what
its operators have made is compared with the final content. What has changed becomes a constant.

The functions are replaced at autograd's key, like those of `composites.py`, as soon as they are registered.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from threading import get_ident
from types import ModuleType
from typing import Any

import torch
from torch.library import _impls as in_python

from dtrrun.core.graph import Version
from dtrrun.core.locks import Locks
from dtrrun.runtime.access import unseen
from dtrrun.runtime.dispatch.arguments import flatten_into, outputs_of
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.operators import OWN_NAMESPACES
from dtrrun.runtime.patches.composites import COMPOSITE, Kernel
from dtrrun.runtime.tracebacks import hiding

REASON = "a composite operator of a native library"
WRITTEN = "written by native code"


class ForeignComposites:
    """The kernels of one session."""

    def __init__(
        self, callbacks: Callbacks, native: ModuleType, kernels: dict[Any, Kernel], devices: Sequence[str]
    ) -> None:
        """native: the extension. kernels, devices: as in `Composites`."""
        self._callbacks, self._native = callbacks, native
        self._kernels, self._devices = kernels, devices
        self._libraries: list[Any] = []
        self._unready: list[str] = []
        self._backward: list[Running] = []
        self._places_written: dict[Any, set[int]] = {}
        """By function: positions, among its tensor arguments, of those that it has written to."""
        self._is_on = False

    def install(self) -> None:
        self._is_on = True
        self._native.watch_registrations(self._registered)

    def remove(self) -> None:
        self._is_on = False
        self._native.watch_registrations(None)
        for library in self._libraries:
            library.reset()
        self._libraries.clear()
        while self._backward:
            self._backward.pop().__exit__()

    def _registered(self, names: Sequence[str]) -> None:
        """Handle newly registered operators; their kernels may not be registered yet."""
        names, self._unready = [*self._unready, *names], []
        for name in names:
            namespace, _, rest = name.partition("::")
            if namespace in OWN_NAMESPACES:
                continue
            if not torch._C._dispatch_has_kernel(name):
                self._unready.append(name)
            elif _is_native_composite(name):
                packet, _, overload = rest.partition(".")
                self._replace(getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default"))

    def _replace(self, func: Any) -> None:
        namespace, _, name = func._schema.name.partition("::")
        if func._overloadname != "default":
            name = f"{name}.{func._overloadname}"
        kernel = self._kernels[func] = hiding(self._watching(func))
        # Not a `torch.library.Library`, which would keep the program from registering a kernel there itself.
        library = torch._C._dispatch_library("IMPL", namespace, "", __file__, 0)
        for device in self._devices:
            library.impl(name, f"Autograd{device}", kernel)
        self._libraries.append(library)

    def _watching(self, func: Any) -> Kernel:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with unseen():
                tensors: list[torch.Tensor] = []
                flatten_into((*args, *kwargs.values()), [], tensors)
                if all(map(self._is_ours, tensors)):
                    return self._run(func, lambda: func._op_dk(COMPOSITE, *args, **kwargs), tensors)
                return func._op_dk(COMPOSITE, *args, **kwargs)

        return kernel

    def call(self, function: Kernel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function of an extension that Python calls directly, and watch it in the same way."""
        if self._callbacks.ledger.budget_bytes is None:  # nothing will be evicted, and nothing recomputed
            return function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        with unseen():
            flatten_into((*args, *kwargs.values()), [], tensors)
            ours = [one for one in tensors if self._is_ours(one)]
        return self._run(function, lambda: function(*args, **kwargs), ours)

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        return type(tensor) in _PLAIN and tensor.device.type == self._callbacks.ledger.device_type

    def _run(self, function: Any, call: Callable[[], Any], tensors: list[torch.Tensor]) -> Any:
        """Call a function that receives these tensors."""
        places = self._places_written.setdefault(function, set())
        with Running(self._callbacks, tensors, places_written=places) as running:
            result = call()
            if torch.is_grad_enabled():
                with unseen():
                    self._watch_backward(outputs_of(result, []), tensors, running.keys())
            return result

    def _watch_backward(
        self, results: list[torch.Tensor], given: list[torch.Tensor], keys: list[int]
    ) -> None:
        """Watch the library's own autograd functions like the operator that has called them.

        keys: those of the storages that they may have saved.
        """
        ends = {tensor.grad_fn for tensor in given}
        nodes = [tensor.grad_fn for tensor in results]
        seen = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in ends or node in seen:
                continue
            seen.add(node)
            nodes += [function for function, _ in node.next_functions]
            if type(node).__name__ == "CppFunction":
                before, after = self._around(keys)
                node.register_prehook(before)
                node.register_hook(after)

    def _around(self, keys: list[int]) -> tuple[Callable[[Any], None], Callable[[Any, Any], None]]:
        """Return hooks for before and after a node of the graph."""
        callbacks = self._callbacks

        def before(gradients: Any) -> None:
            if not self._is_on:
                return
            self._leave_failed()
            with unseen():
                running = Running(callbacks, outputs_of(list(gradients), []), keys)
                self._backward.append(running.__enter__())

        def after(inputs: Any, outputs: Any) -> None:
            for running in [one for one in self._backward if one.is_in(_task())][-1:]:
                self._backward.remove(running)
                running.__exit__()

        return before, after

    def _leave_failed(self) -> None:
        """End this thread's `Running` contexts whose backward pass has raised."""
        thread, task = _task()
        for running in [one for one in self._backward if one.thread == thread and one.task != task]:
            self._backward.remove(running)
            running.__exit__()


def _task() -> tuple[int, int]:
    """Return what distinguishes this thread's backward pass from others."""
    return get_ident(), torch._C._current_graph_task_id()


_DIFFERENT = itertools.count(1)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _is_native_composite(name: str) -> bool:
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if not has(name, "CompositeImplicitAutograd") or has(name, "CPU") or has(name, "CUDA"):
        return False
    namespace, _, rest = name.partition("::")
    return f"{namespace}/{rest}/CompositeImplicitAutograd" not in in_python


class Running:
    """Context in which one such function runs."""

    def __init__(
        self,
        callbacks: Callbacks,
        tensors: list[torch.Tensor],
        keys: Sequence[int] = (),
        places_written: set[int] | None = None,
    ) -> None:
        """tensors: its arguments. keys: those of other storages that it may read.

        places_written: positions of the arguments that it is known to write to; others are added.
        """
        self.thread, self.task = _task()
        self._keys = keys
        self._places_written = set() if places_written is None else places_written
        self._callbacks, self._tensors = callbacks, tensors
        self._ledger, self._dtr = callbacks.ledger, callbacks.dtr
        self._locks = Locks()
        self._given: dict[int, tuple[Version, int]] = {}
        self._made: dict[int, tuple[Version, int]] = {}
        """By storage key: versions, and their content when an operator had made them."""

    def is_in(self, task: tuple[int, int]) -> bool:
        return (self.thread, self.task) == task

    def keys(self) -> list[int]:
        """Return the keys of the storages that it was given and has made so far."""
        return [*self._given, *self._made]

    def __enter__(self) -> Running:
        callbacks = self._callbacks
        joins()
        with unseen(), callbacks.lock:
            try:
                given = list(map(callbacks.version_of, self._tensors))
                for place, version in enumerate(given):
                    if version is not None and place in self._places_written:
                        self._about_to_write(version)
                        given[place] = self._ledger.versions[version.key]
                others = map(self._ledger.versions.get, self._keys)
                versions = [one for one in (*given, *others) if one is not None]
                with callbacks.telling():
                    self._dtr.rematerializer.lock(versions, self._locks)
                for version in versions:
                    self._given[version.key] = version, self._content(version)
            except BaseException:
                self._locks()
                raise
            callbacks.composites.append(self)
            callbacks.reasons.add(REASON)
        return self

    def __exit__(self, *exc: object) -> None:
        callbacks = self._callbacks
        with unseen(), callbacks.lock:
            callbacks.composites.remove(self)
            if not callbacks.composites:
                callbacks.reasons.remove(REASON)
            try:
                self._compare()
            finally:
                self._locks()

    def about_to_run(self, versions: Sequence[Version]) -> bool:
        """Check what an operator is about to read or write, since it may be dead when this function ends.

        Returns whether any of it has been written to since it was made, and so has a new version.
        Raises the budget error.
        """
        found = [version for version in versions if self._is_changed(version)]
        for version in found:
            self._written(version)
            present = self._ledger.versions[version.key]
            self._made[version.key] = present, self._content(present)
            if present is not version:
                self._locks.take((present,))
        return bool(found)

    def _is_changed(self, version: Version) -> bool:
        made, content = self._made.get(version.key, (None, 0))
        return made is version and self._content(version) != content

    def _about_to_write(self, version: Version) -> None:
        with self._callbacks.telling(), Locks() as locks:
            self._dtr.rematerializer.lock([version], locks)
            self._written(version)

    def _written(self, version: Version) -> None:
        self._dtr.mutation.written_outside(version, WRITTEN, escapes=False)

    def about_to_finish(self, written: Sequence[Version]) -> None:
        """Unlock what an operator has written to: a lock would count as use by another thread's operator."""
        for target in written:
            for version in [one for one in self._locks if one is target]:
                version.locks -= 1
                self._locks.remove(version)

    def finished(
        self, read: Sequence[Version], written: Sequence[Version], results: Sequence[torch.Tensor]
    ) -> None:
        """Keep in memory what an operator has used and made: native code may take its address from now on."""
        versions = self._ledger.versions
        used = [versions[version.key] for version in read if version.key in versions]
        found = map(self._callbacks.version_of, results)
        made = [version for version in found if version is not None]
        keys = {version.key for version in written}
        self._locks.take(version for version in (*used, *made) if version.resident)
        for version in (*made, *(one for one in used if one.key in keys)):
            self._given.pop(version.key, None)
            self._made[version.key] = version, self._content(version)

    def _content(self, version: Version) -> int:
        storage = version()
        if storage is None or not version.resident:
            return 0
        if self._ledger.device_type != "cpu":  # the content cannot be read, so it counts as changed
            return next(_DIFFERENT)
        return self._ledger.memory.checksum(storage)

    def _compare(self) -> None:
        """Find what native code has written to: it differs from what was given or made by operators."""
        ledger, recipes = self._ledger, self._dtr.recipes
        ledger.collect_dead()
        for key, (version, _) in self._made.items():
            if ledger.versions.get(key) is version and self._is_changed(version):
                self._written(version)
        changed = [
            version
            for key, (version, content) in self._given.items()
            if ledger.versions.get(key) is version and self._content(version) != content
        ]
        if not changed:
            return
        for version, _ in self._made.values():  # perhaps made from the old content, perhaps from the new
            recipes.make_constant(version, WRITTEN)
        keys = [None if one is None else one.key for one in map(self._callbacks.version_of, self._tensors)]
        for version in changed:
            self._places_written.update(place for place, key in enumerate(keys) if key == version.key)
            if version.operation is None:
                recipes.foreign.lose_dependents(version)
            recipes.supersede(version, None, 0)
