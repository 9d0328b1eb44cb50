"""The conclusions of `dtrrun doctor` from its facts: each problem with a remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

OLDEST_PYTHON = (3, 11)
CACHING_OFF = "PYTORCH_NO_CUDA_MEMORY_CACHING"


class Finding(NamedTuple):
    """`problem`: a run cannot work. `advice`: it can, but not optimally. `note`: information."""

    level: str
    text: str
    do: str


def findings(facts: dict[str, Any]) -> list[Finding]:
    """Return the findings, problems first. facts: the doctor's report, see `cli/doctor.py`."""
    found = [*_python(facts), *(_gpu(facts) if facts["device"] != "cpu" else _cpu(facts))]
    return sorted(found, key=lambda finding: ("problem", "advice", "note").index(finding.level))


def _python(facts: dict[str, Any]) -> Iterator[Finding]:
    probe = facts["torch"]
    where = probe.get("executable") or facts["interpreter"]
    if "python" in probe and _numbers(probe["python"]) < OLDEST_PYTHON:
        yield Finding(
            "problem", f"Python {probe['python']} is too old", "use 3.11 or later (choose one with --python)"
        )
    if probe.get("free_threaded"):
        yield Finding(
            "problem",
            f"{where} is a free-threaded Python, which is not supported",
            "use one with a global interpreter lock (choose one with --python)",
        )
    if "error" in probe:
        yield Finding(
            "problem",
            f"PyTorch cannot be imported by {where}: {probe['error']}",
            f"install it there ({where} -m pip install torch), or name the right interpreter with --python",
        )
    native = probe.get("native")
    if native and native["why"]:
        yield Finding("problem", f"the native extension cannot be used: {native['why']}", native["do"])


def _cpu(facts: dict[str, Any]) -> Iterator[Finding]:
    probe = facts["torch"]
    if facts["visible"] and "error" not in probe and not probe["cuda"]:
        yield Finding("advice", "there is a GPU, but this PyTorch is built for the CPU", _install(facts))


def _gpu(facts: dict[str, Any]) -> Iterator[Finding]:
    probe, driver = facts["torch"], facts["driver"]
    if probe.get("hip"):
        yield Finding(
            "advice",
            "this PyTorch is built for ROCm, and dtrrun has never run on an AMD GPU",
            "check with dtrrun smoke that the results are the same",
        )
    elif driver["error"] and not probe.get("available"):
        yield Finding("problem", f"no NVIDIA driver responds: {driver['error']}", _driver(facts))
    elif driver["error"]:
        yield Finding(
            "advice",
            f"PyTorch sees the GPU, but NVML does not respond: {driver['error']}",
            "install the libnvidia-ml.so.1 that belongs to the driver (in a container: "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility), if there is one for this board; without it, the "
            "driver's figures are estimated",
        )
    else:
        yield from _devices(facts)
    if "error" not in probe:
        yield from _torch(facts)
    if probe.get("backend"):
        yield from _allocator(facts)
        yield from _source(facts)


def _driver(facts: dict[str, Any]) -> str:
    if facts["container"]:
        return "start the container with the GPU: docker run --gpus all (NVIDIA Container Toolkit)"
    if facts["wsl"]:
        return "install NVIDIA's driver for Windows, not one inside WSL; then run: wsl --update"
    return "install NVIDIA's driver and check that nvidia-smi works, or use --device cpu"


def _devices(facts: dict[str, Any]) -> Iterator[Finding]:
    devices, counted = facts["devices"], facts["visible"]
    hides = facts["environment"].get("CUDA_VISIBLE_DEVICES")
    index = int(facts["device"].partition(":")[2] or 0)
    meant = counted[index] if index < len(counted) else None
    for device in devices:
        if device["mig"] and not any(part["part_of"] == device["uuid"] for part in devices):
            yield Finding(
                "note" if meant else "problem",
                f"GPU {device['index']} is in MIG mode but has no instance",
                "create one (nvidia-smi mig -cgi PROFILE -C), or turn MIG mode off (nvidia-smi -mig 0)",
            )
        if device["prohibited"]:
            yield Finding(
                "problem" if device["uuid"] == meant else "note",
                f"GPU {device['index']} is in compute mode Prohibited, so no process can use it",
                f"run: nvidia-smi -i {device['index']} -c DEFAULT",
            )
    if not devices:
        yield Finding("problem", "the driver lists no GPU", _driver(facts))
    elif meant is None and hides is not None:
        yield Finding(
            "problem",
            f"CUDA_VISIBLE_DEVICES={hides} leaves {len(counted)} devices: there is no {facts['device']}",
            "unset it, or name devices that exist (nvidia-smi -L)",
        )
    elif meant is None and counted:
        yield Finding("problem", f"there is no {facts['device']}", f"use cuda:0 to cuda:{len(counted) - 1}")
    if not facts["order_is_certain"]:
        yield Finding(
            "advice",
            "the GPUs are of different models, and CUDA numbers the fastest first, unlike nvidia-smi",
            "export CUDA_DEVICE_ORDER=PCI_BUS_ID, so that both use the same numbers",
        )


