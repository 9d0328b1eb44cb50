"""dtrrun.monitor.ladder: which source a figure comes from, on machines of every kind."""

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
    """Device, bytes and source, by process."""
    return {pid: (name, *figure[::2]) for pid, (name, figure) in ladder.read(processes).items()}


def test_per_process():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {50: 3 * GIB, 60: 9 * GIB}
    gpu.graphics = {50: 3 * GIB}
    assert seen(rungs, process()) == {50: ("GPU-a", 3 * GIB, "nvml_pid")}


def test_a_figure_is_as_old_as_the_question(monkeypatch):
    """The process compares its time with that of its own allocations, which may come while NVML is asked."""
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


def test_before_anything_is_allocated_a_process_that_is_listed_has_a_figure():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    assert seen(rungs, process(reserved=0)) == {}
    gpu.compute = {50: 400 * MIB}
    assert seen(rungs, process(reserved=0)) == {50: ("GPU-a", 400 * MIB, "nvml_pid")}


def test_after_its_end_a_process_has_no_figure():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {50: 3 * GIB}
    assert seen(rungs, process())
    gpu.compute = {}
    assert seen(rungs, process()) == {}  # CUDA is shut down, the process still there: not a rung down
    for over in (process(ended=True), process(alive=False)):
        gpu.compute = {50: 3 * GIB}
        assert seen(rungs, over) == {}


def test_a_zombie_has_no_figure():
    gpu = Gpu("GPU-a", compute={50: 3 * GIB})
    assert seen(Ladder(FakeNvml(gpu), proc_running=lambda pid: False), process()) == {}


@pytest.mark.parametrize("unknown", [None, 2**64 - 1, 0])
def test_memory_not_available_on_an_idle_device(unknown):
    gpu = Gpu("GPU-a", used=3 * MIB)
    rungs = ladder(gpu)
    gpu.compute, gpu.used = {50: unknown}, 3 * GIB + 3 * MIB
    assert seen(rungs, process()) == {50: ("GPU-a", 3 * GIB, "device_delta")}


def test_no_lists_at_all():
    gpu = Gpu("GPU-a", compute=NVMLError_NotSupported("Not Supported"), used=3 * MIB)
    rungs = ladder(gpu)
    gpu.used = 3 * GIB + 3 * MIB
    assert seen(rungs, process()) == {50: ("GPU-a", 3 * GIB, "device_delta")}
    assert rungs.error == "Not Supported"


@pytest.mark.parametrize(
    ("used", "compute"),
    [
        (IDLE_BYTES + 1, NVMLError_NotSupported()),  # someone is there whom we cannot see
        (IDLE_BYTES + 1, {}),
        (0, {7: None}),
    ],
)
def test_memory_not_available_on_a_busy_device(used, compute):
    gpu = Gpu("GPU-a", used=used, compute=compute)
    rungs = ladder(gpu)
    gpu.used += 3 * GIB
    gpu.compute = compute if isinstance(compute, Exception) else compute | {50: None}
    assert seen(rungs, process()) == {50: ("GPU-a", 2 * GIB + 400 * MIB, "reserved_overhead")}


def test_an_old_driver_that_lists_no_processes_cannot_say_whether_a_device_is_idle():
    gpu = Gpu("GPU-a", compute=NVMLError_NotSupported(), old=True)
    rungs = ladder(gpu)
    gpu.used = 3 * GIB
    assert seen(rungs, process())[50][2] == "reserved_overhead"
    gpu = Gpu("GPU-a", old=True)
    rungs = ladder(gpu)
    gpu.used, gpu.compute = 3 * GIB, {50: None}
    assert seen(rungs, process()) == {50: ("GPU-a", 3 * GIB, "device_delta")}


def test_someone_else_comes_to_an_idle_device():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.used, gpu.compute = 9 * GIB, {50: None, 60: None}
    assert seen(rungs, process())[50][2] == "reserved_overhead"


def test_a_device_that_grew_by_less_than_the_process_holds():
    gpu = Gpu("GPU-a", used=100 * MIB)
    rungs = ladder(gpu)
    gpu.used, gpu.compute = 1 * GIB, {50: None}
    assert seen(rungs, process())[50][2] == "reserved_overhead"


def test_growth_is_of_one_process_only():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.used, gpu.compute = 9 * GIB, NVMLError_NotSupported()
    found = seen(rungs, process(50), process(51))
    assert {source for _, _, source in found.values()} == {"reserved_overhead"}


