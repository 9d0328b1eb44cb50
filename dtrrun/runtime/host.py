"""Where tensors may leave for: how much of the host's memory, and of which kind (`core/host.h`).

For a budget on a GPU, copies live in pinned memory of the host; for one on the CPU in a file, since copying
them elsewhere in the same memory would gain nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from dtrrun.core.dtr import DTR
from dtrrun.core.host import FILE, IF_CHEAPER, PINNED, default_folder
from dtrrun.settings import RuntimeSettings
from dtrrun.sizes import AUTO_HOST, NO_HOST, format_size, format_size_up, parse_host

SHARE = 2
"""On a GPU, half of the memory that the machine has left is taken unless the user says otherwise."""
TMPFS = "tmpfs", "ramfs"

LEAVES = (
    "nothing else can be evicted, so weights, gradients and optimizer state leave for {where} from now on, "
    "up to {most} (--host-budget). The final table shows what that costs"
)
HINT = (
    "Weights, gradients and optimizer state can leave for {where} when nothing else can be evicted: "
    "--host-budget {size}"
)
HINTED = 0.5
"""The share of what tensors may take from which on that is mentioned."""
IN_PINNED = "pinned memory of the host"
IN_FILE = "a file in {folder}"
IN_MEMORY = (
    "--host-budget: {folder} is a file system in memory ({kind}), so what leaves for it takes as much memory "
    "there as here; name a folder on a disk: --host-budget {size}:FOLDER"
)
NO_FOLDER = "--host-budget: no file can be made in {folder}: {why}"
FOLDER_ON_GPU = "--host-budget: copies from a GPU live in pinned memory, so {folder} is not used"


class Host:
    """The memory outside of the budget that a session may use."""

    def __init__(
        self,
        dtr: DTR,
        settings: RuntimeSettings,
        native: ModuleType,
        warn: Callable[[str], None],
        costs: tuple[float, float] | None = None,
    ) -> None:
        """warn: shows the user one line. costs: ns for each byte out and in, if they need not be measured."""
        self._dtr, self._native, self._warn, self._costs = dtr, native, warn, costs
        self._modelled = settings.cost == "model" or costs is not None
        self._budget = settings.host_budget
        self._where = ""

    def open(self) -> None:
        """Let constants leave, if there is a place for them. Called when a session begins.

        Also without a budget, since one may be set later.
        Raises OSError if the user's folder can't be used.
        """
        if self._budget == NO_HOST:
            return
        on_gpu = self._dtr.ledger.device_type != "cpu"
        if self._budget == AUTO_HOST:
            if on_gpu:
                self._pin(share_of_memory())
            return
        nbytes, folder = parse_host(self._budget)
        self._dtr.ledger.results_leave = IF_CHEAPER
        if not on_gpu:
            return self._use_file(nbytes, folder or default_folder())
        if folder:
            self._warn(FOLDER_ON_GPU.format(folder=folder))
        self._pin(nbytes)

    def _pin(self, nbytes: int) -> None:
        self._where = IN_PINNED
        if nbytes:
            self._native.open_host_memory(self._dtr.ledger, nbytes, *(self._costs or PINNED), self._modelled)
            self._dtr.eviction.constants_leave = self._say

    def _use_file(self, nbytes: int, folder: str) -> None:
        self._where, costs = IN_FILE.format(folder=folder), self._costs or FILE
        try:
            self._native.open_host_file(self._dtr.ledger, folder, nbytes, *costs, self._modelled)
        except OSError as error:
            raise OSError(NO_FOLDER.format(folder=folder, why=error.strerror)) from None
        if (kind := file_system_of(folder)) in TMPFS:
            self._warn(IN_MEMORY.format(folder=folder, kind=kind, size=format_size(nbytes).replace(" ", "")))
        self._dtr.eviction.constants_leave = self._say

    def _say(self) -> None:
        """Called when the first constant is about to leave."""
        figures = self._dtr.ledger.host
        assert figures is not None
        self._warn(LEAVES.format(where=self._where, most=format_size(figures["most_bytes"])))

    def forked(self) -> None:
        """Called in a parent that has forked: the child goes on reading the copies that there are now."""
        if self._dtr.ledger.host is not None:
            self._native.host_forked(self._dtr.ledger)

    def counters(self) -> dict[str, int]:
        """Return the counters of `telemetry.fields` about the host."""
        ledger = self._dtr.ledger
        figures: Mapping[str, int] = ledger.host or {}
        return {
            "host_budget_bytes": figures.get("most_bytes", 0),
            "host_bytes": figures.get("bytes", 0),
            "host_peak_bytes": figures.get("peak_bytes", 0),
            "left_bytes": ledger.left_bytes,
            "left_peak_bytes": ledger.left_peak_bytes,
            "copies_out": figures.get("copies_out", 0),
            "copied_out_bytes": figures.get("bytes_out", 0),
            "copies_in": figures.get("copies_in", 0),
            "copied_in_bytes": figures.get("bytes_in", 0),
        }

    def ns(self) -> int:
        """Return the time that the program has waited for copies; on a GPU, an estimate."""
        figures: Mapping[str, int] = self._dtr.ledger.host or {}
        return figures.get("waited_ns", 0)

    def hint(self, training: Mapping[str, int | None], limit: int) -> str:
        """Return, for the error's text, that constants could leave; "" if they do, or take too little.

        training: the bytes of parameters, gradients and optimizer state, as far as they are known. limit:
        what tensors may take.
        """
        nbytes = sum(size or 0 for size in training.values())
        if self._dtr.ledger.host is not None or nbytes < HINTED * limit:
            return ""
        where = IN_PINNED if self._dtr.ledger.device_type != "cpu" else "a file"
        return HINT.format(where=where, size=format_size_up(nbytes).replace(" ", ""))


def share_of_memory(environ: Mapping[str, str] = os.environ, root: str = "/") -> int:
    """Return half of the memory that this machine has left, divided among its ranks; 0 if unknown."""
    return memory_left(environ, root) // SHARE


def memory_left(environ: Mapping[str, str] = os.environ, root: str = "/") -> int:
    """Return the memory that this machine has left, in bytes, divided among its ranks; 0 if unknown.

    Respects the limits of the process and of its control group.
    """
    left = _available(root)
    if left is None:
        return 0
    for limit, used in (*_group_limits(root), *_own_limits(root)):
        left = min(left, max(limit - used, 0))
    ranks = environ.get("LOCAL_WORLD_SIZE", "1")
    return left // max(int(ranks) if ranks.isdigit() else 1, 1)


def _own_limits(root: str) -> list[tuple[int, int]]:
    """Return limit and use, in bytes, of this process's address space and data (`ulimit`), if limited."""
    with suppress(ImportError, OSError, ValueError, IndexError):
        import resource

        pages = Path(root, "proc/self/statm").read_text().split()
        kinds = (resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])
        limits = [(resource.getrlimit(kind)[0], int(used) * resource.getpagesize()) for kind, used in kinds]
        return [(limit, used) for limit, used in limits if limit != resource.RLIM_INFINITY]
    return []