def _torch(facts: dict[str, Any]) -> Iterator[Finding]:
    probe, newest = facts["torch"], facts["driver"]["cuda"]
    if not (probe["cuda"] or probe["hip"]):
        yield Finding("problem", "this PyTorch is built for the CPU", _install(facts))
    elif "device_error" in probe:
        yield Finding(
            "problem",
            f"{facts['device']} cannot be used: {probe['device_error']}",
            f"check with {_tool(probe)} whether it is free and healthy, or choose another with --device",
        )
    elif not probe["available"]:
        said = f": {probe['warnings'][-1]}" if probe["warnings"] else ""
        built = f"CUDA {probe['cuda']}" if probe["cuda"] else f"ROCm {probe['hip']}"
        old = newest and probe["cuda"] and _numbers(newest)[0] < _numbers(probe["cuda"])[0]
        yield Finding(
            "problem",
            f"PyTorch {probe['torch']} ({built}) cannot use the driver{said}",
            f"update the driver, which is for CUDA {newest}; or {_install(facts)}"
            if old
            else f"fix the problems above; if there are none, check that {_tool(probe)} works for this user",
        )


def _tool(probe: dict[str, Any]) -> str:
    return "rocm-smi" if probe["hip"] else "nvidia-smi"


def _install(facts: dict[str, Any]) -> str:
    newest = facts["driver"]["cuda"]
    of = f" of at most CUDA {newest}" if newest else ""
    return f"install a build{of} from https://pytorch.org/get-started, or use --device cpu"


def _allocator(facts: dict[str, Any]) -> Iterator[Finding]:
    environment = facts["environment"]
    settings = ",".join(environment[name] for name in environment if name.endswith("ALLOC_CONF"))
    if facts["torch"]["backend"] != "native":
        yield Finding(
            "advice",
            f"the allocator's backend is {facts['torch']['backend']}, whose fragmentation dtrrun cannot see",
            "remove backend: from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        )
    if facts["driver"]["error"] and "expandable_segments:true" in settings.replace(" ", "").lower():
        yield Finding(
            "problem",
            "expandable segments are enabled, and without NVML PyTorch may crash with them",
            "remove expandable_segments:True from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        )
    if "expandable_segments:false" in settings.replace(" ", "").lower():
        yield Finding(
            "advice",
            "expandable segments are turned off: more of the budget is lost to fragmentation",
            "remove expandable_segments:False from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF",
        )
    if environment.get(CACHING_OFF, "0") not in ("", "0"):
        yield Finding(
            "advice", f"{CACHING_OFF} is set: every allocation goes to the driver, which is slow", "unset it"
        )


def _source(facts: dict[str, Any]) -> Iterator[Finding]:
    if facts["source"] in ("nvml_pid", "kfd_pid") or (facts["driver"]["error"] and not facts["torch"]["hip"]):
        return  # without NVML, another finding says that figures are estimated
    if facts["container"]:
        do = (
            "start the container with --pid=host, so that the driver's process ids match those in the "
            "container"
        )
    elif facts["wsl"]:
        do = "nothing to do: under WSL, the driver does not report memory by process"
    else:
        do = (
            f"check whether {_tool(facts['torch'])} shows memory by process; if not, the driver does not "
            "report it for this GPU"
        )
    if facts["source"] == "nvml_new_pid":
        text = "the driver uses other process ids than this system: a process is found as the only new one"
        yield Finding("note", text, do)
    else:
        text = f"the driver does not report the memory of single processes; dtrrun uses {facts['source']}"
        yield Finding("advice", text, do)


def _numbers(version: str) -> tuple[int, ...]:
    """Parse `2.13.0+cpu` as (2, 13, 0)."""
    found = []
    for part in version.partition("+")[0].split("."):
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        found.append(int(digits))
    return tuple(found)
