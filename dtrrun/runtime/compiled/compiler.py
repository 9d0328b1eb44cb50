"""Follows PyTorch's compiler, and puts the session's functions into the modules that it generates.

A generated module calls its globals: these are replaced once it is loaded, whether it was just compiled or
found in a cache. So the caches hold the same as without us. While it compiles, the compiler sees the program
as it would be without us.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

from dtrrun.runtime.compiled import generated
from dtrrun.runtime.compiled.region import Region
from dtrrun.runtime.dispatch.arguments import covers
from dtrrun.runtime.guards import unseen
from dtrrun.runtime.operators import KERNELS
from dtrrun.runtime.patches.registry import Function, Patches, paused

CODE_CACHE = "torch._inductor.codecache"
DYNAMO_CALLBACKS = "torch._dynamo.callback"
OWN = "dtrrun."
CALLING = ("dtrrun.runtime.patches.", "dtrrun.runtime.tracebacks", "dtrrun.runtime.observe.callers")
"""Modules whose functions replace functions of PyTorch that call the program, such as `Function.apply`."""

_kept_out: set[CodeType] = set()
_looked_at: set[str] = set()
COMPILES = ("DYNAMO", "LAZY_BACKWARD")
"""The triggers that PyTorch reports when it compiles, as opposed to recording a CUDA graph."""
UNKNOWN = (
    "torch.compile has generated {}, which dtrrun cannot look into: what it computes stays in memory "
    "(--compile eager runs it eagerly)"
)
UNSEEN = (
    "torch.compile has generated {} before this block began, so dtrrun does not see what that reads and "
    "writes: compile it anew inside the block (torch.compiler.reset())"
)
NO_CUDA_GRAPHS = (
    'torch.compile\'s CUDA graphs (mode="reduce-overhead") are off: what one uses could not be evicted. The '
    "kernels are the same"
)


class Compiler:
    """The part of a session that follows the compiler.

    kernels: number of kernels that are operators of the session. graphs: number of generated modules loaded.
    opaque: number of these that it cannot look into.
    """

    def __init__(
        self,
        native: ModuleType,
        lock: Callable[..., Any],
        written: Callable[..., Any],
        warn: Callable[[str], None],
    ) -> None:
        """lock, written: as `Region.begin` takes them."""
        self._native, self._lock, self._written, self._warn = native, lock, written, warn
        self._patches = Patches(lasting=True)
        self._follows_inductor = self._follows_dynamo = False
        self._token = object()
        self._has_said_so = False
        self._regions: list[Region] = []
        self.kernels = self.graphs = self.opaque = 0

    def install(self) -> None:
        self._patches.wrap(torch, "compile", self._making)
        self._patches.wrap(
            torch._TorchCompileInductorWrapper, "__call__", self._before(self._follow_inductor)
        )
        if DYNAMO_CALLBACKS in sys.modules:
            self._follow_dynamo()
        if CODE_CACHE in sys.modules:
            self._follow_inductor()

    def remove(self) -> None:
        self._patches.undo()
        self._native.hide_from_guards(False)
        self._follows_inductor = self._follows_dynamo = False
        while self._regions:
            self._regions.pop().end()

    @staticmethod
    def _before(follow: Callable[[], None]) -> Callable[[Function], Function]:
        def make(original: Function) -> Function:
            def call(*args: Any, **kwargs: Any) -> Any:
                follow()
                return original(*args, **kwargs)

            return call

        return make

    def _making(self, original: Function) -> Function:
        def compile(*args: Any, **kwargs: Any) -> Any:
            self._follow_dynamo()
            with paused():  # it may store how a module is called at this point
                return original(*args, **kwargs)

        return compile

    # -- while it compiles -----------------------------------------------------------------------

    def _follow_dynamo(self) -> None:
        """Watch when PyTorch compiles. `torch.compile` imports Dynamo anyway, which takes a second."""
        if self._follows_dynamo:
            return
        self._follows_dynamo = True
        _call_our_hooks()
        self._keep_out()
        callbacks = import_module(DYNAMO_CALLBACKS)
        self._patches.wrap(callbacks.CompilationCallbackHandler, "install_callbacks", self._compiling)
        # A graph's guards must not depend on our dispatch key, neither when they are made nor when checked.
        self._patches.wrap(import_module("torch._dynamo.guards").CheckFunctionManager, "__init__", _unseen)
        if _has_compiled():
            self._native.hide_from_guards(True)

    def _compiling(self, original: Function) -> Function:
        @contextmanager
        def install_callbacks(handler: Any, trigger: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
            with original(handler, trigger, *args, **kwargs):
                if getattr(trigger, "name", "") not in COMPILES:
                    yield
                    return
                self._native.hide_from_guards(True)
                self._keep_out()
                if "torch._dynamo.backends.inductor" in sys.modules:  # imported by `torch._dynamo.optimize`
                    self._follow_inductor()
                with paused(but=_is_left_alone):
                    yield

        return install_callbacks

    def _keep_out(self) -> None:
        """Make Dynamo run our functions as they are, and all that they call except the program.

        C++ may call them at any time.
        """
        frames: Any = import_module("torch._C._dynamo.eval_frame")
        types: Any = import_module("torch._dynamo.types")
        skip, default = types.FrameAction.SKIP, types.FrameAction.DEFAULT
        for name in {name for name in sys.modules if name.startswith(OWN)} - _looked_at:
            _looked_at.add(name)
            for code in {*_codes_in(vars(sys.modules[name]), name)} - _kept_out:
                _kept_out.add(code)
                below = default if name.startswith(CALLING) else skip
                frames.set_code_exec_strategy(code, types.FrameExecStrategy(skip, below))

    # -- what it generates -----------------------------------------------------------------------

    def _follow_inductor(self) -> None:
        if self._follows_inductor:
            return
        self._follows_inductor = True
        modules: Any = import_module(CODE_CACHE).PyCodeCache
        for module in [*modules.modules]:
            self._meet(module, is_loaded=True)
        self._patches.wrap(modules, "load_by_key_path", self._loading)
        for name in ("compile_fx", "compile_fx_inner"):  # the latter compiles backward passes, later
            self._patches.wrap(import_module("torch._inductor.compile_fx"), name, self._in_python)
        graph: Any = import_module("torch._inductor.output_code").CompiledFxGraph
        self._patches.wrap(graph, "post_compile", self._compiled)

    def _loading(self, original: Function) -> Function:
        def load_by_key_path(*args: Any, **kwargs: Any) -> Any:
            module = original(*args, **kwargs)
            self._meet(module)
            return module

        return load_by_key_path

    @staticmethod
    def _in_python(original: Function) -> Function:
        """Make the graph a Python function, which we can look into, rather than C++ (`cpp_wrapper`)."""
        config: Any = import_module("torch._inductor.config")
        values: Any = import_module("torch._inductor.virtualized").V

        def compile(*args: Any, **kwargs: Any) -> Any:
            if not config.cpp_wrapper or values.aot_compilation:
                return original(*args, **kwargs)
            if "cpp_wrapper" in kwargs:
                kwargs["cpp_wrapper"] = False
            with config.patch(cpp_wrapper=False):
                return original(*args, **kwargs)

        return compile

    def _meet(self, module: ModuleType, *, is_loaded: bool = False) -> None:
        """Put our functions into a module if it is a graph's. is_loaded: it was loaded before.

        They stay there, since the program may hold functions of the module. Without an active session, they
        do what the originals did.
        """
        names = vars(module)
        if "call" not in names:
            return
        token, found = names.get(generated.MET, (None, None))
        if token is self._token:
            return
        source = ""
        if is_new := found is None:
            source = Path(str(module.__file__)).read_text()
            found = generated.read(source)
        names[generated.MET] = self._token, found
        self.graphs += 1
        if found.unknown:
            self.opaque += 1
            if is_new:
                if is_loaded:  # its callers already hold the function
                    self._warn(UNSEEN.format(found.unknown))
                names["call"] = Region(names["call"])
            names["call"].begin(self._lock, self._written, lambda: self._warn(UNKNOWN.format(found.unknown)))
            self._regions.append(names["call"])
            return
        self.kernels += len(found.kernels)
        if not is_new:
            return
        for kernel in found.kernels.values():
            names[kernel.name] = self._operator(kernel, names[kernel.name])
        for device in ("cpu", "cuda"):
            if (allocate := f"empty_strided_{device}") in names:
                names[allocate] = getattr(self._native, allocate)
        if "reinterpret_tensor" in names:
            names["reinterpret_tensor"] = self._native.noted(names["reinterpret_tensor"])
        if text := generated.with_new_buffers(source, found.kernels):
            names[generated.ANEW], names[generated.COPY] = _anew, _copy
            with suppress(SyntaxError):
                exec(compile(text, str(module.__file__), "exec", dont_inherit=True), names)

    def _operator(self, kernel: generated.Kernel, plain: Any) -> Any:
        """Return what to call in place of a kernel."""
        name = f"{KERNELS}::{kernel.name}_{kernel.digest}"
        if not kernel.is_triton:
            return self._native.compiled_kernel(name, plain, plain, kernel.arguments)

        def launch(*args: Any) -> None:  # on the current stream, also when replayed
            plain.run(*args, stream=torch._C._cuda_getCurrentRawStream(torch.cuda.current_device()))

        return Launcher(plain, self._native.compiled_kernel(name, launch, plain.run, kernel.arguments))

    def _compiled(self, original: Function) -> Function:
        def post_compile(graph: Any, inputs: Any, constants: Any, graph_kwargs: Any) -> Any:
            if isinstance(region := graph.current_callable, Region):
                region.mutated = tuple(graph.mutated_input_idxs)
            if (captures := graph_kwargs.get("cudagraphs")) and "cuda" in graph.device_types:
                if not self._has_said_so:
                    self._has_said_so = True
                    self._warn(NO_CUDA_GRAPHS)
                graph_kwargs = {**graph_kwargs, "cudagraphs": type(captures)(False)}
            return original(graph, inputs, constants, graph_kwargs)

        return post_compile


def _has_compiled() -> bool:
    """Return whether there is a graph whose guards could be checked.

    Hiding our key from them takes time in each operator.
    """
    frames: Any = import_module("torch._dynamo.convert_frame")
    made = getattr(frames, "output_codes", None)
    return made is None or bool(made.seen_ids)


def _unseen(original: Function) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        with unseen():
            return original(*args, **kwargs)

    return call


class Launcher:
    """Stands in for a Triton kernel. run: what to call instead of the kernel's `run`."""

    def __init__(self, kernel: Any, run: Any) -> None:
        self._kernel, self.run = kernel, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def _is_left_alone(function: Function) -> bool:
    """Return whether Dynamo breaks its graph at a function of PyTorch instead of looking into it.

    Its guards compare the function's code with the code at compile time. If our replacement stepped aside
    then, Dynamo would recompile at each call. Methods have no such guard, and Dynamo itself calls those of
    tensors.
    """
    is_method = "." in function.__qualname__
    return not is_method and import_module("torch._dynamo.trace_rules").check(function)


@cache
def _call_our_hooks() -> None:
    """Make Dynamo call our hooks in programs that it compiles, rather than trace them."""
    import_module("torch._dynamo.trace_rules").add(OWN.rstrip("."))


def _anew(size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _copy(buffer: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same memory layout; the buffer itself if it does not cover its storage."""
    return buffer.clone() if covers(buffer) else buffer


def _codes_in(names: dict[str, Any], module: str) -> Iterator[CodeType]:
    """Yield the code of all functions that a module, or a class in it, defines."""
    for value in [*names.values()]:
        if isinstance(value, type):
            if value.__module__ == module:
                yield from _codes_in(dict(vars(value)), module)
            continue
        value = value.fget if isinstance(value, property) else value
        value = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        function = inspect.unwrap(value) if callable(value) else value
        if isinstance(function, FunctionType) and function.__module__ == module:
            yield from _with_inner(function.__code__)


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)
