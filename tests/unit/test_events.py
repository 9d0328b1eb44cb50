"""dtrrun.telemetry.events"""

import os
import stat
import time

import pytest

from dtrrun.telemetry import events
from dtrrun.telemetry.events import EVICT, REMATERIALIZE, SUFFIX, EventWriter, read_events
from tests.unit.fake_records import EVIL


def the_file(folder):
    (name,) = (name for name in os.listdir(folder) if name.endswith(SUFFIX))
    return folder / name


def test_what_is_written_is_read(tmp_path):
    writer = EventWriter(str(tmp_path))
    began = time.monotonic_ns()
    writer.add(EVICT, "aten.relu", began, 100, 900, 100)
    writer.add(REMATERIALIZE, EVIL, began, 7, 907, 93)
    writer.add(EVICT, "aten.relu", began, 50, 850, 143)
    writer.close()
    (found,) = read_events(str(tmp_path))
    assert (found.pid, found.left_out) == (os.getpid(), 0)
    first, second, third = found
    assert first[:2] == (EVICT, "aten.relu")
    assert first[5:] == (100, 900, 100)
    assert second.name == EVIL
    assert third.name == "aten.relu"
    assert first.start_ns == began
    assert 0 <= first.duration_ns < 60e9


def test_the_file_is_its_owners(tmp_path):
    EventWriter(str(tmp_path)).close()
    assert stat.S_IMODE(the_file(tmp_path).stat().st_mode) == 0o600


def test_the_first_events_are_kept_and_the_others_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "LIMIT_BYTES", 20_000)
    writer = EventWriter(str(tmp_path))
    for number in range(1000):
        writer.add(EVICT, f"name {number % 7}", number, number, 0, 0)
    writer.close()
    assert the_file(tmp_path).stat().st_size <= 20_000
    (found,) = read_events(str(tmp_path))
    numbers = [event.nbytes for event in found]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) > 300
    assert found.left_out == 1000 - len(numbers)


def test_very_many_and_very_long_names(tmp_path):
    writer = EventWriter(str(tmp_path))
    for number in range(events.MOST_NAMES + 10):
        writer.add(EVICT, f"{number}" + "é" * 1000, 0, 1, 0, 0)
    writer.close()
    names = [event.name for event in next(read_events(str(tmp_path)))]
    assert names[0] == "0" + "é" * (events.LONGEST_NAME - 1)
    assert names[-1] == ""
    assert len(set(names)) == events.MOST_NAMES + 1


def test_very_many_modules_leave_room_for_the_names_of_operators(tmp_path):
    writer = EventWriter(str(tmp_path))
    for number in range(events.MOST_NAMES + 10):
        writer.add(EVICT, f"aten.relu{events.MODULE}layers.{number}", 0, 1, 0, 0)
    writer.add(EVICT, "aten.mul", 0, 1, 0, 0)
    writer.add(EVICT, f"aten.relu{events.MODULE}layers.0", 0, 1, 0, 0)
    writer.close()
    names = [event.name for event in next(read_events(str(tmp_path)))]
    assert names[0] == names[-1] == f"aten.relu{events.MODULE}layers.0"
    assert names[-3:-1] == ["aten.relu", "aten.mul"]
    assert all(names)


def test_what_was_written_so_far_is_there_in_time(tmp_path):
    writer = EventWriter(str(tmp_path))
    writer.add(EVICT, "a", 0, 1, 0, 0)  # the first is written at once, later ones in batches
    for _ in range(events.BATCH_BYTES // events.EVENT.size + 1):
        writer.add(EVICT, "a", 0, 1, 0, 0)
    assert len(list(next(read_events(str(tmp_path))))) > 1000
    writer.close()


def test_what_is_torn_or_none_of_ours_is_passed_over(tmp_path):
    writer = EventWriter(str(tmp_path))
    for _ in range(3):
        writer.add(EVICT, "a", 0, 1, 0, 0)
    writer.close()
    path = the_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    (tmp_path / f"other{SUFFIX}").write_bytes(b"something else, and long enough")
    (tmp_path / f"short{SUFFIX}").write_bytes(b"x")
    (tmp_path / f"link{SUFFIX}").symlink_to(path)
    os.mkfifo(tmp_path / f"pipe{SUFFIX}")
    (found,) = read_events(str(tmp_path))
    assert len(list(found)) == 2
    assert list(read_events(str(tmp_path / "nowhere"))) == []


def test_a_forked_child_writes_nothing(tmp_path):
    writer = EventWriter(str(tmp_path))
    writer.add(EVICT, "a", 0, 1, 0, 0)
    writer.add(EVICT, "parent's", 0, 1, 0, 0)
    child = os.fork()
    if child == 0:
        writer.add(EVICT, "child's", 0, 1, 0, 0)
        writer.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.close()
    assert [event.name for event in next(read_events(str(tmp_path)))] == ["a", "parent's"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_no_error_of_the_program(tmp_path):
    writer = EventWriter(str(tmp_path))
    writer._file = open("/dev/full", "wb")  # noqa: SIM115
    for number in range(5000):
        writer.add(EVICT, "a", number, 1, 0, 0)
    writer.close()
