"""dtrrun.telemetry.driver"""

import os
import stat
import subprocess
import sys

import pytest

from dtrrun.runtime.cuda.session import driver_bytes
from dtrrun.telemetry import driver
from dtrrun.telemetry.driver import SOURCES, Figure, read_figure, write


def test_the_newest_figure_is_read(tmp_path):
    folder = str(tmp_path)
    assert read_figure(folder, 7) is None
    for time, source in enumerate(SOURCES, 1):
        figure = Figure(time * 1000, time, source)
        write(folder, 7, figure)
        assert read_figure(folder, 7) == figure
    assert read_figure(folder, 8) is None


@pytest.mark.parametrize(("source", "known"), [*zip(SOURCES, (True, True, True, False, False), strict=True)])
def test_a_session_uses_only_what_is_of_the_process_itself(tmp_path, source, known):
    write(str(tmp_path), os.getpid(), Figure(500, 3 * 10**9, source))
    assert driver_bytes(str(tmp_path)) == ((500, 3.0) if known else None)


def test_the_file_is_private(tmp_path):
    write(str(tmp_path), 7, Figure(1, 1, "nvml_pid"))
    (name,) = os.listdir(tmp_path)
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600


def test_a_torn_slot_gives_way_to_the_one_before(tmp_path):
    write(str(tmp_path), 7, Figure(111, 1, "nvml_pid"))
    write(str(tmp_path), 7, Figure(222, 2, "nvml_pid"))
    path = tmp_path / "7.driver"
    whole = path.read_bytes()
    path.write_bytes(whole.replace((222).to_bytes(8, "little"), (333).to_bytes(8, "little")))
    assert read_figure(str(tmp_path), 7).nbytes == 111
    write(str(tmp_path), 7, Figure(444, 3, "nvml_pid"))  # into the slot that was torn
    assert path.read_bytes().count((111).to_bytes(8, "little")) == 1
    assert read_figure(str(tmp_path), 7).nbytes == 444


@pytest.mark.parametrize("length", [0, 1, 27])
def test_a_file_that_has_only_begun(tmp_path, length):
    write(str(tmp_path), 7, Figure(1, 1, "nvml_pid"))
    path = tmp_path / "7.driver"
    path.write_bytes(path.read_bytes()[:length])
    assert read_figure(str(tmp_path), 7) is None


def test_a_link_is_not_followed(tmp_path):
    write(str(tmp_path), 8, Figure(1, 1, "nvml_pid"))
    os.symlink(tmp_path / "8.driver", tmp_path / "7.driver")
    assert read_figure(str(tmp_path), 7) is None
    with pytest.raises(OSError, match=r"7\.driver"):
        write(str(tmp_path), 7, Figure(1, 1, "nvml_pid"))


def test_a_reader_never_sees_a_torn_figure(tmp_path):
    """While a process writes as fast as it can, bytes and time of each figure read belong together."""
    program = (
        "import sys; from dtrrun.telemetry.driver import Figure, write\n"
        "i = 0\n"
        "while True: i += 1; write(sys.argv[1], 7, Figure(i * 1000003, i, 'nvml_pid')); "
        "i == 1 and print(flush=True)"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        seen = []
        while len(seen) < 2000 or seen[-1].monotonic_ns < 1000:
            seen.append(read_figure(str(tmp_path), 7))
    finally:
        child.kill()
        child.communicate()
    assert all(figure.nbytes == figure.monotonic_ns * 1000003 for figure in seen)
    assert [figure.monotonic_ns for figure in seen] == sorted(figure.monotonic_ns for figure in seen)


def test_the_format_is_that_of_the_file(tmp_path):
    assert driver.SLOT.size == 32
    assert driver.BODY.size == 24
