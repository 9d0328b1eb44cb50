"""dtrrun.monitor over the real driver: what NVML lists, in which order, and what doctor makes of it."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from dtrrun.launch.torch_probe import probed
from dtrrun.monitor.checkup import source_for
from dtrrun.monitor.devices import all_devices, by_uuid, order_is_certain, visible
from dtrrun.monitor.ladder import Ladder
from dtrrun.monitor.nvml import NvmlUnavailable, memory, started
from dtrrun.telemetry.driver import PER_PROCESS, SOURCES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a PyTorch with CUDA"
)

PROGRAM = """
import torch, time
held = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").zero_()
torch.cuda.synchronize()
time.sleep(5)
"""


@pytest.fixture
def nvml():
    try:
        with started() as module:
            yield module
    except NvmlUnavailable as error:
        pytest.skip(f"needs NVML: {error}")


def test_cudas_devices_are_the_ones_that_are_counted(nvml):
    devices = all_devices(nvml)
    counted = visible(devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert len(counted) >= torch.cuda.device_count() > 0
    if order_is_certain(devices, os.environ.get("CUDA_DEVICE_ORDER")):
        for index in range(torch.cuda.device_count()):
            assert by_uuid(devices, str(torch.cuda.get_device_properties(index).uuid)) == counted[index]


def test_a_device_has_the_memory_that_cuda_sees(nvml):
    device = visible(all_devices(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    assert memory(nvml, device.handle).total >= torch.cuda.mem_get_info(0)[1]


def test_a_process_is_shown_with_all_that_it_holds(nvml):
    ladder = Ladder(nvml)
    with probed(sys.executable, "cuda:0") as facts:
        source, nbytes = source_for(ladder, facts)
    assert source in SOURCES
    assert nbytes >= facts["reserved_bytes"]
    if source in PER_PROCESS:
        assert nbytes > facts["reserved_bytes"]  # a context takes memory as well


def test_doctor_finds_no_problem(tmp_path):
    command = [
        sys.executable,
        "-m",
        "dtrrun",
        "doctor",
        "--device",
        "cuda",
        "--json",
        str(tmp_path / "x.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    report = json.loads((tmp_path / "x.json").read_text())
    assert (done.returncode, report["ok"]) == (0, True), done.stdout
    assert report["source"] in SOURCES


def test_what_the_driver_shows_grows_with_the_process(nvml):
    """The device's memory grows by at least a gibibyte while a program holds one."""
    device = visible(all_devices(nvml), os.environ.get("CUDA_VISIBLE_DEVICES"))[0]
    before = memory(nvml, device.handle).used
    child = subprocess.Popen([sys.executable, "-c", PROGRAM])
    try:
        most = 0
        while child.poll() is None:
            most = max(most, memory(nvml, device.handle).used - before)
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert most >= 1 << 30
