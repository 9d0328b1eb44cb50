"""How much of the host's memory may be used, and where."""

import resource

import pytest

from dtrrun import values
from dtrrun.core.host import default_folder
from dtrrun.runtime import host

GB = 1 << 30


def machine(folder, available=64 * GB, group="0::/job\n", **limits):
    """Make the files of a machine. limits: files of its control groups, by path with `__` for `/`."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available >> 10} kB\n")
    (folder / "proc/self/cgroup").write_text(group)
    for name, text in limits.items():
        path = folder / "sys/fs/cgroup" / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))
    return str(folder)


def test_half_of_what_is_free_is_taken_by_all_ranks_together(tmp_path):
    root = machine(tmp_path)
    assert host.share_of_memory({}, root) == 32 * GB
    assert host.share_of_memory({"LOCAL_WORLD_SIZE": "4"}, root) == 8 * GB


def test_the_limit_of_a_group_holds_and_so_do_those_above_it(tmp_path):
    groups = {"job__memory.max": "max", "job__memory.current": GB}
    root = machine(tmp_path, group="0::/job/step\n", **groups)
    assert host.share_of_memory({}, root) == 32 * GB
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text(str(17 * GB))
    assert host.share_of_memory({}, root) == 8 * GB
    (tmp_path / "sys/fs/cgroup/job/step").mkdir()
    for name, nbytes in (("max", 5 * GB), ("current", 4 * GB)):
        (tmp_path / f"sys/fs/cgroup/job/step/memory.{name}").write_text(str(nbytes))
    assert host.share_of_memory({}, root) == GB // 2


def test_groups_of_the_first_version(tmp_path):
    names = ("memory__memory.limit_in_bytes", 9 * GB), ("memory__memory.usage_in_bytes", GB)
    root = machine(tmp_path, group="3:cpu:/a\n2:memory:/\n", **dict(names))
    assert host.share_of_memory({}, root) == 4 * GB


@pytest.mark.parametrize(("kind", "pages"), [(resource.RLIMIT_AS, 1000), (resource.RLIMIT_DATA, 500)])
def test_the_limits_of_the_process_hold(tmp_path, monkeypatch, kind, pages):
    root = machine(tmp_path)
    (tmp_path / "proc/self/statm").write_text("1000 900 10 1 0 500 0\n")
    free = resource.RLIM_INFINITY
    limits = {kind: (3 * GB + pages * resource.getpagesize(), free)}
    monkeypatch.setattr(resource, "getrlimit", lambda one: limits.get(one, (free, free)))
    assert host.memory_left({}, root) == 3 * GB
    assert host.memory_left({"LOCAL_WORLD_SIZE": "3"}, root) == GB
    limits.clear()
    assert host.memory_left({}, root) == 64 * GB


def test_a_machine_that_does_not_say(tmp_path):
    assert host.share_of_memory({}, str(tmp_path)) == 0


def test_where_a_file_goes(monkeypatch):
    assert default_folder({"TMPDIR": "/scratch"}) == "/scratch"
    assert default_folder({}) in ("/var/tmp", "/tmp")
    assert host.file_system_of("/proc/self") == "proc"


@pytest.mark.parametrize("text", ["auto", "none", "20GB", "1.5GiB"])
def test_values_without_a_folder(text):
    assert values.host_budget(text) == text


def test_a_folder_becomes_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert values.host_budget("20GB:.") == f"20GB:{tmp_path}"


@pytest.mark.parametrize(
    ("text", "why"),
    [("20", "no unit"), ("20GB:", "no folder"), ("20GB:/nowhere", "not a folder"), ("some", "size")],
)
def test_what_is_refused(text, why):
    with pytest.raises(ValueError, match=why):
        values.host_budget(text)
