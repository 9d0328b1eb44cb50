"""Starts the runtime as soon as a process of the target has imported torch.

A finder, first on `sys.meta_path`, calls back after an import. It finds nothing itself: it asks the other
finders, and for the duration of one import adds its call after the `exec_module` of the loader they return.
`importlib.util.find_spec`, `reload` and pickling see no difference. Needed because Python has no callback
after an import. Standard library only, and little of it: every Python process of the target loads this file,
including versions older than LEAST, from 3.7 on.
"""

from __future__ import annotations

import os
import sys
import time
from importlib._bootstrap import _call_with_frames_removed  # type: ignore[attr-defined]

TYPE_CHECKING = False  # as in typing, which takes longer to import than this whole file
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

LEAST = (3, 11)
PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def install() -> None:
    """Activate the runtime in this process as soon as torch has been imported."""
    mark("python", f"{os.getpid()} {time.time_ns()}\n")
    sys.meta_path[:0] = [OwnPackage(), AfterImport("torch", _torch_imported, marks=True)]
    if "torch" in sys.modules:  # imported by a .pth file
        _torch_imported(sys.modules["torch"])


def mark(name: str, text: str = "") -> bool:
    """Write a message for the launcher to a file in the folder of records. Returns whether it was written."""
    try:
        path = os.path.join(os.environ["DTRRUN_RECORDS"], name)
        with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "a") as file:
            file.write(text)
        return True
    except (OSError, KeyError):
        return False  # the launcher has ended


class OwnPackage:
    """Finds the launcher's copy of `dtrrun`, even if another is installed. Adds nothing to the path."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "dtrrun":
            return None
        from importlib.util import spec_from_file_location

        init = os.path.join(PACKAGE, "__init__.py")
        return spec_from_file_location(name, init, submodule_search_locations=[PACKAGE])


class AfterImport:
    """Calls `action(module)` once, when the module `name` has been imported without an error.

    marks: whether to notify the launcher when the import begins and when it ends.
    """

    def __init__(self, name: str, action: Callable[[ModuleType], None], *, marks: bool = False) -> None:
        self.name = name
        self.action = action
        self.marks = marks
        self.searching = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name or self.searching:
            return None
        self.searching = True  # other finders of this kind may ask all finders, including this one
        try:
            spec = self._find(path, target)
        finally:
            self.searching = False
        if spec is None:
            mark("no-" + name, sys.executable + "\n")
        elif spec.origin is not None and spec.loader is not None:  # not a folder of that name
            self._call_after(spec.loader)
        return spec

    def _find(self, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(self.name, path, target)
                if spec is not None:
                    return spec
        return None

    def _call_after(self, loader: Any) -> None:
        exec_module = loader.exec_module

        def exec_and_call(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            pid = f"{os.getpid()}\n"
            if self.marks:
                mark("importing", pid)
            try:
                exec_module(module)
            except BaseException as error:
                if self.marks and isinstance(error, Exception):  # which the program may catch
                    mark("imported", pid)
                # Remove our frame; the others are importlib's, which Python omits when printing.
                if error.__traceback__ is not None and not os.environ.get("DTRRUN_DEBUG"):
                    error.__traceback__ = error.__traceback__.tb_next
                raise
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                try:
                    _call_with_frames_removed(self.action, module)
                except BaseException as error:
                    while not (isinstance(error, Exception) or _as_if_importing(error)):
                        pass  # interrupted by another Ctrl-C: try again
                    raise
            if self.marks:
                mark("imported", pid)

        loader.exec_module = exec_and_call


def _as_if_importing(error: BaseException) -> bool:
    """Remove our frames from an interrupt that came in our work after an import, except one of importlib's.

    Python omits that one and those before it when printing. Returns False if interrupted itself.
    """
    try:
        ours = error.__traceback__
        if ours is not None and ours.tb_next is not None and not os.environ.get("DTRRUN_DEBUG"):
            ours.tb_next.tb_next = None
            error.__traceback__ = ours.tb_next
            error.__context__ = None
        return True
    except KeyboardInterrupt:
        return False


def _torch_imported(module: ModuleType) -> None:
    if sys.version_info < LEAST:
        version = ".".join(map(str, sys.version_info[:3]))
        fail(f"{sys.executable} is Python {version}, and dtrrun needs {'.'.join(map(str, LEAST))} or later")
    if not hasattr(module, "Tensor"):
        found = getattr(module, "__file__", None) or "a module"
        fail(f"`import torch` found {found}, which is not PyTorch; give that file another name")
    try:
        from dtrrun.boot.activation import activate

        activate()
    except Exception as error:
        fail(f"{type(error).__name__}: {error}")


def fail(reason: str) -> None:
    """End this process, because continuing without a budget would be worse. The reason is reported."""
    reason = " ".join(reason.split())
    if not mark(f"failed-{os.getpid()}", reason):
        sys.stderr.write(f"dtrrun: error: process {os.getpid()} cannot run under a budget: {reason}\n")
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105 - contextlib would have to be imported by every Python process
            stream.flush()
        except (OSError, ValueError, AttributeError):
            pass
    os._exit(125)  # not SystemExit: a bare `except` around `import torch` would swallow it
