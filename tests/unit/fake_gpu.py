"""A GPU in plain Python for sessions on CPU tensors: an allocator with a cap, segments and holes.

`FakeGpu` stands for `runtime.gpu.Gpu`, `Allocator` for the caching allocator behind it. Operators come to it
from below the session, through a dispatch mode of its own, and replays directly: it refuses them for want of
memory, or once they have written. Freed memory is found by looking at the storages that there are.
"""

import weakref
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtrrun
from dtrrun.runtime import device as devices
from dtrrun.runtime import replay, storage
from dtrrun.runtime.cuda import Cuda
from dtrrun.runtime.gpu import Statistics
from dtrrun.runtime.holes import Block
from dtrrun.runtime.rng import replaying
from dtrrun.runtime.shares import MIB

TOTAL = 1 << 40
storage_of = torch._C.TensorBase.untyped_storage
address_of = torch._C.StorageBase.data_ptr


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


@dataclass
class Piece:
    """Of a segment: its bytes, and the address of the storage in it, or 0."""

    nbytes: int
    address: int = 0


@dataclass
class Allocator:
    """First fit into segments, as long as what is reserved stays below the cap."""

    cap: int | None = None
    segments: list = field(default_factory=list)
    allocated: int = 0
    peak: int = 0
    total: int = 0
    reserved_peak: int = 0
    known: list = field(default_factory=list)
    emptied: int = 0
    ooms: int = 0
    busy: bool = False  # an operator runs: its workspace is in use

    @property
    def reserved(self):
        return sum(piece.nbytes for segment in self.segments for piece in segment)

    def collect(self):
        """Free the pieces of storages that died, were emptied, or gave their memory away."""
        self.known = [known for known in self.known if known() is not None]
        alive = {address_of(storage) for known in self.known if (storage := known()) is not None}
        for segment in self.segments:
            for piece in segment:
                if piece.address and piece.address not in alive and not (piece.address < 0 and self.busy):
                    self.allocated -= piece.nbytes
                    piece.address = 0
            place = 0
            while place + 1 < len(segment):
                if segment[place].address or segment[place + 1].address:
                    place += 1
                else:
                    segment[place].nbytes += segment.pop(place + 1).nbytes

    def empty_cache(self):
        self.emptied += 1
        self.collect()
        self.segments = [segment for segment in self.segments if any(piece.address for piece in segment)]

    def mapped(self):
        """Pieces side by side, as the snapshot has them."""
        return self.segments

    def find(self, nbytes):
        for segment in self.segments:
            for place, piece in enumerate(segment):
                if not piece.address and piece.nbytes >= nbytes:
                    if piece.nbytes > nbytes:
                        segment.insert(place + 1, Piece(piece.nbytes - nbytes))
                        piece.nbytes = nbytes
                    return piece
        return None

    def reserve(self, nbytes):
        """A piece for a request; raises as the real one does, after it has returned what it does not use."""
        self.collect()
        nbytes = -(-nbytes // 512) * 512
        piece = self.find(nbytes)
        if piece is None and self.cap is not None and self.reserved + nbytes > self.cap:
            self.empty_cache()
            if self.reserved + nbytes > self.cap:
                self.ooms += 1
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {nbytes / MIB:.2f} MiB. And more words."
                )
        if piece is None:
            piece = Piece(nbytes)
            self.segments.append([piece])
        self.allocated += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return piece

    def take(self, nbytes):
        """Workspace: there for a moment, under an address that no storage has."""
        self.reserve(nbytes).address = -1

    def knows(self, storage):
        return any(known() is storage for known in self.known)

    def enter(self, storage, piece):
        piece.address = address_of(storage)
        self.known.append(weakref.ref(storage))


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

    def call(op, args, kwargs):
        with replaying(op.rng) if op.rng else nullcontext():
            return gpu.run(op.func, args, kwargs)

    allocate = storage.allocate

    def counted(nbytes, device):  # a replay's copy of what its operator writes into
        made = allocate(nbytes, device)
        gpu.allocator.enter(made, gpu.allocator.reserve(nbytes))
        return made

    monkeypatch.setattr(devices, "choose", choose)
    monkeypatch.setattr(storage, "allocate", counted)
    monkeypatch.setattr(replay, "_call", call)  # replays run below all modes
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
