"""The stack of dispatch modes of the current thread.

PyTorch enters and leaves modes only at its top. A session must be able to leave when a mode of the program is
above its own (a fork inside one, a generator that is resumed elsewhere), and to enter beneath those that a
thread entered before the session began.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _python_dispatch

_C: Any = torch._C

_tell_dynamo: Any = getattr(
    _python_dispatch, "set_is_in_mode_without_ignore_compile_internals", lambda flag: None
)

_FLAGS = (
    ("old_dispatch_mode_flags", "_is_in_torch_dispatch_mode"),
    ("old_non_infra_dispatch_mode_flags", "_is_in_non_infra_torch_dispatch_mode"),
    (
        "old_without_ignore_compile_internals_dispatch_mode_flags",
        "_is_in_any_mode_without_ignore_compile_internals",
    ),
)
"""The flags that a mode saves when it is entered and restores when it is left."""


def stacked() -> tuple[Any, ...]:
    """Return the modes of this thread, outermost first."""
    return tuple([_C._get_dispatch_stack_at(place) for place in range(_C._len_torch_dispatch_stack())])


def stack_up(modes: tuple[Any, ...]) -> None:
    """Push the missing ones of `modes` to the top. Can be repeated after an interrupt."""
    while (height := _C._len_torch_dispatch_stack()) < len(modes):
        _C._push_on_torch_dispatch_stack(modes[height])


def put_under(mode: Any) -> None:
    """Enter `mode` beneath all others."""
    _replace((mode, *stacked()))


def take_out(mode: Any) -> bool:
    """Remove `mode` from anywhere in the stack; return whether it was there. Its saved flags remain."""
    modes = stacked()
    others = tuple([one for one in modes if one is not mode])
    if len(others) == len(modes):
        return False
    _replace(others)
    return True


def leave(mode: Any) -> bool:
    """Like `mode.__exit__`, but also below modes entered since. Returns whether the mode was there."""
    modes = stacked()
    places = [place for place, one in enumerate(modes) if one is mode]
    if not places:
        return False
    under, above = modes[: places[-1] + 1], modes[places[-1] + 1 :]
    if not above:
        mode.__exit__(None, None, None)
        return True
    before = {flag: getattr(_python_dispatch, flag, None) for _, flag in _FLAGS}
    _replace(under)
    mode.__exit__(None, None, None)
    for kept, flag in _FLAGS:
        # The next one has saved that it was entered within a mode, and would restore that.
        noted = above[0].__dict__.get(kept)
        if noted:
            noted[-1] = getattr(_python_dispatch, flag)
            setattr(_python_dispatch, flag, before[flag])
    _tell_dynamo(getattr(_python_dispatch, _FLAGS[-1][1], False))
    stack_up((*under[:-1], *above))
    return True


def _replace(modes: tuple[Any, ...]) -> None:
    try:
        _restack(modes)
    except BaseException:  # an interrupt
        _restack(modes)
        raise


def _restack(modes: tuple[Any, ...]) -> None:
    for _ in range(_C._len_torch_dispatch_stack()):
        _C._pop_torch_dispatch_stack(None)
    stack_up(modes)
