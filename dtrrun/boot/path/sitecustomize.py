# Trick: Python imports a module of this name when it starts, from the first folder of its path that has one.
# We are that folder (PYTHONPATH), so this runs in every Python process of the target; it sets up our hook,
# steps aside, and imports the `sitecustomize` that would have been found without us. Needed for as long as a
# program cannot be told from outside to import something (all versions until now). No function, no new
# syntax: any Python may come by here, version 2 too.
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("DTRRUN_RUNTIME"):
    try:
        if sys.version_info >= (3, 10):  # noqa: UP036 - whatever Python the target starts
            import _dtrrun_hook  # type: ignore[import-not-found]

            _dtrrun_hook.install()
            del sys.modules["_dtrrun_hook"]
        else:
            _mark = os.path.join(os.environ["DTRRUN_RECORDS"], "old-python")
            os.close(os.open(_mark, os.O_WRONLY | os.O_CREAT, 0o600))
    except Exception:
        pass  # the launcher sees that no process reported, and says so

# From here on the path is what it would be without us; child processes find us by PYTHONPATH again.
sys.path[:] = [_folder for _folder in sys.path if _folder != _here]
sys.path_importer_cache.pop(_here, None)
_this = sys.modules.pop("sitecustomize", None)  # held: version 2 empties a module that nobody holds
# If there is none, the ImportError of this line is what Python expects to see.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
