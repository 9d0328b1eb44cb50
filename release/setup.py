"""Tells setuptools that the wheel is for one Python and one kind of machine: it has binaries (wheels.py)."""

from setuptools import Distribution, setup


class WithBinaries(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=WithBinaries)
