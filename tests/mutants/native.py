"""The list of native mutants, which `native_*.py` fill.

Those that no test is known to notice name none: each is a test that is missing, or changes nothing.
"""

from __future__ import annotations

from schemata import NativeMutant

NATIVE: list[NativeMutant] = []


def native(row: str, file: str, *mutants: tuple[str, str, str, str]) -> None:
    """Add mutants of a file: what goes wrong, the code, what is put in its place, and who notices."""
    NATIVE.extend(
        NativeMutant(row, name, file, code, instead, tests) for name, code, instead, tests in mutants
    )
