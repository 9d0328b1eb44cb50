# Python imports a module of this name when it starts, from the first folder of its path that has one. This
# folder is first on PYTHONPATH, so this runs in every Python process of the target. It installs our hook,
# removes itself, and imports the `sitecustomize` that it shadows. Needed as long as Python cannot be told
# from outside to import something (all versions so far). No function and no new syntax, since any Python may
# run this, including version 2.
import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if os.environ.get("DTRRUN_RUNTIME"):
    try:
        if sys.version_info >= (3, 7):  # noqa: UP036 - whatever Python the target starts; the hook can say so
            import _dtrrun_hook  # type: ignore[import-not-found]

            _dtrrun_hook.install()
            del sys.modules["_dtrrun_hook"]
        else:
            _mark = os.path.join(os.environ["DTRRUN_RECORDS"], "old-python")
            os.close(os.open(_mark, os.O_WRONLY | os.O_CREAT, 0o600))
    except Exception:
        pass  # the launcher reports that no process has started the runtime

# From here on, sys.path is as without us; child processes find us through PYTHONPATH again.
sys.path[:] = [_folder for _folder in sys.path if _folder != _here]
sys.path_importer_cache.pop(_here, None)
_this = sys.modules.pop("sitecustomize", None)  # referenced: version 2 clears an unreferenced module
# If there is none, Python expects this line's ImportError.
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401
