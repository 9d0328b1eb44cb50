"""dtrrun.cli.doctor, its findings and its view, on fake machines of every kind."""

import json
import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_nvml import GIB, MIB, FakeNvml, Gpu, NVMLError_NotSupported, only_nvml
from fake_records import printed
from view_snapshots import check

from dtrrun.cli import doctor as module
from dtrrun.cli.doctor import VARIABLES, examine
from dtrrun.monitor import checkup
from dtrrun.views.doctor import print_doctor

CPU = {
    "pid": os.getpid(),
    "python": "3.11.7",
    "executable": "/venv/bin/python",
    "torch": "2.13.0+cpu",
    "cuda": None,
    "hip": None,
    "available": False,
    "count": 0,
    "warnings": [],
    "native": {
        "path": "/cache/native.so",
        "built": True,
        "shipped": False,
        "compiler": None,
        "why": None,
        "do": None,
    },
}
UNBUILT = CPU["native"] | {"built": False, "why": "no C++ compiler was found", "do": "install one"}
HELD = {
    "index": 0,
    "uuid": "1a2b",
    "name": "NVIDIA H200",
    "free_bytes": 70 * GIB,
    "total_bytes": 80 * GIB,
    "reserved_bytes": 32 * MIB,
    "backend": "native",
}
CUDA = {
    **CPU,
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "available": True,
    "count": 1,
    **HELD,
}
BLIND = {**CPU, "torch": "2.13.0+cu130", "cuda": "13.0"}


@pytest.fixture
def machine(monkeypatch):
    """Examine a fake machine: its GPUs, PyTorch's answers, and what happens once PyTorch has its context."""
    only_nvml(monkeypatch)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def machine(torch, *gpus, device="auto", then=lambda: None, environ=(), around=(), **more):
        for name, value in dict(environ).items():
            monkeypatch.setenv(name, value)
        here = {"system": "Linux 6.1.0 x86_64", "wsl": False, "container": False} | dict(around)
        monkeypatch.setattr(module, "surroundings", lambda: here)

        @contextmanager
        def probed(python, device):
            then()
            yield torch

        monkeypatch.setattr(module, "probed", probed)
        nvml = FakeNvml(*gpus, **more)
        report = examine(device, "/venv/bin/python", nvml)
        assert nvml.open == 0
        assert json.loads(json.dumps(report)) == report
        return report

    return machine


def told(report, level=None):
    return [finding["text"] for finding in report["findings"] if level in (None, finding["level"])]


def todo(report):
    return " ".join(finding["do"] for finding in report["findings"])


def good(machine, **more):
    gpu = Gpu("GPU-1a2b", total=80 * GIB, used=1 * MIB)

    def then():
        gpu.compute, gpu.used = {os.getpid(): 500 * MIB}, 501 * MIB

    return machine(CUDA, gpu, then=more.pop("then", then), **more)


def test_a_machine_with_a_gpu(machine):
    report = good(machine)
    assert (report["ok"], report["findings"], report["device"]) == (True, [], "cuda:0")
    assert (report["source"], report["shown_bytes"]) == ("nvml_pid", 500 * MIB)
    assert report["driver"] == {"driver": "580.65.06", "nvml": "13.580.65.06", "cuda": "13.0", "error": None}
    (device,) = report["devices"]
    assert (device["total_bytes"], device["used_bytes"], device["processes"]) == (80 * GIB, 501 * MIB, 1)
    assert report["visible"] == ["GPU-1a2b"]


def test_a_machine_without_a_gpu(machine):
    report = machine(CPU, library=False)
    assert (report["ok"], report["findings"], report["device"]) == (True, [], "cpu")
    report = machine(CPU, library=False, device="cuda")
    assert not report["ok"]
    assert told(report) == [
        "no NVIDIA driver responds: NVML Shared Library Not Found",
        "this PyTorch is built for the CPU",
    ]
    assert "nvidia-smi" in todo(report)


