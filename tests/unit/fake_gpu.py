"""A GPU in plain Python for sessions on CPU tensors, over `fake_allocator`.

`FakeGpu` stands for `runtime.gpu.Gpu`. Operators come to it from below the session, through a dispatch mode
of its own, and replays directly: it refuses them for want of memory, or once they have written.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from fake_allocator import Allocator
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from dtrrun.runtime import device as devices
from dtrrun.runtime import replay, storage
from dtrrun.runtime import session as sessions
from dtrrun.runtime.cuda import Cuda
from dtrrun.runtime.gpu import Statistics
from dtrrun.runtime.holes import Block
from dtrrun.runtime.rng import replaying
from dtrrun.runtime.shares import MIB

TOTAL = 1 << 40
storage_of = torch._C.TensorBase.untyped_storage


@dataclass
class Event:
    gpu: "FakeGpu"
    time: float = -1.0

    def record(self, stream):
        assert stream == "main"
        self.time = self.gpu.clock

    def query(self):
        return self.gpu.done

    def elapsed_time(self, end):
        assert self.gpu.done, "read before it was done"
        return end.time - self.time


class Kernels(TorchDispatchMode):
    """Below the session: every operator allocates through the model. `workspace`: bytes by operator."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.gpu.run(func, args, kwargs or {})


class FakeGpu:
    """The model, and what the session asks of it."""

    type = "cpu"  # its tensors'
    index = -1

    def __init__(self, context=300 * MIB):
        self.allocator = Allocator()
        self.context = context
        self.others = 0
        self.clock = 0.0  # ms
        self.done = True
        self.side = False
        self.overruled = False  # the cap, by one that the program has set
        self.current = 0  # the program's current device
        self.moves = []
        self.workspace = {}
        self.library = {}  # operator name: workspace that a library asks for, and does without
        self.did_without = []
        self.duration = {}
        self.ran = []
        self.refuse = {}  # operator name: how many calls fail after they have written

    def run(self, func, args, kwargs):
        name = func._schema.name
        self.ran.append(name)
        allocator = self.allocator
        self.clock += self.duration.get(name, 0.01)
        if self.refuse.get(name, 0):
            self.refuse[name] -= 1
            func(*args, **kwargs)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
        allocator.busy = True
        try:
            return self.kernel(func, name, args, kwargs)
        finally:
            allocator.busy = False

    def kernel(self, func, name, args, kwargs):
        allocator = self.allocator
        before = {id(known()) for known in allocator.known}
        if self.workspace.get(name):
            allocator.take(self.workspace[name])
        if self.library.get(name):
            try:
                allocator.take(self.library[name])
            except torch.OutOfMemoryError:
                self.did_without.append(name)
        # Unlike the real one it runs first and refuses then: the results are gone before anyone sees them.
        if func._schema.is_mutable or func.is_view:
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = storage_of(tensor)
                if id(storage) not in before and storage.nbytes() and not allocator.knows(storage):
                    allocator.enter(storage, allocator.reserve(storage.nbytes()))
        return result

    @staticmethod
    def initialized():
        return True

    @staticmethod
    def usable():
        return True

    @staticmethod
    def touched_by(args, kwargs):
        return torch.device("cpu")

    def bind(self, index):
        self.index = 0 if index is None else index

    def uuid(self):
        return "8f2c6f4e-0000-0000-0000-00000000000a"

    def statistics(self):
        a = self.allocator
        a.collect()
        return Statistics(a.allocated, a.peak, a.total, a.reserved, a.reserved_peak, a.ooms)

    def used_and_total(self):
        return self.context + self.others + self.allocator.reserved, TOTAL

    def set_cap(self, nbytes):
        self.allocator.cap = nbytes
        self.overruled = False

    def cap_stands(self):
        return not self.overruled

    def take(self, sizes):
        self.allocator.busy = True
        try:
            for nbytes in sizes:
                self.allocator.take(nbytes)
        finally:
            self.allocator.busy = False
            self.allocator.collect()

    def empty_cache(self):
        self.allocator.empty_cache()

    def segments(self, nbytes):
        self.allocator.collect()
        return [
            [Block(piece.address, piece.nbytes, not piece.address) for piece in pieces]
            for pieces in self.allocator.mapped()
        ]

    def on_side_stream(self):
        return self.side

    def come_from(self):
        before, self.current = self.current, self.index
        return None if before == self.index else before

    def go_back(self, index):
        self.current = index

    def leave_side_stream(self):
        self.side = False
        self.moves.append("to the main stream")
        return "side"

    def return_to(self, side):
        self.side = True
        self.moves.append(f"back to {side}")

    @staticmethod
    def home_stream():
        return "main"

    def event(self):
        return Event(self)


@contextmanager
def fake_session(monkeypatch, budget, **options):
    """A session on a fake GPU, with its operators below; yields (session, gpu)."""
    gpu = options.pop("gpu", None) or FakeGpu()

    def choose(settings):
        return Cuda(gpu, settings, None)

    def call(_replay, op, args, kwargs):
        with replaying(op.rng) if op.rng else nullcontext():
            return gpu.run(op.func, args, kwargs)

    allocate = storage.allocate

    def counted(nbytes, device):  # a replay's copy of what its operator writes into
        made = allocate(nbytes, device)
        gpu.allocator.enter(made, gpu.allocator.reserve(nbytes))
        return made

    monkeypatch.setattr(devices, "choose", choose)
    monkeypatch.setattr(storage, "allocate", counted)
    monkeypatch.setattr(sessions, "modes_around", lambda: 0)  # the mode below stands for a device
    monkeypatch.setattr(replay.Replay, "_call", call)  # replays run below all modes
    with Kernels(gpu), dtrrun.budget(budget, **options) as session:
        yield session, gpu


def tensor():
    return torch.ones(512, 512)  # 1 MiB


def chain(length):
    """Tensors of which each is computed from the one before."""
    kept = [tensor()]
    for _ in range(length):
        kept.append(kept[-1].mul(2.0))
    return kept


def correct(kept):
    return all(torch.equal(one, torch.full((512, 512), 2.0**step)) for step, one in enumerate(kept))


def stepped(session):
    """As if an optimizer's step were over."""
    session.steps.last = dict.fromkeys(session.times(), 0) | {"index": 1}
    session._step_ended()
