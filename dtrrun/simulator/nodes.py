"""The data of a replay: the paper's storages, tensors and operators (App. C.1), with their state."""

from __future__ import annotations

from typing import Any


class Storage:
    """A node of the policy (`core.node`), with its state in the replay."""

    __slots__ = (
        "__weakref__",
        "age",
        "bound",
        "component",
        "constant",
        "cost",
        "dependents",
        "inputs",
        "last_access",
        "locks",
        "nbytes",
        "neighbourhood",
        "pinned",
        "released",
        "resident",
        "tensors",
        "uses",
    )

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.cost = 0
        self.last_access = 0
        self.inputs: list[Storage] = []
        self.resident = False
        self.constant = False
        self.locks = 0
        self.pinned = False
        self.released = False
        self.age = 0
        self.uses: Any = None
        self.tensors: list[Tensor] = []
        self.component = self.dependents = self.bound = self.neighbourhood = None


class Tensor:
    __slots__ = ("defined", "nbytes", "operator", "storage")

    def __init__(self, storage: Storage, nbytes: int) -> None:
        self.storage = storage
        self.nbytes = nbytes
        """0 for an alias."""
        self.defined = False
        self.operator: Any = None


class Op:
    __slots__ = ("cost", "inputs", "name", "nbytes", "outputs", "peak_bytes")

    def __init__(
        self, name: str, cost: int, inputs: list[Tensor], outputs: list[Tensor], workspace: int = 0
    ) -> None:
        """workspace: bytes that it needs while it runs, in addition to its outputs."""
        self.name = name
        self.cost = cost
        self.inputs = inputs
        self.outputs = outputs
        self.nbytes = 0
        for one in outputs:
            self.nbytes += one.nbytes
            one.operator = self
        self.peak_bytes = self.nbytes + workspace
