"""The launcher's error: the message to print, and the exit status."""

from __future__ import annotations

USAGE = 2
MISMATCH = 3  # --verify found a difference
VIOLATION = 4  # --on-violation stop: the driver showed more than the budget
FAILED = 125  # dtrrun itself failed, or never ran
NOT_EXECUTABLE = 126
NOT_FOUND = 127
BY_SIGNAL = 128  # plus the signal's number


class LaunchError(Exception):
    """Ends the command with one line on stderr and `exit_status`."""

    def __init__(self, message: str, exit_status: int = USAGE) -> None:
        super().__init__(message)
        self.exit_status = exit_status
