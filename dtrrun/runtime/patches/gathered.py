"""Follows the weights that FSDP2 (`fully_shard`) gathers, frees and gathers again.

A gathered weight is one storage for life. FSDP empties it when a group of modules has run, and fills it
again by a collective before the group's backward pass. To us it is a constant that is away meanwhile
(`core/away.h`): what is computed from it may be evicted and recomputed, but not while it is away, since a
collective is never replayed.

- Before the first weight of a group leaves, what is computed from the group's weights and may be read while
  they are away is brought back, and stays: what Python code refers to, such as the group's outputs, or an
  activation that a module has kept; and in a backward pass, everything. What only autograd's graph holds is
  read in the group's backward pass, when the weights are back (`native/recent_tensors.h`).
- When they come back, a checksum shows whether their content is the same. If not, nothing is recomputed from
  the new content: what was evicted is lost, which raises an error in any code that needs it.
- A group that is not gathered in the backward pass (`set_unshard_in_backward(False)`) keeps everything.

FSDP is not imported before the program does that. Needed as long as FSDP has no hooks around gathering and
freeing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from dtrrun.core.foreign import AWAY
from dtrrun.core.graph import Version
from dtrrun.core.ledger import GATHERED
from dtrrun.core.locks import Locks
from dtrrun.runtime import storage as memory
from dtrrun.runtime.cuda.sums import Sum, Sums
from dtrrun.runtime.dispatch.callbacks import Callbacks
from dtrrun.runtime.dispatch.threads import joins
from dtrrun.runtime.guards import aside, below, unseen
from dtrrun.runtime.imports import after_import
from dtrrun.runtime.patches.registry import Function, Patches

PACKAGE = "torch.distributed.fsdp._fully_shard"
NEEDED = "needed while gathered weights are away"


class Weight:
    """One gathered weight."""

    __slots__ = ("checksum", "first", "group")

    def __init__(self, first: Version, group: Group) -> None:
        self.first = first  # its version when it was met, which knows whether the storage has died
        self.group = group
        self.checksum: int | Sum | None = None  # when it left; None if nothing depended on its content


class Group:
    """The weights that are gathered together."""

    __slots__ = ("examined", "keys", "leaving", "returns")

    def __init__(self) -> None:
        self.keys: set[int] = set()  # of those weights that are not away
        self.returns = True  # for the backward pass, where what only autograd holds is read
        self.leaving = False  # the first has left since they arrived
        self.examined = 0  # how many tensors had been noted when one left


class Gathered:
    """Patches FSDP while installed, once the program has imported it."""

    def __init__(self, callbacks: Callbacks) -> None:
        self._callbacks, self._dtr, self._ledger = callbacks, callbacks.dtr, callbacks.ledger
        self._native = callbacks.native
        self._weights: dict[int, Weight] = {}  # by the key of their versions
        self._prune_at = 64
        self._notes = self._sees_data = False
        self._groups: weakref.WeakKeyDictionary[Any, Group] = weakref.WeakKeyDictionary()  # by FSDP's own
        self._sums: Sums | None = None  # on a GPU
        self._patches = Patches()
        self._forget_import: Callable[[], None] = lambda: None

    def install(self) -> None:
        def imported(module: Any) -> None:
            self._patches.wrap(module._fsdp_param_group.FSDPParamGroup, "wait_for_unshard", self._gathering)
            self._patches.wrap(module._fsdp_param, "free_storage", self._freeing)
            self._patches.wrap(module._fsdp_param, "alloc_storage", self._allocating)
            self._patches.wrap(module._fsdp_param.DTensor, "__init__", self._wrapping)

        self._forget_import = after_import(PACKAGE, imported)

    def remove(self) -> None:
        self._forget_import()
        self._patches.undo()
        self._note(False)

    # -- they arrive -----------------------------------------------------------------------------------

    def _gathering(self, original: Function) -> Function:
        def wait_for_unshard(params: Any) -> Any:
            arrives = params._all_gather_result is not None or params not in self._groups
            found = original(params)
            if arrives and params.is_unsharded:
                with self._callbacks.own(), unseen():
                    joins()
                    with self._callbacks.lock:
                        self._arrived(params)
            return found

        return wait_for_unshard

    def _arrived(self, params: Any) -> None:
        self._ledger.collect_dead()
        group = self._groups.setdefault(params, Group())
        group.returns = params.unshard_in_backward
        group.leaving = False
        for tensor in _tensors_of(params):
            version = self._ledger.version_of(memory.own_storage_of(tensor))
            if version is None:  # it was gathered before the session began
                version = self._callbacks.version_of(tensor)
            if version is None or version.escaped:
                continue
            weight = self._weight(version)
            if weight is None:
                self._met(version, group)
            elif version.away:
                self._returned(version, memory.own_storage_of(tensor), weight)
            group.keys.add(version.key)
        if group.keys and not self._notes:
            if not self._sees_data:  # libraries import FSDP in programs that do not use it
                self._sees_data = True
                self._patches.wrap(torch.Tensor, "data", self._native.noted, assigns=self._assigning)
            self._note(True)

    def _met(self, version: Version, group: Group) -> None:
        if len(self._weights) >= self._prune_at:
            for key in [key for key, one in self._weights.items() if not one.first.has_storage]:
                del self._weights[key]
            self._prune_at = 2 * len(self._weights) + 64
        if version.used:  # by something that has not been noted
            group.returns = False
        version.fixed = True  # the program frees and fills the storage itself
        self._keep([version], GATHERED)
        self._weights[version.key] = Weight(version, group)

    def _returned(self, version: Version, storage: Any, weight: Weight) -> None:
        version.away = False
        if not version.readers:
            return
        if not self._is_same(weight.checksum, self._checksum(storage)):
            self._dtr.recipes.foreign.lose_dependents(version, AWAY)
            self._dtr.recipes.supersede(version, None, 0)

    def _keep(self, versions: list[Version], why: str) -> None:
        """Bring versions back, and keep them. Raises the budget error."""
        with self._callbacks.telling(), Locks() as locks:
            self._dtr.rematerializer.lock(versions, locks)
            for version in versions:
                self._dtr.recipes.pin(version, why)

    def _weight(self, version: Version) -> Weight | None:
        weight = self._weights.get(version.key)
        return weight if weight is not None and weight.first.has_storage else None

    def _note(self, on: bool) -> None:
        """Note tensors from now on, or no longer: while there is a gathered weight."""
        self._notes = on
        self._native.note_tensors(on)

    # -- their content ---------------------------------------------------------------------------------

    def _checksum(self, storage: Any) -> int | Sum | None:
        """Return None if a GPU has no memory for it."""
        if storage.device.type == "cpu":
            return memory.checksum(storage)
        try:
            if self._sums is None:
                self._sums = aside(partial(Sums, storage.device))
            if not self._sums.has_room():
                return None
            found: Sum = aside(partial(self._sums.of, storage, storage.nbytes()))
        except torch.OutOfMemoryError:
            return None
        return found

    def _is_same(self, before: int | Sum | None, now: int | Sum | None) -> bool:
        """If it is not known, return False."""
        if isinstance(before, Sum) and isinstance(now, Sum) and self._sums is not None:
            figures = aside(self._sums.read)  # waits for the GPU
            return bool(figures[before.slot] == figures[now.slot])
        return before is not None and before == now

    # -- tensors that wrap others ------------------------------------------------------------------------

    def _wrapping(self, original: Function) -> Function:
        """A `DTensor` refers to its part, from Python. Autograd may be all that refers to the `DTensor`."""

        def init(tensor: Any, *args: Any, **kwargs: Any) -> None:
            original(tensor, *args, **kwargs)
            if self._notes:
                self._native.note_wrapper(tensor, "_local_tensor")

        return init

    # -- tensors that no operator makes -------------------------------------------------------------------

    def _assigning(self, original: Function) -> Function:
        """From then on, the tensor is one over the other's storage."""
        note = self._native.noted(lambda tensor: tensor)

        def assign(tensor: torch.Tensor, other: torch.Tensor) -> None:
            original(tensor, other)
            note(tensor)

        return assign

    # -- they leave ------------------------------------------------------------------------------------

    def _freeing(self, original: Function) -> Function:
        def free_storage(tensor: torch.Tensor) -> None:
            if type(tensor) is not torch.Tensor or not self._resize(tensor, 0):
                original(tensor)

        return free_storage

    def _allocating(self, original: Function) -> Function:
        def alloc_storage(tensor: torch.Tensor) -> None:
            plain = type(tensor) is torch.Tensor
            if not (plain and self._resize(tensor, tensor.numel() * tensor.itemsize)):
                original(tensor)

        return alloc_storage

    def _resize(self, tensor: torch.Tensor, nbytes: int) -> bool:
        """Resize a tensor's storage, unless it is not that of a gathered weight. Raises the budget error."""
        with self._callbacks.own(), unseen():
            storage = memory.own_storage_of(tensor)
            if memory.bytes_of(storage) == nbytes:
                return True
            joins()
            with self._callbacks.lock:
                self._ledger.collect_dead()
                version = self._ledger.version_of(storage)
                weight = self._weight(version) if version is not None else None
                if memory.device_type_of(storage) != self._ledger.device_type:
                    return False
                if version is not None and (weight is None or version.escaped):
                    return False
                more = memory.rounded(nbytes) - (0 if version is None else version.nbytes)
                if more > 0:
                    with self._callbacks.telling(), (guard := below()), guard:
                        self._dtr.eviction.make_room(more, "gathered weights")
                elif version is not None and weight is not None and not version.away:
                    self._about_to_leave(version, storage, weight)
                try:
                    memory.resize(storage, nbytes)
                finally:  # also if interrupted after the resize
                    if version is not None:  # otherwise it was gathered before the session began
                        self._ledger.resized(version, memory.size_of(storage))
        return True

    def _about_to_leave(self, version: Version, storage: Any, weight: Weight) -> None:
        group, ledger = weight.group, self._ledger
        leaving = [ledger.versions[key] for key in group.keys if key in ledger.versions]
        since = group.examined if group.leaving else 0
        needed, group.examined = self._native.needed_without(leaving, since, not group.returns)
        group.leaving = True
        self._keep(needed, NEEDED)
        weight.checksum = None
        if version.readers and ledger.budget_bytes is not None:
            weight.checksum = self._checksum(storage)
        ledger.take_away(version)
        group.keys.discard(version.key)
        if not any(one.keys for one in self._groups.values()):
            self._note(False)


def _tensors_of(params: Any) -> Iterator[torch.Tensor]:
    for one in params.fsdp_params:
        yield from one.all_gather_outputs
        yield from one._unsharded_inner_tensors
