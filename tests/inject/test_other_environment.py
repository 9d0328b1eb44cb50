"""A target in another environment: with torch but without dtrrun, or without torch."""

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch
from modes import MODES


def needed_by(name):
    """Return the names of the distributions that `name` needs, including itself."""
    found, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        try:
            requires = importlib.metadata.distribution(name).requires or []
        except importlib.metadata.PackageNotFoundError:
            continue
        if name not in found:
            found.add(name)
            waiting += [re.split(r"[ ;<>=!~\[(]", line)[0] for line in requires if "extra ==" not in line]
    return found


@pytest.fixture
def python(plain, tmp_path):
    """The interpreter of an empty environment."""
    assert plain(sys.executable, "-m", "venv", "--without-pip", "venv").status == 0
    return str(tmp_path / "venv" / "bin" / "python")


@pytest.fixture
def python_with_torch(python, tmp_path):
    """The interpreter of an environment with torch and its dependencies, but without dtrrun."""
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    ours = Path(torch.__file__).parent.parent
    for name in needed_by("torch"):
        for file in importlib.metadata.distribution(name).files or []:
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(ours / top)
    return python


def test_with_torch_but_without_dtrrun(program, plain, dtrrun, python_with_torch):
    program(
        "train.py",
        "import sys\n"
        "before = list(sys.path)\n"
        f"import torch{MODES}\n"
        "assert modes() == ['dtrrun']\n"
        "assert sys.path == before\n"
        "import dtrrun\n"
        "print(dtrrun.__file__)\n"
        "for name in ('yaml', 'typer', 'psutil'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ModuleNotFoundError:\n"
        "        print('no', name)\n",
    )
    missing = plain(python_with_torch, "-c", "import torch, dtrrun")
    assert missing.err.endswith("No module named 'dtrrun'\n")
    ended = dtrrun("--budget", "1GB", "--python", python_with_torch, "train.py")
    import dtrrun as package

    assert ended.out == f"{package.__file__}\nno yaml\nno typer\nno psutil\n", ended.err
    assert (ended.status, len(ended.processes)) == (0, 1)


def test_without_torch(program, plain, dtrrun, python):
    program("train.py", "import torch\n")
    without = plain(python, "train.py")
    ended = dtrrun("--quiet", "--budget", "1GB", "--python", python, "train.py")
    assert (ended.status, ended.err) == (1, without.err)
    assert "ModuleNotFoundError: No module named 'torch'" in without.err
    ended = dtrrun("--budget", "1GB", "--python", python, "train.py")
    assert ended.ours[-1] == (
        f"torch is not installed for {python}: install it there, or name another Python with --python"
    )


@pytest.mark.parametrize(
    ("disguise", "why"),
    [
        (
            "import sys\nsys.version_info = (3, 10, 4)\nsys.path[:0] = ['old']\n",
            f"{sys.executable} is Python 3.10.4, and dtrrun needs 3.11 or later",
        ),
        (
            "import sysconfig\nsysconfig.get_config_vars()['Py_GIL_DISABLED'] = 1\n",
            "free-threaded Python is not supported: use one with a global interpreter lock",
        ),
    ],
    ids=["too old", "free-threaded"],
)
def test_a_python_that_will_not_do_ends_at_the_import_of_torch(program, dtrrun, disguise, why):
    """The run ends there rather than train without a budget."""
    program("old/torch.py", "Tensor = None\n")
    program("train.py", f"{disguise}print('before', flush=True)\nimport torch\nprint('after')\n")
    ended = dtrrun("--budget", "1GB", "train.py")
    assert (ended.status, ended.out) == (125, "before\n")
    assert ended.ours[-1] == f"error: a process could not be put under the budget: {why}"
    ended = dtrrun("smoke", "train.py") if "free" in why else None
    assert ended is None or why in ended.out


def test_the_active_environment_is_the_one_that_is_meant(program, plain, python, tmp_path):
    """With dtrrun on PATH, as after `pipx install`, the active environment's Python is used."""
    program("bin/dtrrun", f"#!{sys.executable}\nfrom dtrrun.cli.main import main\nmain()\n")
    (tmp_path / "bin" / "dtrrun").chmod(0o755)
    program("show.py", "import sys\nprint(sys.prefix)\n")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    env = {"PATH": path, "VIRTUAL_ENV": str(tmp_path / "venv")}
    assert plain("dtrrun", "--budget", "1GB", "show.py", env=env).out == f"{tmp_path / 'venv'}\n"
    assert plain("./bin/dtrrun", "--budget", "1GB", "show.py", env=env | {"PATH": "/usr/bin:/bin"}).out == (
        f"{sys.prefix}\n"
    )
