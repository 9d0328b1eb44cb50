"""runtime.cuda.session with other devices, the driver, and limits that the program sets itself."""

import torch
from fake_gpu import TEMPORARY, chain, fake_session, stepped, tensor

from dtrrun.monitor.devices import Device
from dtrrun.monitor.ladder import Ladder
from dtrrun.runtime.cuda.budget import LEAST_GUARD, MIB
from dtrrun.runtime.observe import publish
from dtrrun.telemetry.record import Snapshot

CONTEXT = 300 * MIB
BUDGET = CONTEXT + LEAST_GUARD + 16 * MIB


def test_replays_run_on_our_device(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        kept = chain(30)
        evicted = next(one for one in kept if not session.callbacks.version_of(one).resident)
        devices = []
        real = gpu.run
        monkeypatch.setattr(gpu, "run", lambda *a, **k: devices.append(gpu.current) or real(*a, **k))
        gpu.current = 1  # `with torch.cuda.device(1):`
        evicted.add(1.0)
        assert devices[0] == 0  # the replay
        assert devices[-1] == gpu.current == 1  # the program's operator


def test_several_gpus_in_a_process_are_a_reason_for_care(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, _):
        tensor()
        assert "several GPUs" not in session.callbacks.reasons.all
        monkeypatch.setattr(session.ledger.memory, "device_type_of", lambda _storage: "cuda:1")
        session.dtr.operators.adopt(torch.UntypedStorage(64))
        assert "several GPUs" in session.callbacks.reasons.all


def test_a_limit_of_the_programs_own_is_overruled(monkeypatch):
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        tensor()
        gpu.allocator.cap, gpu.overruled = None, True  # set_per_process_memory_fraction(1.0)
        stepped(session)
        assert gpu.allocator.cap == 16 * MIB


def test_the_launcher_is_told_which_device_it_is(monkeypatch, tmp_path):
    """The device is reported by its UUID: CUDA's first device may be any of the driver's."""
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        assert session.report()["device_uuid"] == ""
        tensor()
        tables = publish.tables(session)
        assert tables["device_uuid"] == gpu.uuid()
    ladder = Ladder(None)
    ladder.devices = [Device(f"GPU-{number}", number, "a") for number in range(2)]
    ladder.devices.append(Device(f"GPU-{gpu.uuid()}", 2, "a"))
    monkeypatch.setattr(ladder, "_look_at", lambda *_: None)
    snapshot = Snapshot(pid=1, meta={"device": "cuda"}, counters={"device_index": 0}, tables=tables)
    assert ladder._place(snapshot, {}).index == 2


def test_two_figures_that_do_not_belong_together_are_not_used(monkeypatch):
    """Another thread reserves memory between the readings of the allocator's figure and the device's."""
    with fake_session(monkeypatch, BUDGET) as (session, gpu):
        tensor()
        real = gpu.used_and_total

        def used_and_total():
            gpu.allocator.allocate(8 * MIB).address = TEMPORARY
            return real()

        monkeypatch.setattr(gpu, "used_and_total", used_and_total)
        stepped(session)
        monkeypatch.undo()
        assert session.report()["overhead_bytes"] == CONTEXT
        assert gpu.allocator.cap == 16 * MIB
