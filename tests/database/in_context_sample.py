"""A sample of `in_context`: half of the composites under autocast and in each grad mode, some operators."""

from __future__ import annotations

from collections.abc import Iterator

from tests.database import in_context
from tests.database.composites import COMPOSITES
from tests.database.in_context import InContext

judge = in_context.judge

EACH = 200
"""One out of this many operators."""

MAIN = {"grad", "autocast"}
LEFT_OUT = {("backward after", False), ("backward after", True), ("no_grad", True)}
"""Contexts of composites that differ little from the others."""


def names() -> list[str]:
    operators = [name for name in in_context.names() if name not in COMPOSITES]
    return [*list(COMPOSITES)[::2], *operators[::EACH]]


def cases(name: str) -> Iterator[InContext]:
    for case in in_context.cases(name):
        context = case.context
        main = set(context.changed()) <= MAIN and (context.grad, context.autocast) not in LEFT_OUT
        if name not in COMPOSITES or main:
            yield case
