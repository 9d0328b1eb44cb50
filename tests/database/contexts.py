"""What a program may have set around its operators, and a covering choice of the combinations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

GRAD = ("backward inside", "backward after", "no_grad", "inference")
AUTOCAST = (False, True)
DEFAULT_DTYPE = (torch.float32, torch.float64, torch.bfloat16)
DEVICE = ("", "cpu", "meta")
USER_MODE = ("", "dispatch inside", "dispatch outside", "function inside", "function outside")
DETERMINISTIC = (False, True)
INPUTS = (torch.float32, torch.bfloat16, torch.int64, torch.complex64)
VARIANT = ("", "in place", "out=")


class Context(NamedTuple):
    """One combination. The defaults are those of a program that sets nothing.

    `grad` says where the backward pass runs: inside the context, or after its end, as the documentation of
    autocast recommends. `inputs` is the sample's dtype and `variant` the operator's form: neither is set by a
    program around an operator, but both determine what a context changes.
    """

    grad: str = GRAD[0]
    autocast: bool = AUTOCAST[0]
    default_dtype: torch.dtype = DEFAULT_DTYPE[0]
    device: str = DEVICE[0]
    user_mode: str = USER_MODE[0]
    deterministic: bool = DETERMINISTIC[0]
    inputs: torch.dtype = INPUTS[0]
    variant: str = VARIANT[0]

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in self.changed().items()]
        return ", ".join(told).replace("torch.", "") or "nothing set"

    def changed(self) -> dict[str, Any]:
        """Return what differs from a program that sets nothing."""
        plain = self._field_defaults
        return {name: value for name, value in self._asdict().items() if value != plain[name]}


LEVELS = (GRAD, AUTOCAST, DEFAULT_DTYPE, DEVICE, USER_MODE, DETERMINISTIC, INPUTS, VARIANT)
"""The values of each field of `Context`, in order."""

NOT_TOGETHER = {("device", "meta"): ("variant", "out=")}
"""`out=` needs an initial result, which an operator on the other device refuses to make."""


@cache
def covering() -> tuple[Context, ...]:
    """Return autocast × grad mode in full, each other setting alone, and each pair at least once."""
    rows = [Context(grad, autocast) for grad, autocast in product(GRAD, AUTOCAST)]
    rows += [
        Context()._replace(**{name: value})
        for name, values in zip(Context._fields, LEVELS, strict=True)
        for value in values[1:]
        if name not in ("grad", "autocast")
    ]
    missing = [pair for pair in _pairs() if not any(_has(row, pair) for row in rows)]
    while missing:
        row = _next_row(missing)
        rows.append(row)
        missing = [pair for pair in missing if not _has(row, pair)]
    return tuple(rows)


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs() -> list[Pair]:
    settings = [
        [(name, value) for value in values] for name, values in zip(Context._fields, LEVELS, strict=True)
    ]
    pairs = [pair for one, other in combinations(settings, 2) for pair in product(one, other)]
    return [pair for pair in pairs if NOT_TOGETHER.get(pair[0]) != pair[1]]


def _has(row: Context, pair: Pair) -> bool:
    return all(getattr(row, name) == value for name, value in pair)


def _next_row(missing: list[Pair]) -> Context:
    """Start with a missing pair; each further field takes the value that covers most of the others."""
    chosen = dict(missing[0])
    for name, values in zip(Context._fields, LEVELS, strict=True):
        if name not in chosen:
            allowed = [value for value in values if not _clashes(chosen, (name, value))]
            chosen[name] = max(allowed, key=lambda value: _covered(missing, {**chosen, name: value}))
    return Context(**chosen)


def _covered(missing: list[Pair], chosen: dict[str, Any]) -> int:
    return sum(all(name in chosen and chosen[name] == value for name, value in pair) for pair in missing)


def _clashes(chosen: dict[str, Any], setting: tuple[str, Any]) -> bool:
    return any(
        setting in (one, other)
        and all(chosen.get(name) == value for name, value in (one, other) if (name, value) != setting)
        for one, other in NOT_TOGETHER.items()
    )


class Rounding(TorchDispatchMode):
    """A user's mode that changes values, and notes what it sees."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        result = func(*args, **(kwargs or {}))
        fresh = isinstance(func, torch._ops.OpOverload) and all(
            returned.alias_info is None for returned in func._schema.returns
        )
        if (
            fresh
            and type(result) is torch.Tensor
            and result.layout == torch.strided
            and result.is_floating_point()
            and not result._is_zerotensor()  # has no memory, but kernels called in here would read it
        ):
            return torch.round(result * 64) / 64
        return result


class Listening(TorchFunctionMode):
    """A user's mode that notes the functions that a program calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(resolve_name(func) or getattr(func, "__name__", func)))
        return func(*args, **(kwargs or {}))


MODES = {"dispatch": Rounding, "function": Listening}


@contextmanager
def around(context: Context) -> Iterator[None]:
    """Set what a program sets before the session begins."""
    kind, _, where = context.user_mode.partition(" ")
    with ExitStack() as stack:
        if where == "outside":
            stack.enter_context(MODES[kind]())
        yield


@contextmanager
def within(context: Context) -> Iterator[list[str]]:
    """Set what it sets inside the session; yield what its own mode sees there."""
    kind, _, where = context.user_mode.partition(" ")
    before = torch.get_default_dtype(), _determinism()
    with ExitStack() as stack:
        stack.callback(_restore, *before)
        if context.device:
            stack.enter_context(torch.device(context.device))
        torch.set_default_dtype(context.default_dtype)
        if context.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        if context.grad == "no_grad":
            stack.enter_context(torch.no_grad())
        elif context.grad == "inference":
            stack.enter_context(torch.inference_mode())
        if context.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        yield stack.enter_context(MODES[kind]()).seen if where == "inside" else []


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _restore(default_dtype: torch.dtype, determinism: tuple[bool, bool]) -> None:
    torch.set_default_dtype(default_dtype)
    torch.use_deterministic_algorithms(determinism[0], warn_only=determinism[1])
