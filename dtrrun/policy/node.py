"""What the policy asks of a storage's record; the runtime and the simulator each bring their own.

Records are compared with `is` and looked up by number only: one that is a `weakref.ref` hashes and
compares as its referent does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar


class Node(Protocol):
    """A storage S of App. C. The first eight are the owner's to keep, the last four the policy's.

    The owner sets the last four to None when it makes the record, and touches them no more. For heuristics
    with foresight it has an `age` besides (`foresight.Made`), and room for `uses`, which `foresight` fills;
    the owner sets it to () where the program itself will use the storage no more.
    """

    @property
    def nbytes(self) -> int:
        """size(S), bytes; fixed while the node is in the pool."""

    @property
    def cost(self) -> int:
        """cost(S), the c_0 of Sec. 2, in units of the clock; fixed while S is evicted."""

    @property
    def last_access(self) -> int:
        """last_access(S), a value of the clock; never goes back."""

    @property
    def inputs(self) -> Sequence[Any]:
        """deps(S): the nodes that S's recipe reads, without S itself."""

    @property
    def resident(self) -> bool: ...

    @property
    def constant(self) -> bool:
        """Has no recipe, so is never evicted and in no neighbourhood."""

    @property
    def released(self) -> bool:
        """The program itself has it no more; fixed while the node is in the pool."""

    component: Any
    """S's membership among the evicted and released (`evicted.Evicted`); None while S is resident."""
    dependents: Any
    """deps_e^T(S): the evicted dependents of S, as {id: Evicted}."""
    bound: Any
    """The number under which S is in the pool; None while it is not."""
    neighbourhood: Any
    """Numbers of the pool's nodes whose cached e* ends at S (exact neighbourhoods only)."""


N = TypeVar("N", bound=Node)
