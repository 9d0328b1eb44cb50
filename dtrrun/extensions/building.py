"""Compiles an extension once, for all processes that need it, into the user's cache.

The compiler is called directly: `torch.utils.cpp_extension` would import setuptools, and need ninja, in every
training process. Processes that start together wait for one build. Imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.machinery
import importlib.util
import json
import os
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import NoReturn, TextIO

from . import compiling
from .compiling import Recipe

TIME_LIMIT_SECONDS = 900.0
ERRORS = "errors.txt"
"""Why the last build failed: a line, and what the compiler wrote."""

BUILDING = "building {} {}"
ELSEWHERE = "{} cannot be written ({}), so {} is used instead: {}"
WAITING = "another run is building {}: waiting for it"
STILL = "still building: {:.0f} seconds so far"
STILL_SECONDS = 15.0
NO_COMPILER = "no C++ compiler was found", "install one (apt install g++), or set CXX to one"
NO_PYTHON = "no python3 was found, which would run the compiler", "put one in PATH"
NO_SOURCES = "{} is not there", "install dtrrun in a folder, not in an archive"
NO_SUCH_COMPILER = "CXX names {}, which does not exist", "set it to a C++ compiler, or unset it"
NO_HEADERS = "Python's headers are missing", "install them (apt install python{}.{}-dev)"
NO_PYBIND11 = "pybind11's headers are missing", "install them (pip install pybind11)"
NO_ROOM = "free some space there, or set XDG_CACHE_HOME to another folder"
UNWRITABLE = (
    "{}: {} cannot be kept there ({})",
    "set XDG_CACHE_HOME to a writable folder",
)
UNFINISHED = "unfinished-"
OBJECTS = "objects"
KEPT_SECONDS = 14 * 86400.0
"""For how long an object is kept that is not used."""


class CannotBuild(RuntimeError):
    """There is no extension, or it cannot work. why: the cause. do: what would help."""

    def __init__(self, why: str, do: str) -> None:
        super().__init__(why, do)
        self.why, self.do = why, do

    def __str__(self) -> str:
        return f"{self.why}; {self.do}"


def cache_folder() -> Path:
    """Return where built extensions are kept."""
    home = os.path.expanduser("~")  # unchanged if this user has none
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(home if os.path.isabs(home) else "/", ".cache")
    return Path(base) / "dtrrun" / "native"


def compiler() -> list[str]:
    """Return the command that compiles C++. Raises CannotBuild."""
    named = os.environ.get("CXX", "").strip()
    try:
        command = shlex.split(named)
    except ValueError:  # an unmatched quotation mark
        command = [named]
    if command:
        if not shutil.which(command[0]):
            raise CannotBuild(NO_SUCH_COMPILER[0].format(command[0]), NO_SUCH_COMPILER[1])
        return command
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    raise CannotBuild(*NO_COMPILER)


def python_headers() -> str:
    """Return the folder of Python's headers. Raises CannotBuild."""
    folder = sysconfig.get_path("include")
    if not os.path.exists(os.path.join(folder, "Python.h")):
        raise CannotBuild(NO_HEADERS[0], NO_HEADERS[1].format(*sys.version_info[:2]))
    return folder


def pybind11_headers() -> Path:
    """Return the folder of pybind11's headers. Raises CannotBuild.

    PyTorch's come first, so that both extensions are compiled with the same ones; then a wheel's.
    """
    folders = [_include_of("torch"), compiling.HERE / compiling.HEADERS, _include_of("pybind11")]
    for folder in folders:
        if folder and (folder / "pybind11" / "pybind11.h").exists():
            return folder
    raise CannotBuild(*NO_PYBIND11)


def _include_of(package: str) -> Path | None:
    """Return the folder of a package's headers, without importing it. None if it is not installed."""
    with suppress(ImportError, ValueError):  # ValueError: something else was put into `sys.modules`
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.origin is not None:
            return Path(spec.origin).resolve().parent / "include"
    return None


def make(
    target: Path,
    recipe: Callable[[bool], Recipe],
    what: str,
    about: str,
    say: Callable[[str], None],
) -> Path:
    """Return `target`, after compiling it if it is not there, or its `spare`. Raises CannotBuild.

    recipe: called with whether to compile as a whole. what, about: for messages.
    """
    if found := found_at(target):
        return found
    is_kept = compiling.is_checkout()
    how = compiler(), recipe(not is_kept), is_kept
    text = BUILDING.format(what, about)
    try:
        return _make(target, how, what, text, say)
    except OSError as error:
        unwritable, why = _unwritable(error, target.parent, what), error.strerror
    try:
        other = spare(target)
        if other is None:
            raise unwritable
        with suppress(FileExistsError):
            os.mkdir(other.parents[1], 0o700)
        if not _is_private(other.parents[1]):
            raise unwritable
        text = ELSEWHERE.format(cache_folder(), why, other.parents[1], text)
        return _make(other, how, what, text, say)
    except OSError:
        raise unwritable from None


