"""dtrrun.extensions: the native extension's cache, the binary in a wheel, and everything that can go wrong.

Nothing is compiled.
"""

import errno
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import pytest
import torch

from dtrrun.extensions import build, building, compiling, shipped
from dtrrun.runtime.dispatch.native import load  # before NATIVE replaces it
from dtrrun.settings import RuntimeSettings
from tests.waiting import is_running, state_of, until

UNWRITABLE = "the native part cannot be kept there ({}); set XDG_CACHE_HOME to a writable folder"
CODE = b"what the compiler makes"
IS_CHECKOUT = compiling.is_checkout
CALLS = len(compiling.FILES) + 1
"""Compiler calls for one extension."""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.delitem(sys.modules, build.NAME, raising=False)  # another test may have loaded it
    monkeypatch.setattr(compiling, "is_checkout", lambda: False)
    build._loaded.cache_clear()
    yield tmp_path / "cache" / "dtrrun" / "native"
    build._loaded.cache_clear()


class Compiler:
    """A script that stands for a compiler: it records its calls and does what it is told."""

    def __init__(self, folder, monkeypatch):
        self.path, self.log, self.result = folder / "cxx", folder / "calls", folder / "made.so"
        self.result.write_bytes(CODE)
        self.does("")
        monkeypatch.setenv("CXX", str(self.path))

    def does(self, first, then='cp "$0/../made.so" "$2"'):
        then = then.replace("$0/..", str(self.path.parent))
        self.path.write_text(
            f'#!/bin/sh\nPATH=/usr/bin:/bin\nall="$*"\necho "$@" >> {self.log}\n'
            f'[ "$1" = --version ] && exit\n'
            f'while [ "$1" != -o ]; do shift; done\n{first}\n{then}\n'
        )
        self.path.chmod(0o755)

    @property
    def calls(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def cxx(tmp_path, monkeypatch):
    return Compiler(tmp_path, monkeypatch)


def silent(text):
    pass


def why_not():
    with pytest.raises(building.CannotBuild) as caught:
        build.build(silent)
    text = str(caught.value)
    assert text == f"{caught.value.why}; {caught.value.do}"
    assert "\n" not in text
    return text


def left(cache):
    """Return the names of the files in the cache, except the lock."""
    return sorted(path.name for path in cache.glob("*/*") if path.name != "lock")


def test_it_is_built_once(cxx, cache):
    said = []
    path = build.build(said.append)
    assert path == build.built() == cache / build.key() / "_dtrrun_native.so"
    assert path.read_bytes().startswith(CODE)
    assert path.stat().st_mode & stat.S_IRUSR
    assert said == [f"building the native part for PyTorch {torch.__version__} (once, about a minute)"]
    assert build.build(said.append) == path
    assert (len(said), len(cxx.calls), left(cache)) == (1, CALLS, ["_dtrrun_native.so"])
    for files in compiling.FILES:
        (call,) = [call for call in cxx.calls if str(files[-1]) in call]
        assert all(str(file) in call for file in files)
        assert "-std=c++20" in call


def test_what_is_built_needs_no_compiler(cxx, monkeypatch):
    path = build.build(silent)
    monkeypatch.setenv("CXX", "/none")
    assert build.build(silent) == path


def test_no_compiler(monkeypatch, tmp_path, cache):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "no C++ compiler was found; install one (apt install g++), or set CXX to one"
    monkeypatch.setenv("CXX", "/no/such/cxx -m64")
    assert why_not() == "CXX names /no/such/cxx, which does not exist; set it to a C++ compiler, or unset it"
    monkeypatch.setenv("CXX", "g++ 'a")
    assert why_not().startswith("CXX names g++ 'a, which")
    assert not cache.exists()


def test_no_interpreter_in_a_program_that_embeds_python(cxx, monkeypatch, tmp_path, cache):
    monkeypatch.setattr(sys, "executable", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not() == "no python3 was found, which would run the compiler; put one in PATH"
    assert left(cache) == []


@pytest.mark.parametrize(
    ("output", "line"),
    [
        (
            "In file error.h:\nerror.h:3:1: error: what is this\nmore error: of it",
            "error.h:3:1: error: what is",
        ),
        ("/usr/bin/ld: cannot find -lc10\ncollect2: error: ld returned 1", "/usr/bin/ld: cannot find -lc10"),
        ("something else\nand more", "something else"),
        ("\\377", "�"),
        ("", "it printed nothing and exited with status 1"),
    ],
)
def test_a_compiler_that_fails(cxx, cache, output, line):
    cxx.does(f"printf '{output}' >&2", "exit 1")
    text = why_not()
    assert text.startswith(f"{cxx.path} failed: {line}")
    errors = cache / build.key() / "errors.txt"
    assert text.endswith(f"; see {errors}")
    first, _, *rest = errors.read_text().splitlines()
    assert text.startswith(first)
    commands, rest = rest[:CALLS], rest[CALLS:]
    assert all(command.startswith(f"$ {cxx.path} ") for command in commands)
    assert rest == output.replace("\\377", "�").splitlines()
    assert left(cache) == ["errors.txt"]
    cxx.does("")  # it has been repaired
    assert build.build(silent) == build.built()
    assert left(cache) == ["_dtrrun_native.so"]


@pytest.mark.parametrize("then", ["exit 0", 'rm -f "$2"', "kill -9 $$"])
def test_a_compiler_that_makes_nothing(cxx, cache, then):
    cxx.does("", then)
    assert why_not().startswith(f"{cxx.path} failed: it printed nothing and exited with status ")
    assert left(cache) == ["errors.txt"]
    assert not build.built().exists()


def test_a_compiler_that_hangs(cxx, cache, monkeypatch, tmp_path):
    """The compiler's worker process, which holds the pipe, is ended too."""
    monkeypatch.setattr(building, "TIME_LIMIT_SECONDS", 0.3)
    cxx.does(f"sleep 60 & echo $! > {tmp_path}/worker", "wait")
    began = time.monotonic()
    assert why_not().startswith(f"{cxx.path} took more than 0.3 seconds; see ")
    assert time.monotonic() - began < 30
    until(lambda: not is_running((tmp_path / "worker").read_text().strip()))
    assert left(cache) == ["errors.txt"]


def test_headers_that_are_missing(cxx, monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    version = "{}.{}".format(*sys.version_info[:2])
    assert why_not() == f"Python's headers are missing; install them (apt install python{version}-dev)"
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert why_not().startswith("PyTorch's headers are missing; ")
    assert cxx.calls == []


@pytest.mark.parametrize("version", ["2.8.0+cpu", "2.0.0", "1.13"])
def test_a_pytorch_that_is_too_old(cxx, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    least = ".".join(map(str, build.OLDEST))
    assert why_not() == f"PyTorch {version} is too old for dtrrun; install {least} or later"
    assert cxx.calls == []


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0a0+git1234", "3.0.0"])
def test_a_pytorch_that_is_not(cxx, monkeypatch, version):
    monkeypatch.setattr(torch, "__version__", version)
    build.build(silent)


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """A cache that cannot be made, because a file is in the way."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    return tmp_path / "file" / "dtrrun" / "native"


def test_without_a_cache_a_temporary_folder_is_used(cxx, no_cache, tmp_path, monkeypatch):
    """One line says so when it is built there; later runs find it, and so does doctor."""
    said = []
    folder = tmp_path / "temporary" / f"dtrrun-{os.getuid()}"
    assert (build.outlook()["why"], folder.exists()) == (None, False)
    assert build.outlook()["path"] == str(folder / build.key() / "_dtrrun_native.so")
    path = build.find(said.append)
    assert path == folder / build.key() / "_dtrrun_native.so"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert said == [
        f"{no_cache} cannot be written (Not a directory), so {folder} is used instead: building the native "
        f"part for PyTorch {torch.__version__} (once, about a minute)"
    ]
    monkeypatch.setenv("CXX", "/none")
    assert build.find(said.append) == path
    monkeypatch.setattr(build, "import_from", lambda name, path: None)
    assert (build.outlook()["built"], build.outlook()["path"], len(said)) == (True, str(path), 1)


@pytest.mark.parametrize("theirs", ["writable by others", "a link", "a file"])
def test_a_temporary_folder_that_may_be_another_users_is_not_used(cxx, no_cache, tmp_path, theirs):
    """What is in it would be loaded into the process."""
    folder = tmp_path / "temporary" / f"dtrrun-{os.getuid()}"
    if theirs == "writable by others":
        folder.mkdir()
        folder.chmod(0o770)
    elif theirs == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    assert why_not() == f"{no_cache}: {UNWRITABLE.format('Not a directory')}"
    assert build.outlook()["why"] == f"{tmp_path / 'file'}: cannot be written"
    assert cxx.calls == []


@pytest.mark.parametrize("call", ["open", "mkstemp"])
@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written(cxx, cache, monkeypatch, number, call):
    def refuse(*args, **more):
        raise OSError(number, os.strerror(number), "/the/path")

    if call == "open":
        monkeypatch.setattr(building, "open", refuse, raising=False)
    else:
        monkeypatch.setattr(building.tempfile, "mkstemp", refuse)
    why = f"{cache}: {UNWRITABLE.format(os.strerror(number))}"
    full = f"/the/path: {os.strerror(number)}; free some space there, or set XDG_CACHE_HOME to another folder"
    assert why_not() == (full if number == errno.ENOSPC else why)
    assert (cxx.calls, left(cache)) == ([], [])


def test_a_full_disk_beneath_the_compiler(cxx, cache, monkeypatch):
    cxx.does("echo 'fatal error: error writing to x.s: No space left on device' >&2", "exit 1")

    def refuse(*args, **more):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", refuse)
    text = why_not()
    assert "error writing to x.s: No space left on device; free some space there, or set XDG" in text
    assert left(cache) == []


@pytest.mark.parametrize("damage", [b"", CODE[:10], CODE, b"\0" * 500])
def test_a_damaged_file_is_built_anew(cxx, damage):
    """A truncated file is detected before loading: mapping the missing part would crash Python."""
    path = build.build(silent)
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert build.build(silent) == path
    assert (path.read_bytes(), len(cxx.calls)) == (whole, 2 * CALLS)
    path.write_bytes(whole[:5] + b"?" + whole[6:])
    build.build(silent)
    assert (path.read_bytes(), len(cxx.calls)) == (whole, 3 * CALLS)


def test_a_damaged_file_that_cannot_be_built_anew(cxx, monkeypatch, tmp_path):
    build.build(silent).write_bytes(CODE[:10])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not().startswith("no C++ compiler was found; ")


def test_a_file_that_cannot_be_loaded(cxx, cache):
    """The reason (a different C++ library, say) is kept, so that not every session tries again."""
    with pytest.raises(
        building.CannotBuild, match=r"^it cannot be loaded: .*; remove .*, so that it is built"
    ):
        build.load(silent)
    (cache / build.key() / "_dtrrun_native.so").unlink()
    with pytest.raises(building.CannotBuild, match=r"^it cannot be loaded: "):
        build.load(silent)
    assert len(cxx.calls) == CALLS


def in_processes(count, action):
    """Call `action` in `count` processes at once and return their results."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=lambda: results.put(action())) for _ in range(count)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
    return found


def attempt():
    try:
        return str(build.build(silent))
    except building.CannotBuild as error:
        return str(error)


@pytest.fixture
def until_arrived(monkeypatch, tmp_path):
    """Return a function that returns shell code, which waits until so many processes want to build."""
    folder, take = tmp_path / "arrived", building._take
    folder.mkdir()

    def arrives(*args):
        (folder / str(os.getpid())).touch()
        take(*args)

    monkeypatch.setattr(building, "_take", arrives)
    return lambda count: f"while [ $(ls {folder} | wc -l) -lt {count} ]; do sleep 0.01; done"


def test_processes_that_start_together_compile_once(cxx, until_arrived):
    cxx.does(until_arrived(4))
    assert in_processes(4, attempt) == [str(build.built())] * 4
    assert len(cxx.calls) == CALLS


@pytest.mark.parametrize("same", [True, False])
def test_a_process_that_waits_for_another_run_says_so(cxx, monkeypatch, tmp_path, same):
    cxx.does(f"touch {tmp_path}/begun; while [ ! -e {tmp_path}/said ]; do sleep 0.01; done")
    monkeypatch.setenv("DTRRUN_RECORDS", "one run")
    process = multiprocessing.get_context("fork").Process(target=attempt)
    process.start()
    until((tmp_path / "begun").exists)
    if not same:
        monkeypatch.setenv("DTRRUN_RECORDS", "another")
    said = []
    if same:
        (tmp_path / "said").touch()
    build.build(lambda text: said.append(text) or (tmp_path / "said").touch())
    process.join()
    assert said == ([] if same else ["another run is building the native part: waiting for it"])
    assert len(cxx.calls) == CALLS


def test_processes_that_start_together_fail_once(cxx, cache, until_arrived):
    cxx.does(f"{until_arrived(4)}; echo 'error: no' >&2", "exit 1")
    assert (
        in_processes(4, attempt)
        == [f"{cxx.path} failed: error: no; see {cache / build.key() / 'errors.txt'}"] * 4
    )
    assert len(cxx.calls) == len(compiling.FILES)


def test_an_unfinished_file_is_never_in_place(cxx, cache, tmp_path):
    """This holds for a process killed while its compiler writes, and the next one does not wait for it."""
    (cache / build.key()).mkdir(parents=True)
    (cache / build.key() / "unfinished-before.so").write_bytes(b"of a power cut")
    cxx.does('printf half > "$2"; echo $$ > $0.pid; mv $0.pid $0.writes; sleep 60')
    context = multiprocessing.get_context("fork")
    process = context.Process(target=attempt)
    process.start()
    until((tmp_path / "cxx.writes").exists)
    assert not build.built().exists()
    process.kill()
    process.join()
    assert not build.built().exists()
    cxx.does("")
    assert build.build(silent).read_bytes().startswith(CODE)
    assert left(cache) == ["_dtrrun_native.so"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_the_compiler_ends_with_the_process_that_waits_for_it(cxx, cache, tmp_path, number):
    """It leaves no files and no processes behind, including the child that does the compiler's work."""
    cxx.does(
        f'printf half > "$2"; sleep 60 & echo $! > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/worker',
        "wait",
    )
    code = "import sys; from dtrrun.extensions import build; build.build(print)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=compiling.PACKAGE.parent, stderr=subprocess.DEVNULL
    )
    until((tmp_path / "worker").exists)
    process.send_signal(number)
    process.wait()
    until(lambda: not is_running((tmp_path / "worker").read_text().strip()) and not left(cache))


def test_it_is_said_that_the_build_goes_on(cxx, monkeypatch, tmp_path):
    monkeypatch.setattr(building, "STILL_SECONDS", 0.05)
    cxx.does(f"while [ ! -e {tmp_path}/said ]; do sleep 0.01; done")
    said = []

    def say(text):
        said.append(text)
        if len(said) > 2:
            (tmp_path / "said").touch()

    build.build(say)
    assert said[0].startswith("building the native part")
    assert all(re.fullmatch(r"still building: \d+ seconds so far", line) for line in said[1:])
    assert len(said) > 2


def test_the_key(monkeypatch, tmp_path):
    first = build.key()
    assert re.fullmatch(r"torch-[\w.+]+-cpython-3\d+-[0-9a-f]{16}", first)
    found = {first}
    for module, name, value in (
        (torch, "__version__", "2.99.0"),
        (torch.version, "git_version", "1234"),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            found.add(build.key())
    for folder in ("HERE", "NATIVE"):
        for path in getattr(compiling, folder).glob("*"):
            if path.suffix in (".cpp", ".h", ".py"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        monkeypatch.setattr(compiling, folder, tmp_path)
    compiling.sources.cache_clear()
    assert build.key() == first
    for name in ("interposer.cpp", "python.h", "compiling.py"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        compiling.sources.cache_clear()
        found.add(build.key())
    assert len(found) == 6
    compiling.sources.cache_clear()


class Checkout:
    """Sources of an extension that someone works on, in place of dtrrun's."""

    def __init__(self, folder, monkeypatch):
        self.native = folder / "dtrrun" / "native"
        (folder / ".git").mkdir(parents=True)
        self.write("compiling.py", "")
        self.write("one.cpp", '#include "common.h"\n#include <vector>\n')
        self.write("two.cpp", '#include "own.h"\n')
        self.write("common.h", "")
        self.write("own.h", '#include "common.h"\n')
        files = tuple((self.native / name,) for name in ("one.cpp", "two.cpp"))
        for name, place in (("PACKAGE", self.native.parent), ("HERE", self.native), ("NATIVE", self.native)):
            monkeypatch.setattr(compiling, name, place)
        monkeypatch.setattr(compiling, "FILES", files)
        monkeypatch.setattr(compiling, "is_checkout", IS_CHECKOUT)

    def write(self, name, text):
        self.native.mkdir(parents=True, exist_ok=True)
        (self.native / name).write_text(text)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    yield Checkout(tmp_path / "checkout", monkeypatch)
    compiling.sources.cache_clear()


def test_in_a_checkout_only_what_includes_a_change_is_compiled_again(cxx, checkout):
    def compiled():
        cxx.log.unlink(missing_ok=True)
        compiling.sources.cache_clear()
        build.build(silent)
        return {Path(word).stem for call in cxx.calls for word in call.split() if word.endswith(".cpp")}

    assert compiled() == {"one", "two"}
    assert (len(cxx.calls), compiled()) == (4, set())  # one asks for the compiler's version, one links
    for name, again in (("own.h", {"two"}), ("common.h", {"one", "two"}), ("one.cpp", {"one"})):
        before = (checkout.native / name).read_text()
        checkout.write(name, f"{before}// changed\n")
        assert compiled() == again
        checkout.write(name, before)
        build.built().unlink()
        assert compiled() == set()


def test_in_a_checkout_what_has_been_compiled_is_kept_where_something_else_cannot_be(cxx, checkout):
    cxx.does("", 'case "$*" in *two.cpp*) exit 1;; esac; cp "$0/../made.so" "$2"'.replace("$*", "$all"))
    with pytest.raises(building.CannotBuild):
        build.build(silent)
    cxx.does("")
    cxx.log.unlink()
    build.build(silent)
    assert not any("one.cpp" in call for call in cxx.calls)


def test_an_object_depends_on_the_compiler_its_flags_and_pytorch(checkout):
    unit = compiling.Unit((checkout.native / "one.cpp",), ("-O2",), "2.13")
    others = unit._replace(flags=("-O1",)), unit._replace(against="2.14")
    names = {compiling.object_name(unit, "g++ 12"), compiling.object_name(unit, "g++ 13")}
    names |= {compiling.object_name(other, "g++ 12") for other in others}
    assert len(names) == 4


def test_environments_with_the_same_pytorch_share_a_key(monkeypatch):
    first = build.key()
    monkeypatch.setattr(torch, "__file__", "/elsewhere/torch/__init__.py")
    assert build.key() == first


@pytest.mark.parametrize("environ", [{"XDG_CACHE_HOME": "/x"}, {"XDG_CACHE_HOME": "", "HOME": "/x/.."}])
def test_where_it_is_kept(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert os.path.normpath(building.cache_folder()) in ("/x/dtrrun/native", "/.cache/dtrrun/native")


def test_a_session_without_it(monkeypatch, tmp_path, capfd):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=r"^no C\+\+ compiler was found; install one \(apt install g\+\+\)"
    ):
        load(RuntimeSettings())
    assert capfd.readouterr() == ("", "")


def test_the_outlook(cxx, cache, monkeypatch, tmp_path):
    """doctor's information about the extension is found without building or writing anything."""

    def told():
        found = build.outlook()
        assert found.pop("path") == str(build.built())
        assert not found.pop("shipped")
        return tuple(found.values())

    assert told() == (False, str(cxx.path), None, None)
    assert (cxx.calls, cache.exists()) == ([], False)
    cxx.does("echo 'error: no' >&2", "exit 1")
    why_not()
    errors = cache / build.key() / "errors.txt"
    again = f"see {errors}; the next run tries again"
    assert told() == (False, str(cxx.path), f"{cxx.path} failed: error: no", again)
    cxx.does("")
    build.build(silent)
    built, compiler, why, _ = told()
    assert (built, compiler) == (True, None)
    assert why.startswith("it cannot be loaded: ")
    monkeypatch.setattr(build, "import_from", lambda name, path: None)
    assert told() == (True, None, None, None)
    monkeypatch.setattr(torch, "__version__", "1.13.0")
    assert build.outlook()["why"] == build.TOO_OLD[0].format("1.13.0")


def test_the_outlook_of_a_folder_that_cannot_be_written(cxx, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "spare", lambda target: None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a" / "b"))
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK and access(path, mode))
    assert build.outlook()["why"] == f"{tmp_path}: cannot be written"


def test_the_outlook_without_a_compiler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.outlook()
    assert (found["built"], found["compiler"], found["why"], found["do"]) == (
        False,
        None,
        *building.NO_COMPILER,
    )


@pytest.mark.parametrize(("damage", "status"), [("", 0), ("exit 1", 1)])
def test_building_ahead(cxx, damage, status):
    cxx.does(damage)
    done = subprocess.run([sys.executable, "-m", "dtrrun.native"], capture_output=True, text=True)
    assert done.returncode == status
    if status:
        assert done.stderr.splitlines()[-1].startswith(f"dtrrun: {cxx.path} failed: ")
    else:
        assert done.stdout == f"{build.built()}\n"


class Wheel:
    """A wheel's binary for this PyTorch, and a trial that does what it is told. Records each trial."""

    def __init__(self, folder, monkeypatch):
        self.log = folder / "trials"
        for name in ("interposer.cpp", "compiling.py"):
            (folder / "native").mkdir(exist_ok=True)
            (folder / "native" / name).write_text("")
        (folder / "native" / "binaries").mkdir()
        for name in ("HERE", "NATIVE"):
            monkeypatch.setattr(compiling, name, folder / "native")
        compiling.sources.cache_clear()
        self.path = self.add("2.13.0", torch.version.git_version)
        self.trial = folder / "trial.py"
        self.does("")
        monkeypatch.setattr(shipped, "TRIAL", self.trial)

    def add(self, version, commit):
        path = compiling.HERE / "binaries" / compiling.binary_name(version, commit)
        path.write_bytes(CODE)
        assert compiling.seal(path)
        return path

    def does(self, code):
        note = f"import sys\nopen({str(self.log)!r}, 'a').write(repr(sys.argv[1:]) + '\\n')\n"
        self.trial.write_text(f"{note}{code}\nprint('works')\n")

    @property
    def trials(self):
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler
    monkeypatch.delenv("DTRRUN_RECORDS", raising=False)
    yield Wheel(tmp_path, monkeypatch)
    compiling.sources.cache_clear()


def test_a_wheels_binary_is_tried_once(wheel, monkeypatch, cache):
    """It is tried again only for another installation of the same PyTorch; no compiler is looked for."""
    monkeypatch.setenv("CXX", "/none")
    assert [build.find(silent) for _ in range(3)] == [wheel.path] * 3
    (trial,) = wheel.trials
    assert str(wheel.path) in trial
    assert build.outlook()["why"].startswith("it cannot be loaded")
    monkeypatch.setattr(build, "import_from", lambda name, path: None)
    found = build.outlook()
    assert (found["path"], found["built"], found["shipped"]) == (str(wheel.path), True, True)
    assert len(wheel.trials) == 1
    monkeypatch.setattr(torch._C, "__file__", torch.__file__)
    assert build.find(silent) == wheel.path
    assert len(wheel.trials) == 2


def test_what_was_built_here_comes_first(wheel, cxx):
    path = build.build(silent)
    assert build.find(silent) == path
    assert wheel.trials == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "in a trial: Segmentation fault"),
        ("import os; os.abort()", "in a trial: Aborted"),
        (
            "sys.exit('first\\nversion `GLIBCXX_3.4.30 not found')",
            "in a trial: version `GLIBCXX_3.4.30 not found",
        ),
        ("sys.exit(3)", "in a trial: exit status 3"),
        ("import time; time.sleep(60)", "a trial did not end within 0.5 seconds"),
    ],
)
def test_a_binary_that_does_not_work(wheel, monkeypatch, tmp_path, code, said):
    """The extension is built instead; without a compiler, the error says both. No second trial is made."""
    wheel.does(code)
    if "sleep" in code:
        monkeypatch.setattr(shipped, "TIME_LIMIT_SECONDS", 0.5)
    for _ in range(2):
        with pytest.raises(building.CannotBuild) as caught:
            build.find(silent)
        unfit = shipped.UNFIT.format(said)
        assert str(caught.value) == f"{building.NO_COMPILER[0]}, and {unfit}; {building.NO_COMPILER[1]}"
        assert build.outlook()["why"] == caught.value.why
    assert len(wheel.trials) == 1
    Compiler(tmp_path, monkeypatch)
    assert build.find(silent) == build.built()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_trial_that_others_end_tells_nothing(wheel, number):
    wheel.does(f"import os; os.kill(os.getpid(), {int(number)})")
    with pytest.raises(building.CannotBuild):
        build.find(silent)
    wheel.does("")
    assert build.find(silent) == wheel.path


def test_a_binary_that_is_cut_short_is_not_tried(wheel):
    wheel.path.write_bytes(wheel.path.read_bytes()[:-1])
    with pytest.raises(building.CannotBuild, match="the binary that came with dtrrun is damaged"):
        build.find(silent)
    assert wheel.trials == []


def test_a_binary_for_others(wheel, monkeypatch):
    """A binary for another PyTorch (a nightly, a patched one) or for older sources is not tried."""
    wheel.add("2.9.1", "0123456789abcdef")
    with monkeypatch.context() as changed:
        changed.setattr(torch.version, "git_version", "0f" * 20)
        changed.setattr(torch, "__version__", "2.14.0.dev20260701+cpu")
        with pytest.raises(
            building.CannotBuild, match=r"dtrrun came with binaries for PyTorch 2\.9\.1, 2\.13\.0 only;"
        ):
            build.find(silent)
    (compiling.HERE / "interposer.cpp").write_text("// changed\n")
    compiling.sources.cache_clear()
    with pytest.raises(building.CannotBuild, match=r"^no C\+\+ compiler was found; install"):
        build.find(silent)
    assert wheel.trials == []


def test_a_cache_that_cannot_keep_the_result(wheel, monkeypatch, tmp_path):
    """The processes of a run still share the result."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("DTRRUN_RECORDS", str(tmp_path / "run"))
    assert [build.find(silent) for _ in range(2)] == [wheel.path] * 2
    assert len(wheel.trials) == 1
    monkeypatch.delenv("DTRRUN_RECORDS")
    assert build.find(silent) == wheel.path
    assert len(wheel.trials) == 2


def test_processes_that_start_together_try_once(wheel):
    wheel.does("import time; time.sleep(0.5)")
    found = in_processes(4, lambda: str(build.find(silent)))
    assert found == [str(wheel.path)] * 4
    assert len(wheel.trials) == 1


def test_a_binary_that_loads_in_a_trial_but_not_here(wheel, cxx, monkeypatch):
    """The extension is built then: this process may already have loaded other libraries."""
    loaded = []

    def refuse(_, path):
        loaded.append(path)
        if path == wheel.path:
            raise building.CannotBuild("it cannot be loaded", "")
        return sys

    monkeypatch.setattr(build, "import_from", refuse)
    assert build.load(silent) is sys
    assert loaded == [wheel.path, build.built()]


def test_a_trial_whose_status_is_lost(wheel, monkeypatch):
    """The program may ignore SIGCHLD, and a power cut may have emptied the file with the result."""
    wheel.does("import os; os.abort()")
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(building.CannotBuild, match="does not work here"):
            build.find(silent)
    finally:
        signal.signal(signal.SIGCHLD, before)
    (kept,) = build.built().parent.glob("trial-*")
    kept.write_text("")
    wheel.does("")
    assert build.find(silent) == wheel.path


def test_ctrl_c_ends_a_trial(wheel, tmp_path):
    wheel.does(
        f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    )
    process = multiprocessing.get_context("fork").Process(target=lambda: build.find(silent))
    process.start()
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    until(lambda: state_of(process.pid) == "S")  # it waits for the trial, and does not just start it
    os.kill(process.pid, signal.SIGINT)
    process.join()
    until(lambda: not is_running((tmp_path / "pid").read_text()))
    wheel.does("")
    assert build.find(silent) == wheel.path


def test_dtrrun_in_an_archive(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FILES", [[tmp_path / "dtrrun.zip" / "native" / "interposer.cpp"]])
    assert why_not().endswith("interposer.cpp is not there; install dtrrun in a folder, not in an archive")
    assert build.outlook()["path"] is None


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert building.cache_folder() == Path("/.cache/dtrrun/native")
