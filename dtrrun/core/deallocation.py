"""Storages that the program releases (`core/deallocation.h`)."""

from __future__ import annotations

from dtrrun.core import bound


class Deallocation(bound.Deallocation):
    """Keeps released storages while that saves more than it costs."""