def found_at(target: Path) -> Path | None:
    """Return where `target` has been built, in the cache or in its place for want of one."""
    if compiling.digest_of(target):
        return target
    other = spare(target)
    return other if other and compiling.digest_of(other) else None


def spare(target: Path) -> Path | None:
    """Return where `target` is kept if the cache cannot be written: in a temporary folder of this user.

    None if there is none, or if that folder is not this user's alone: what is in it will be loaded.
    """
    with suppress(OSError):
        folder = Path(tempfile.gettempdir(), f"dtrrun-{os.getuid()}")
        if not os.path.lexists(folder) or _is_private(folder):
            return folder / target.parent.name / target.name
    return None


def _is_private(folder: Path) -> bool:
    found = os.lstat(folder)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077


def _make(
    target: Path,
    how: tuple[list[str], Recipe, bool],
    what: str,
    text: str,
    say: Callable[[str], None],
) -> Path:
    """Compile `target`, unless another process has done so meanwhile. Raises CannotBuild, OSError.

    how: the compiler, the recipe, and whether objects are kept. text: what to say when the compiler starts.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with open(target.parent / "lock", "a+") as lock:
        _take(lock, what, say)
        if not compiling.digest_of(target):  # not built by another run meanwhile
            if why := last_failure(target.parent, began):  # another run tried meanwhile
                raise CannotBuild(why, f"see {target.parent / ERRORS}")
            say(text)
            _remove_unfinished(target.parent)
            try:
                _compile(*how, target, say)
            finally:
                with suppress(OSError):
                    _remove_unfinished(target.parent)
    return target


def _take(lock: TextIO, what: str, say: Callable[[str], None]) -> None:
    """Lock the file until it is closed or the process ends. Report it if another run is building."""
    run = os.environ.get("DTRRUN_RECORDS", str(os.getpid()))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        if lock.read() not in (run, ""):  # not a process of the same run, which says that it is building
            say(WAITING.format(what))
        fcntl.flock(lock, fcntl.LOCK_EX)
    lock.truncate(0)
    lock.write(run)
    lock.flush()


def _unwritable(error: OSError, folder: Path, what: str) -> CannotBuild:
    """Return why a file could not be written in the folder, or the folder could not be made."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotBuild(f"{error.filename or folder}: {error.strerror}", NO_ROOM)
    return CannotBuild(UNWRITABLE[0].format(cache_folder(), what, error.strerror), UNWRITABLE[1])


def _remove_unfinished(folder: Path) -> None:
    """Remove what failed or interrupted builds have left. The caller has the lock."""
    for path in folder.glob(f"{UNFINISHED}*"):
        path.unlink(missing_ok=True)


def last_failure(folder: Path, since: float = 0.0) -> str:
    """Return why the last build failed, if it did, and not before `since` (seconds since the epoch)."""
    try:
        path = folder / ERRORS
        return path.read_text().partition("\n")[0] if path.stat().st_mtime >= since else ""
    except (OSError, ValueError):
        return ""


def _compile(
    compiler: list[str], recipe: Recipe, is_kept: bool, target: Path, say: Callable[[str], None]
) -> None:
    handle, unfinished = tempfile.mkstemp(prefix=UNFINISHED, suffix=".so", dir=target.parent)
    os.close(handle)
    objects = _Objects(target.parents[1] / OBJECTS, compiler, recipe) if is_kept else None
    stages = recipe.stages(compiler, Path(unfinished), objects.found if objects else {})
    try:
        status, output = output_of(stages, unfinished, say)
    except subprocess.TimeoutExpired:
        _fail(f"{compiler[0]} took more than {TIME_LIMIT_SECONDS:g} seconds", stages, "", target.parent)
    if objects:
        objects.keep(recipe.objects(Path(unfinished)))
    made = False
    with suppress(FileNotFoundError):
        made = status == 0 and compiling.seal(Path(unfinished))
    if not made:
        lines = output.strip().splitlines() or [f"it printed nothing and exited with status {status}"]
        why = next((line for line in lines if "error:" in line or "ld: " in line), lines[0])
        _fail(f"{compiler[0]} failed: {why.strip()}", stages, output, target.parent)
    os.rename(unfinished, target)
    with suppress(OSError):
        os.unlink(target.parent / ERRORS)


