"""Reads the Python modules that inductor generates: which kernels they call, and with what.

Such a module allocates buffers and calls kernels on them, bypassing PyTorch's dispatcher. Its source says
what a kernel does with each argument: inductor declares what a kernel only reads as `const`, and names what
it updates in place `in_out_ptr`.
"""

from __future__ import annotations

import ast
import hashlib
import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_INTEGERS = {"int64_t", "int32_t", "int", "long", "size_t"}
_NUMBERS = {"float", "double"}
_COMPILER = "async_compile"
"""The name of inductor's kernel compiler in these modules."""
_CPP_WRAPPER = "CppWrapperCodeCache"
"""The name that they import if the whole graph is one C++ function."""
UPDATED = "in_out_ptr"
MET = "_dtrrun_met"
"""The name, in a generated module, of the token of the last session that met it and of what was read then."""


@dataclass(frozen=True)
class Kernel:
    """A kernel, as a module defines it.

    arguments: a letter for each argument, as `native.compiled_kernel` expects it. updated: whether it
    updates each of them in place, rather than overwriting it.
    """

    name: str
    arguments: str
    updated: tuple[bool, ...]
    digest: str
    """Of its source: kernels of the same name differ from graph to graph."""
    is_triton: bool = False
    """Whether it is launched through its method `run`."""


@dataclass
class Found:
    """What a module's source says. unknown: what bypasses the dispatcher and is not understood, if any."""

    kernels: dict[str, Kernel] = field(default_factory=dict)
    unknown: str = ""


def read(source: str) -> Found:
    """Return the kernels of a generated module."""
    found = Found()
    if _CPP_WRAPPER in source:
        found.unknown = "a graph in C++ (cpp_wrapper)"
        return found
    for statement in ast.parse(source).body:
        if not (isinstance(statement, ast.Assign) and isinstance(call := statement.value, ast.Call)):
            continue
        if not (isinstance(made := call.func, ast.Attribute) and isinstance(made.value, ast.Name)):
            continue
        if made.value.id != _COMPILER or not isinstance(target := statement.targets[0], ast.Name):
            continue
        reader = _READERS.get(made.attr)
        kernel = reader(target.id, call) if reader else None
        if kernel is None:
            found.unknown = f"{target.id} ({made.attr})"
            return found
        found.kernels[kernel.name] = kernel
    return found


def _cpp(name: str, call: ast.Call) -> Kernel | None:
    """Return a C++ kernel; None if it takes anything other than tensors and numbers."""
    try:
        types, source = (ast.literal_eval(arg) for arg in call.args[:2])
    except ValueError:
        return None
    letters = [_letter_of(declared) for declared in types]
    parameters = re.search(r"\bkernel\s*\(([^)]*)\)", source)
    names = re.findall(r"(\w+)\s*(?:,|$)", parameters[1]) if parameters else []
    if None in letters or len(names) != len(letters):
        return None
    return Kernel(
        name,
        "".join(map(str, letters)),
        # Memory that the kernel itself computes before it updates it also has a second name.
        tuple(
            one.startswith(UPDATED) and not re.search(rf"\bauto out_ptr\d+ = {one};", source) for one in names
        ),
        hashlib.sha256(repr((types, source)).encode()).hexdigest()[:8],
    )


def _triton(name: str, call: ast.Call) -> Kernel | None:
    """Return a Triton kernel. Its parameters are named as in C++. Their types are declared beside it, as are
    the parameters that it changes, since the program's own kernels use other names."""
    try:
        source = ast.literal_eval(call.args[1])
    except (ValueError, IndexError):
        return None
    function = next((one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef)), None)
    if function is None:
        return None
    said: dict[str, Any] = {}
    for keyword in (
        one for decorator in function.decorator_list for one in getattr(decorator, "keywords", ())
    ):
        if keyword.arg in ("triton_meta", "inductor_meta") and isinstance(keyword.value, ast.Dict):
            said |= _literals(keyword.value)
    types, changed = said.get("signature"), said.get("mutated_arg_names", [])
    if not isinstance(types, dict):
        return None
    letters, updated = "", []
    for parameter in function.args.args:
        declared = types.get(parameter.arg, "constexpr")
        if isinstance(
            parameter.annotation, ast.Attribute
        ):  # tl.constexpr: block sizes, which are not arguments
            continue
        writes = parameter.arg in changed or parameter.arg.startswith(("out_ptr", UPDATED))
        if declared.startswith("*"):
            letters += "w" if writes else "r"
        elif declared.startswith(("i", "u", "constexpr")):
            letters += "i"
        elif declared.startswith("fp"):
            letters += "f"
        else:
            return None
        updated.append(parameter.arg in changed or parameter.arg.startswith(UPDATED))
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    return Kernel(name, letters, tuple(updated), digest, is_triton=True)


def _literals(table: ast.Dict) -> dict[str, Any]:
    """Return the entries of a dictionary that are literals."""
    found = {}
    for key, value in zip(table.keys, table.values, strict=True):
        with suppress(ValueError):
            found[ast.literal_eval(key)] = ast.literal_eval(value)  # type: ignore[arg-type]
    return found


