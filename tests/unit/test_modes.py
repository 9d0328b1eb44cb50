"""Entering and leaving dispatch modes elsewhere than at the top of the stack."""

import torch
from torch.utils import _python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from dtrrun.runtime.dispatch.python_mode import modes
from dtrrun.runtime.guards import below


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_is_left_beneath_others():
    ours, first, second = Mode(), Mode(), Mode()
    with ours.__class__() as outer:
        ours.__enter__()
        with first, second:
            assert modes.leave(ours)
            assert modes.stacked() == (outer, first, second)
            assert not modes.leave(ours)
        assert modes.stacked() == (outer,)
    assert modes.stacked() == ()


def test_the_flags_of_what_was_entered_within_are_those_of_what_is_left():
    before = dispatch.is_in_torch_dispatch_mode()  # PyTorch has one flag for all threads
    ours = Mode()
    ours.__enter__()
    with Mode():
        assert modes.leave(ours)
        assert dispatch.is_in_torch_dispatch_mode()
    assert dispatch.is_in_torch_dispatch_mode() == before


def test_a_mode_is_put_beneath_others_and_taken_out():
    guest, one, other = Mode(), Mode(), Mode()
    with one:
        modes.put_under(guest)
        with other:
            assert modes.stacked() == (guest, one, other)
        assert modes.stacked() == (guest, one)
    assert modes.take_out(guest)
    assert not modes.take_out(guest)
    assert modes.stacked() == ()


def test_what_the_first_exit_of_a_guard_was_kept_from_the_second_does():
    class Interrupted(below):
        kept = 0

        def __exit__(self, *exc):
            self.kept += 1
            if self.kept == 1:
                raise KeyboardInterrupt
            super().__exit__(*exc)

    with Mode() as mode:
        try:
            with torch.inference_mode(), (guard := Interrupted()), guard:
                assert modes.stacked() == ()
                assert not torch.is_inference_mode_enabled()
        except KeyboardInterrupt:
            pass
        assert modes.stacked() == (mode,)
