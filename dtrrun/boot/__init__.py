"""Code injected into the target's Python processes; standard library only.

`path/` is the folder that goes on PYTHONPATH. It contains only the `sitecustomize` that Python imports at
startup, and the import hook that this installs. The rest is loaded once torch has been imported.
"""