def test_host_ids_in_a_container():
    gpu = Gpu("GPU-a", compute={9001: 5 * GIB})
    rungs = ladder(gpu)
    gpu.compute = {9001: 5 * GIB, 9876: 3 * GIB}
    assert seen(rungs, process()) == {50: ("GPU-a", 3 * GIB, "nvml_new_pid")}
    gpu.compute = {9001: 5 * GIB, 9876: 4 * GIB, 9999: 3 * GIB}  # known by now: who comes later is another
    assert seen(rungs, process()) == {50: ("GPU-a", 4 * GIB, "nvml_new_pid")}


def test_host_ids_of_two_that_came_at_once():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute, gpu.used = {9876: 3 * GIB, 9999: 3 * GIB}, 6 * GIB
    assert seen(rungs, process())[50][2] == "reserved_overhead"


def test_a_host_id_that_is_too_small_for_the_process_is_not_its():
    gpu = Gpu("GPU-a", used=1 * GIB)
    rungs = ladder(gpu)
    gpu.compute = {9876: 1 * GIB}
    assert seen(rungs, process())[50][2] == "reserved_overhead"


def test_the_hosts_id_of_another_is_ours_by_chance():
    gpu = Gpu("GPU-a", compute={50: 30 * GIB})
    rungs = ladder(gpu)
    assert seen(rungs, process())[50] == ("GPU-a", 2 * GIB + 400 * MIB, "reserved_overhead")
    gpu.compute = {50: 30 * GIB, 9876: 3 * GIB}
    assert seen(rungs, process())[50] == ("GPU-a", 3 * GIB, "nvml_new_pid")


def test_two_ranks_on_two_devices():
    one, two = Gpu("GPU-a"), Gpu("GPU-b")
    rungs = ladder(one, two)
    one.compute, two.compute = (
        {50: 3 * GIB, 51: 300 * MIB},
        {51: 4 * GIB},
    )  # 51 has a context on the first, too
    assert seen(rungs, process(50, 0), process(51, 1)) == {
        50: ("GPU-a", 3 * GIB, "nvml_pid"),
        51: ("GPU-b", 4 * GIB, "nvml_pid"),
    }


def test_two_ranks_on_two_devices_with_host_ids():
    one, two = Gpu("GPU-a"), Gpu("GPU-b")
    rungs = ladder(one, two)
    one.compute, two.compute = {9001: 3 * GIB}, {9002: 4 * GIB}
    assert seen(rungs, process(50, 0), process(51, 1)) == {
        50: ("GPU-a", 3 * GIB, "nvml_new_pid"),
        51: ("GPU-b", 4 * GIB, "nvml_new_pid"),
    }


def test_two_ranks_on_one_device_with_host_ids_cannot_be_told_apart():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {9001: 3 * GIB}
    found = seen(rungs, process(50), process(51, reserved=0))
    assert found[50][2] == "reserved_overhead"  # it may as well be the other's
    assert 51 not in found


def test_ranks_that_come_to_one_device_after_each_other():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {9001: 3 * GIB}
    seen(rungs, process(50))
    gpu.compute = {9001: 3 * GIB, 9002: 4 * GIB}
    found = seen(rungs, process(50), process(51))
    assert [found[pid][1:] for pid in (50, 51)] == [
        (3 * GIB, "nvml_new_pid"),
        (4 * GIB, "nvml_new_pid"),
    ]


def test_one_that_has_its_id_leaves_the_other_new_one():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu, proc_outer=lambda pid, listed: None)
    gpu.compute = {51: 3 * GIB, 9001: 4 * GIB}
    elsewhere = process(50, meta={"pid_namespace": "pid:[1]"})
    found = seen(rungs, elsewhere, process(51))
    assert found == {50: ("GPU-a", 4 * GIB, "nvml_new_pid"), 51: ("GPU-a", 3 * GIB, "nvml_pid")}


def test_two_ranks_on_one_device_by_their_own_ids():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {50: 3 * GIB, 51: 4 * GIB}
    found = seen(rungs, process(50), process(51))
    assert [found[pid][1:] for pid in (50, 51)] == [(3 * GIB, "nvml_pid"), (4 * GIB, "nvml_pid")]


def test_the_driver_goes_in_the_middle_and_comes_back():
    gpu = Gpu("GPU-a")
    rungs = ladder(gpu)
    gpu.compute = {50: 3 * GIB}
    assert seen(rungs, process())[50][2] == "nvml_pid"
    gpu.lost = True
    assert seen(rungs, process()) == {50: ("GPU-a", 2 * GIB + 400 * MIB, "reserved_overhead")}
    assert rungs.error == "GPU is lost"
    gpu.lost = False
    assert seen(rungs, process())[50][2] == "nvml_pid"


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
    )  # its id means another process here, or none
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
