"""dtrrun.monitor.ladder: which source a figure comes from, on all kinds of machines."""

import os
from dataclasses import replace

import pytest
from fake_nvml import GIB, MIB, FakeNvml, Gpu, NVMLError_NotSupported
from fake_records import snapshot

from dtrrun.monitor import ladder as ladder_module
from dtrrun.monitor.ladder import IDLE_BYTES, Ladder, on_gpu
from dtrrun.telemetry.record import pid_namespace


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


def process(pid=50, index=0, reserved=2 * GIB, overhead=400 * MIB, device="cuda", meta=(), **more):
    found = snapshot(pid, device_index=index, reserved_bytes=reserved, overhead_bytes=overhead, **more)
    return replace(found, meta=found.meta | {"device": device} | dict(meta))


def ladder(*gpus, **more):
    return Ladder(FakeNvml(*gpus), proc_running=lambda pid: True, **more)


def seen(ladder, *processes):
    """Return device, bytes and source by process."""
    return {pid: (name, *figure[::2]) for pid, (name, figure) in ladder.read(processes).items()}


ONE, TWO = process(), process(51)
NEW = process(reserved=0)
SHOWN = {50: (3 * GIB, "nvml_pid")}
DELTA = {50: (3 * GIB, "device_delta")}
BELIEVED = {50: (2 * GIB + 400 * MIB, "reserved_overhead")}
UNKNOWN = NVMLError_NotSupported("Not Supported")

ONE_GPU = {
    # The GPU's state when the run begins. Then, one or more times: what changes, which processes exist, and
    # the bytes and the source of each.
    "listed": ({}, ({"compute": {50: 3 * GIB, 60: 9 * GIB}, "graphics": {50: 3 * GIB}}, [ONE], SHOWN)),
    "listed before anything is allocated": (
        {},
        ({}, [NEW], {}),
        ({"compute": {50: 400 * MIB}}, [NEW], {50: (400 * MIB, "nvml_pid")}),
    ),
    "CUDA is shut down: no rung down": (
        {},
        ({"compute": {50: 3 * GIB}}, [ONE], SHOWN),
        ({"compute": {}}, [ONE], {}),
    ),
    **{
        f"it is over ({over.alive=})": (
            {},
            ({"compute": {50: 3 * GIB}}, [ONE], SHOWN),
            ({}, [over], {}),
        )
        for over in (process(ended=True), process(alive=False))
    },
    **{
        f"size {size} on an idle device": (
            {"used": 3 * MIB},
            ({"compute": {50: size}, "used": 3 * GIB + 3 * MIB}, [ONE], DELTA),
        )
        for size in (None, 2**64 - 1, 0)
    },
    "no lists": (
        {"compute": UNKNOWN, "used": 3 * MIB},
        ({"used": 3 * GIB + 3 * MIB}, [ONE], DELTA),
    ),
    "no lists on a device that someone uses": (
        {"compute": UNKNOWN, "used": IDLE_BYTES + 1},
        ({"used": 3 * GIB + IDLE_BYTES + 1}, [ONE], BELIEVED),
    ),
    "no size on a device that someone uses": (
        {"used": IDLE_BYTES + 1},
        ({"used": 3 * GIB + IDLE_BYTES + 1, "compute": {50: None}}, [ONE], BELIEVED),
    ),
    "no sizes, and another is listed": (
        {"compute": {7: None}},
        ({"used": 3 * GIB, "compute": {7: None, 50: None}}, [ONE], BELIEVED),
    ),
    "an old driver without lists cannot say whether a device is idle": (
        {"compute": UNKNOWN, "old": True},
        ({"used": 3 * GIB}, [ONE], BELIEVED),
    ),
    "an old driver with lists can": ({"old": True}, ({"used": 3 * GIB, "compute": {50: None}}, [ONE], DELTA)),
    "someone else comes to an idle device": (
        {},
        ({"used": 9 * GIB, "compute": {50: None, 60: None}}, [ONE], BELIEVED),
    ),
    "the device grew by less than the process holds": (
        {"used": 100 * MIB},
        ({"used": GIB, "compute": {50: None}}, [ONE], BELIEVED),
    ),
    "growth is of one process only": (
        {},
        ({"used": 9 * GIB, "compute": UNKNOWN}, [ONE, TWO], BELIEVED | {51: BELIEVED[50]}),
    ),
    "the host's ids": (
        {"compute": {9001: 5 * GIB}},
        ({"compute": {9001: 5 * GIB, 9876: 3 * GIB}}, [ONE], {50: (3 * GIB, "nvml_new_pid")}),
        # Our process is identified by now, so a later one is another process.
        (
            {"compute": {9001: 5 * GIB, 9876: 4 * GIB, 9999: 3 * GIB}},
            [ONE],
            {50: (4 * GIB, "nvml_new_pid")},
        ),
    ),
    "the host's ids of two that came at once": (
        {},
        ({"compute": {9876: 3 * GIB, 9999: 3 * GIB}, "used": 6 * GIB}, [ONE], BELIEVED),
    ),
    "a host's id with too little to be its": (
        {"used": GIB},
        ({"compute": {9876: GIB}}, [ONE], BELIEVED),
    ),
    "the host's id of another is ours by chance": (
        {"compute": {50: 30 * GIB}},
        ({}, [ONE], BELIEVED),
        ({"compute": {50: 30 * GIB, 9876: 3 * GIB}}, [ONE], {50: (3 * GIB, "nvml_new_pid")}),
    ),
    "two ranks with host ids cannot be told apart": (
        {},
        ({"compute": {9001: 3 * GIB}}, [ONE, process(51, reserved=0)], BELIEVED),
    ),
    "ranks with host ids that come after each other": (
        {},
        ({"compute": {9001: 3 * GIB}}, [ONE], {50: (3 * GIB, "nvml_new_pid")}),
        (
            {"compute": {9001: 3 * GIB, 9002: 4 * GIB}},
            [ONE, TWO],
            {50: (3 * GIB, "nvml_new_pid"), 51: (4 * GIB, "nvml_new_pid")},
        ),
    ),
    "two ranks by their own ids": (
        {},
        ({"compute": {50: 3 * GIB, 51: 4 * GIB}}, [ONE, TWO], SHOWN | {51: (4 * GIB, "nvml_pid")}),
    ),
    "the driver goes in the middle and comes back": (
        {},
        ({"compute": {50: 3 * GIB}}, [ONE], SHOWN),
        ({"lost": True}, [ONE], BELIEVED),
        ({"lost": False}, [ONE], SHOWN),
    ),
}


