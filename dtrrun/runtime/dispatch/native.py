"""The native extension, and the policy of a session."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from dtrrun import bindings
from dtrrun.core.backend import Policy
from dtrrun.core.heuristics import AUTO, FIRST
from dtrrun.native import build, ways_in
from dtrrun.runtime import guards
from dtrrun.runtime.patches import registry
from dtrrun.settings import RuntimeSettings


def load(settings: RuntimeSettings) -> ModuleType:
    """Return the native extension, building it if necessary.

    Raises CannotBuild, with a one-line message, if it can be neither found nor built, and RuntimeError if the
    way in named by DTRRUN_WAY_IN does not exist or is closed.
    """
    extension = build.load(_nothing if settings.quiet else _say)
    _take_way_in(extension)
    return extension


def _take_way_in(extension: ModuleType) -> None:
    """Open the extension's way in, unless an earlier session has. Raises RuntimeError."""
    try:
        extension.use_way(extension.way() or ways_in.choose(torch))
    except (ways_in.Closed, ValueError) as error:
        raise RuntimeError(f"dtrrun: {error}") from None
    guards.use_extension(extension)
    registry.use_extension(extension)


def policy(extension: ModuleType, settings: RuntimeSettings, heuristic: str | None = None) -> Policy:
    """Return a policy for a session.

    heuristic: overrides that of the settings. Raises ValueError if a rule is unknown or cannot be loaded.
    """
    name = heuristic or settings.heuristic
    return bindings.make_policy(
        FIRST if name == AUTO else name,
        seed=settings.seed,
        sample=settings.sample,
        ignore_small=settings.ignore_small,
        extension=extension,
    )


def _nothing(_: str) -> None:
    pass


def _say(text: str) -> None:
    print(f"dtrrun: {text}", file=sys.stderr, flush=True)
