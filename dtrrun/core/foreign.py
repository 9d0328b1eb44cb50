"""Memory that PyTorch does not own: weights from NumPy, a buffer, a mapped file, or shared with processes.

It is never evicted. Whether results may be recomputed from it is another question: writes by operators are
seen, but the program may also write to it in other ways, which no version counter shows.

- What is not a parameter (a batch in a loader's array): nothing is recomputed from it, unless it comes from a
  worker of a `DataLoader`.
- A parameter in a private mapping of a file (safetensors, `torch.load(mmap=True)`): no other code can
  reach that memory. It is a constant like any other.
- A parameter in other memory of this process (`torch.from_numpy`, `torch.frombuffer`) or in shared memory
  (`share_memory_`), or what a worker has made: a constant while a checksum finds its content unchanged. The
  checksum is computed whenever an operator of the program reads it, when something computed from it is to be
  evicted, and before a rematerialization reads it. So an unseen write never leads to a wrong value: results
  that are in memory stay there from then on, and those that were evicted are lost, which raises an error in
  any code that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dtrrun.core.graph import Version
from dtrrun.core.ledger import Ledger
from dtrrun.core.observer import ESCAPES, TRUSTED

if TYPE_CHECKING:
    from dtrrun.core.recipes import Recipes

LOST = "computed from memory that was then written to outside of PyTorch"
AWAY = "computed from weights that are away"


WHY_LOST = (
    "dtrrun: an evicted tensor cannot be recomputed, because code outside of PyTorch has overwritten what it "
    "was computed from: NumPy or another process wrote to memory that PyTorch does not own "
    "(torch.from_numpy, torch.frombuffer), or a native extension wrote to a tensor that it was given. "
    "Write with PyTorch (tensor.copy_), give that code a copy (.clone()), or keep the tensors that are "
    "needed later in memory (session.pin)."
)
WHY_AWAY = (
    "dtrrun: an evicted tensor is needed and cannot be recomputed: FSDP has freed the weights that it was "
    "computed from, or has gathered others since, and only autograd referred to the tensor when they were "
    "freed. Let the program refer to it when the module's forward pass ends, or keep it in memory "
    "(session.pin)."
)
WHY_GIVEN_UP = (
    "dtrrun: this tensor has no data any more. It was evicted when a block of dtrrun.budget ended by an "
    "error, and was not read before the next block began."
)


class LostError(RuntimeError):
    """An evicted value is needed but cannot be recomputed.

    Code outside of PyTorch has written to memory that it was computed from; or its block has ended by an
    error, and another has begun.
    """

    def __init__(self, why: str = WHY_LOST) -> None:
        super().__init__(why)


LostError.__module__ = "dtrrun"  # the name that the program uses, also shown in tracebacks


class Region:
    """One foreign storage."""

    __slots__ = ("changing", "checksum", "from_worker", "origin", "sealed", "span", "usable")

    def __init__(self, origin: Callable[[], Any], span: tuple[int, int], *, from_worker: bool) -> None:
        """origin: returns the storage, or None once it has died. from_worker: see `Memory`."""
        self.origin = origin
        self.span = span  # addresses
        self.from_worker = from_worker
        self.usable = True  # until other code is known to write to it
        self.sealed: Version | None = None  # the version whose content has the checksum
        self.checksum = 0
        self.changing = False  # an operator is about to write to it


class Foreign:
    """Decides which foreign storages can be recomputed from.

    Their versions are all `escaped`, so that `read` is asked about each operator that reads them. Private
    mappings are the exception, once a parameter has been seen in them.
    """

    def __init__(self, ledger: Ledger, recipes: Recipes) -> None:
        self._ledger, self._recipes = ledger, recipes
        self._regions: dict[int, Region] = {}  # by the key of the storage's versions
        self._prune_at = 64

    def adopted(self, version: Version, storage: Any) -> list[Version]:
        """Enter a foreign storage that is new to the ledger. Returns the versions of those that it overlaps.

        A write to one of them also writes to the others, without changing their versions.
        """
        regions = self._regions
        if len(regions) >= self._prune_at:
            for key in [key for key, region in regions.items() if region.origin() is None]:
                del regions[key]
            self._prune_at = 2 * len(regions) + 64
        memory = self._ledger.memory
        span = memory.span_of(storage)
        origin = self._ledger.graph.version(storage, None)
        region = Region(origin, span, from_worker=memory.is_from_worker(span))
        first, last = region.span
        overlapping = []
        for key, other in regions.items():
            if not (other.span[0] < last and first < other.span[1]) or (storage := other.origin()) is None:
                continue
            if memory.span_of(storage) == other.span:  # otherwise it has been on the host since
                region.usable = False
                overlapping.append(self._ledger.versions[key])
        regions[version.key] = region
        return overlapping

    def _region(self, version: Version) -> Region | None:
        region = self._regions.get(version.key)
        return region if region is not None and region.origin() is not None else None

    def undecided(self, version: Version) -> bool:
        """Return whether a version is foreign, and nothing has been recomputed from it so far."""
        region = self._region(version)
        return region is not None and region.usable and region.sealed is None

    def trusts(self, version: Version) -> bool:
        """Return whether an escaped version is known to be a constant nonetheless."""
        region = self._region(version)
        return region is not None and region.sealed is version and region.usable and not region.changing

    def trusted(self) -> list[Version]:
        """Return all versions that `trusts` holds for."""
        sealed = [region.sealed for region in list(self._regions.values())]
        return [version for version in sealed if version is not None and self.trusts(version)]

    def may_be_read(self, version: Version) -> bool:
        """Return whether something computed from an escaped version may be evicted. Checks the content."""
        return self.trusts(version) and self.unchanged(version)

    def unchanged(self, version: Version) -> bool:
        """Check an escaped version before a rematerialization reads it.

        If False, its dependents have been given up.
        """
        region = self._region(version)
        if region is None or region.sealed is not version:
            return True  # escaped for another reason: mutations are kept in order
        if region.checksum == self._ledger.memory.checksum(region.origin()):
            return True
        self._written_unseen(version, region)
        return False

    def read(self, version: Version, *, is_parameter: bool, evicts: bool) -> Version:
        """Return the version that an operator of the program reads if it is given an escaped one.

        evicts: whether something may be evicted; if not, no checksum is needed.
        """
        region = self._region(version)
        if region is None or not region.usable:
            return version
        memory = self._ledger.memory
        storage = region.origin()
        if region.sealed is None:
            if not (is_parameter or region.from_worker):
                return version
            kind = "private" if region.from_worker else memory.mapping_of(region.span)
            if kind == "file":
                if memory.is_held(storage):
                    return version  # while the program holds the storage itself, it can write to it
                version.escaped = region.usable = False
                self._trusted(version)
                return version
            if kind not in ("private", "shared"):
                region.usable = False
                return version
            if not evicts:
                return version
        elif region.sealed is version and version.used:
            if self.unchanged(version):
                region.changing = False  # the operator that was about to write has not
                return version
            return self._recipes.supersede(version, None, 0)
        if region.sealed is not version:
            self._trusted(version)
        region.sealed, region.changing = version, False
        region.checksum = memory.checksum(storage)
        return version

    def _trusted(self, version: Version) -> None:
        """Notify observers that results can be recomputed from a version from now on."""
        for observer in self._ledger.observers:
            observer.changes(TRUSTED, version)

    def about_to_change(self, version: Version) -> None:
        """Note that an operator is about to write to a version.

        Until it has, nothing else may come to depend on the content.
        """
        region = self._region(version)
        if region is not None:
            region.changing = True

    def give_up(self, version: Version) -> None:
        """Recompute nothing from a version from now on, since it is handed out or shared."""
        region = self._region(version)
        if region is not None:
            region.usable = False
            region.sealed = None

    def lose_dependents(self, version: Version, why: str = LOST) -> None:
        """Give up what was computed from a constant whose content has changed unseen.

        What is in memory stays there; the rest is lost.
        """
        recipes = self._recipes
        stack = [version]
        while stack:
            for node in stack.pop().dependents or ():
                if node.operation is None:
                    continue
                if node.resident and (node.scratch is None or node.locks):
                    recipes.make_constant(node, why)
                else:
                    recipes.lose(node)
                    node.pin = why
                    stack.append(node)
        version.forget_dependents()

    def _written_unseen(self, version: Version, region: Region) -> None:
        region.usable = False
        region.sealed = None
        self.lose_dependents(version)
        why = version.pin or "foreign memory"
        for observer in self._ledger.observers:
            observer.changes(ESCAPES, version, why=why)
        self._recipes.make_constant(version, why)
        version.escaped, version.pin = True, why
