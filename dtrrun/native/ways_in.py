"""Chooses the way in: the place in PyTorch's dispatcher at which operators come to the native extension.

`way_in.h` describes both. A fallback at the dispatch key `Fake` is simpler, but closed once anyone else has
one there, as PyTorch itself is going to. `DTRRUN_WAY_IN` names the one to take.

Uses only the standard library: the launcher checks the variable, and `dtrrun doctor` has the target's
interpreter run this file by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "DTRRUN_WAY_IN"
FAKE, CUSTOM_RNG = "fake", "custom-rng"
KEYS = {FAKE: "Fake", CUSTOM_RNG: "CustomRNGKeyId"}
"""The ways in, each with its dispatch key."""

UNKNOWN = "{!r} is not one of {}"
CLOSED = (
    f"{VARIABLE} is {FAKE}, but PyTorch or another extension uses the dispatch key {KEYS[FAKE]}",
    f"unset {VARIABLE}, or set it to {CUSTOM_RNG}",
)


class Closed(Exception):
    """The way in that the variable names cannot be taken. why: the cause. do: what would help."""

    def __init__(self) -> None:
        super().__init__("; ".join(CLOSED))
        self.why, self.do = CLOSED


def forced(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the way in that the variable names, or None. Raises ValueError if it is unknown."""
    name = environ.get(VARIABLE) or None
    if name is not None and name not in KEYS:
        raise ValueError(f"{VARIABLE}: {UNKNOWN.format(name, ', '.join(KEYS))}")
    return name


def choose(torch: Any, environ: Mapping[str, str] = os.environ) -> str:
    """Return the way in for a process that has taken none. torch: the module.

    Raises Closed, and ValueError as `forced` does.
    """
    name = forced(environ)
    if name == FAKE and is_closed(torch):
        raise Closed
    return name or (CUSTOM_RNG if is_closed(torch) else FAKE)


def is_closed(torch: Any) -> bool:
    """Return whether PyTorch or another extension uses the key `Fake`, for a fallback or kernels."""
    key = torch._C._dispatch_key_parse(KEYS[FAKE])
    return bool(
        torch._C._dispatch_has_backend_fallback(key)
        or torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[FAKE])
    )
