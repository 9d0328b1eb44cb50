"""What to evict: heuristics, evicted neighbourhoods and the search for the least score.

Plain Python, shared by the live runtime and the simulator.

    policy = make_policy("h_dtr_eq")
    policy.insert(node)                        # a storage became resident and evictable
    victim = policy.select(now, evictable)     # the one to evict, or None
    policy.evicted(victim)                     # it was
    policy.rematerialized(victim)              # it came back; `insert` it when it is evictable again
"""

from __future__ import annotations

from typing import Any

from .heuristics import ABLATION_NAMES, HEURISTIC_NAMES, Heuristic, check_heuristic, make_heuristic
from .node import Node
from .pool import Policy
from .scan import ScanSearch
from .search import HeapSearch

__all__ = [
    "ABLATION_NAMES",
    "HEURISTIC_NAMES",
    "HeapSearch",
    "Heuristic",
    "Node",
    "Policy",
    "ScanSearch",
    "check_heuristic",
    "make_heuristic",
    "make_policy",
]


def make_policy(
    heuristic: str,
    *,
    seed: int = 0,
    sample: bool = False,
    ignore_small: float = 0.0,
    latest: bool = False,
    scan: bool = False,
) -> Policy[Any]:
    """The policy that evicts by `heuristic` (one of HEURISTIC_NAMES, h'(s=…,m=…,c=…) or module:function).

    seed: of the `random` heuristic and of sampling. sample: search only a random √n of the n nodes.
    ignore_small: nodes under this share of the mean size are chosen only when nothing else is left.
    latest: of equal scores, choose the node that was inserted last, not first.
    scan: compute every score at each choice, which chooses the same.
    Raises ValueError for a heuristic that is unknown or cannot be loaded.
    """
    chosen = make_heuristic(heuristic, seed)
    if scan or sample or not chosen.ordered:
        return ScanSearch(chosen, ignore_small, sample, seed, latest)
    return HeapSearch(chosen, ignore_small, latest)
