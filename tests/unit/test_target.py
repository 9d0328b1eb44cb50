"""dtrrun.launch.target"""

import os
import shutil

import pytest

from dtrrun.launch.errors import LaunchError
from dtrrun.launch.target import is_python, refuse_stream, resolve

PYTHON = "/the/python"


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


def file(path, text="print()\n", executable=False):
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755 if executable else 0o644)
    return str(path)


def resolved(*words):
    return resolve(words, lambda: PYTHON)


def refused(*words):
    with pytest.raises(LaunchError) as caught:
        resolved(*words)
    return caught.value.exit_status, str(caught.value)


def test_scripts(here):
    file(here / "train.py")
    file(here / "shebang.py", "#!/usr/bin/env python3\n", executable=True)
    file(here / "noname")
    file(here / "pkg" / "__main__.py")
    for word in (
        "train.py",
        "./train.py",
        "shebang.py",
        str(here / "train.py"),
        "./noname",
        "noname",
        "pkg",
        "./pkg",
    ):
        assert resolved(word, "-I", "--", "x") == [PYTHON, word, "-I", "--", "x"]


def test_what_only_python_takes(here):
    assert resolved("-m", "pkg.train", "a") == [PYTHON, "-m", "pkg.train", "a"]
    assert resolved("-mpkg.train") == [PYTHON, "-mpkg.train"]
    assert resolved("-c", "pass", "-m") == [PYTHON, "-c", "pass", "-m"]
    assert resolved("-", "a") == [PYTHON, "-", "a"]


def test_commands(here):
    assert resolved("true", "a", "-c") == ["true", "a", "-c"]
    assert resolved("/bin/sh", "-c", "x") == ["/bin/sh", "-c", "x"]
    own = file(here / "bin" / "launcher", "#!/bin/sh\n", executable=True)
    assert resolved("launcher", "train.py") == ["launcher", "train.py"]
    assert resolved(own) == [own]


def test_a_command_goes_before_a_file_of_its_name(here):
    file(here / "true")
    file(here / "sh" / "__main__.py")
    assert resolved("true") == ["true"]
    assert resolved("sh") == ["sh"]
    assert resolved("./true") == [PYTHON, "./true"]
    assert resolved("./sh") == [PYTHON, "./sh"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ([], 2, "nothing to run"),
        (["-m"], 2, "-m needs a module"),
        (["-c"], 2, "-c needs code"),
        (["--help"], 2, "'--help' is not a target"),
        (["-x"], 2, "'-x' is not a target"),
        (["-O", "train.py"], 2, "for an option of Python, write: dtrrun python -O ..."),
        ([""], 127, "empty string"),
        (["nosuch.py"], 127, "no such script: nosuch.py"),
        (["./nosuch"], 127, "no such script or command: ./nosuch"),
        (["train"], 127, "did you mean train.py?"),
        (["./empty"], 126, "without a __main__.py"),
        (["./binary"], 126, "neither executable nor a script"),
        (["binary"], 126, "neither executable nor a script"),
    ],
)
def test_what_cannot_be_run(here, words, status, message):
    file(here / "train.py")
    (here / "empty").mkdir()
    (here / "binary").write_bytes(b"\x7fELF\0\0")
    found = refused(*words)
    assert found[0] == status
    assert message in found[1]


@pytest.mark.parametrize("word", ["/dev/stdin", "/dev/fd/{}", "/proc/self/fd/{}"])
def test_open_files_are_scripts(word):
    """A path as the shell makes of `<(command)` is a script: it is not read here, and cannot be run twice."""
    reader, writer = os.pipe()
    try:
        word = word.format(reader)
        assert resolved(word, "a") == [PYTHON, word, "a"]
        with pytest.raises(LaunchError, match="smoke runs its target several times: it cannot be read from"):
            refuse_stream([word], "smoke")
    finally:
        os.close(reader)
        os.close(writer)
    refuse_stream(["train.py"], "smoke")
    assert refused("/dev/fd/999999")[0] == 127


ISOLATED = {
    "by hand": ["python3", "-I", "train.py"],
    "by path": [shutil.which("python3", path="/usr/bin:/bin") or "/usr/bin/python3", "-E", "train.py"],
    "through env": ["env", "A=1", "python3", "-I", "train.py"],
    "in a first line": ["isolated"],
    "in a first line with env": ["split"],
}


@pytest.mark.parametrize("words", ISOLATED.values(), ids=ISOLATED.keys())
def test_flags_that_switch_us_off_are_refused(here, words):
    file(here / "bin" / "python3", "#!/bin/sh\n", executable=True)
    file(here / "bin" / "isolated", "#!/usr/bin/python3 -I\n", executable=True)
    file(here / "bin" / "split", "#!/usr/bin/env -S python3 -I\n", executable=True)
    status, message = refused(*words)
    assert status == 2
    assert "which dtrrun needs" in message


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "train.py", "-I"],
        ["env", "python3", "train.py", "-I"],
        ["plain", "-I"],
        ["grep", "-I", "x"],
    ],
)
def test_the_same_letters_elsewhere_are_not(here, words):
    file(here / "bin" / "python3", "#!/bin/sh\n", executable=True)
    file(here / "bin" / "plain", "#!/usr/bin/env python3\n", executable=True)
    assert resolved(*words) == words


@pytest.mark.parametrize(
    ("name", "python"),
    [
        ("python", True),
        ("/usr/bin/python3.12", True),
        ("python3.13t", True),
        ("pypy3", True),
        ("pythonic", False),
        ("ipython", False),
        ("torchrun", False),
    ],
)
def test_names_of_interpreters(name, python):
    assert is_python(name) is python
