"""Wraps the functions that identify a process as a helper, so that the runtime ends before they run.

A data-loader worker makes batches and torchrun's agent supervises processes: neither trains. Both import
torch before that, so the runtime has started. Needed until PyTorch marks such processes itself.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType

HELPERS = {
    "torch.utils.data._utils.worker": "_worker_loop",  # looked up whenever a worker starts
    "torch.distributed.launcher.api": "launch_agent",  # torchrun, and accelerate with several processes
    "accelerate.commands.launch": "launch_command",  # accelerate with one: starts the script and waits
}


def watch(deactivate: Callable[[], None]) -> None:
    """Wrap the functions that have been imported already, and the others when they are imported."""
    from dtrrun.boot.path._dtrrun_hook import AfterImport
    from dtrrun.runtime.tracebacks import hide

    def wrap(module: ModuleType) -> None:
        name = HELPERS[module.__name__]
        function = getattr(module, name)

        @functools.wraps(function)  # keeps the name by which it is pickled for a spawned worker
        def helper(*args: object, **kwargs: object) -> object:
            deactivate()
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                hide(error)
                raise

        _wrapped.append(helper)
        setattr(module, name, helper)

    for name in HELPERS:
        if name in sys.modules:
            wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport(name, wrap))


def is_helper(function: object) -> bool:
    """Return whether `function` was wrapped by `watch`."""
    return any(function is wrapped for wrapped in _wrapped)


_wrapped: list[object] = []
