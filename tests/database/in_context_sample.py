"""A sample of `in_context`: composites under autocast and in each grad mode, and some operators."""

from __future__ import annotations

from collections.abc import Iterator

from tests.database import in_context
from tests.database.composites import COMPOSITES
from tests.database.in_context import InContext

judge = in_context.judge

EACH = 100
"""One of so many operators."""

MAIN = {"grad", "autocast"}


def names() -> list[str]:
    operators = [name for name in in_context.names() if name not in COMPOSITES]
    return [*COMPOSITES, *operators[::EACH]]


def cases(name: str) -> Iterator[InContext]:
    for case in in_context.cases(name):
        context = case.context
        if name not in COMPOSITES or (set(context.changed()) <= MAIN and context.grad != "backward after"):
            yield case
