"""Interprets the words after our options, and makes the command that runs them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dtrrun.launch.errors import NOT_EXECUTABLE, NOT_FOUND, LaunchError
from dtrrun.launch.python_flags import refuse_flags

_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")
_OPEN_FILE = re.compile(r"/dev/stdin|(/dev|/proc/self)/fd/\d+")
_SUFFIXES = (".py", ".pyw", ".pyz")


def resolve(words: Sequence[str], interpreter: Callable[[], str]) -> list[str]:
    """Return the command line that runs the target `words`. interpreter(): the Python for Python targets.

    A script, `-m module`, `-c code` and `-` (a script on standard input) run in Python; everything else is a
    command. Raises LaunchError for a usage error, if not found (127), or if it cannot be executed (126).
    """
    if not words:
        raise LaunchError("there is nothing to run: give a script, -m module, -c code or a command")
    first = words[0]
    if first.startswith("-"):
        return [interpreter(), *_python_words(words)]
    if not first:
        raise LaunchError("the target is an empty string", NOT_FOUND)
    if _is_script(first):
        return [interpreter(), *words]
    command = shutil.which(first)
    if command is None:
        if "/" not in first and os.path.isfile(first):
            _refuse_binary(first)
            return [interpreter(), *words]
        raise _not_found(first)
    refuse_flags(_expand(command, words[1:]))
    return [command, *words[1:]] if "/" in first else list(words)


def refuse_stream(words: Sequence[str], verb: str) -> None:
    """Raise LaunchError for a target that can be read only once: the verb runs it several times."""
    if words and (words[0] == "-" or is_stream(words[0])):
        raise LaunchError(f"{verb} runs its target several times: it cannot be read from {_stream(words[0])}")


def _stream(word: str) -> str:
    return "standard input" if word in ("-", "/dev/stdin") else f"a pipe ({word})"


def is_python(command: str) -> bool:
    """Return whether `command` is named like a Python interpreter."""
    return _PYTHON.fullmatch(os.path.basename(command)) is not None


def is_stream(word: str) -> bool:
    """Return whether a word names an open file or pipe, as a shell does for `<(command)`."""
    return _OPEN_FILE.fullmatch(word) is not None and os.path.exists(word) and not os.path.isdir(word)


def _python_words(words: Sequence[str]) -> Sequence[str]:
    if words[0] in ("-m", "-c") and len(words) < 2:
        raise LaunchError(f"{words[0]} needs {'a module' if words[0] == '-m' else 'code'} after it")
    if words[0] != "-" and not words[0].startswith(("-m", "-c")):
        hint = (
            ""
            if words[0].startswith("--")
            else f" (for an option of Python, write: dtrrun python {words[0]} ...)"
        )
        what = "a target is a script, -m module, -c code or a command"
        raise LaunchError(f"{words[0]!r} is not a target; {what}{hint}")
    return words


def _is_script(word: str) -> bool:
    """Return whether Python runs `word`: by its suffix, a folder with a __main__.py, an open file, or a
    non-executable text."""
    if is_stream(word):
        return True
    if os.path.isdir(word):
        if os.path.isfile(os.path.join(word, "__main__.py")):
            return "/" in word or shutil.which(word) is None
        if "/" in word:
            raise LaunchError(f"{word} is a folder without a __main__.py", NOT_EXECUTABLE)
        return False
    if word.endswith(_SUFFIXES):
        if os.path.isfile(word):
            return True
        if shutil.which(word) is None:
            raise LaunchError(f"no such script: {word}", NOT_FOUND)
        return False
    if "/" in word and os.path.isfile(word) and not os.access(word, os.X_OK):
        _refuse_binary(word)
        return True
    return False


def _refuse_binary(path: str) -> None:
    """Raise LaunchError unless a non-executable file is text, hence a Python script as for `python FILE`."""
    try:
        with open(path, "rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}", NOT_EXECUTABLE) from None
    if b"\0" in head:
        raise LaunchError(f"{path} is neither executable nor a script", NOT_EXECUTABLE)


def _not_found(word: str) -> LaunchError:
    if "/" in word and os.path.exists(word):
        return LaunchError(f"{word}: cannot be executed", NOT_EXECUTABLE)
    hint = f"; did you mean {word}.py?" if os.path.isfile(f"{word}.py") else ""
    return LaunchError(f"no such script or command: {word}{hint}", NOT_FOUND)


def _expand(command: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line that starts Python, as far as known: through `#!` and `env`."""
    words = [command, *arguments] if is_python(command) else [*_shebang(command), command, *arguments]
    while words and os.path.basename(words[0]) == "env":
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0]):
            split = shlex.split(words[0][2:]) if words[0].startswith("-S") else []
            words = [*split, *words[1:]]
    return words if words and is_python(words[0]) else []


def _shebang(path: str) -> list[str]:
    """Return the words of the `#!` line of `path`; empty for a binary."""
    try:
        with Path(path).open("rb") as file:
            line = file.readline(512)
    except OSError:
        return []
    if not line.startswith(b"#!"):
        return []
    # The kernel passes everything after the interpreter as one word.
    return line[2:].decode(errors="replace").strip().split(maxsplit=1)
