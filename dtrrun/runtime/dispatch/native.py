"""The native extension, and the policy of a session."""

from __future__ import annotations

import sys
from types import ModuleType

import torch

from dtrrun import bindings
from dtrrun.core.backend import Policy
from dtrrun.core.heuristics import AUTO, STEADY
from dtrrun.extensions import build
from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime import guards
from dtrrun.runtime.dispatch import arrivals
from dtrrun.runtime.patches import registry
from dtrrun.settings import RuntimeSettings

OTHER_STORAGES = (
    "PyTorch {} frees storages by other functions than dtrrun expects",
    "use another version of PyTorch or dtrrun, and report this",
)


def load(settings: RuntimeSettings) -> ModuleType:
    """Return the native extension, building it if necessary. Operators can come to it from now on.

    Raises CannotBuild, with a one-line message, if it can be neither found nor built, or if this PyTorch's
    storages are not as expected, or the way in which it hands operators on.
    """
    extension = build.load(_nothing if settings.quiet else _say)
    guards.use_extension(extension)
    registry.use_extension(extension)
    _open(extension)
    return extension


def _open(extension: ModuleType) -> None:
    """Let operators come to the extension, and check that they do: once in a process. Raises CannotBuild."""
    if not _opened:
        if not extension.knows_storages():
            raise CannotBuild(OTHER_STORAGES[0].format(torch.__version__), OTHER_STORAGES[1])
        build.check_key()
        _opened.append(extension)
        extension.open_way_in()
    if not _checked:
        arrivals.check(extension)
        _checked.append(extension)


_opened: list[ModuleType] = []
_checked: list[ModuleType] = []


def policy(extension: ModuleType, settings: RuntimeSettings, heuristic: str | None = None) -> Policy:
    """Return a policy for a session.

    heuristic: overrides that of the settings. Raises ValueError if a rule is unknown or cannot be loaded.
    """
    name = heuristic or settings.heuristic
    return bindings.make_policy(
        STEADY if name == AUTO else name,
        seed=settings.seed,
        sample=settings.sample,
        ignore_small=settings.ignore_small,
        extension=extension,
    )


def _nothing(_: str) -> None:
    pass


def _say(text: str) -> None:
    print(f"dtrrun: {text}", file=sys.stderr, flush=True)
