"""What must hold for a session's own data between any two operators (design note, section 2)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from dtrrun.core.graph import Version
from dtrrun.runtime import storage as memory
from dtrrun.runtime.session import Session
from dtrrun.runtime.storage import rounded
from tests import walks_model


def check(session: Session) -> None:
    """Raise AssertionError if the ledger, the recipes or the pool contradict each other or the memory."""
    ledger = session.ledger
    ledger.collect_dead()
    dtr = session.dtr
    versions = list(ledger.versions.items())
    for key, version in versions:
        check_version(ledger, key, version)
    check_bytes(dtr)
    check_host(ledger, [version for _, version in versions])
    known = reachable([version for _, version in versions])
    for version in known:
        assert version.locks == 0, f"{told(version)} is still locked"
    check_readers(ledger)
    check_recipes(dtr, [version for _, version in versions if not version.resident])
    check_pool(ledger, [version for _, version in versions])
    check_choice_of_copies(ledger, [version for _, version in versions])


def check_version(ledger: Any, key: int, version: Version) -> None:
    assert version.key == key
    assert not version.superseded, f"{told(version)} is listed, but a later version has its storage"
    assert version.scratch is None, f"{told(version)} has memory of its own beside the program's"
    storage = version()
    if storage is None:  # it has just died, and is in the queue
        return
    assert ledger.key_of(storage) == key
    if version.pin == "other device":
        return
    size = storage.nbytes()
    if not version.resident:
        assert memory.is_empty(storage), f"{told(version)} counts as evicted, but has {size} bytes"
        recipe = version.operation is not None or version.has_left
        assert recipe, f"{told(version)} was evicted without a recipe, and is not on the host"
        assert not version.escaped, f"{told(version)} was evicted, but other code can reach it"
    else:
        assert rounded(size) == version.nbytes, f"{told(version)} of {version.nbytes} bytes has {size}"


def check_bytes(dtr: Any) -> None:
    ledger = dtr.ledger
    listed = ledger.versions.values()
    resident = sum(version.nbytes for version in listed if version.resident)
    held = ledger.scratch_bytes + ledger.brought_bytes + sum(ledger.pinned_blocks().values())
    assert ledger.resident_bytes == resident + held, (ledger.resident_bytes, resident, held)
    assert ledger.evicted_bytes == sum(version.nbytes for version in listed if not version.resident)
    assert ledger.scratch_bytes == sum(version.nbytes for version in ledger.scratch)
    for version in ledger.scratch:
        assert version.resident
        assert version.scratch is not None
    if ledger.resident_bytes > ledger.limit and not dtr.eviction.warn_only:
        # The program may have brought tensors that the session did not see being made; then the rest is gone.
        idle = [version for version in ledger.policy if dtr.eviction.may_be_evicted(version)]
        assert not idle, (
            f"{ledger.resident_bytes} bytes in a budget of {ledger.limit}, and {told(idle[0])} stays"
        )


def check_host(ledger: Any, listed: list[Version]) -> None:
    """Check what has left for the host."""
    left = sum(version.nbytes for version in listed if version.has_left and version.operation is None)
    assert ledger.left_bytes == left, (ledger.left_bytes, left)
    if (host := ledger.host) is not None:
        assert host["bytes"] <= min(host["most_bytes"], host["peak_bytes"]), host


def check_readers(ledger: Any) -> None:
    """Check that a version counts as readers at least the recipes of all known versions that read it."""
    reads: Counter[Version] = Counter()
    for operation in {version.operation for version in ledger.known()} - {None}:
        reads.update(operation.inputs)
    for version, count in reads.items():
        assert version.readers >= count, f"{told(version)} has {version.readers} readers of {count}"


def check_recipes(dtr: Any, evicted: list[Version]) -> None:
    """Check that all that is evicted can be computed from constants that are resident, held and unchanged."""
    key_of = dtr.ledger.key_of
    held = {
        key_of(content)
        for version in reachable(evicted)
        if version.operation
        for content in version.operation.constants
    }
    for version in reachable(evicted):
        if version.operation is None:
            assert version.resident or version.has_left, (
                f"{told(version)}, of which something is to be recomputed, is lost"
            )
            seen = not version.escaped or dtr.recipes.foreign.trusts(version)  # trusted memory has a checksum
            assert seen, f"{told(version)} is read by recipes, but other code can write to it"
            key = key_of(version.memory())
            own = version.scratch is not None or (version.has_left and version in evicted)
            assert own or key in held, f"{told(version)} is not kept for the recipe that reads it"
        elif not version.resident or version.scratch is not None:
            assert version.operation.secured, f"{told(version)} is needed for a replay, but not secured"


def check_pool(ledger: Any, listed: list[Version]) -> None:
    policy = ledger.policy
    for version in policy:
        assert version.pool_id is not None
        assert version.operation is not None, f"{told(version)} is in the pool without a recipe"
        assert version.resident or version() is None, f"{told(version)} is in the pool, but evicted"
    assert policy.nbytes == sum(version.nbytes for version in policy)
    if not ledger.pressure:
        return
    for version in listed:
        if (
            version.resident
            and version.operation is not None
            and version.nbytes >= max(ledger.least_bytes, 1)
        ):
            assert version.pool_id is not None, f"{told(version)} is not in the pool"


def check_choice_of_copies(ledger: Any, listed: list[Version]) -> None:
    assert ledger.largest_copy() == walks_model.held_bytes(listed) // 4
    assert ledger.weigh() == walks_model.weigh(listed)


def reachable(versions: list[Version]) -> list[Version]:
    """Return these, and all that their recipes depend on through what is not in memory."""
    seen: dict[int, Version] = {id(version): version for version in versions}
    stack = list(versions)
    while stack:
        version = stack.pop()
        if version.resident and version.scratch is None:
            continue
        for source in version.inputs:
            if id(source) not in seen:
                seen[id(source)] = source
                stack.append(source)
    return list(seen.values())


def told(version: Version) -> str:
    made = (
        version.operation.signature.operator.name
        if version.operation is not None
        else f"constant ({version.pin})"
    )
    return f"<{made}, version {version.mutations}, {version.nbytes} bytes>"


def content(version: Version) -> bytes:
    """Return the bytes of a resident version, read past all patches."""
    import ctypes

    storage = version.memory()
    assert storage is not None
    assert memory.is_ours(storage)
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())
