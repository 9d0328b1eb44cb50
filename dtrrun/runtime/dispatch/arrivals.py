"""Checks that PyTorch hands operators to the native extension as it did when this was written.

`docs/design/native.md` says what of PyTorch's dispatcher this relies on. If another version of PyTorch
differed, operators could pass by unseen, and results be wrong. So before the first session of a process, an
operator of each kind is called. Each must arrive, and what its kernel calls must not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime import guards

CHANGED = (
    "PyTorch {} does not hand operators on as dtrrun expects: for {}, {} should have arrived, and {} has",
    "use another version of PyTorch or dtrrun, and report this",
)
FILLED = "`torch.tensor`, which fills memory by address"

Case = tuple[str, str, Callable[[], Any]]


def cases(x: torch.Tensor) -> list[Case]:
    """Return calls: what kind of operator, its name, and the call. x: a square matrix."""
    aten, sparse = torch.ops.aten, x.to_sparse()
    return [
        ("an operator", "aten::add.Tensor", lambda: aten.add(x, x)),
        ("an operator on a list", "aten::cat", lambda: aten.cat([x, x])),
        ("a view", "aten::t", lambda: aten.t(x)),
        ("a factory", "aten::empty.memory_format", lambda: aten.empty([2], device="cpu")),
        ("a factory whose arguments are boxed", "aten::eye", lambda: aten.eye(2, device="cpu")),
        ("a composite", "aten::matmul", lambda: aten.matmul(x, x)),
        ("a composite with a kernel for CPUs", "aten::silu_backward", lambda: aten.silu_backward(x, x)),
        ("an operator on a sparse tensor", "aten::neg", lambda: aten.neg(sparse)),
    ]


def check(native: ModuleType, cases: Callable[[torch.Tensor], Sequence[Case]] = cases) -> None:
    """Raise CannotBuild, with a line that says what differs. native: the extension, without a session."""

    def run() -> None:
        for what, name, call in cases(torch.ones(2, 2, device="cpu")):
            if (found := native.heard(call)) != [name]:
                raise _changed(what, name, found)
        found = native.heard(lambda: torch.tensor([1.0], device="cpu"))
        if any(name.startswith("aten::empty") for name in found):
            raise _changed(FILLED, "no aten::empty", found)

    guards.aside(run)


def _changed(what: str, expected: str, found: list[str]) -> CannotBuild:
    received = ", ".join(found) or "nothing"
    return CannotBuild(CHANGED[0].format(torch.__version__, what, expected, received), CHANGED[1])