@pytest.mark.parametrize(
    ("native", "problems", "row"),
    [
        ({}, [], "built: /cache/native.so"),
        ({"shipped": True, "path": "/dtrrun/torch.so"}, [], "included: /dtrrun/torch.so"),
        (
            {"built": False, "compiler": "g++ -m64"},
            [],
            "not built yet: the first run compiles it with g++ -m64",
        ),
        (
            {"built": False, "why": "no C++ compiler was found", "do": "install one (apt install g++)"},
            ["the native extension cannot be used: no C++ compiler was found"],
            "not available",
        ),
        (
            {"why": "it cannot be loaded: no", "do": "remove /cache"},
            ["the native extension cannot be used: it cannot be loaded: no"],
            "not available",
        ),
    ],
)
def test_the_native_extension(machine, native, problems, row):
    report = machine({**CPU, "native": CPU["native"] | native}, library=False)
    assert (report["ok"], told(report, "problem")) == (not problems, problems)
    assert todo(report) == native.get("do", "")
    assert f"native   {row}" in printed(print_doctor, report, 200)


def test_the_native_extension_on_a_gpu(machine):
    report = machine({**BLIND, "native": UNBUILT}, Gpu("GPU-1a2b"))
    assert report["device"] == "cuda:0"
    assert "the native extension cannot be used: no C++ compiler was found" in told(report, "problem")


def test_a_gpu_and_a_pytorch_for_the_cpu(machine):
    report = machine(CPU, Gpu("GPU-a"))
    assert (report["ok"], report["device"]) == (True, "cpu")
    assert told(report, "advice") == ["there is a GPU, but this PyTorch is built for the CPU"]
    assert "at most CUDA 13.0" in todo(report)
    report = machine(CPU, Gpu("GPU-a"), device="cuda:0")
    assert told(report, "problem") == ["this PyTorch is built for the CPU"]


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
@pytest.mark.parametrize(
    ("torch", "text"),
    [
        ({"error": "ModuleNotFoundError: No module named 'torch'", "python": "3.11.7"}, "cannot be imported"),
        ({"error": "/venv/bin/python ended with 3"}, "cannot be imported"),
        ({**CPU, "python": "3.9.18"}, "Python 3.9.18 is too old"),
        ({**CPU, "free_threaded": True}, "is a free-threaded Python"),
    ],
)
def test_an_interpreter_that_will_not_do(machine, torch, text, device):
    report = machine(torch, library=False, device=device)
    assert not report["ok"]
    assert text in told(report, "problem")[0] or text in told(report, "problem")[-1]


def test_a_driver_that_is_too_old(machine):
    said = "CUDA initialization: The NVIDIA driver on your system is too old"
    report = machine({**BLIND, "cuda": "14.0", "warnings": [said]}, Gpu("GPU-a"))
    assert report["device"] == "cuda:0"
    (text,) = told(report, "problem")
    assert said in text
    assert "update the driver, which is for CUDA 13.0" in todo(report)


def test_a_driver_and_a_pytorch_that_do_not_meet(machine):
    report = machine(BLIND, Gpu("GPU-a"))
    assert "update the driver" not in todo(report)
    assert not report["ok"]


def test_nvml_is_missing_but_cuda_works(machine):
    report = machine(CUDA, library=False)
    assert (report["ok"], report["source"]) == (True, "reserved_overhead")
    (advice,) = told(report)
    assert "NVML does not respond" in advice
    report = machine(CUDA, library=False, environ={"PYTORCH_ALLOC_CONF": "expandable_segments: True"})
    assert told(report, "problem") == [
        "expandable segments are enabled, and without NVML PyTorch may crash with them"
    ]


@pytest.mark.parametrize(("hides", "ok"), [("", False), ("7", False), ("0", True), ("GPU-1a", True)])
def test_visible_devices(machine, hides, ok):
    torch = CUDA if ok else BLIND
    report = machine(torch, Gpu("GPU-1a2b"), device="cuda", environ={"CUDA_VISIBLE_DEVICES": hides})
    assert report["ok"] == ok
    assert any("CUDA_VISIBLE_DEVICES" in text for text in told(report)) != ok


def test_a_number_too_many(machine):
    torch = {**BLIND, "available": True, "count": 2, "device_error": "RuntimeError: invalid device ordinal"}
    report = machine(torch, Gpu("GPU-1a2b"), Gpu("GPU-b"), device="cuda:2")
    assert told(report, "problem") == [
        "there is no cuda:2",
        "cuda:2 cannot be used: RuntimeError: invalid device ordinal",
    ]
    assert "use cuda:0 to cuda:1" in todo(report)