@pytest.mark.parametrize("case", ONE_GPU)
def test_the_source_on_one_gpu(case):
    before, *steps = ONE_GPU[case]
    gpu = Gpu("GPU-a", **before)
    rungs = ladder(gpu)
    for changes, processes, found in steps:
        vars(gpu).update(changes)
        assert seen(rungs, *processes) == {pid: ("GPU-a", *figure) for pid, figure in found.items()}


@pytest.mark.parametrize(
    ("changes", "error"), [({"compute": UNKNOWN}, "Not Supported"), ({"lost": True}, "GPU is lost")]
)
def test_why_the_driver_does_not_tell(changes, error):
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    vars(gpu).update(changes)
    seen(rungs, ONE)
    assert rungs.error == error


@pytest.mark.parametrize(
    ("first", "second", "source"),
    [
        ({50: 3 * GIB, 51: 300 * MIB}, {51: 4 * GIB}, "nvml_pid"),  # 51 also has a context on the first GPU
        ({9001: 3 * GIB}, {9002: 4 * GIB}, "nvml_new_pid"),
    ],
)
def test_two_ranks_on_two_devices(first, second, source):
    one, two = Gpu("GPU-a"), Gpu("GPU-b")
    rungs = ladder(one, two)
    one.compute, two.compute = first, second
    assert seen(rungs, process(50, 0), process(51, 1)) == {
        50: ("GPU-a", 3 * GIB, source),
        51: ("GPU-b", 4 * GIB, source),
    }


def test_a_figure_is_as_old_as_the_question(monkeypatch):
    """Its time is when NVML was asked: the process may allocate during the query, and compares times."""
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {50: 3 * GIB}
    clock = [1000]
    monkeypatch.setattr(ladder_module.time, "monotonic_ns", lambda: clock[0])
    real = ladder_module.processes

    def slowly(nvml, handle):
        listed = real(nvml, handle)
        clock[0] += 500
        return listed

    monkeypatch.setattr(ladder_module, "processes", slowly)
    ((_, figure),) = rungs.read([process()]).values()
    assert figure.monotonic_ns == 1000


def test_a_zombie_has_no_figure():
    gpu = Gpu("GPU-a", compute={50: 3 * GIB})
    assert seen(Ladder(FakeNvml(gpu), proc_running=lambda pid: False), process()) == {}


def test_one_that_has_its_id_leaves_the_other_new_one():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu, proc_outer=lambda pid, listed: None)
    gpu.compute = {51: 3 * GIB, 9001: 4 * GIB}
    elsewhere = process(50, meta={"pid_namespace": "pid:[1]"})
    found = seen(rungs, elsewhere, process(51))
    assert found == {50: ("GPU-a", 4 * GIB, "nvml_new_pid"), 51: ("GPU-a", 3 * GIB, "nvml_pid")}


def test_no_driver_to_ask():
    rungs = Ladder(None, proc_running=lambda pid: True)
    assert seen(rungs, process(index=1)) == {50: ("cuda:1", 2 * GIB + 400 * MIB, "reserved_overhead")}
    assert seen(rungs, process(reserved=0)) == {}


