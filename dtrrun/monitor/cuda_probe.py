"""Prints what CUDA sees, as JSON: the bytes of each device, or why there is none.

Run as a script, in a separate process: after `cuInit`, a process can neither fork children that use CUDA nor
change CUDA_VISIBLE_DEVICES.
"""

import json
import sys
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t
from typing import Any

LIBRARY = "libcuda.so.1"


def devices(library: str = LIBRARY) -> list[int]:
    """Return the bytes of CUDA's devices in its order. Raises OSError."""
    cuda = CDLL(library)
    call(cuda, "cuInit", 0)
    count, device, nbytes = c_int(), c_int(), c_size_t()
    call(cuda, "cuDeviceGetCount", byref(count))
    found = []
    for index in range(count.value):
        call(cuda, "cuDeviceGet", byref(device), index)
        call(cuda, "cuDeviceTotalMem_v2", byref(nbytes), device)
        found.append(nbytes.value)
    return found


def call(cuda: Any, name: str, *arguments: Any) -> None:
    """Call a function of the driver. Raises OSError if it fails."""
    if code := getattr(cuda, name)(*arguments):
        text = c_char_p()
        cuda.cuGetErrorString(code, byref(text))
        raise OSError(f"{name}: {(text.value or b'').decode() or f'error {code}'}")


if __name__ == "__main__":
    try:
        json.dump({"devices": devices(*sys.argv[1:])}, sys.stdout)
    except (OSError, AttributeError) as error:
        json.dump({"why": str(error)}, sys.stdout)