def test_a_container_with_the_hosts_ids(machine):
    gpu = Gpu("GPU-1a2b", compute={9: 3 * GIB})

    def then():
        gpu.compute = {9: 3 * GIB, 123456: 500 * MIB}

    report = machine(CUDA, gpu, then=then, around={"container": True})
    assert (report["ok"], report["source"]) == (True, "nvml_new_pid")
    assert told(report, "note") == [
        "the driver uses other process ids than this system: a process is found as the only new one"
    ]
    assert "--pid=host" in todo(report)


def test_a_container_without_the_gpu(machine):
    report = machine(BLIND, library=False, device="cuda", around={"container": True})
    assert "docker run --gpus all" in todo(report)


def test_wsl(machine):
    gpu = Gpu("GPU-1a2b", compute=NVMLError_NotSupported(), used=900 * MIB)
    report = machine(CUDA, gpu, around={"wsl": True})
    assert (report["ok"], report["source"]) == (True, "reserved_overhead")
    assert told(report, "advice") == [
        "the driver does not report the memory of single processes; dtrrun uses reserved_overhead"
    ]
    assert "under WSL" in todo(report)
    assert "driver for Windows" in todo(machine(BLIND, library=False, device="cuda", around={"wsl": True}))


def test_mig(machine):
    part = Gpu("MIG-7", name="NVIDIA H200 MIG 1g.18gb", total=16 * GIB)

    def then():
        part.compute = {os.getpid(): 400 * MIB}

    report = machine(CUDA, Gpu("GPU-1a2b", parts=[part]), then=then)
    assert (report["ok"], report["source"], report["visible"]) == (True, "nvml_pid", ["MIG-7"])
    assert [device["part_of"] for device in report["devices"]] == [None, "GPU-1a2b"]
    report = machine(BLIND, Gpu("GPU-1a2b", parts=[]), device="cuda")
    assert told(report, "problem")[0] == "GPU 0 is in MIG mode but has no instance"
    report = machine(CUDA, Gpu("GPU-9", parts=[]), Gpu("GPU-1a2b"))
    assert (report["ok"], report["visible"]) == (True, ["GPU-1a2b"])
    assert "GPU 0 is in MIG mode but has no instance" in told(report, "note")


def test_a_gpu_on_which_nobody_may_compute(machine):
    report = machine(BLIND, Gpu("GPU-1a2b"), mode=2)
    assert "compute mode Prohibited" in told(report, "problem")[0]
    assert "nvidia-smi -i 0 -c DEFAULT" in todo(report)


