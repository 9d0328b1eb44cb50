"""Wheels of this project, in a separate environment without PyTorch."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import torch
import yaml

from dtrrun.cli.main import VERBS
from dtrrun.extensions import compiling

ROOT = Path(__file__).parents[2]
TRAIN = """\
import argparse, sys
import torch
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
epochs = parser.parse_args().epochs
torch.manual_seed(0)
layers = [layer for _ in range(8) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(epochs):
    loss = model(torch.ones(4096, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(epoch, loss.item().hex())
print(sys.executable)
if "dtrrun" in sys.modules:
    print(sys.modules["dtrrun"].__file__, file=sys.stderr)
"""


def call(*command, cwd=None):
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built as for a release, from a source archive, in a copy: setuptools leaves files behind."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("dtrrun", "profiles"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "clone" / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "clone" / name)
    archive = "from setuptools import build_meta; build_meta.build_sdist('..')"
    call(sys.executable, "-c", archive, cwd=folder / "clone")
    call(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", folder, *folder.glob("*.tar.gz")),
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A wheel as `make wheels` makes it, with the native extension for this environment's PyTorch."""
    folder = tmp_path_factory.mktemp("full")
    call(sys.executable, ROOT / "release" / "wheels.py", "--here", "--to", folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def clean(full):
    """The folder of commands of an environment with that wheel installed."""
    venv = full.parent / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv)
    call(
        *(sys.executable, "-m", "pip", "--python", venv / "bin" / "python", "install", "--quiet"),
        *("--constraint", ROOT / "constraints.txt", full),
    )
    return venv / "bin"


def test_it_has_every_file_and_asks_for_no_torch(wheel):
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if name.startswith("dtrrun/")}
        (metadata,) = (name for name in opened.namelist() if name.endswith("dist-info/METADATA"))
        told = Parser().parsestr(opened.read(metadata).decode())
    folders = (ROOT / "dtrrun", ROOT / "dtrrun" / "profiles")  # the second is a symbolic link
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert names == {path.relative_to(ROOT).as_posix() for path in files if path.parent.name != "__pycache__"}
    needed = [line for line in told.get_all("Requires-Dist") if line.startswith("torch>")]
    assert needed == ['torch>=2.9; extra == "torch"']


def test_what_a_full_wheel_adds(wheel, full):
    """It adds two binaries, and its name states what auditwheel read from their symbols."""
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    with zipfile.ZipFile(full) as opened:
        core, binary = sorted({name for name in opened.namelist() if not name.endswith("/")} - names)
        assert "Root-Is-Purelib: false" in opened.read("dtrrun-0.1.0.dist-info/WHEEL").decode()
    assert core == f"dtrrun/extensions/binaries/{compiling.core_binary_name()}"
    assert binary.startswith(f"dtrrun/extensions/binaries/torch-{torch.__version__.partition('+')[0]}-")
    assert binary.endswith(f"-{sysconfig.get_config_var('SOABI')}-{compiling.sources()}.so")
    version = "cp{}{}".format(*sys.version_info)
    machine = sysconfig.get_platform().rpartition("-")[2]
    assert re.fullmatch(rf"dtrrun-0.1.0-{version}-{version}-manylinux_2_\d+_{machine}.whl", full.name)


def test_the_jobs_of_the_page_about_ci(wheel, plain, program, tmp_path):
    """Their commands run in a new environment, with a wheel in `vendor` and nothing from an index."""
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs" / "ci.md").read_text(), re.MULTILINE | re.DOTALL
    )
    github, gitlab = map(yaml.safe_load, blocks)
    lines = [step["run"] for step in github["jobs"]["smoke"]["steps"] if "run" in step]
    assert lines == gitlab["smoke"]["script"]
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (site / "requirements.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = tmp_path / "venv" / "bin" / "pip"
    pip.write_text(f'#!/bin/sh\nexec {sys.executable} -m pip --python {pip.with_name("python")} "$@"\n')
    pip.chmod(0o755)
    (tmp_path / "vendor").mkdir()
    shutil.copy(wheel, tmp_path / "vendor")
    (tmp_path / "requirements.txt").touch()
    program("train.py", TRAIN)
    env = {"PATH": f"{pip.parent}:/usr/bin:/bin", "PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}
    for line in lines:
        ended = plain("sh", "-c", line, env=env)
        assert ended.status == 0, ended.out + ended.err
    assert (tmp_path / "smoke.xml").exists()


def test_no_compiler_is_needed(clean, plain, program, tmp_path):
    """A run at 60 % of its peak gives the same bits, natively. The binary is tried once."""
    program("train.py", TRAIN)
    dtrrun = (str(clean / "dtrrun"), "--device", "cpu", "--json", "run.json")
    alone = {
        "VIRTUAL_ENV": sys.prefix,
        "PATH": "/nowhere",
        "CXX": "/none",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    expected = plain(sys.executable, "train.py", "--epochs", "3").out
    budget = []
    for _ in range(2):
        ended = plain(*dtrrun, *budget, "train.py", "--epochs", "3", env=alone)
        assert (ended.status, ended.out) == (0, expected), ended.err
        report = json.loads((tmp_path / "run.json").read_text())
        budget = ["--budget", f"{report['peak_bytes'] * 6 // 10}B"]
    assert report["rematerializations"] > 0
    assert report["native"]["in_python"] < report["native"]["operators"] / 2
    kept = [path.name for path in (tmp_path / "cache" / "dtrrun" / "native").rglob("*") if path.is_file()]
    assert sorted(name.split("-")[0] for name in kept) == ["trial", "trial.lock"]
    doctor = plain(str(clean / "dtrrun"), "doctor", "--device", "cpu", "--json", "doctor.json", env=alone)
    assert (doctor.status, doctor.err) == (0, "")
    native = json.loads((tmp_path / "doctor.json").read_text())["torch"]["native"]
    assert (native["shipped"], native["why"]) == (True, None)
    assert native["path"].startswith(str(clean.parent / "lib"))


def test_the_readmes_first_command(clean, plain, program, tmp_path):
    """It runs in the active environment, with the options that need the package's files."""
    lines = (ROOT / "README.md").read_text().splitlines()
    words = shlex.split(next(line for line in lines if line.startswith("    dtrrun")))
    assert words[-3:] == ["train.py", "--epochs", "3"]
    program("train.py", TRAIN)
    active = {"VIRTUAL_ENV": sys.prefix}
    more = ("--profile", "low-memory", "--html", "page.html", "--json", "run.json")
    ended = plain(str(clean / "dtrrun"), *more, *words[1:], env=active)
    assert (ended.status, ended.out.splitlines()[-1]) == (0, sys.executable), ended.err
    assert f"\n{clean.parent}/lib/" in ended.err  # the wheel's code ran
    assert "uPlot" in (tmp_path / "page.html").read_text()
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["budget_bytes"] == 6 * 10**9


def test_what_works_without_torch(clean, plain, program, tmp_path):
    dtrrun = str(clean / "dtrrun")
    log = str(ROOT / "tests" / "logs" / "amp.log.gz")
    words = (dtrrun, "simulate", "--heuristic", "h_dtr_eq", "--budgets", "0.5", "--jobs", "1", log)
    ended = plain(*words, env={"CXX": "/none", "XDG_CACHE_HOME": str(tmp_path)})  # uses the wheel's core
    assert ended.status == 0
    assert "h_dtr_eq" in ended.out
    assert plain(dtrrun, "top", "--once").status == 0
    assert all(verb in plain(dtrrun, "--help").out for verb in VERBS)


def test_what_does_not_says_so_in_a_line(clean, plain, program):
    python = str(clean / "python")
    nowhere = {"PATH": "/nowhere"}  # no other interpreter
    program("train.py", "import torch\n")
    said = f"torch is not installed for {python}: install it there, or name another Python with --python"
    for verb in ("run", "record -o step.log", "profile", "smoke"):
        ended = plain(str(clean / "dtrrun"), *verb.split(), "train.py", env=nowhere)
        assert ended.status == 1, ended.err
        assert said in ended.err + ended.out
    doctor = plain(str(clean / "dtrrun"), "doctor", env=nowhere)
    assert doctor.status == 1
    assert f"PyTorch cannot be imported by {python}" in " ".join(doctor.out.split())
    ended = plain(python, "-m", "dtrrun.native")
    assert (ended.status, ended.err) == (
        1,
        f"dtrrun: PyTorch is not installed for {python}: use the Python that runs the script\n",
    )
    ended = plain(python, "-c", "import dtrrun\ndtrrun.budget('1GB')")
    assert ended.err.splitlines()[-1] == (
        f"ModuleNotFoundError: dtrrun.budget needs PyTorch, which is not installed for {python}: "
        "pip install 'torch>=2.9'"
    )
