"""The list of native mutants, filled by `native_*.py`.

A mutant that no test is known to notice names none: either a test is missing, or it changes nothing.
"""

from __future__ import annotations

from schemata import NativeMutant

NATIVE: list[NativeMutant] = []


def native(row: str, file: str, *mutants: tuple[str, str, str, str]) -> None:
    """Add mutants of a file: what goes wrong, the code, its replacement, and the tests that notice."""
    NATIVE.extend(
        NativeMutant(row, name, file, code, instead, tests) for name, code, instead, tests in mutants
    )
