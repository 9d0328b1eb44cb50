"""Memory that PyTorch does not own: weights from NumPy, from a buffer or from a mapped file.

Nothing of it is ever evicted. Whether results may be recomputed from it is another question: operators that
write to it are seen, but the program may also write to it by other ways, and no version counter tells.

- What other processes can write to (shared memory), and all that is no parameter (a batch in a loader's
  array): nothing is recomputed from it.
- A parameter in a private mapping of a file (safetensors, `torch.load(mmap=True)`): nobody else has that
  memory. It is a constant like any other.
- A parameter in other memory of this process (`torch.from_numpy`, `torch.frombuffer`): a constant as long as
  its content is found the same by a checksum, whenever an operator of the program reads it, when something
  that was computed from it is to be evicted, and before a replay reads it. So a write that nobody saw never
  ends in a wrong value: what was computed before and is in memory stays there from then on, and what was
  evicted is lost, of which an error tells whoever needs it.
"""

from __future__ import annotations

import weakref
from typing import Any

from dtrrun.ledger.record import Record

LOST = "computed from memory that was then written to outside of PyTorch"


class LostError(RuntimeError):
    """What the program needs was evicted, and can't be recomputed: foreign memory that it was computed from
    has been written to by code that is not PyTorch."""

    def __init__(self) -> None:
        super().__init__(
            "dtrrun: a tensor that was evicted is needed, but the parameter that it was computed from is in "
            "memory that PyTorch does not own (torch.from_numpy, torch.frombuffer), and other code has "
            "written to it since. Write to the parameter with PyTorch (parameter.copy_), copy it when it is "
            "loaded (.clone()), or keep in memory what is needed later (session.pin)."
        )


LostError.__module__ = "dtrrun"  # the name by which a program knows it, in tracebacks as well


class Region:
    """One foreign storage."""

    __slots__ = ("changing", "checksum", "origin", "sealed", "span", "usable")

    def __init__(self, storage: Any, span: tuple[int, int]) -> None:
        self.origin = weakref.ref(storage)
        self.span = span  # of addresses
        self.usable = True  # until it is known that others write to it
        self.sealed: Record | None = None  # the version whose content has the checksum
        self.checksum = 0
        self.changing = False  # an operator is about to write to it


class Foreign:
    """Knows which foreign storages can be recomputed from.

    The records of all of them are `exposed`, so that operators that read them take the careful way; but for
    the private mappings, once a parameter has been seen in them.
    """

    def __init__(self, ledger: Any) -> None:
        self._ledger = ledger
        self._regions: dict[int, Region] = {}  # by the key of the storage's record
        self._prune_at = 64

    def adopted(self, record: Record, storage: Any) -> None:
        """A foreign storage is new to the ledger. Raises BudgetError."""
        regions = self._regions
        if len(regions) >= self._prune_at:
            for key in [key for key, region in regions.items() if region.origin() is None]:
                del regions[key]
            self._prune_at = 2 * len(regions) + 64
        region = Region(storage, self._ledger.memory.span_of(storage))
        first, last = region.span
        for key, other in list(regions.items()):
            if other.span[0] < last and first < other.span[1] and other.origin() is not None:
                # Each is written to when the other is, and neither's version tells.
                region.usable = False
                self._ledger.expose(self._ledger.records[key], "foreign memory")
        regions[record.key] = region

    def _region(self, record: Record) -> Region | None:
        region = self._regions.get(record.key)
        return region if region is not None and region.origin() is not None else None

    def undecided(self, record: Record) -> bool:
        """Whether it is foreign, and nothing has been recomputed from it so far."""
        region = self._region(record)
        return region is not None and region.usable and region.sealed is None

    def trusts(self, record: Record) -> bool:
        """Whether an exposed record is a constant all the same, as far as anyone knows."""
        region = self._region(record)
        return region is not None and region.sealed is record and region.usable and not region.changing

    def may_be_read(self, record: Record) -> bool:
        """Whether something that was computed from an exposed record may be evicted: looks at the content."""
        return self.trusts(record) and self.unchanged(record)

    def unchanged(self, record: Record) -> bool:
        """Before a replay reads an exposed record. False: what depended on it has been given up."""
        region = self._region(record)
        if region is None or region.sealed is not record:
            return True  # exposed for another reason: the ledger's own order sees to it
        if region.checksum == self._ledger.memory.checksum(region.origin()):
            return True
        self._written_unseen(record, region)
        return False

    def read(self, record: Record, *, is_parameter: bool, evicts: bool) -> Record:
        """An operator of the program is about to read an exposed record: the version that it reads.

        evicts: something may be evicted; else there is no need for a checksum.
        """
        region = self._region(record)
        if region is None or not region.usable:
            return record
        memory = self._ledger.memory
        storage = region.origin()
        if region.sealed is None:
            if not is_parameter:
                return record
            kind = memory.mapping_of(region.span)
            if kind == "file":
                if memory.is_held(storage):
                    return record  # the program can write to the storage itself: as long as it has it
                record.exposed = region.usable = False
                self._ledger.trusted(record)
                return record
            if kind != "private":
                region.usable = False
                return record
            if not evicts:
                return record
        elif region.sealed is record and record.used:
            if self.unchanged(record):
                region.changing = False  # if an operator was going to write to it, it has not
                return record
            version: Record = self._ledger.supersede(record, None, 0)
            return version
        if region.sealed is not record:
            self._ledger.trusted(record)
        region.sealed, region.changing = record, False
        region.checksum = memory.checksum(storage)
        return record

    def about_to_change(self, record: Record) -> None:
        """An operator is going to write to it: until it has, nothing else may come to rely on the content."""
        region = self._region(record)
        if region is not None:
            region.changing = True

    def give_up(self, record: Record) -> None:
        """It is handed out, or shared: nothing is recomputed from it from now on."""
        region = self._region(record)
        if region is not None:
            region.usable = False
            region.sealed = None

    def _written_unseen(self, record: Record, region: Region) -> None:
        """What was computed from the old content stays if it is in memory, and is lost if it is not."""
        region.usable = False
        region.sealed = None
        ledger = self._ledger
        stack = [record]
        while stack:
            for reference in stack.pop().secured_by or ():
                node = reference()
                if node is None or node.op is None:
                    continue
                if node.resident and (node.held is None or node.locks):
                    ledger.make_constant(node, LOST)
                else:
                    ledger.lose(node)
                    node.pin = LOST
                    stack.append(node)
        record.secured_by = None
        ledger.expose(record, record.pin or "foreign memory")
