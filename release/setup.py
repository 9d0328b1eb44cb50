"""Tells setuptools that the wheel is specific to a Python and a platform: it has binaries (wheels.py)."""

from setuptools import Distribution, setup


class WithBinaries(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(distclass=WithBinaries)
