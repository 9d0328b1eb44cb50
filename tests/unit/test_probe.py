"""dtrrun.launch.torch_probe, and the script that it runs (dtrrun.runtime.probe)"""

import os
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from dtrrun.extensions import build
from dtrrun.launch import torch_probe
from dtrrun.launch.torch_probe import probed
from dtrrun.monitor.namespaces import is_running
from dtrrun.runtime import probe


@pytest.fixture(scope="module")
def told():
    with probed(sys.executable, "auto") as facts:
        assert is_running(facts["pid"])
        yield facts
    assert not is_running(facts["pid"])


def test_what_an_interpreter_has(told):
    assert told["torch"] == torch.__version__
    assert told["cuda"] == torch.version.cuda
    assert told["executable"] == sys.executable
    assert told["available"] == torch.cuda.is_available()
    assert ("backend" in told) == told["available"]


def test_the_native_part_as_a_run_would_find_it(told, monkeypatch, tmp_path):
    assert told["native"] == build.outlook()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "true")
    with probed(sys.executable, "cpu") as facts:
        assert facts["native"] == {
            "path": str(build.built()),
            "built": False,
            "shipped": False,
            "compiler": "true",
            "why": None,
            "do": None,
        }
    assert not (tmp_path / "cache").exists()


def test_a_dispatch_key_that_pytorch_uses_itself(monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        f"import torch\nlibrary = torch.library.Library('_', 'IMPL')\nlibrary.fallback(id, {build.KEY!r})\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with probed(sys.executable, "cpu") as facts:
        assert facts["native"]["why"] == build.TAKEN[0].format(torch.__version__)


def test_a_native_build_that_cannot_be_asked(tmp_path):
    found = probe.native(torch, str(tmp_path / "none"))
    assert found["why"].startswith("FileNotFoundError: ")


def test_both_sides_know_the_mark():
    assert probe.MARK == torch_probe.MARK


def interpreter(folder, text):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo noise; echo 'no such thing' >&2; exit 3", "ended with 3: no such thing"),
        ("exit 3", "ended with 3: it printed nothing"),
    ],
)
def test_an_interpreter_that_does_not_tell(tmp_path, text, error):
    python = interpreter(tmp_path, text)
    with probed(python, "cpu") as facts:
        assert facts == {"error": f"{python} {error}"}


def test_an_interpreter_that_never_answers(tmp_path):
    python = interpreter(tmp_path, "exec sleep 20")
    began = time.monotonic()
    with probed(python, "cpu", seconds=0.2) as facts:
        assert facts == {"error": f"{python} did not answer within 0 s"}
    assert time.monotonic() - began < 10


def test_an_interpreter_that_prints_something_first(tmp_path):
    python = interpreter(tmp_path, f'echo hello; echo \'{probe.MARK}{{"torch": "9"}}\'; read x; exit 1')
    with probed(python, "cpu") as facts:
        assert facts == {"torch": "9"}


def test_no_interpreter(tmp_path):
    with probed(str(tmp_path / "none"), "cpu") as facts:
        assert facts["error"].endswith("cannot be run: No such file or directory")


def test_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    found = probe.facts("cpu", "/none")
    assert found["error"].startswith("ModuleNotFoundError")
    assert found["pid"] == os.getpid()


class Cuda:
    """The part of torch.cuda that is used."""

    broken = False

    def mem_get_info(self, index):
        if self.broken:
            raise RuntimeError("CUDA error: out of memory\nmore")
        return 70, 80

    def get_device_properties(self, index):
        return SimpleNamespace(uuid="1a2b")

    def get_device_name(self, index):
        return f"GPU {index}"

    def memory_reserved(self, index):
        return 32

    def get_allocator_backend(self):
        return "native"


def machine(broken=False):
    made = []
    cuda = Cuda()
    cuda.broken = broken
    fake = SimpleNamespace(
        cuda=cuda, uint8=1, empty=lambda size, dtype, device: made.append((size, device)) or "x"
    )
    return fake, made


def test_a_device_is_held(monkeypatch):
    monkeypatch.setattr(probe, "held", [])
    fake, made = machine()
    found = probe.on_device(fake, "cuda:1")
    assert (found["index"], found["uuid"], found["free_bytes"], found["backend"]) == (1, "1a2b", 70, "native")
    assert made == [(probe.HELD_BYTES, "cuda:1")]
    assert probe.held == ["x"]
    assert probe.on_device(fake, "auto")["index"] == 0


def test_a_device_that_fails(monkeypatch):
    monkeypatch.setattr(probe, "held", [])
    fake, _ = machine(broken=True)
    assert probe.on_device(fake, "cuda") == {"device_error": "RuntimeError: CUDA error: out of memory"}