_READERS = {"cpp_pybinding": _cpp, "triton": _triton}
"""Keyed by the method of inductor's compiler that a module calls."""


def _letter_of(declared: str) -> str | None:
    bare = declared.removeprefix("const ").strip()
    if bare.endswith("*"):
        return "r" if declared.startswith("const ") else "w"
    return "i" if bare in _INTEGERS else "f" if bare in _NUMBERS else None


# -- reused buffers ----------------------------------------------------------------------------------------

_REUSES = re.compile(
    r"^(\s+)(\w+) = (?:(\w+)|reinterpret_tensor\((\w+), (\([^()]*\)), (\([^()]*\)), 0\)); del (\w+)  # reuse$"
)
_ALIAS = re.compile(r"^\s+\w+ = reinterpret_tensor\(.*\)  # alias$")
_CALL = re.compile(r"^(\w+)(?:\.run)?\((.*)\)$")
_INTO = re.compile(r"^[\w.]+\((.*), out=(\w+)\)$")
ANEW, COPY = "_dtrrun_anew", "_dtrrun_copy"
"""The names in a module of the functions that allocate a buffer, and that copy one."""


def with_new_buffers(source: str, kernels: dict[str, Kernel]) -> str | None:
    """Return the part of a module's source that calls kernels, changed to overwrite only new buffers.

    Inductor gives a kernel the buffer of a value that is no longer read. Then the new value depends on all
    earlier values in the same memory, and recomputing it would require all of them. So the old value is
    released after its last use, and the kernel gets a new buffer. For the same reason, what is updated in
    place several times, such as a sum over the layers, is copied in between. Lines stay where they were.
    None if nothing changes.
    """
    lines = source.split("\n")
    first = next((place for place, line in enumerate(lines) if line.startswith(f"del {_COMPILER}")), None)
    if first is None:
        return None
    last = next(
        (place for place, line in enumerate(lines) if re.match(r"def (get_args|benchmark_)", line)),
        len(lines),
    )
    changed = False
    updated: set[str] = set()  # buffers whose values have been computed in another's memory
    for place in range(first, last):
        found = _REUSES.match(lines[place])
        if not found or found[7] != (before := found[3] or found[4]):
            continue
        later = lines[place + 1 : last]
        if not _is_overwritten(found[2], later, kernels):
            if not _REUSES.match(_first_use(found[2], later)):
                updated.add(found[2])
            if before in updated:
                lines[place] = lines[place].replace(before, f"{COPY}({before})", 1)
                changed = True
            continue
        size, stride = (found[5], found[6]) if found[4] else (f"{before}.size()", f"{before}.stride()")
        lets_go = f"{before} = {size}, {stride}, {before}.dtype, {before}.device"
        used = _last_use(before, lines, first, place)
        new = tuple(f"{found[1]}{before} = {function}" for function in ("empty_strided_", ANEW))
        if used is not None and lines[used].startswith(new):
            continue
        lines[place] = f"{found[1]}{found[2]} = {ANEW}(*{before}); del {before}"
        if used is None or _indented(lines[used]) != found[1]:
            lines[place] = f"{found[1]}{lets_go}; {lines[place].strip()}"
        else:
            lines[used] = f"{lines[used].partition('  #')[0]}; {lets_go}"
        changed = True
    return "\n".join(["" for _ in lines[: first + 1]] + lines[first + 1 : last]) if changed else None


def _first_use(buffer: str, lines: list[str]) -> str:
    """Return the first line that uses a buffer."""
    named = re.compile(rf"\b{buffer}\b")
    return next((line for line in lines if named.search(line)), "")


def _last_use(buffer: str, lines: list[str], first: int, last: int) -> int | None:
    """Return the last line between these that uses a buffer."""
    named = re.compile(rf"\b{buffer}\b")
    uses = (place for place in range(last - 1, first, -1) if named.search(lines[place].partition("#")[0]))
    return next(uses, None)


def _indented(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _is_overwritten(buffer: str, lines: list[str], kernels: dict[str, Kernel]) -> bool:
    """Return whether the first use of a buffer overwrites it."""
    line = _first_use(buffer, lines)
    if named_anew := _REUSES.match(line):
        return _is_overwritten(named_anew[2], lines[lines.index(line) + 1 :], kernels)
    if _ALIAS.match(line):  # of tensors that will be concatenated there
        return True
    named = re.compile(rf"\b{buffer}\b")
    line = line.strip()
    if into := _INTO.match(line):
        return into[2] == buffer and not named.search(into[1])
    if not ((called := _CALL.match(line)) and (kernel := kernels.get(called[1]))):
        return False
    given = _split(called[2])
    return len(given) >= len(kernel.arguments) and all(
        one == buffer and letter == "w" and not updated
        for one, letter, updated in zip(given, kernel.arguments, kernel.updated, strict=False)
        if named.search(one)
    )


def _split(arguments: str) -> list[str]:
    """Split the text of a call's arguments."""
    given: list[Any] = [""]
    depth = 0
    for letter in arguments:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            given.append("")
        else:
            given[-1] += letter
    return [one.strip() for one in given]