class _Objects:
    """The objects of a checkout's files, kept from one build to the next, by all that they depend on."""

    def __init__(self, folder: Path, compiler: list[str], recipe: Recipe) -> None:
        version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
        using = f"{shlex.join(compiler)}\n{version}"
        self._paths = [folder / compiling.object_name(unit, using) for unit in recipe.units]
        self.found = {place: path for place, path in enumerate(self._paths) if compiling.digest_of(path)}
        folder.mkdir(exist_ok=True)
        for path in self.found.values():
            os.utime(path)
        for path in folder.glob("*.o"):
            with suppress(OSError):
                if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                    path.unlink()

    def keep(self, made: Sequence[Path]) -> None:
        """Keep what has been compiled, even if something else could not be."""
        for path, kept in zip(made, self._paths, strict=True):
            with suppress(FileNotFoundError):
                if compiling.seal(path):
                    os.rename(path, kept)


_WATCHER = """
import concurrent.futures, glob, json, os, signal, subprocess, sys, threading, time
gone = threading.Event()
def watch():
    os.read(0, 1)
    gone.set()
    os.killpg(0, signal.SIGTERM)  # at which a compiler removes its temporary files
    time.sleep(0.3)
    for path in glob.glob(glob.escape(sys.argv[1]) + "*"):
        os.unlink(path)
    os.killpg(0, signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: None)
threading.Thread(target=watch, daemon=True).start()
status = 0
streams = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
def run(command):
    if gone.is_set():
        time.sleep(60)
    child = subprocess.Popen(command, **streams)
    printed = child.communicate()[0]
    if gone.is_set():
        time.sleep(60)
    return child.returncode, printed
for commands in json.loads(sys.argv[2]):
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        failed = [(code, text) for code, text in pool.map(run, commands) if code]
    if failed:
        status, text = failed[0]
        sys.stdout.buffer.write(text)
        sys.stdout.flush()
        break
os._exit(status if status >= 0 else 128 - status)
"""
"""Runs the compiler, for as many units at once as there are cores. When the process that waits for it ends,
for whatever reason, standard input closes: then this ends the compiler with all its processes, and removes
what it has written."""


def output_of(stages: list[list[list[str]]], unfinished: str, say: Callable[[str], None]) -> tuple[int, str]:
    """Run what `Recipe.stages` returned: return the exit status and what was printed.

    unfinished: the target; on interruption it is removed, with the files beside it. Raises OSError,
    TimeoutExpired, CannotBuild.
    """
    python = sys.executable or shutil.which("python3")  # empty in a program that embeds Python
    if not python:
        raise CannotBuild(*NO_PYTHON)
    command = [python, "-IS", "-c", _WATCHER, unfinished, json.dumps(stages)]
    began = time.monotonic()
    reader, writer = os.pipe()
    try:
        child = subprocess.Popen(
            command,
            stdin=reader,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},  # we look for the word "error"
            start_new_session=True,  # so that the processes that it starts can be ended with it
        )
        with child:
            try:
                output = _read(child, began, say)
                return child.returncode, output
            except BaseException:  # also Ctrl-C
                os.close(writer)
                writer = -1
                _end(child)
                raise
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _read(child: subprocess.Popen[str], began: float, say: Callable[[str], None]) -> str:
    """Return what the compiler has written, when it has ended. Raises TimeoutExpired."""
    while True:
        left = began + TIME_LIMIT_SECONDS - time.monotonic()
        try:
            return child.communicate(timeout=min(left, STILL_SECONDS))[0]
        except subprocess.TimeoutExpired:
            if left <= STILL_SECONDS:
                raise
            say(STILL.format(time.monotonic() - began))


def _end(child: subprocess.Popen[str]) -> None:
    """End the compiler, whose standard input has been closed."""
    try:
        child.wait(2)
    except subprocess.TimeoutExpired:
        with suppress(OSError):
            os.killpg(child.pid, signal.SIGKILL)


def _fail(why: str, stages: list[list[list[str]]], output: str, folder: Path) -> NoReturn:
    commands = "".join(f"$ {shlex.join(command)}\n" for commands in stages for command in commands)
    try:
        (folder / ERRORS).write_text(f"{why}\n\n{commands}{output}")
    except OSError:
        raise CannotBuild(why, NO_ROOM) from None
    raise CannotBuild(why, f"see {folder / ERRORS}")


def import_from(name: str, path: Path) -> ModuleType:
    """Import the extension from a file. Raises CannotBuild."""
    spec = importlib.util.spec_from_file_location(
        name, path, loader=importlib.machinery.ExtensionFileLoader(name, str(path))
    )
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (ImportError, RuntimeError) as error:
        why = f"it cannot be loaded: {str(error).splitlines()[0]}"
        raise CannotBuild(why, f"remove {path.parent}, so that it is built again") from None
    sys.modules[name] = module  # it is not imported again, nor is another version of it
    return module
