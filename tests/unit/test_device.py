"""dtrrun.runtime.device, and the parts of `gpu` that can be tested without one."""

import pytest
import torch

import dtrrun
from dtrrun.monitor.gpus import CUDA, Gpus
from dtrrun.runtime import device
from dtrrun.runtime.cuda.gpu import Gpu
from dtrrun.runtime.device import Cpu, choose
from dtrrun.runtime.storage import place_of, use_device
from dtrrun.settings import RuntimeSettings
from dtrrun.telemetry.fields import COUNTERS

choose_by_name = device.choose_by_name  # which tests on the CPU replace


def chosen(name):
    return choose(RuntimeSettings(device=name))


@pytest.fixture
def built(monkeypatch):
    """A PyTorch for CUDA, on a machine with two GPUs."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_see", lambda build: Gpus((1, 1) if build == CUDA else ()))
    monkeypatch.setattr(device, "choose_by_name", choose_by_name)


@pytest.fixture
def not_built(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)


def test_auto_is_the_gpu_that_there_is(built, monkeypatch):
    assert chosen("auto").type == "cuda"
    assert chosen("cpu").type == "cpu"
    monkeypatch.setattr(device, "_see", lambda build: Gpus(()))
    assert chosen("auto").type == "cpu"


def test_a_gpu_that_is_not_there(built):
    with pytest.raises(ValueError, match=r"no CUDA device 2: 2 are visible"):
        chosen("cuda:2")


def test_a_program_that_uses_cuda_has_counted_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(device, "gpus", None)  # so that no driver is asked
    assert len(device._see(CUDA).sizes) == 3


def test_a_pytorch_without_cuda(not_built, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(device, "DRIVER", str(tmp_path / "none"))
    assert type(chosen("auto")) is Cpu
    with pytest.raises(ValueError, match=r"cuda:1: this PyTorch is built for the CPU"):
        chosen("cuda:1")
    with dtrrun.budget("1GB"):
        assert capsys.readouterr().err == ""
    monkeypatch.setattr(device, "DRIVER", str(tmp_path))  # there is a driver
    with dtrrun.budget("1GB"):
        assert "built without CUDA: the budget applies to the CPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("said", "meant"), [({}, "auto"), ({"device": "cpu"}, "cpu"), ({"device": "cuda:1"}, "cuda:1")]
)
def test_a_block_takes_its_device_as_the_command_does(monkeypatch, said, meant):
    asked = []
    monkeypatch.setattr(device, "choose", lambda settings: asked.append(settings.device) or Cpu())
    with dtrrun.budget("1GB", **said):
        assert asked == [meant]


def test_the_index_that_was_asked_for(built):
    assert chosen("cuda:1")._index == 1
    assert chosen("cuda")._index is None


def test_the_counters_are_those_of_the_record():
    assert set(device.COUNTERS) <= set(COUNTERS)
    with dtrrun.budget("1GB") as session:
        report = session.report()
    assert report["device_index"] == -1
    assert {report[name] for name in device.COUNTERS if name != "device_index"} == {0}


def test_other_devices_of_the_kind_are_not_ours():
    asked = []

    def joins(index):
        asked.append(index)
        return index == 2

    try:
        use_device(512, 1, joins=joins)
        found = [place_of(torch.device(name)) for name in ("cpu", "cuda", "cuda:1", "cuda:0", "cuda:2")]
    finally:
        use_device(64)
    assert (found, asked) == (["cpu", "cuda", "cuda", "cuda:0", "cuda"], [0, 2])
    assert place_of(torch.device("cuda:3")) == "cuda"  # before any is bound


CPU, META = torch.ones(2), torch.ones(2, device="meta")


@pytest.mark.parametrize(
    ("args", "kwargs", "touched"),
    [
        ((CPU, 2.0), None, None),
        (([CPU, CPU],), {}, None),
        ((CPU, META), {}, "meta"),
        (([CPU, META],), {}, "meta"),
        (((CPU, None, META),), {}, "meta"),
        ((CPU,), {"out": META}, "meta"),
        (([2],), {"device": torch.device("cuda:1")}, "cuda:1"),
        (([2],), {"device": "cuda"}, "cuda"),
        (([2],), {"device": torch.device("cpu")}, None),
        (([2],), {"dtype": torch.float32}, None),
    ],
)
def test_what_an_operator_touches(args, kwargs, touched):
    found = Gpu.touched_by(args, kwargs)
    assert found == (touched and torch.device(touched))
