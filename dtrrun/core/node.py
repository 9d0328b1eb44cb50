"""The interface of a node in the policy; the runtime and the simulator each implement it.

Nodes are compared with `is` and looked up by number only, because one that is a `weakref.ref` hashes and
compares as its referent does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar


class Node(Protocol):
    """A storage S of App. C. The first eight attributes belong to the owner, the last four to the policy.

    The owner sets the last four to None when it makes the node, and does not touch them again. For heuristics
    with foresight it also has an `age` (`foresight.Made`) and a slot `uses`, which `foresight` fills; the
    owner sets it to () once the program will not use the storage again. What `foresight` puts there is when
    the storage is used, or None, behind what the program was doing when that was looked up.
    """

    @property
    def nbytes(self) -> int:
        """size(S), bytes; fixed while the node is in the pool."""

    @property
    def cost(self) -> int:
        """cost(S), the c_0 of Sec. 2, in units of the clock; fixed while S is evicted."""

    @property
    def last_access(self) -> int:
        """last_access(S), a value of the clock; never decreases."""

    @property
    def inputs(self) -> Sequence[Any]:
        """deps(S): the nodes that S's recipe reads, excluding S."""

    @property
    def resident(self) -> bool: ...

    @property
    def constant(self) -> bool:
        """Whether it has no recipe, and so is never evicted and is in no neighbourhood."""

    @property
    def released(self) -> bool:
        """Whether the program has released it; fixed while the node is in the pool."""

    component: Any
    """S's element among the evicted and released (`neighbourhoods.Evicted`); None while S is resident."""
    dependents: Any
    """deps_e^T(S): the evicted dependents of S, as {id: Evicted}."""
    bound: Any
    """The number of S in the pool; None while it is not there."""
    neighbourhood: Any
    """Numbers of the pool's nodes whose cached e* ends at S (exact neighbourhoods only)."""


N = TypeVar("N", bound=Node)
