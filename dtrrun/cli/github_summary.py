"""`--github-summary`: adds Markdown to the page of a job on GitHub Actions."""

from __future__ import annotations

import os
from collections.abc import Callable

from dtrrun.launch.errors import FAILED, LaunchError

VARIABLE = "GITHUB_STEP_SUMMARY"


def summary_writer(wanted: bool) -> Callable[[str], None]:
    """Return a function that adds text to the job's summary, if that is wanted.

    Raises LaunchError if this is no job of GitHub Actions, or its file cannot be written.
    """
    if not wanted:
        return lambda text: None
    path = os.environ.get(VARIABLE)
    if not path:
        raise LaunchError(f"--github-summary: {VARIABLE} is not set; it is in a job of GitHub Actions")

    def write(text: str) -> None:
        try:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise LaunchError(
                f"--github-summary: {path} cannot be written: {error.strerror}", FAILED
            ) from None

    write("")
    return write
