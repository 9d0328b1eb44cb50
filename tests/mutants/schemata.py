"""Mutants of the native sources, all in one build: the environment selects one for a process.

A mutant is a piece of the sources and its replacement. The build has both, with a switch:

    a condition        (mutant(17) ? (false) : (version.resident.is_true(one)))
    a statement        if (mutant(17)) {} else { accounts.add(bytes); }
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from dtrrun.extensions import build, building, compiling

PACKAGE = compiling.PACKAGE
SOURCES = (compiling.NATIVE, compiling.BINDINGS, compiling.CORE)
BUILDS = Path(__file__).parents[2] / "build" / "mutants"
VARIABLE = "DTRRUN_MUTANT"
SWITCH = f"""
#include <cstdlib>
namespace dtrrun {{
inline const char* named_mutant = std::getenv("{VARIABLE}");
inline const int chosen_mutant = named_mutant == nullptr ? 0 : std::atoi(named_mutant);
inline bool mutant(int number) {{ return number == chosen_mutant; }}
}}  // namespace dtrrun
"""
SWITCHES = "switches.h"  # included before all other files

NOWHERE = "of {file}, {code!r} is there {count} times"
UNMARKED = "{code!r} has no piece, or several, between « and »"
OVERLAP = "pieces of {file} overlap: {one!r} and {other!r}"


class NativeMutant(NamedTuple):
    row: str  # the part of the native code
    name: str  # what goes wrong
    file: str  # in dtrrun/native, or the path in dtrrun; a header stands for its source, too
    code: str  # a text that occurs once, with the piece to replace between « and »
    instead: str
    tests: str  # see `mutant.paths_of`; empty: no test is known to notice


class Piece(NamedTuple):
    begin: int
    end: int
    cases: list[tuple[int, str]]  # numbers of mutants, and their replacements


def squeezed(text: str) -> tuple[str, list[int]]:
    """Return a text with each run of white space as one space, and each character's original place."""
    places = [
        place for place, one in enumerate(text) if not one.isspace() or not text[place - 1 : place].isspace()
    ]
    return "".join(" " if text[place].isspace() else text[place] for place in places), places


def place_of(mutant: NativeMutant, source: str) -> tuple[int, int]:
    """Return the place of the piece that a mutant replaces. Raises ValueError unless it occurs once."""
    code = re.sub(r"\s+", " ", mutant.code)
    if code.count("«") != 1 or code.count("»") != 1 or code.index("«") > code.index("»"):
        raise ValueError(UNMARKED.format(code=mutant.code))
    text, places = squeezed(source)
    before, piece, _ = re.split("[«»]", code)
    plain = re.sub("[«»]", "", code)
    if (count := text.count(plain)) != 1:
        raise ValueError(NOWHERE.format(file=mutant.file, code=plain, count=count))
    begin = text.index(plain) + len(before)
    return places[begin], places[begin + len(piece) - 1] + 1


def switched(piece: str, cases: list[tuple[int, str]]) -> str:
    """Return code that switches between a piece and the mutants' replacements."""
    if piece.endswith((";", "}")):
        chosen = "".join(f"if (mutant({number})) {{ {new} }} else " for number, new in cases)
        return f"{chosen}{{ {piece} }}"
    for number, new in reversed(cases):
        piece = f"(mutant({number}) ? ({new}) : ({piece}))"
    return piece


def mutated(file: str, source: str, mutants: dict[int, NativeMutant]) -> str:
    """Return a source with its mutants, given by number. Raises ValueError."""
    pieces: dict[tuple[int, int], Piece] = {}
    for number, mutant in mutants.items():
        if mutant.file == file:
            place = place_of(mutant, source)
            pieces.setdefault(place, Piece(*place, [])).cases.append((number, mutant.instead))
    last = None
    for piece in sorted(pieces.values(), reverse=True):
        if last is not None and piece.end > last.begin:
            texts = {"one": source[piece.begin : piece.end], "other": source[last.begin : last.end]}
            raise ValueError(OVERLAP.format(file=file, **texts))
        last = piece
    for piece in sorted(pieces.values(), reverse=True):
        code = switched(source[piece.begin : piece.end], piece.cases)
        source = source[: piece.begin] + code + source[piece.end :]
    return source


def placed(mutant: NativeMutant) -> NativeMutant:
    """Return a mutant with the file in which its piece is: the one named, or the source of that header."""
    folder = PACKAGE if "/" in mutant.file else compiling.NATIVE
    source = mutant.file.removesuffix(".h") + ".cpp"
    if source != mutant.file and (folder / source).exists():
        with suppress(ValueError):
            place_of(mutant, (folder / source).read_text())
            return mutant._replace(file=source)
    return mutant


def sources(mutants: list[NativeMutant]) -> dict[str, str]:
    """Return the native sources with all mutants, numbered from 1. Raises ValueError."""
    mutants = [placed(mutant) for mutant in mutants]
    numbered = dict(enumerate(mutants, 1))
    made = {SWITCHES: SWITCH}
    for folder in SOURCES:
        for path in sorted([*folder.rglob("*.h"), *folder.rglob("*.cpp")]):
            name = path.relative_to(PACKAGE).as_posix()
            made[name] = mutated(name.removeprefix("native/"), path.read_text(), numbered)
    names = {name.removeprefix("native/") for name in made}
    if strangers := {mutant.file for mutant in mutants} - names:
        raise ValueError(f"not in {PACKAGE.name}: {', '.join(sorted(strangers))}")
    return made


def library(mutants: list[NativeMutant]) -> Path:
    """Return the folder of the extensions with all mutants, which are built if necessary.

    Raises ValueError, building.CannotBuild.
    """
    made = sources(mutants)
    digest = hashlib.sha256(repr((made, build.key())).encode()).hexdigest()[:16]
    folder = BUILDS / digest
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, text in made.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        _build(folder, build.recipe(), f"{compiling.NAME}.so")
        _build(
            folder,
            compiling.core(building.python_headers(), building.pybind11_headers(), whole=True),
            f"{compiling.CORE_NAME}.so",
        )
    return folder


def _build(folder: Path, recipe: compiling.Recipe, target: str) -> None:
    if (folder / target).exists():
        return
    switches = folder / SWITCHES
    units = tuple(
        compiling.Unit(
            (switches, *(folder / file.relative_to(PACKAGE) for file in unit.files)),
            (*unit.flags, "-O1"),  # builds in half the time
        )
        for unit in recipe.units
    )
    unfinished = folder / "unfinished.so"
    stages = compiling.Recipe(units, recipe.linking).stages(building.compiler(), unfinished)
    status, output = building.output_of(stages, str(unfinished), lambda text: None)
    if status:
        raise building.CannotBuild(f"the mutants do not compile: {output[:3000]}", "mend their table")
    os.rename(unfinished, folder / target)
