"""What pyproject.toml cannot say of a wheel.

It has pybind11's headers, since the simulator's core is compiled where it is first used, if no binary fits.
With binaries (release/wheels.py), it is for one Python and platform.
"""

import shutil
from importlib.metadata import distribution
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

EXTENSIONS = Path("dtrrun", "extensions")


class WithHeaders(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # a checkout uses those of the environment
            return
        folder = Path(self.build_lib, EXTENSIONS, "include", "pybind11")
        for file in distribution("pybind11").files or ():
            if file.parts[:2] == ("pybind11", "include") or file.name == "LICENSE":
                target = folder.joinpath(*file.parts[3:]) if "include" in file.parts else folder / file.name
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file.locate(), target)


class PerhapsWithBinaries(Distribution):
    def has_ext_modules(self) -> bool:
        return (EXTENSIONS / "binaries").exists()


setup(distclass=PerhapsWithBinaries, cmdclass={"build_py": WithHeaders})