def _available(root: str) -> int | None:
    with suppress(OSError, ValueError, IndexError):
        text = Path(root, "proc/meminfo").read_text()
        return int(text.split("MemAvailable:")[1].split()[0]) << 10
    return None


def _group_limits(root: str) -> list[tuple[int, int]]:
    """Return limit and use, in bytes, of each control group that this process is in, of either version."""
    found = []
    with suppress(OSError, ValueError):
        for line in Path(root, "proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if not kinds:  # version 2, in which the limits of groups above hold as well
                names = "memory.max", "memory.current"
                folder = Path(root, "sys/fs/cgroup")
            elif "memory" in kinds.split(","):
                names = "memory.limit_in_bytes", "memory.usage_in_bytes"
                folder = Path(root, "sys/fs/cgroup/memory")
            else:
                continue
            parts = [part for part in path.split("/") if part and part != ".."]
            for depth in range(len(parts) + 1):
                here = folder.joinpath(*parts[:depth])
                with suppress(OSError, ValueError):
                    found.append(tuple(int((here / name).read_text()) for name in names))
    return [(limit, used) for limit, used in found]


def file_system_of(folder: str) -> str:
    """Return the kind of file system that a folder is in, such as "ext4"; "" if unknown."""
    best, kind = "", ""
    with suppress(OSError, ValueError):
        path = os.path.realpath(folder)
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, point, name, *_ = line.split()
            point = point.encode().decode("unicode_escape")
            if os.path.commonpath([path, point]) == point and len(point) >= len(best):
                best, kind = point, name
    return kind
