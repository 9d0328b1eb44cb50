"""BudgetError, raised to the program if its budget is too small, and the text that explains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

from dtrrun.sizes import format_size, format_size_up
from dtrrun.telemetry.advice import FOR_A_COMMAND, Advised, advice
from dtrrun.telemetry.holding import as_lines

SHOWN = 4
"""How many reasons why memory cannot be evicted are listed in the message: at least half of them are about
tensors, if there are so many, and half about other memory."""


CPU_WORDS = "DefaultCPUAllocator: can't allocate memory"
"""PyTorch's message when the CPU has no memory left."""


class Advice(NamedTuple):
    """Values of the attributes of an error that have these names."""

    training: dict[str, int | None] | None = None
    expected_bytes: int = 0
    hint: str = ""
    pinned: dict[str, int] | None = None  # None: as the error was made with
    held_by: dict[str, str] | None = None
    holds: dict[str, Any] | None = None
    likely_bytes: int = 0
    plain_bytes: int = 0
    expected_slowdown: float = 1.0
    basis: str = ""


class BudgetError(torch.OutOfMemoryError):
    """The budget is too small for one operator. The program's state is intact.

    A program may catch such errors at every step, and look at none of them. So the text, and what is not at
    hand (`training`, `expected_bytes`, `hint`, `held_by`, `holds`, and the names in `pinned`), are worked out
    when somebody asks for them, from what the session knew when it raised the error.

    The message begins with PyTorch's words for a device without memory, and on a CPU has its allocator's,
    because programs that retry with a smaller batch look for these words, not for the class.

    It has these attributes:

    - `operator`: the name of the operator that did not fit.
    - `needed_bytes`: how much it had to allocate; 0 if it had allocated already.
    - `budget_bytes`: the budget that was too small.
    - `least_budget_bytes`: the smallest budget that would have been enough at this point. A later operator
      may need more.
    - `pinned`: how many bytes in memory could not be evicted, by reason.
    - `held_by`: what refers to most of them, by reason, where a variable of the program was found.
    - `holds`: what the memory is for the program: its `bytes`, a list of `classes` and one of `variables` (as
      in the report of `dtrrun peak`); None if operators have run before anybody asked.
    - `called`: the operator that the program called. It differs from `operator` if an input had to be
      recomputed.
    - `called_bytes`: the bytes of its inputs, its results and all memory that cannot be evicted; 0 if
      unknown.
    - `training`: about how many bytes parameters, gradients and optimizer state need; None if unknown.
    - `expected_bytes`: the budget that is expected to be enough for the whole program; 0 if unknown.
    - `likely_bytes`: a smaller one that may be enough; otherwise the same.
    - `expected_slowdown`: how many times as long as its own work a backward pass takes there; 1 if unknown.
    - `basis`: what the expected budget is for, and what takes more; "" if `plain_bytes` is known.
    - `plain_bytes`: what earlier runs of this command have taken without a budget; 0 if unknown.
    - `device_type`: the type of the session's device.
    - `hint`: what the program itself can do, if that is known.
    - `explained`: whether the session has added what it knows.
    """

    def __init__(
        self,
        operator: str = "",
        needed_bytes: int = 0,
        budget_bytes: int | None = None,
        least_budget_bytes: int = 0,
        pinned: dict[str, int] | None = None,
        overhead: Collection[str] = (),
    ) -> None:
        """overhead: which reasons in `pinned` are not about tensors.

        Without figures, the first argument is the message: a library may re-create the error that way.
        """
        super().__init__()
        told = budget_bytes is None
        self.operator = "" if told else operator
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes or 0
        self.least_budget_bytes = least_budget_bytes
        self._pinned, self._overhead = pinned or {}, overhead
        self.called, self.called_bytes = self.operator, 0
        self.device_type = "cpu"
        self.explained = told
        self._given = (operator,) if told else None  # the arguments, once they are known
        self._advice: Callable[[BudgetError], Advice] | None = None
        self._known = Advice()
        self._how = FOR_A_COMMAND

    def explain(
        self,
        advice: Callable[[BudgetError], Advice],
        how: tuple[str, str] = FOR_A_COMMAND,
        device_type: str = "cpu",
    ) -> None:
        """Set what is called, with this error, once somebody asks what training needs or which budget to try.

        Should not refer to the error, which would then be garbage that only a collection frees.
        """
        self._advice, self._how, self.explained = advice, how, True
        self.device_type = device_type
        self._given = None

    def _settled(self) -> Advice:
        advice, self._advice = self._advice, None
        if advice is not None:
            self._known = advice(self)
        return self._known

    @property
    def training(self) -> dict[str, int | None] | None:
        return self._settled().training

    @property
    def expected_bytes(self) -> int:
        return self._settled().expected_bytes

    @property
    def likely_bytes(self) -> int:
        return self._settled().likely_bytes

    @property
    def plain_bytes(self) -> int:
        return self._settled().plain_bytes

    @property
    def expected_slowdown(self) -> float:
        return self._settled().expected_slowdown

    @property
    def basis(self) -> str:
        return self._settled().basis

    @property
    def hint(self) -> str:
        return self._settled().hint

    @property
    def pinned(self) -> dict[str, int]:
        found = self._settled().pinned
        return self._pinned if found is None else found

    @property
    def held_by(self) -> dict[str, str]:
        return self._settled().held_by or {}

    @property
    def holds(self) -> dict[str, Any] | None:
        return self._settled().holds

    @property
    def args(self) -> tuple[Any, ...]:
        if self._given is None:
            self._given = (self._text(),)
        return self._given

    @args.setter
    def args(self, given: Any) -> None:
        self._given = tuple(given)

    def __str__(self) -> str:
        """Return the message, and below it, in a table, what holds the memory."""
        message = str(self.args[0]) if len(self.args) == 1 else str(self.args) if self.args else ""
        held = self.holds
        return message if held is None else "\n".join([message, *as_lines(held)])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.args))})"

    @property
    def without_advice(self) -> str:
        """The text as far as it is known at once, for C++, which asks whenever it passes an error on."""
        if self._given is not None:
            return str(self.args[0]) if self.args else ""
        return self._text() if self._advice is None else self._text(Advice())

    def keep_to(self, plain_bytes: int) -> None:
        """Claim no more than what the program's tensors would take together without a budget, so far."""
        if plain_bytes > self.budget_bytes:
            self.least_budget_bytes = min(self.least_budget_bytes, plain_bytes)
            self.called_bytes = min(self.called_bytes, plain_bytes)

    @property
    def least_bytes(self) -> int:
        """The bytes known to be needed for the program's own operator and for the one that failed."""
        return max(self.least_budget_bytes, self.called_bytes)

    def __reduce__(self) -> Any:
        """Support pickling: a pool's workers send errors to another process."""
        _ = self.args  # works out the rest
        given = (self.operator, self.needed_bytes, self.budget_bytes, self.least_budget_bytes, self._pinned)
        self._settled()
        return type(self), given, dict(vars(self))

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        for name, value in (state or {}).items():
            setattr(self, name, value)

    def _text(self, known: Advice | None = None) -> str:
        if known is None:
            known = self._settled()
        pinned = self._pinned if known.pinned is None else known.pinned
        names = known.held_by or {}
        rank = f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""
        excess = self.least_budget_bytes - self.budget_bytes
        if self.needed_bytes > 0:
            what = f"{self.operator} needs {format_size_up(self.needed_bytes)} more"
        elif excess > 0:
            what = f"{self.operator} exceeds it by {format_size_up(excess)}"
        else:
            what = f"it does not hold what {self.operator} uses"
        held = ", ".join(
            f"{reason} {format_size(size)}" + (f" [{names[reason]}]" if reason in names else "")
            for reason, size in _shown(pinned, self._overhead)
        )
        evictable = f"nothing else can be evicted ({held})" if held else "nothing can be evicted"
        if self.called != self.operator:
            what = f"{self.called} needs {self.operator} to run again, and {what}"
        advised = Advised(self.least_bytes, known.expected_bytes, known.likely_bytes, known.plain_bytes)
        advised = advised._replace(slowdown=known.expected_slowdown, basis=known.basis)
        least = advice(self.called, advised, known.training, self._how)
        budget = format_size(self.budget_bytes)
        full = f"{rank}{self.device_type.upper()} out of memory. "
        hint = f" {known.hint}." if known.hint else ""
        in_pytorch = f" [{CPU_WORDS}]" if self.device_type == "cpu" else ""
        return (
            f"{full}dtrrun's budget of {budget} is too small: {what}, and {evictable}. "
            f"It takes {least}.{hint}{in_pytorch}"
        )


def _shown(pinned: dict[str, int], overhead: Collection[str]) -> list[tuple[str, int]]:
    """Return the reasons to list, with their bytes, largest first."""
    of_tensors = [reason for reason in pinned if reason not in overhead]
    others = [reason for reason in pinned if reason in overhead]
    listed = dict.fromkeys([*of_tensors[: SHOWN // 2], *others[: SHOWN // 2], *pinned])
    kept = list(listed)[:SHOWN]
    return [(reason, size) for reason, size in pinned.items() if reason in kept]


BudgetError.__module__ = "dtrrun"  # the name that the program uses, also shown in tracebacks
