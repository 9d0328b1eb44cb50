"""The user's sitecustomize and usercustomize run as Python itself would run them."""

import sys

import pytest

SAYS = (
    "import sys\nprint('mine', __name__, __file__, 'sitecustomize' in sys.modules)\nsys.customized = True\n"
)
SHOWS = (
    "import sys\n"
    "module = sys.modules.get('sitecustomize')\n"
    "print(module, getattr(sys, 'customized', None), sys.path)\n"
)


@pytest.fixture
def venv(plain, tmp_path):
    """A fresh environment: its interpreter and its site-packages."""
    assert plain(sys.executable, "-m", "venv", "--without-pip", "venv").status == 0
    (packages,) = tmp_path.glob("venv/lib/python*/site-packages")
    return str(tmp_path / "venv" / "bin" / "python"), packages


@pytest.mark.parametrize(
    "text",
    [SAYS, "import nosuchmodule\n", "raise ImportError('x', name='y')\n", "1 / 0\n", "this is no Python\n"],
    ids=["works", "misses a module", "misses another", "raises", "malformed"],
)
def test_on_pythonpath(program, plain, dtrrun, tmp_path, text):
    program("mine/sitecustomize.py", text)
    program("show.py", SHOWS)
    env = {"PYTHONPATH": str(tmp_path / "mine")}
    without = plain(sys.executable, "show.py", env=env)
    ended = dtrrun("--quiet", "show.py", env=env)
    # The parent is also a Python, and runs the user's module first.
    says = [line for line in without.out.splitlines() if line.startswith("mine")]
    assert ended.out.splitlines() == says + without.out.splitlines()
    theirs = [line for line in ended.err.splitlines() if not line.startswith("dtrrun: ")]
    assert theirs == without.err.splitlines() * 2
    assert len(says) == (text == SAYS)
    assert "sitecustomize" in without.out + without.err


def test_in_site_packages(program, plain, dtrrun, venv):
    python, packages = venv
    (packages / "sitecustomize.py").write_text(SAYS)
    (packages / "early.pth").write_text("import sys; sys.early = 'sitecustomize' in sys.modules\n")
    program("show.py", SHOWS + "print(sys.early)\n")
    without = plain(python, "show.py")
    ended = dtrrun("--budget", "1GB", "--python", python, "show.py")
    assert without.out.startswith("mine sitecustomize")
    assert ended.out == without.out


def test_usercustomize(program, plain, dtrrun, tmp_path):
    program("mine/usercustomize.py", SAYS)
    program("show.py", SHOWS)
    base = sys._base_executable  # in a virtual environment, Python imports no usercustomize
    env = {"PYTHONPATH": str(tmp_path / "mine")}
    without = plain(base, "show.py", env=env)
    ended = dtrrun("--quiet", "--python", base, "show.py", env=env)
    assert without.out.startswith("mine usercustomize")
    assert ended.out == without.out


def test_one_that_imports_torch(program, dtrrun, tmp_path):
    program("mine/sitecustomize.py", "import sys\nif sys.argv[0] == 'train.py': import torch\n")
    program("train.py", "import sys\nassert 'torch' in sys.modules\n")
    ended = dtrrun("--budget", "1GB", "train.py", env={"PYTHONPATH": str(tmp_path / "mine")})
    assert (ended.status, len(ended.processes)) == (0, 1), ended.err
