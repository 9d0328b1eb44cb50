"""A KeyboardInterrupt at each place in dtrrun's code where Python checks for signals, one at a time.

The program catches it and repeats its attempt. Afterwards all bits are those of a plain run, the thread has
its modes, and the accounts are right. A place is an instruction before which Python may have run a signal
handler: the beginning of a function, the instruction after a call, and the head of a loop.
"""

import collections
import dis
import gc
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from faults import check_accounts
from programs import assert_same, bits
from torch import nn

import dtrrun
from tests.care import budget

pytestmark = pytest.mark.skipif("INTERRUPTS" not in os.environ, reason="takes long: INTERRUPTS=40 runs it")

BUDGET_BYTES = 28_000
SHARE = int(os.environ.get("INTERRUPTS", "40"))
"""Try one place out of this many; 1: every place."""

OURS = tuple(str(Path(dtrrun.__file__).parent / name) + os.sep for name in ("core", "runtime"))
"""The folders, with their subfolders, whose code a session runs below the user's calls."""


def places_of(code):
    """Return the offsets of instructions before which an interrupt can be raised as Python would raise it."""
    instructions = list(dis.get_instructions(code))
    handlers = {}
    for start, end, target, *_ in dis._parse_exception_table(code):
        for offset in range(start, end, 2):
            handlers.setdefault(offset, target)
    after_call, heads = set(), set()
    for one, following in itertools.pairwise(instructions):
        calls = one.opname.startswith("CALL") and "INTRINSIC" not in one.opname
        # Python attributes it to the call: if that has another handler, this would raise into the wrong one.
        same_handler = handlers.get(one.offset) == handlers.get(following.offset)
        if (calls and same_handler) or (one.opname == "RESUME" and not one.arg):
            after_call.add(following.offset)
        elif one.opname.startswith("JUMP_BACKWARD"):
            heads.add(one.argval)
    return after_call, heads


class Interrupts:
    """Context: counts the places that an attempt passes, or raises at one of them, once."""

    def __init__(self, code=None, offset=-1, count=0):
        self.code, self.offset, self.count = code, offset, count
        self.seen = collections.Counter()
        self.raised = 0
        self.known = {}

    def __enter__(self):
        if not self.raised:
            sys.settrace(self.entered)

    def __exit__(self, kind, error, trace):
        sys.settrace(None)
        return kind is KeyboardInterrupt

    def entered(self, frame, event, argument):
        code = frame.f_code
        if self.code not in (None, code) or not code.co_filename.startswith(OURS):
            return None
        if code not in self.known:
            self.known[code] = places_of(code)
        after_call, heads = self.known[code]
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        before = -1

        def stepped(frame, event, argument):
            nonlocal before
            if event == "opcode":
                offset = frame.f_lasti
                if offset in after_call or (offset in heads and before > offset):
                    self.come_by(code, offset)
                before = offset
            return stepped

        return stepped

    def come_by(self, code, offset):
        self.seen[code, offset] += 1
        if code is self.code and offset == self.offset and self.seen[code, offset] == self.count + 1:
            self.raised += 1
            raise KeyboardInterrupt


def program(interrupts):
    """Run attempts that start from state no attempt changes, so that each can be repeated."""
    torch.manual_seed(5)
    base = torch.randn(32, 16)
    state = torch.zeros(32, 16)
    kept, results = [base], []

    def attempt(step):
        torch.manual_seed(step)
        model = nn.Sequential(
            nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(16, 16)
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        made = []
        hidden = model(base.sin() + step)
        folded = hidden.clone().mul_(0.5)
        folded[4:8] += hidden[:4]
        first, second = folded.split(16)
        made += [hidden, folded, product := first @ second.t(), *folded.max(1), torch.rand(32, 16)]
        optimizer.zero_grad()
        (folded.exp().mean() + product.square().mean()).backward()
        optimizer.step()
        state.copy_(kept[-1]).mul_(2).add_(base)
        made += [one * 2 for one in reversed(kept)]
        numbers = [made[0].tolist(), state.detach().numpy().sum().item(), float(made[1].detach().sum())]
        return made, numbers, model, torch.rand(3)

    for step in range(2):
        done = None
        while done is None:
            with interrupts:
                done = attempt(step)
        made, *others = done
        kept.append(made[-1].detach())
        results.append([made, *others, state.clone()])
    return results


def run(interrupts, careful):
    """Return the program's bits inside a session; check the session's state afterwards."""
    gc.collect()
    gc.freeze()
    gc.disable()
    guards = str(torch._C._dispatch_tls_local_exclude_set()), str(torch._C._dispatch_tls_local_include_set())
    try:
        with budget(BUDGET_BYTES, over_budget="evict", careful=careful, verify=True) as session:
            inside = guards_of()
            results = program(interrupts)
            found = bits(results)
            assert guards_of() == inside, "dispatch keys"
            assert torch.is_grad_enabled()
            assert not torch.is_inference_mode_enabled()
            assert not session.callbacks.lock._is_owned(), "lock"
            assert session.ledger.reserved_bytes == 0, f"{session.ledger.reserved_bytes} bytes promised"
            check_accounts(session)
            assert session.report()["evictions"] > 0
        assert session.report()["mismatches"] == []
        assert torch._C._len_torch_dispatch_stack() == 0
        assert_same(found, bits(results), "after the session's end")
        assert guards_of() == guards, "dispatch keys, afterwards"
    finally:
        gc.enable()
        gc.unfreeze()
    return found


def guards_of():
    return str(torch._C._dispatch_tls_local_exclude_set()), str(torch._C._dispatch_tls_local_include_set())


@pytest.mark.parametrize("careful", [False, True], ids=["plain", "careful"])
def test_an_interrupt_at_each_place(careful, monkeypatch):
    reports = sys.unraisablehook

    def report(unraisable):
        # Python drops what a finalizer raises: the attempt goes on, and must end as well as any other.
        if unraisable.exc_type is not KeyboardInterrupt:
            reports(unraisable)

    monkeypatch.setattr(sys, "unraisablehook", report)
    expected = bits(program(Interrupts()))
    run(Interrupts(), careful)  # run one-time imports and setup
    counting = Interrupts()
    assert_same(expected, run(counting, careful), "without an interrupt")
    places = [(*place, count) for place, n in counting.seen.items() for count in {0, n // 2, n - 1}]
    assert len(places) > 1000
    for folder in OURS:  # otherwise a renamed folder would silently go untested
        assert Path(folder).is_dir(), folder
        assert any(code.co_filename.startswith(folder) for code, *_ in places), folder
    places.sort(key=lambda place: (place[0].co_filename, place[0].co_firstlineno, *place[1:]))
    wrong, hit = [], 0
    for code, offset, count in places[::SHARE]:
        interrupts = Interrupts(code, offset, count)
        try:
            assert_same(expected, run(interrupts, careful), "after the interrupt")
        except (Exception, KeyboardInterrupt) as failed:
            line = next((line for start, end, line in code.co_lines() if start <= offset < end), 0)
            where = f"{Path(code.co_filename).name}:{line} {code.co_name}+{offset}, time {count}"
            wrong.append(f"{where}: {type(failed).__name__} {str(failed)[:160]}")
        torch.set_grad_enabled(True)
        hit += interrupts.raised
    assert hit > len(places) // SHARE // 2
    assert not wrong, f"{len(wrong)} of {hit}:\n" + "\n".join(wrong)
