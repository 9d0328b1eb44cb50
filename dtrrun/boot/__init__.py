"""What is injected into the target's Python processes; standard library only.

`path/` is the folder that goes on PYTHONPATH, with nothing in it but the `sitecustomize` that Python imports
at its start and the import hook that this sets up. The rest is loaded when torch has been imported, not
before.
"""