def test_gpus_that_differ(machine):
    report = machine(CUDA, Gpu("GPU-1a2b"), Gpu("GPU-b", name="NVIDIA A100"))
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in todo(report)
    report = good(machine, environ={"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})
    assert report["findings"] == []


@pytest.mark.parametrize(
    ("environ", "torch", "text"),
    [
        (
            {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"},
            {"backend": "cudaMallocAsync"},
            "backend is cuda",
        ),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments: False"},
            {},
            "expandable segments are turned off",
        ),
        ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, {}, "PYTORCH_NO_CUDA_MEMORY_CACHING is set"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, {}, None),
    ],
)
def test_settings_of_the_allocator(machine, environ, torch, text):
    gpu = Gpu("GPU-1a2b")

    def then():
        gpu.compute = {os.getpid(): 500 * MIB}

    report = machine(CUDA | torch, gpu, then=then, environ=environ)
    assert report["ok"]
    assert report["environment"] == environ
    assert [text in found for found in told(report, "advice")] == ([True] if text else [])


def test_rocm(machine):
    untried = "this PyTorch is built for ROCm, and dtrrun has never run on an AMD GPU"
    report = machine({**CPU, "hip": "6.2"}, Gpu("GPU-a"), device="cuda")
    assert told(report) == ["PyTorch 2.13.0+cpu (ROCm 6.2) cannot use the driver", untried]
    assert "rocm-smi" in todo(report)
    report = machine({**CUDA, "cuda": None, "hip": "6.2"}, library=False)
    assert (report["ok"], report["device"], report["source"]) == (True, "cuda:0", "reserved_overhead")
    assert told(report) == [
        untried,
        "the driver does not report the memory of single processes; dtrrun uses reserved_overhead",
    ]


def test_a_device_that_is_lost_is_no_crash(machine):
    gpu = Gpu("GPU-1a2b")
    report = machine(CUDA, gpu, then=lambda: setattr(gpu, "lost", True))
    (device,) = report["devices"]
    assert (device["total_bytes"], device["processes"]) == (None, None)
    assert report["source"] == "reserved_overhead"


def test_surroundings(tmp_path, monkeypatch):
    assert not checkup.surroundings({}, tmp_path)["container"]
    assert checkup.surroundings({"KUBERNETES_SERVICE_HOST": "1"}, tmp_path)["container"]
    (tmp_path / ".dockerenv").touch()
    assert checkup.surroundings({}, tmp_path)["container"]
    monkeypatch.setattr(checkup.platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    assert checkup.surroundings({}, tmp_path)["wsl"]


@pytest.mark.parametrize(("case", "width"), [("good", 80), ("bad", 80), ("bad", 120)])
def test_looks_as_it_did(machine, case, width):
    if case == "good":
        report = good(machine)
    else:
        environ = {"CUDA_VISIBLE_DEVICES": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:False"}
        gpus = [Gpu("GPU-a", parts=[]), Gpu("GPU-1a2b", name="NVIDIA A100", compute=NVMLError_NotSupported())]
        slow = {**CUDA, "native": UNBUILT}
        report = machine(slow, *gpus, environ=environ, around={"container": True}, mode=2)
    report["dtrrun"] = "0.1.0"
    check(f"doctor_{case}_{width}", printed(print_doctor, report, width))


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_table_shows_memory_rather_than_uuids(machine, width):
    uuid = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
    gpus = [
        Gpu(uuid, name="NVIDIA H100 80GB HBM3"),
        Gpu(uuid[:-1] + "7", name="NVIDIA RTX PRO 6000 Blackwell"),
    ]
    lines = printed(print_doctor, machine(CUDA | {"uuid": uuid[4:]}, *gpus), width).splitlines()
    (head,) = [line for line in lines if line.startswith("cuda")]
    assert head.split()[:6] == ["cuda", "GPU", "memory", "in", "use", "processes"]
    assert sum("85.9 GB" in line for line in lines) == 2
    assert ("GPU-8932f937" in "".join(lines)) == (width == 80)


def test_the_page_describes_each_field(machine):
    page = Path(__file__).parents[2] / "docs" / "doctor.md"
    rows = page.read_text().split("## `--json`")[1].splitlines()
    fields = {
        name for row in rows if row.startswith("| `") for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    report = good(machine)
    assert fields == set(report)
    for name in ("driver", "devices"):
        (row,) = [row for row in rows if row.startswith(f"| `{name}` |")]
        facts = report[name] if name == "driver" else report[name][0]
        assert set(re.findall(r"`(\w+)`", row.split("|")[2])) == set(facts)


def test_the_command(machine, monkeypatch, command, tmp_path):
    report = good(machine)
    monkeypatch.setattr(module, "examine", lambda device, python: report | {"device": device})
    status, out, _ = command("doctor")
    assert (status, "A run on auto can work." in out) == (0, True)
    status, out, _ = command("doctor", "--device", "cuda:1", "--json", "-")
    assert (status, json.loads(out)["device"]) == (0, "cuda:1")
    status, out, _ = command("doctor", "--json", tmp_path / "x.json")
    assert (status, "can work" in out) == (0, True)
    assert json.loads((tmp_path / "x.json").read_text())["schema"] == "dtrrun.doctor/1"
    monkeypatch.setattr(module, "examine", lambda device, python: report | {"ok": False})
    assert command("doctor")[0] == 1


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["train.py"], 2, "doctor takes no target: 'train.py' is unexpected"),
        (["--device", "tpu"], 2, "--device: 'tpu' is not one of auto, cpu, cuda, cuda:N"),
        (["--python", "/none"], 127, "--python: no such interpreter: /none"),
    ],
)
def test_what_is_refused(words, code, line, refused):
    assert refused("doctor", *words, status=code) == line


def test_this_machine(command):
    """The real machine is examined, whatever it has: the CPU always works."""
    status, out, _ = command("doctor", "--device", "cpu", "--python", sys.executable)
    assert (status, "A run on cpu can work." in out) == (0, True)
