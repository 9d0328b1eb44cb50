"""The child process of tests/bench/gpu: what it records, and how its outcome is read."""

import warnings

import pytest
import torch
from torch import nn

from tests.bench.gpu import children
from tests.bench.gpu.step import collect, fingerprint, warm


@pytest.mark.parametrize(
    ("times_ms", "most", "enough"),
    [
        ([], 0, True),
        ([], 5, False),
        ([1.0] * 4, 5, False),
        ([1.0] * 5, 5, True),
        ([20e3], 5, False),
        ([20e3, 1.0], 5, True),
        ([20e3], 1, True),
    ],
)
def test_warm(times_ms, most, enough):
    assert warm(times_ms, most) == enough


def test_operators_without_a_deterministic_kernel_are_kept(monkeypatch):
    shown, names = [], set()
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: shown.append(str(message)))
    collect(names)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(
            "some_backward_cuda does not have a deterministic implementation, but you set", stacklevel=1
        )
        warnings.warn("another", stacklevel=1)
    assert names == {"some_backward_cuda"}
    assert shown == ["another"]


def test_a_fingerprint_is_of_every_bit():
    model = nn.BatchNorm1d(3)
    before = fingerprint((model,))
    assert fingerprint((model,)) == before
    model.running_mean[1] = torch.nextafter(model.running_mean[1], torch.tensor(1.0))
    assert fingerprint((model,)) != before


@pytest.mark.parametrize(
    ("exit_status", "stderr", "has_result", "status"),
    [
        (0, "", True, "ok"),
        (3, "--verify found a difference", True, "ok"),
        (None, "", True, "no end"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", False, "out of memory"),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", False, "out of memory"),
        (1, "dtrrun.runtime.errors.BudgetError: the budget is too small: out of memory", False, "budget"),
        (1, "ValueError: no", False, "failed"),
        (0, "", False, "failed"),
        (1, "after the last step", True, "failed"),
    ],
)
def test_the_end_of_a_child(exit_status, stderr, has_result, status):
    assert children._status(exit_status, stderr, has_result) == status


def read(result, report=None, driver=None):
    found = children.Run("ok", "plain", 1.0, driver=driver, driver_source="process" if driver else None)
    children._read_result(found, result)
    children._read_report(found, report or {})
    return found


def test_overhead_is_what_the_driver_shows_beyond_the_allocators():
    found = read({"allocated": 5, "reserved": 7, "in_use": 100}, driver=10)
    assert (found.driver, found.driver_source, found.overhead) == (10, "process", 3)


def test_without_nvml_it_is_of_the_device():
    found = read({"allocated": 5, "reserved": 7, "in_use": 100})
    assert (found.driver, found.driver_source, found.overhead) == (100, "device", 93)


def test_the_larger_peak_counts():
    report = {"processes": [{"driver_peak_bytes": 12}, {"driver_peak_bytes": None}]}
    result = {"allocated": 5, "reserved": 7, "in_use": 100}
    assert read(result, report, driver=10).driver == 12
    assert read(result, report, driver=13).driver_source == "process"


def test_on_the_cpu_there_is_what_dtrrun_counts():
    found = read({"steps_ms": [1.0]}, {"peak_bytes": 9, "seconds": {}, "unknown": 1})
    assert (found.allocated, found.driver, found.overhead) == (9, None, None)
    assert found.report == {"peak_bytes": 9, "seconds": {}}


def test_a_failure_is_said_in_its_last_line():
    run = children.Run("failed", "plain", 1.0, error="Traceback\n  …\nValueError: no")
    assert run.said == "failed: ValueError: no"
    needs = children.Run("budget", "dtrrun", 1.0, error="x", report={"least_budget_bytes": 3 * 10**9})
    assert needs.said == "budget, needs 3 GB"
