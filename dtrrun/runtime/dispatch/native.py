"""Decides what is done natively: how operators come to a session, and the search for what to evict."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType
from typing import Any

from dtrrun.core.graph import Graph, Operation, Signature, Version
from dtrrun.core.heuristics import AUTO, FIRST, make_heuristic
from dtrrun.core.ledger import Ledger, SlottedLedger
from dtrrun.core.pool import Policy
from dtrrun.core.search import make_policy
from dtrrun.native import build
from dtrrun.settings import RuntimeSettings


def choose(settings: RuntimeSettings) -> ModuleType | None:
    """Return the native extension, or None if it is off. Raises CannotBuild, of one line."""
    if settings.native == "off":
        return None
    return build.load(_nothing if settings.quiet else _say)


@cache
def graph(extension: ModuleType) -> Graph:
    """Return what makes native nodes. They have the attributes of Python's, and get its methods here."""
    for native, own in (extension.Version, Version), (extension.Operation, Operation):
        for name, value in vars(own).items():
            if name not in vars(native) and (callable(value) or isinstance(value, property)):
                setattr(native, name, value)
    signature = type("NativeSignature", (extension.SignatureFigures, Signature), {})
    return Graph(
        extension.Version,
        extension.Operation,
        signature,
        extension.Queue,
        extension.Versions,
        extension.key_of,
    )


@cache
def parts(extension: ModuleType | None) -> tuple[Graph, type[Ledger]]:
    """Return what makes the graph's nodes, and the class of the ledger."""
    if extension is None:
        return Graph(), SlottedLedger
    return graph(extension), type("NativeLedger", (extension.Counters, Ledger), {})


def policy(
    extension: ModuleType | None, settings: RuntimeSettings, heuristic: str | None = None
) -> Policy[Any]:
    """Return a policy of a session: the extension's for most rules, Python's for the user's own and `random`.

    heuristic: another than that of the settings. Raises ValueError for a rule that is unknown or cannot be
    loaded.
    """
    name = heuristic or settings.heuristic
    sample, ignore_small = settings.sample, settings.ignore_small
    if name == AUTO:
        name = FIRST
    if extension is not None and not (sample or ignore_small):
        rule = make_heuristic(name, settings.seed)
        if rule.powers is not None:
            found: Policy[Any] = extension.Policy(rule)
            return found
    return make_policy(name, seed=settings.seed, sample=sample, ignore_small=ignore_small)


def _nothing(_: str) -> None:
    pass


def _say(text: str) -> None:
    print(f"dtrrun: {text}", file=sys.stderr, flush=True)
