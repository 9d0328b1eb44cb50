"""dtrrun.monitor.devices"""

import pytest
from fake_nvml import FakeNvml, Gpu

from dtrrun.monitor.devices import all_devices, by_uuid, order_is_certain, visible

PARTS = [
    None,
    Gpu("MIG-1111-aa", name="NVIDIA A100 MIG 1g.5gb", part=(7, 0)),
    Gpu("MIG-2222-bb", name="NVIDIA A100 MIG 2g.10gb", part=(3, 1)),
]
PLAIN = all_devices(FakeNvml(Gpu("GPU-abc1"), Gpu("GPU-abd2"), Gpu("GPU-ef03")))
MIXED = all_devices(FakeNvml(Gpu("GPU-abc1"), Gpu("GPU-0f0f", parts=PARTS)))


def counted(devices, variable):
    return [device.uuid for device in visible(devices, variable)]


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, "012"),
        ("", ""),
        ("2,0", "20"),
        (" 1 , 2", "12"),
        ("0,7,1", "0"),  # entries after an invalid one are hidden
        ("0,-1,1", "0"),
        ("-1", ""),
        ("1,1", ""),  # duplicate
        ("1gpu2,2ampere", "12"),  # as strtoul parses it
        ("nonsense", ""),
        ("GPU-abd2,GPU-abc1", "10"),
        ("GPU-e", "2"),  # a unique prefix
        ("GPU-ab,GPU-ef03", ""),  # an ambiguous prefix
        ("GPU-ef03,GPU-0000,GPU-abc1", "2"),
        ("GPU-e,2", ""),  # the same device twice
        ("MIG-1111-aa", ""),
        ("NoDevFiles", ""),  # what Slurm sets for a job without GPUs
    ],
)
def test_visible_devices(variable, numbers):
    assert counted(PLAIN, variable) == [PLAIN[int(number)].uuid for number in numbers]


@pytest.mark.parametrize(
    ("variable", "uuids"),
    [
        (None, ["MIG-1111-aa"]),  # a part of a GPU hides whole GPUs; only the first part is visible
        ("0", ["GPU-abc1"]),
        ("1", ["MIG-1111-aa"]),
        ("0,1", ["MIG-1111-aa"]),
        ("GPU-0f0f", ["MIG-1111-aa"]),
        ("MIG-2222-bb", ["MIG-2222-bb"]),
        ("MIG-2222", ["MIG-2222-bb"]),
        ("MIG-GPU-0f0f/3/1", ["MIG-2222-bb"]),  # names before R470
        ("MIG-GPU-0f0f/9/9", []),
        ("2", []),
    ],
)
def test_visible_devices_where_one_is_in_parts(variable, uuids):
    assert counted(MIXED, variable) == uuids


def test_a_gpu_in_mig_mode_without_parts_cannot_be_used():
    assert counted(all_devices(FakeNvml(Gpu("GPU-a", parts=[None]))), None) == []


def test_what_the_devices_are():
    first, gpu, one, two = MIXED
    assert (first.index, gpu.index, one.index, two.index) == (0, 1, 1, 1)
    assert (first.mig, gpu.mig, one.mig) == (False, True, False)
    assert (gpu.part, one.part, two.part) == (None, (7, 0), (3, 1))
    assert one.parent == two.parent == gpu.uuid


def test_a_device_that_is_lost_hides_no_other():
    assert [d.uuid for d in all_devices(FakeNvml(Gpu("GPU-a", lost=True), Gpu("GPU-b")))] == ["GPU-b"]


@pytest.mark.parametrize(
    ("text", "uuid"),
    [
        ("GPU-abc1", "GPU-abc1"),
        ("abc1", "GPU-abc1"),  # as PyTorch writes it
        ("1111-aa", "MIG-1111-aa"),
        ("MIG-2222-bb", "MIG-2222-bb"),
        ("GPU-0f0f", "MIG-1111-aa"),  # a GPU in MIG mode: CUDA runs in its first part
    ],
)
def test_by_uuid(text, uuid):
    assert by_uuid(MIXED, text).uuid == uuid


def test_by_uuid_of_no_device():
    assert by_uuid(MIXED, "GPU-77") is None


def test_the_order_is_not_certain_where_gpus_differ():
    differ = all_devices(FakeNvml(Gpu("GPU-a", name="A"), Gpu("GPU-b", name="B")))
    assert order_is_certain(PLAIN, None)
    assert not order_is_certain(differ, None)
    assert not order_is_certain(differ, "FASTEST_FIRST")
    assert order_is_certain(differ, "PCI_BUS_ID")
