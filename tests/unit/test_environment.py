"""dtrrun.launch.environment"""

import os
from dataclasses import replace

import pytest

from dtrrun.launch import environment
from dtrrun.launch.environment import HOOK, allocator_settings, child_environment
from dtrrun.launch.errors import LaunchError
from dtrrun.monitor.gpus import Gpus
from dtrrun.settings import RuntimeSettings

SETTINGS = RuntimeSettings(budget_bytes=1, record_dir="/records")


@pytest.fixture(autouse=True)
def a_known_kernel(monkeypatch):
    plain = os.uname_result(("Linux", "host", "6.1.0", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: plain)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (None, HOOK),
        ("", HOOK),
        ("/a", f"{HOOK}:/a"),
        ("/a::b:", f"{HOOK}:/a::b:"),  # an empty folder means the current one
        (f"{HOOK}:/a", f"{HOOK}:/a"),  # one dtrrun inside another
        (HOOK, HOOK),
    ],
)
def test_our_hook_comes_first_and_the_rest_stays(before, after):
    environ = {} if before is None else {"PYTHONPATH": before}
    assert child_environment(SETTINGS, environ)["PYTHONPATH"] == after


def test_all_else_stays_and_the_settings_come_with_it():
    found = child_environment(SETTINGS, {"HOME": "/h", "DTRRUN_BUDGET": "1B"})
    assert (found["HOME"], found["DTRRUN_BUDGET"], found["DTRRUN_RECORDS"]) == ("/h", "1B", "/records")
    assert RuntimeSettings.from_environment(found) == SETTINGS


def test_the_hooks_folder_holds_nothing_that_a_program_could_import_by_accident():
    files = {name for name in os.listdir(HOOK) if name != "__pycache__"}
    assert files == {"sitecustomize.py", "_dtrrun_hook.py"}


def test_a_folder_that_pythonpath_cannot_name(monkeypatch):
    monkeypatch.setattr(environment, "HOOK", "/a:b/dtrrun/boot/path")
    with pytest.raises(LaunchError, match="PYTHONPATH cannot hold") as caught:
        child_environment(SETTINGS, {})
    assert caught.value.exit_status == 125


def test_segments_that_grow_where_nothing_is_said():
    assert allocator_settings({}, "linux") == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_settings_are_kept(name):
    merged = allocator_settings({name: "max_split_size_mb:128"}, "linux")
    assert merged == {name: "max_split_size_mb:128,expandable_segments:True"}
    assert allocator_settings({name: "expandable_segments:False"}, "linux") == {}
    assert allocator_settings({name: "backend: cudaMallocAsync"}, "linux") == {}
    assert allocator_settings({name: " "}, "linux") == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


def test_both_names_are_read_by_some_part_of_pytorch():
    merged = allocator_settings({"PYTORCH_ALLOC_CONF": "a:1,", "PYTORCH_CUDA_ALLOC_CONF": "b:2"}, "linux")
    assert merged == {
        "PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "b:2,expandable_segments:True",
    }


def test_platforms_without_it(monkeypatch):
    assert allocator_settings({}, "win32") == {}
    wsl = os.uname_result(("Linux", "host", "5.15.153.1-microsoft-standard-WSL2", "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: wsl)
    assert allocator_settings({}, "linux") == {}


def test_a_run_on_the_cpu_leaves_the_allocator_alone(monkeypatch):
    monkeypatch.setattr(environment, "gpus", lambda _: Gpus((1,), nvml=True))
    assert "PYTORCH_ALLOC_CONF" not in child_environment(replace(SETTINGS, device="cpu"), {})
    assert "PYTORCH_ALLOC_CONF" in child_environment(SETTINGS, {})


@pytest.mark.parametrize("seen", [Gpus(()), Gpus((1,))])
def test_without_nvml_such_segments_crash_pytorch(monkeypatch, seen):
    monkeypatch.setattr(environment, "gpus", lambda _: seen)
    assert "PYTORCH_ALLOC_CONF" not in child_environment(SETTINGS, {})
