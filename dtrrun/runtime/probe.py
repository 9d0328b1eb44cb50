"""Describes the PyTorch installation for `dtrrun doctor`.

The target's interpreter, which may lack dtrrun, runs this file's text.

Its arguments are a device and the folder of dtrrun's `extensions`. Writes one line of JSON. On a GPU it then
holds a context and some memory until its standard input is closed, so that the launcher can ask the driver
how much memory it reports for this process.
"""

import importlib.util
import json
import os
import sys
import sysconfig
import warnings
from typing import Any

MARK = "dtrrun-probe:"
HELD_BYTES = 32 << 20
EXTENSIONS = "_dtrrun_probed_extensions"
"""The name of dtrrun's package `extensions` here: an installed one may be another version's."""


def facts(device: str, package: str) -> dict[str, Any]:
    """Return versions and settings; `error` if torch cannot be used, `device_error` if the device cannot.

    package: the folder of dtrrun's `extensions`.
    """
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "free_threaded": bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        "executable": sys.executable,
    }
    try:
        import torch
    except Exception as error:  # a broken installation can raise anything
        return found | {"error": f"{type(error).__name__}: {error}"}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found |= {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "available": torch.cuda.is_available(),
            "count": torch.cuda.device_count(),
        }
        if found["available"] and device != "cpu":
            found |= on_device(torch, device)
        found["native"] = native(torch, package)
    return found | {"warnings": [str(warning.message).splitlines()[0] for warning in said]}


def native(torch: Any, package: str) -> dict[str, Any]:
    """Return the outlook for the native extension; `why`: why it cannot be used, or why that is unknown."""
    found: dict[str, Any] = dict.fromkeys(("path", "compiler", "why", "do"))
    found |= {"built": False, "shipped": False}
    try:
        init = os.path.join(package, "__init__.py")
        spec = importlib.util.spec_from_file_location(EXTENSIONS, init, submodule_search_locations=[package])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[EXTENSIONS] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        build = importlib.import_module(f"{EXTENSIONS}.build")
        found |= build.outlook()
        try:
            build.check_key()
        except build.CannotBuild as error:
            found |= {"why": error.why, "do": error.do}
    except Exception as error:
        found |= {"why": f"{type(error).__name__}: {error}", "do": "report this"}
    return found


def on_device(torch: Any, device: str) -> dict[str, Any]:
    """Describe the device, with a context and memory held until the process ends."""
    try:
        index = int(device.partition(":")[2] or 0)
        held.append(torch.empty(HELD_BYTES, dtype=torch.uint8, device=f"cuda:{index}"))
        free, total = torch.cuda.mem_get_info(index)
        return {
            "index": index,
            "uuid": str(getattr(torch.cuda.get_device_properties(index), "uuid", "")),
            "name": torch.cuda.get_device_name(index),
            "free_bytes": free,
            "total_bytes": total,
            "reserved_bytes": torch.cuda.memory_reserved(index),
            "backend": torch.cuda.get_allocator_backend(),
        }
    except Exception as error:  # CUDA fails in many ways
        return {"device_error": f"{type(error).__name__}: {str(error).splitlines()[0]}"}


held: list[Any] = []

if __name__ == "__main__":
    print(MARK + json.dumps(facts(*sys.argv[1:])), flush=True)
    sys.stdin.read()
