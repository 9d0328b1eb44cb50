"""Finds how much memory the driver shows for each training process, from the most direct source available.

    nvml_pid            the process's entry in NVML's list
    kfd_pid             the same from AMD's driver, which NVML does not cover
    nvml_new_pid        the only new entry since the launch: in a container, NVML may use the host's process
                        ids, which do not match
    device_delta        the growth of the device's use since the launch, if it was idle then and has only
                        one process of ours
    reserved_overhead   the process's own figures: the allocator's reserved bytes and measured overhead

Sources are tried anew at every reading, so a driver that fails during a run moves us a rung down, and one
that recovers moves us up again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dtrrun.monitor import kfd
from dtrrun.monitor.devices import Device, all_devices, by_uuid, order_is_certain, visible
from dtrrun.monitor.namespaces import is_running, outer_id
from dtrrun.monitor.nvml import DeviceMemory, memory, processes
from dtrrun.telemetry.driver import Figure
from dtrrun.telemetry.record import Snapshot, pid_namespace

IDLE_BYTES = 128 << 20
"""A device without processes may show this much; more belongs to a process that we cannot see."""


class Look(NamedTuple):
    """One device at one moment; None: the driver did not answer."""

    processes: Mapping[int, int | None] | None
    memory: DeviceMemory | None
    asked_ns: int = 0
    """When the query began, on the monotonic clock: its answer may predate its end."""


@dataclass
class Ladder:
    """Create it before the target is started, because existing processes are not ours.

    `nvml` is None without NVML. `proc_running` and `proc_outer` look up processes.
    """

    nvml: Any
    proc_running: Callable[[int], bool] = is_running
    proc_outer: Callable[[int, Sequence[int]], int | None] = outer_id
    error: str = ""
    """NVML's last error."""
    kfd: Path = kfd.KFD
    """The files of AMD's driver."""
    devices: list[Device] = field(init=False)
    _before: dict[str, Look] = field(init=False)
    _known: dict[tuple[int, str], tuple[int, str]] = field(default_factory=dict)
    """By process and device: the driver's id for it, and the source by which it was found."""

    def __post_init__(self) -> None:
        self.devices = all_devices(self.nvml) if self.nvml is not None else []
        self._before = {device.uuid: self._look(device) for device in self.devices if not device.mig}

    def read(self, snapshots: Sequence[Snapshot]) -> dict[int, tuple[str, Figure]]:
        """Return the device (`DriverUse.device`) and the reading, by process.

        Processes on the CPU, ended ones and those without known figures are omitted.
        """
        ours = [snapshot for snapshot in snapshots if on_gpu(snapshot) and self._running(snapshot)]
        now: dict[str, Look] = {}
        places: dict[int, Device | None] = {}
        for snapshot in ours:
            places[snapshot.pid] = self._place(snapshot, now)
        found = {}
        # Processes with a known id come first: the remaining entries may belong to the others.
        for sure in (True, False):
            for snapshot in ours:
                pid, device = snapshot.pid, places[snapshot.pid]
                if pid in found or (sure and device is None):
                    continue
                neighbours = [
                    other for other in ours if other is not snapshot and places[other.pid] == device
                ]
                taken = self._by_id(snapshot, device, now) if device else None
                if taken is None and not sure:
                    taken = self._otherwise(snapshot, device, neighbours, now)
                if taken is not None:
                    found[pid] = (device.uuid if device else f"cuda:{_index(snapshot)}", taken)
        return {pid: (name, figure) for pid, (name, figure) in found.items() if figure.nbytes > 0}

    def _running(self, snapshot: Snapshot) -> bool:
        if snapshot.ended or not same_namespace(snapshot):
            return not snapshot.ended
        return snapshot.alive and self.proc_running(snapshot.pid)

    def _place(self, snapshot: Snapshot, now: dict[str, Look]) -> Device | None:
        """Return the device that a process's budget is for."""
        uuid = snapshot.tables.get("device_uuid") or snapshot.meta.get("device_uuid")
        counted, index = visible(self.devices, _variable(snapshot)), _index(snapshot)
        numbered = counted[index : index + 1]
        if isinstance(uuid, str) and (device := by_uuid(self.devices, uuid, numbered)):
            self._look_at(device, now)
            return device
        if index >= len(counted):
            return None
        listed = self._look_at(counted[index], now).processes
        order = os.environ.get("CUDA_DEVICE_ORDER")
        if listed is not None and snapshot.pid not in listed and not order_is_certain(counted, order):
            # CUDA lists the fastest GPU first, NVML does not: use the one that lists the process.
            others = [
                other
                for other in counted
                if snapshot.pid in (self._look_at(other, now).processes or ())
                and snapshot.pid not in self._listed_before(other)
            ]
            if len(others) == 1:
                return others[0]
        return counted[index]

    def _by_id(self, snapshot: Snapshot, device: Device, now: dict[str, Look]) -> Figure | None:
        """Try the first rung. A figure of zero bytes means that the process has left the device."""
        listed, pid = now[device.uuid].processes, snapshot.pid
        if listed is None:
            return None
        new = [other for other in listed if other not in self._listed_before(device)]
        mine = pid if same_namespace(snapshot) else self.proc_outer(pid, new)
        if mine is not None and mine in new:
            self._known[pid, device.uuid] = (mine, "nvml_pid")
            return _figure(listed[mine], "nvml_pid", now[device.uuid])
        _, source = self._known.get((pid, device.uuid), (0, ""))
        return Figure(0, time.monotonic_ns(), source) if source == "nvml_pid" else None

    def _otherwise(
        self, snapshot: Snapshot, device: Device | None, neighbours: Sequence[Snapshot], now: dict[str, Look]
    ) -> Figure | None:
        """Try the other rungs, which require that a process already holds memory on the device."""
        reserved = snapshot.counters.get("reserved_bytes", 0)
        if reserved <= 0:
            return None
        if device is None:
            size = self._by_kfd(snapshot)
            if size:
                return Figure(size, time.monotonic_ns(), "kfd_pid")
        else:
            size = self._by_new_id(snapshot, device, neighbours, now)
            if size:
                return _figure(size, "nvml_new_pid", now[device.uuid])
            size = self._by_growth(device, neighbours, now)
            if size and size >= reserved:
                return _figure(size, "device_delta", now[device.uuid])
        estimate = reserved + max(0, snapshot.counters.get("overhead_bytes", 0))
        return Figure(estimate, time.monotonic_ns(), "reserved_overhead")

    def _by_new_id(
        self, snapshot: Snapshot, device: Device, neighbours: Sequence[Snapshot], now: dict[str, Look]
    ) -> int | None:
        listed, key = now[device.uuid].processes or {}, (snapshot.pid, device.uuid)
        known, _ = self._known.get(key, (0, ""))
        if known in listed:
            return listed[known]
        others = [self._known.get((other.pid, device.uuid)) for other in neighbours]
        taken = {other[0] for other in others if other is not None}
        new = [pid for pid in listed if pid not in self._listed_before(device) and pid not in taken]
        if len(new) != 1 or None in others:
            return None
        size = listed[new[0]]
        if size is None or size < snapshot.counters["reserved_bytes"]:  # our process holds more: not this one
            return None
        self._known[key] = (new[0], "nvml_new_pid")
        return size

    def _by_kfd(self, snapshot: Snapshot) -> int | None:
        environ, variable = dict(os.environ), _variable(snapshot)
        if variable is not None:
            environ["CUDA_VISIBLE_DEVICES"] = variable
        counted, index = kfd.gpus(environ, self.kfd), _index(snapshot)
        if index >= len(counted) or not same_namespace(snapshot):
            return None
        return kfd.process_bytes(snapshot.pid, counted[index], self.kfd)

    def _by_growth(self, device: Device, neighbours: Sequence[Snapshot], now: dict[str, Look]) -> int | None:
        before, look = self._before[device.uuid], now[device.uuid]
        if before.memory is None or look.memory is None or neighbours or not idle(before):
            return None
        if look.processes is not None and len(look.processes) > 1:
            return None  # another process has been started
        return look.memory.used - before.memory.used

    def _listed_before(self, device: Device) -> Mapping[int, int | None]:
        return self._before[device.uuid].processes or {}

    def _look_at(self, device: Device, now: dict[str, Look]) -> Look:
        if device.uuid not in now:
            now[device.uuid] = self._look(device)
        return now[device.uuid]

    def _look(self, device: Device) -> Look:
        asked_ns = time.monotonic_ns()
        return Look(self._ask(processes, device), self._ask(memory, device), asked_ns)

    def _ask(self, what: Callable[[Any, Any], Any], device: Device) -> Any:
        try:
            return what(self.nvml, device.handle)
        except (self.nvml.NVMLError, OSError) as error:
            self.error = str(error)
            return None


def on_gpu(snapshot: Snapshot) -> bool:
    """Return whether the process's budget is for a CUDA device."""
    return str(snapshot.meta.get("device", "")).startswith("cuda") and _index(snapshot) >= 0


def same_namespace(snapshot: Snapshot) -> bool:
    """Return whether the process's id is valid here, which it is not if it runs in a separate container."""
    return snapshot.meta.get("pid_namespace") in (None, pid_namespace())


def idle(look: Look) -> bool:
    """Return whether a device had no processes and no memory in use, as far as visible."""
    if look.processes or look.memory is None:
        return False
    if not look.memory.exact:
        return look.processes is not None  # some of it belongs to the driver
    return look.memory.used <= IDLE_BYTES


def _variable(snapshot: Snapshot) -> str | None:
    found: str | None = snapshot.meta.get("cuda_visible_devices", os.environ.get("CUDA_VISIBLE_DEVICES"))
    return found


def _index(snapshot: Snapshot) -> int:
    return snapshot.counters.get("device_index", -1)


def _figure(size: int | None, source: str, look: Look) -> Figure | None:
    return None if size is None else Figure(size, look.asked_ns, source)
