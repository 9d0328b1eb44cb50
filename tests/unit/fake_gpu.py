"""A model of a GPU in plain Python, on which sessions with CPU tensors run as they would on a real one.

`FakeGpu` replaces `dtrrun.runtime.cuda.gpu.Gpu`: memory, streams and the current device. Its memory
is an `Allocator`, a model of PyTorch's. The session runs every kernel through it (`Interposer.model`), so
that it can raise out-of-memory errors.

    with fake_session(monkeypatch, budget) as (session, gpu):
        ...  # any program on the CPU

A test can give operators a workspace or an error, move the program to another stream or device,
and lower the cap.

`fake_nvml` replaces the driver's library. `tests/hollow` is another model of a GPU, in C, underneath a real
PyTorch with CUDA.
"""

import itertools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

import dtrrun
from dtrrun.runtime import device as devices
from dtrrun.runtime import storage
from dtrrun.runtime.cuda.budget import MIB
from dtrrun.runtime.cuda.fragmentation import Block
from dtrrun.runtime.cuda.gpu import AllocatorStatistics
from dtrrun.runtime.cuda.session import Cuda
from dtrrun.runtime.session import Session

TOTAL = 1 << 40
ENDLESS = 1 << 60  # bytes of address space after a pool's last part
TEMPORARY = -1  # address of memory that belongs to no storage
address_of = torch._C.StorageBase.data_ptr
storage_of = torch._C.TensorBase.untyped_storage


# -- memory ----------------------------------------------------------------------------------------


@dataclass
class Part:
    """A range of a pool's addresses: its size, the address of the storage in it (0: free), and whether it is
    mapped."""

    nbytes: int
    address: int = 0
    mapped: bool = True

    def joins(self, other):
        return not (self.address or other.address) and self.mapped == other.mapped


