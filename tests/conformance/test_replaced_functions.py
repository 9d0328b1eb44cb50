"""What a session replaces in PyTorch leaves none of our frames between the program and the original."""

import sys
import types
import warnings
from unittest.mock import MagicMock

import torch

import dtrrun
from dtrrun.runtime.patches import registry
from dtrrun.runtime.tracebacks import PACKAGE

UNREACHED = {
    "__call__",  # of `torch.compile`'s backend, and of scripted functions
    *("apply", "apply_boxed"),  # see below
    *("_create_interpreter_name_lookup_fn", "key_extractor"),  # PyTorch alone calls them
    *("register_kernel", "set_kernel_enabled"),
    *("install_callbacks", "load_by_key_path", "post_compile"),  # where the compiler has been imported
    *("alloc_storage", "free_storage", "wait_for_unshard"),  # where FSDP has been
}
"""Names of replaced functions that need what cannot be made up here."""


class Reached(Exception):
    pass


class Probe:
    """Stands for all originals. While it is armed, it notes who calls it."""

    def __init__(self):
        self.armed, self.callers = False, []

    def make(self, original):
        def probe(*args, **kwargs):
            if not self.armed:
                return original(*args, **kwargs)
            caller = sys._getframe(1)
            is_own = (
                caller.f_code.co_filename == registry.__file__
            )  # that of a Python function with this probe
            self.callers.append(caller.f_back if is_own else caller)
            raise Reached

        return probe

    def sees_this_frame(self, owner, name):
        """Call a replaced function. Returns whether its original, if it is reached, sees this frame."""
        here, tensor = sys._getframe(), torch.ones(4)
        mock = MagicMock()
        candidates = [(tensor,), (tensor, tensor), (tensor.untyped_storage(),), (), (mock,), (mock, "name")]
        candidates += [(mock, "name", mock), (mock,) * 6, (mock, MagicMock(return_value=0), 8)]
        for args in candidates:
            self.armed = True
            try:
                function = getattr(owner, name)
                (function.fget if isinstance(function, property) else function)(*args)
            except BaseException:
                pass
            finally:
                self.armed = False
            found, self.callers = self.callers, []
            assert not any(one.f_code.co_filename.startswith(PACKAGE) for one in found), (owner, name, found)
            if here in found:  # otherwise PyTorch has called another one
                return True
        return False


def test_no_replaced_function_adds_a_frame():
    with dtrrun.budget("1GB"):
        places = registry.installed()
    assert len(places) > 50
    probe, patches = Probe(), registry.Patches()
    try:
        for owner, name in places:
            patches.wrap(owner, name, probe.make)
        with dtrrun.budget("1GB"):
            unreached = {name for owner, name in places if not probe.sees_this_frame(owner, name)}
    finally:
        patches.undo()
    assert not unreached - UNREACHED


def test_warnings_name_the_line_of_the_program():
    """Those of C functions and, with a `stacklevel`, those of Python functions."""
    leaf = torch.ones(1, requires_grad=True)

    def deprecated():
        warnings.warn("an old name", stacklevel=2)
        return sys._getframe(1)

    owner = types.SimpleNamespace(deprecated=deprecated, frame=sys._getframe)
    patches = registry.Patches()
    with dtrrun.budget("1GB"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for name in vars(owner):
            patches.wrap(owner, name, lambda original: lambda *args: original(*args))
        here = sys._getframe()
        assert owner.deprecated() is here
        assert owner.frame() is here
        float(leaf)
        with torch.inference_mode():
            bool(leaf)
    patches.undo()
    assert len(told) == 2  # of `deprecated`, and of `float`
    assert [one.filename for one in told] == [__file__] * len(told)


def frames_here():
    """Return the files of all callers."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


def test_functions_of_autograd_see_the_frames_of_a_plain_run():
    seen = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(frames_here())
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            seen.append(frames_here())
            return gradient * ctx.saved_tensors[0]

    def run():
        Function.apply(torch.ones(3, requires_grad=True)).sum().backward()

    run()
    with dtrrun.budget("1GB"):
        run()
    assert seen[:2] == seen[2:]
