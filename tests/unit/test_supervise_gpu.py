"""dtrrun.cli.supervise on a machine with a GPU; the driver and the program's records are fake."""

import json
import signal
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from fake_nvml import GIB, FakeNvml, Gpu, only_nvml

from dtrrun.cli.options import collect
from dtrrun.cli.supervise import supervise

PROGRAM = """
import os, signal, sys, time
from dtrrun.telemetry import driver
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer
folder = os.environ["DTRRUN_RECORDS"]
writer = Writer(folder, {"device": sys.argv[2]})
for name, value in {"budget_bytes": 2 << 30, "reserved_bytes": 1 << 30, "steps": 3}.items():
    writer.counters[COUNTERS.index(name)] = value
writer.publish({})
signal.signal(signal.SIGTERM, lambda *_: (writer.close(), sys.exit(int(sys.argv[3]))))
end = time.monotonic() + 20
while driver.read_figure(folder, os.getpid()) is None and sys.argv[2] == "cuda" and time.monotonic() < end:
    time.sleep(0.01)
if sys.argv[4] == "stay":
    time.sleep(20)
writer.close()
figure = driver.read_figure(folder, os.getpid())
print("told", figure and figure.nbytes)
"""


class Children(dict):
    """What NVML lists: every process that this one has started, with so many bytes."""

    def __init__(self, nbytes):
        self.nbytes = nbytes

    def items(self):
        return [(child.pid, self.nbytes) for child in psutil.Process().children(recursive=True)]


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    only_nvml(monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(nbytes, *words, device="cuda", status=9, stay="", **options):
        nvml = FakeNvml(Gpu("GPU-a"))
        monkeypatch.setattr("dtrrun.monitor.nvml.LIBRARY", nvml)
        monkeypatch.setattr("dtrrun.cli.options.target_build", lambda python: None)
        options = {"device": device, "budget": "2GiB", "json": str(tmp_path / "report.json")} | options
        read = collect(options, {}, tmp_path)
        nvml.gpus[0].compute = Children(nbytes)
        command = [*words, sys.executable, str(tmp_path / "program.py"), device, device, str(status), stay]
        found = supervise(read, command)
        assert nvml.open == 0
        return found, capfd.readouterr(), json.loads(Path(options["json"]).read_text())

    return run


@pytest.mark.parametrize("live", ["never", "always"])
def test_a_run_inside_its_budget(run, live):
    status, (out, err), report = run(GIB + 5, live=live)
    assert (status, out) == (0, f"told {GIB + 5}\n")
    assert "driver's peak 1.07 GB (50.0 % of the budget of 2.15 GB; NVML)" in " ".join(err.split())
    assert "warning" not in err
    (process,) = report["processes"]
    assert process["driver_bytes"] == process["driver_peak_bytes"] == GIB + 5
    assert (process["driver_source"], process["driver_device"]) == ("nvml_pid", "GPU-a")
    assert report["violations"] == {"count": 0, "most_bytes": 0}


@pytest.mark.parametrize("options", [{"live": "never"}, {"live": "always"}, {"quiet": True}])
def test_more_than_the_budget_is_warned_of(run, options):
    status, (_, err), report = run(3 * GIB, **options)
    assert status == 0
    warned = [line for line in err.splitlines() if line.startswith("dtrrun: warning: pid ")]
    assert len(warned) == 1
    assert "holds 3.22 GB on its GPU (NVML), 1.07 GB over the budget of 2.15 GB" in warned[0]
    assert report["violations"] == {"count": 1, "most_bytes": GIB}
    assert ("1 time over the budget, by 1.07 GB at most" in err) == ("quiet" not in options)


@pytest.mark.parametrize("words", [(), ("sh", "-c", '"$@"; exit 5', "sh")])
@pytest.mark.parametrize("live", ["never", "always"])
def test_more_than_the_budget_ends_the_run(run, live, words):
    before = set(psutil.Process().children())  # from other tests
    status, (out, err), report = run(
        3 * GIB, *words, status=0, stay="stay", live=live, on_violation="stop", device="cuda"
    )
    assert (status, report["exit_code"], out) == (4, 4, "")
    (line,) = [line for line in err.splitlines() if "error" in line]
    assert line.startswith("dtrrun: error: stopped: pid ")
    assert line.endswith("over the budget of 2.15 GB (3,221,225,472 bytes)")
    assert set(psutil.Process().children(recursive=True)) <= before


def test_on_the_cpu_nothing_is_asked_and_nothing_shown(run, monkeypatch):
    monkeypatch.setattr("dtrrun.cli.supervise.Sampler", lambda *_: 1 / 0)
    status, (_, err), report = run(3 * GIB, device="cpu", on_violation="stop")
    assert status == 0
    assert "driver" not in err
    assert report["violations"] is report["driver_source"] is None


def test_our_signals_still_reach_the_target(run, monkeypatch):
    """Ending the run installs no SIGTERM handler: a SIGTERM from outside goes to the target."""
    before = signal.getsignal(signal.SIGTERM)
    run(GIB + 5)
    assert signal.getsignal(signal.SIGTERM) is before