def test_a_part_of_a_gpu():
    part = Gpu("MIG-1", part=(1, 0))
    whole = Gpu("GPU-a", parts=[None, part], compute=NVMLError_NotSupported())
    rungs = ladder(whole)
    part.compute = {50: 3 * GIB}
    assert seen(rungs, process()) == {50: ("MIG-1", 3 * GIB, "nvml_pid")}
    part.compute, part.used = NVMLError_NotSupported(), 4 * GIB
    assert seen(rungs, process()) == {50: ("MIG-1", 4 * GIB, "device_delta")}


def test_a_part_whose_uuid_is_that_of_its_gpu():
    parts = [Gpu("MIG-1", part=(1, 0)), Gpu("MIG-2", part=(2, 0))]
    rungs = ladder(Gpu("GPU-a", parts=parts))
    told = {"device_uuid": "a", "cuda_visible_devices": "MIG-2"}
    parts[1].compute = {50: 3 * GIB}
    assert seen(rungs, process(meta=told)) == {50: ("MIG-2", 3 * GIB, "nvml_pid")}


def test_a_gpu_of_amds(tmp_path, monkeypatch):
    for node in range(2):
        folder = tmp_path / "topology" / "nodes" / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text("simd_count 304\n")
        (folder / "gpu_id").write_text(f"{node + 7}\n")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    rungs = Ladder(None, proc_running=lambda pid: True, kfd=tmp_path)
    ours, pid = tmp_path / "proc" / str(os.getpid()), os.getpid()
    assert seen(rungs, process(pid))[pid][-1] == "reserved_overhead"
    ours.mkdir(parents=True)
    (ours / "vram_7").write_text(f"{3 * GIB}\n")
    (ours / "vram_8").write_text(f"{5 * GIB}\n")
    assert seen(rungs, process(pid)) == {pid: ("cuda:0", 3 * GIB, "kfd_pid")}
    assert seen(rungs, process(pid, meta={"cuda_visible_devices": "1"}))[pid] == (
        "cuda:0",
        5 * GIB,
        "kfd_pid",
    )


def test_the_processs_own_visible_devices_count():
    one, two = Gpu("GPU-a"), Gpu("GPU-b")
    rungs = ladder(one, two)
    two.compute = {50: 3 * GIB}
    ours = process(meta={"cuda_visible_devices": "1"})
    assert seen(rungs, ours) == {50: ("GPU-b", 3 * GIB, "nvml_pid")}
    assert seen(rungs, process(meta={"cuda_visible_devices": None}))[50][0] == "GPU-a"


def test_the_launchers_where_a_record_does_not_say(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert seen(ladder(Gpu("GPU-a"), Gpu("GPU-b")), process())[50][0] == "GPU-b"


@pytest.mark.parametrize("where", ["meta", "tables"])
def test_the_uuid_that_a_process_tells_goes_before_its_number(where):
    rungs = ladder(Gpu("GPU-a"), Gpu("GPU-b"))
    told = {"device_uuid": "b"}
    ours = process(meta=told) if where == "meta" else process(tables=told)
    assert seen(rungs, ours)[50][0] == "GPU-b"


def test_the_fastest_gpu_may_be_the_first():
    one, two = Gpu("GPU-a", name="slow"), Gpu("GPU-b", name="fast")
    rungs = ladder(one, two)
    two.compute = {50: 3 * GIB}
    assert seen(rungs, process(index=0)) == {50: ("GPU-b", 3 * GIB, "nvml_pid")}


def test_a_device_beyond_those_that_we_see():
    assert seen(ladder(Gpu("GPU-a")), process(index=3))[50][::2] == ("cuda:3", "reserved_overhead")


def test_a_process_in_a_container_that_the_target_started():
    gpu = Gpu("GPU-a", compute={7: 1 * GIB})
    asked = []
    rungs = ladder(gpu, proc_outer=lambda pid, listed: asked.append((pid, list(listed))) or 4242)
    gpu.compute = {7: 1 * GIB, 4242: 3 * GIB, 50: 9 * GIB}
    inside = process(
        meta={"pid_namespace": "pid:[1]"}, alive=False
    )  # here its id belongs to another process, or to none
    assert seen(rungs, inside) == {50: ("GPU-a", 3 * GIB, "nvml_pid")}
    assert asked == [(50, [4242, 50])]
    assert seen(rungs, process(meta={"pid_namespace": pid_namespace()}))[50][1] == 9 * GIB


def test_nothing_is_asked_for_the_cpu():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    before = rungs.nvml.asked
    ours = [process(device="cpu"), process(51, index=-1)]
    assert not any(map(on_gpu, ours))
    assert seen(rungs, *ours) == {}
    assert rungs.nvml.asked == before
