"""Handles what the kernel of a foreign operator touches besides its arguments.

Such a kernel may read a table or a buffer of its module, or keep an argument for later. The native interposer
sees the operators that the kernel calls (`native/bodies.h`) and reports what they touch.
"""

from __future__ import annotations

from typing import Any

from dtrrun.core.dtr import DTR
from dtrrun.core.graph import Version
from dtrrun.core.locks import Locks


class Body:
    """One run of such a kernel."""

    def __init__(self, dtr: DTR, lock: Any) -> None:
        self.locks = Locks()
        self._dtr, self._lock = dtr, lock

    def touch(self, version: Version, writes: bool) -> None:
        """Bring back what the kernel is about to read or write besides its arguments.

        It stays resident until the kernel has ended. Raises BudgetError.
        """
        with self._lock:
            self._dtr.rematerializer.lock([version], self.locks)
            if writes:
                self._dtr.mutation.written_outside(version, "written by another operator", escapes=False)
