"""What must hold of a session's own data between any two operators (design note, section 2)."""

from __future__ import annotations

from typing import Any

from dtrrun.ledger.record import Record
from dtrrun.runtime import storage as memory
from dtrrun.runtime.session import Session
from dtrrun.runtime.storage import rounded


def check(session: Session) -> None:
    """Raises AssertionError where the ledger, the recipes or the pool contradict themselves or the memory."""
    ledger = session.ledger
    ledger.drain()
    records = list(ledger.records.items())
    for key, record in records:
        check_record(ledger, key, record)
    check_bytes(ledger)
    known = reachable([record for _, record in records])
    for record in known:
        assert record.locks == 0, f"{told(record)} is still locked"
    check_recipes(ledger, [record for _, record in records if not record.resident])
    check_pool(ledger, [record for _, record in records])


def check_record(ledger: Any, key: int, record: Record) -> None:
    assert record.key == key
    assert not record.superseded, f"{told(record)} is listed, but a later version has its storage"
    assert record.held is None, f"{told(record)} has memory of its own beside the program's"
    storage = record()
    if storage is None:  # died this moment: it is in the queue
        return
    assert id(storage) == key
    if record.pin == "other device":
        return
    size = storage.nbytes()
    if not record.resident:
        assert size == 0, f"{told(record)} counts as evicted, but has {size} bytes"
        assert record.op is not None, f"{told(record)} was evicted without a recipe"
        assert not record.exposed, f"{told(record)} was evicted, but other code can reach it"
    else:
        assert rounded(size) == record.nbytes, f"{told(record)} of {record.nbytes} bytes has {size}"


def check_bytes(ledger: Any) -> None:
    listed = ledger.records.values()
    resident = sum(record.nbytes for record in listed if record.resident)
    held = sum(block.nbytes for block in ledger.blocks.values())
    assert ledger.resident_bytes == resident + held, (ledger.resident_bytes, resident, held)
    assert ledger.evicted_bytes == sum(record.nbytes for record in listed if not record.resident)
    assert ledger.held_bytes == sum(record.nbytes for record in ledger.held.values())
    for record in ledger.held.values():
        assert record.resident
        assert record.held is not None
        assert id(record.block) in ledger.blocks
    if ledger.resident_bytes > ledger.limit and not ledger.warn_only:
        # The program may have brought tensors that the session did not see being made; then all else is gone.
        idle = [record for record in ledger.policy._pool.values() if ledger._evictable(record)]
        assert not idle, (
            f"{ledger.resident_bytes} bytes in a budget of {ledger.limit}, and {told(idle[0])} stays"
        )


def check_recipes(ledger: Any, evicted: list[Record]) -> None:
    """All that is evicted can be computed from constants that are here, kept alive and unchanged."""
    held = {id(content) for record in reachable(evicted) if record.op for content in record.op.held or ()}
    for record in reachable(evicted):
        if record.op is None:
            assert record.resident, f"{told(record)}, of which something is to be recomputed, is lost"
            seen = not record.exposed or ledger.foreign.trusts(record)  # it has a checksum
            assert seen, f"{told(record)} is read by recipes, but other code can write to it"
            assert id(record.memory()) in held, f"{told(record)} is not kept for the recipe that reads it"
        elif not record.resident or record.held is not None:
            assert record.op.secured, f"{told(record)} is needed for a replay, but not secured"


def check_pool(ledger: Any, listed: list[Record]) -> None:
    policy = ledger.policy
    for number, record in policy._pool.items():
        assert record.bound == number
        assert record.op is not None, f"{told(record)} is in the pool without a recipe"
        assert record.resident or record() is None, f"{told(record)} is in the pool, but evicted"
    assert policy._pool_nbytes == sum(record.nbytes for record in policy._pool.values())
    if not ledger.pressure:
        return
    for record in listed:
        if record.resident and record.op is not None and record.nbytes >= max(ledger.least_bytes, 1):
            assert record.bound is not None, f"{told(record)} is not in the pool"


def reachable(records: list[Record]) -> list[Record]:
    """These, and all that their recipes lead to through what is not in memory."""
    seen: dict[int, Record] = {id(record): record for record in records}
    stack = list(records)
    while stack:
        record = stack.pop()
        if record.resident and record.held is None:
            continue
        for source in record.inputs:
            if id(source) not in seen:
                seen[id(source)] = source
                stack.append(source)
    return list(seen.values())


def told(record: Record) -> str:
    made = record.op.signature.operator.name if record.op is not None else f"constant ({record.pin})"
    return f"<{made}, version {record.version}, {record.nbytes} bytes>"


def content(record: Record) -> bytes:
    """The bytes of a resident record, read past everything."""
    import ctypes

    storage = record.memory()
    assert storage is not None
    assert memory.is_ours(storage)
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())
