"""Code injected into the target's Python processes; standard library only.

`path/` is the folder that goes on PYTHONPATH. It contains only the `sitecustomize` that Python imports when
it starts, and the import hook that this installs. The rest is loaded when torch has been imported.
"""
