"""Files that only their owner can access, whatever the umask. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

MODE = 0o600


def open_private(path: str | os.PathLike[str], mode: str = "w") -> IO[Any]:
    """Open a new file of mode 0600, for `mode` "w" or "wb". Raises OSError, also if the file exists."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, MODE), mode)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Context with a new file, which replaces the one at `path` at the end, unless there is an error."""
    part = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        with open_private(part, "wb") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Atomically write `text` to the file at `path`. Only one writer. Raises OSError."""
    part = f"{os.fspath(path)}.part"
    with suppress(FileNotFoundError):
        os.unlink(part)  # left by a writer that was killed
    with open_private(part) as file:
        file.write(text)
    os.replace(part, path)