class Allocator:
    """A model of PyTorch's caching allocator with expandable segments (c10/cuda/CUDACachingAllocator.cpp).

    There are two pools, each a list of parts in address order; everything after the last part is unmapped.
    Requests of up to one unit go to the first pool, which maps pages of 2 units. All others go to the second,
    which maps pages of `page` units. As in the real allocator,

    - the cap is compared with the whole request, rounded up, even if only a page of it is missing
      (`counted`). The error names that size. The last page may exceed the cap;
    - a request takes the best fit, where a block's size includes the unmapped addresses after it (`find`), or
      else the lowest addresses at which free and unmapped parts together are large enough (`_map`);
    - if no mapped part fits, a callback may free something first (`before_flush`);
    - before it refuses a request, the allocator returns all free whole pages (`_flush`).

    The real unit is 1 MiB and the real page 20 units (`REAL`). A smaller unit models a smaller program with
    the same fragmentation. By default, pages are so small that tensors of whole MiB fill them exactly and are
    unmapped when they are free. Fragmentation needs a page of several MiB.

    Freed memory is found by checking which storages are still alive (`collect`).
    """

    def __init__(self, unit=1 << 10, page=16):
        self.unit = unit
        self.page = page
        self.cap = None
        self.pools = [], []
        self.allocated = self.peak = self.total = self.reserved_peak = 0
        self.emptied = self.ooms = self.flushes = 0
        self.unmapped = 0  # total bytes, over all flushes
        self.busy = False  # an operator is running, and its workspace is in use
        self.refuses = False  # whether the last error was one that libraries don't catch (native/shortage.h)
        self.relieve = lambda nbytes, attempt: None  # `Retry.relieve` of a session
        self.before_flush = lambda nbytes: None  # `Flushes.avoid` of a session
        self._storages = {}  # by id: weak references

    @property
    def pages(self):
        return 2 * self.unit, self.page * self.unit

    @property
    def reserved(self):
        return sum(part.nbytes for pool in self.pools for part in pool if part.mapped)

    def counted(self, nbytes):
        """Return the size that a request counts as against the cap and in the error's text."""
        small, page = self.pages
        if nbytes <= self.unit:
            return small
        return page if nbytes < 10 * self.unit else -(-nbytes // small) * small

    def allocate(self, nbytes):
        """Return a part for a request."""
        nbytes = -(-nbytes // 512) * 512
        for attempt in itertools.count():
            part = self._asked(nbytes)
            if part is not None:
                break
            self.ooms += 1
            answer = self.relieve(nbytes, attempt)
            if not answer:
                self.refuses = answer is False
                size = self.counted(nbytes) / MIB
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size:.2f} MiB. GPU 0 has"
                )
        self.allocated += nbytes
        self.total += nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        return part

    def _asked(self, nbytes):
        """Return a part, or None if the request is refused."""
        self.collect()
        part = self.find(nbytes)
        if part is None:
            self.before_flush(nbytes)
            self.collect()
            part = self.find(nbytes)
        if part is not None:
            return part
        if self.cap is not None and self.reserved + self.counted(nbytes) > self.cap:
            self._flush()
            if self.reserved + self.counted(nbytes) > self.cap:
                return None
        return self._map(nbytes)

    def take(self, nbytes):
        """Allocate workspace that lives until the operator ends."""
        self.allocate(nbytes).address = TEMPORARY

    def enter(self, made):
        """Account for a new storage."""
        self.allocate(made.nbytes()).address = address_of(made)
        self._storages[id(made)] = weakref.ref(made)

    def knows(self, made):
        known = self._storages.get(id(made))
        return known is not None and known() is made

    def collect(self):
        """Free the parts of storages that died, were emptied, or gave their memory away."""
        storages = {key: one for key, known in self._storages.items() if (one := known()) is not None}
        self._storages = {key: self._storages[key] for key in storages}
        alive = {address_of(one) for one in storages.values()}
        if self.busy:
            alive.add(TEMPORARY)
        for pool in self.pools:
            for part in pool:
                if part.address and part.address not in alive:
                    self.allocated -= part.nbytes
                    part.address = 0
            _join(pool)

    def empty_cache(self):
        self.emptied += 1
        self._unmap()

    def _flush(self):
        self.flushes += 1
        before = self.reserved
        self._unmap()
        self.unmapped += before - self.reserved

    def _unmap(self):
        """Unmap every whole page that is free."""
        self.collect()
        for pool, page in zip(self.pools, self.pages, strict=True):
            start, parts = 0, []
            for part in pool:
                end = start + part.nbytes
                first, last = -(-start // page) * page, end // page * page
                if part.address or not part.mapped or last <= first:
                    parts.append(part)
                else:
                    parts += [Part(first - start), Part(last - first, mapped=False), Part(end - last)]
                start = end
            pool[:] = [part for part in parts if part.nbytes]
            _join(pool)
            if pool and not pool[-1].mapped:
                pool.pop()  # everything after the last part is unmapped anyway

    def find(self, nbytes):
        """Return the best fit among the mapped parts, or None."""
        pool = self.pools[nbytes > self.unit]
        fitting = []
        for place, part in enumerate(pool):
            if part.mapped and not part.address and part.nbytes >= nbytes:
                last = place + 1 == len(pool)
                behind = ENDLESS if last else 0 if pool[place + 1].mapped else pool[place + 1].nbytes
                fitting.append((part.nbytes, place, part.nbytes + behind))
        if not fitting:
            return None
        fitting.sort()
        _, chosen, could_be = fitting[0]
        for _, place, larger in fitting[1:]:
            if larger >= could_be:
                break
            chosen, could_be = place, larger
        return _split(pool, chosen, nbytes)

    def _map(self, nbytes):
        """Map whole pages at the lowest address where free and unmapped parts together are large enough."""
        pool, page = self.pools[nbytes > self.unit], self.pages[nbytes > self.unit]
        pool.append(Part(ENDLESS, mapped=False))
        for place, part in enumerate(pool):
            first = place - (place > 0 and not pool[place - 1].address)
            if not part.mapped and _room(pool, first) >= nbytes:
                break
        while not (pool[first].mapped and pool[first].nbytes >= nbytes):
            missing = first + pool[first].mapped  # a free part has at most two unmapped neighbors
            have = pool[first].nbytes if missing > first else 0
            more = min(-(-(nbytes - have) // page) * page, pool[missing].nbytes)
            _split(pool, missing, more).mapped = True
            _join(pool)
        pool.pop()
        return _split(pool, first, nbytes)

    def blocks(self, nbytes):
        """Return the pool for requests of that size as a snapshot shows it: an unmapped part separates
        segments."""
        self.collect()
        found = [[]]
        for part in self.pools[nbytes > self.unit]:
            if part.mapped:
                found[-1].append(Block(part.address, part.nbytes, not part.address))
            else:
                found.append([])
        return [blocks for blocks in found if blocks]


REAL = {"unit": MIB, "page": 20}


def _join(pool):
    place = 0
    while place + 1 < len(pool):
        if pool[place].joins(pool[place + 1]):
            pool[place].nbytes += pool.pop(place + 1).nbytes
        else:
            place += 1


def _split(pool, place, nbytes):
    part = pool[place]
    if part.nbytes > nbytes:
        pool.insert(place + 1, Part(part.nbytes - nbytes, mapped=part.mapped))
        part.nbytes = nbytes
    return part


def _room(pool, place):
    nbytes = 0
    while place < len(pool) and not pool[place].address:
        nbytes += pool[place].nbytes
        place += 1
    return nbytes


# -- the device ------------------------------------------------------------------------------------


class FakeGpu:
    """The interface of `cuda.gpu.Gpu` that the session uses, and settings for tests."""

    type = "cpu"  # of its tensors
    index = -1

    def __init__(self, context=300 * MIB, allocator=None):
        self.allocator = allocator or Allocator()
        self.context = context
        self.others = 0  # bytes of other processes on the device
        self.own = None  # a function that returns the driver's figure for this process; None: unavailable
        self.side = False  # whether the current stream is a side stream
        self.overruled = False  # whether the program has replaced the cap with its own
        self.current = 0  # the program's current device
        self.moves = []  # from one stream to another
        self.workspace = {}  # by operator name: bytes
        self.library = {}  # by operator name: bytes of workspace that a library requests but can do without
        self.did_without = []
        self.refuse = {}  # by operator name: how many calls fail after writing
        self.ran = []

    # -- operators

    def run(self, func, args, kwargs, compute, *, again):
        """Run an operator on the model. compute: a function without arguments that computes it."""
        name = func._schema.name
        self.ran.append(name)
        if self.refuse.get(name, 0):
            self.refuse[name] -= 1
            compute()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 MiB.")
        self.allocator.busy = True
        try:
            return self.kernel(func, name, args, kwargs, compute)
        finally:
            self.allocator.busy = False
            self.allocator.collect()

    def kernel(self, func, name, args, kwargs, compute):
        if self.workspace.get(name):
            self.allocator.take(self.workspace[name])
        if self.library.get(name):
            try:
                self.allocator.take(self.library[name])
            except torch.OutOfMemoryError:
                if self.allocator.refuses:
                    raise
                self.did_without.append(name)
        # Unlike a real GPU, it computes before it refuses: the results are dropped before anyone sees them.
        result = compute()
        if not (func._schema.is_mutable or func.is_view):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    made = storage_of(tensor)
                    if made.nbytes() and not self.allocator.knows(made):
                        self.allocator.enter(made)
        return result

    # -- the session's interface

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

    def install(self, limited):
        pass

    def remove(self):
        pass

    def stranded_bytes(self):
        return 0

    def programs_cap(self):
        return None

    def is_current(self):
        return self.current == self.index

    def uuid(self):
        return "8f2c6f4e-0000-0000-0000-00000000000a"

    def statistics(self):
        a = self.allocator
        a.collect()
        return AllocatorStatistics(
            a.allocated, a.peak, a.total, a.reserved, a.reserved_peak, a.ooms, a.flushes, a.unmapped
        )

    def used_and_total(self):
        return self.context + self.allocator.reserved + self.others, TOTAL

    def shown(self):
        return None if self.own is None else self.own()

    def set_cap(self, nbytes):
        self.allocator.cap = nbytes
        self.overruled = False

    def cap_stands(self):
        return not self.overruled

    def empty_cache(self):
        self.allocator.empty_cache()

    def segments(self, nbytes):
        return self.allocator.blocks(nbytes)

    follows = None  # its blocks are read anew each time

    def follows_blocks(self, native):
        return False

    def unheard(self, native):
        return []

    def check_blocks(self, native, reserved):
        pass

    def leave_blocks(self, native):
        pass

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


# -- sessions --------------------------------------------------------------------------------------


class ModelledCuda(Cuda):
    """The CUDA parts of a session, on a model of a GPU."""

    def make_interposer(self, native, callbacks, *told):
        made = super().make_interposer(native, callbacks, *told)
        made.model, self.operators._tells = self.gpu, False
        return made


@contextmanager
def fake_session(monkeypatch, budget, gpu=None, **options):
    """Start a session that runs its operators on a fake GPU; yield (session, gpu)."""
    gpu = gpu or FakeGpu()

    allocate = storage.allocate

    def counted(nbytes, device):  # a replay copies what its operator writes into
        made = allocate(nbytes, device)
        gpu.allocator.enter(made)
        return made

    monkeypatch.setattr(devices, "choose", lambda settings: ModelledCuda(gpu, settings, None))
    monkeypatch.setattr(Session, "_make_heap", lambda _: None)  # the model has its own allocator
    monkeypatch.setattr(storage, "allocate", counted)
    with dtrrun.budget(budget, **options) as session:
        gpu.allocator.relieve = session.device.retry.relieve
        gpu.allocator.before_flush = session.device.retry.flushes.avoid
        yield session, gpu
    gpu.allocator.relieve = lambda nbytes, attempt: None
    gpu.allocator.before_flush = lambda nbytes: None


def stepped(session):
    """Do what happens at the end of an optimizer's step."""
    session.steps.last = dict.fromkeys(session.times(), 0) | {"index": 1}
    session._step_ended()


def unprofiled(session, name):
    """Return the signature of an operator whose first calls are still being measured."""
    signatures = session.callbacks.signatures.all()
    return next(one for one in signatures if one.operator.name == name and one.calls < one.SETTLED)


# -- programs --------------------------------------------------------------------------------------


def tensor(mib=1):
    return torch.ones(512 * mib, 512)


def chain(length, mib=1):
    """Return tensors that are each computed from the one before."""
    kept = [tensor(mib)]
    for _ in range(length):
        kept.append(kept[-1].mul(2.0))
    return kept


def correct(kept):
    return all(bool((one == 2.0**step).all()) for step, one in enumerate(kept))
