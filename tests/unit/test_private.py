"""dtrrun.telemetry.private and dtrrun.launch.records: files are private to the user, and are removed."""

import fcntl
import os
import stat
import subprocess
import sys
import tempfile
import time

import pytest

from dtrrun.launch import records
from dtrrun.launch.records import STALE_SECONDS, clean_up, records_folder
from dtrrun.telemetry.lock import LOCK, abandoned_on, machine
from dtrrun.telemetry.private import open_private, write_private
from dtrrun.telemetry.run import ABOUT, announce

LONG_AGO = time.time() - 2 * STALE_SECONDS


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(autouse=True)
def _open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_a_new_file_is_its_owners_whatever_the_umask(tmp_path):
    with open_private(tmp_path / "x") as file:
        file.write("a")
    assert mode(tmp_path / "x") == 0o600
    with pytest.raises(FileExistsError):
        open_private(tmp_path / "x")


def test_no_link_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="link"):
        open_private(tmp_path / "link")
    (tmp_path / "x.part").symlink_to(tmp_path / "victim")
    write_private(tmp_path / "x", "text")
    assert (tmp_path / "x").read_text() == "text"
    assert not (tmp_path / "victim").exists()


def test_what_is_written_again_is_whole(tmp_path):
    for text in ("first", "second"):
        write_private(tmp_path / "x", text)
    assert (tmp_path / "x").read_text() == "second"
    assert os.listdir(tmp_path) == ["x"]
    assert mode(tmp_path / "x") == 0o600


# -- the folder of records ------------------------------------------------------------------------


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(records, "folders", lambda: set())
    return tmp_path


def left_behind(folder, name="dtrrun-abc", age=LONG_AGO, lock=True, where=None):
    path = folder / name
    path.mkdir(mode=0o700)
    names = ["1-2.record", LOCK] if lock else ["1-2.record"]
    for inside in names:
        (path / inside).write_text(machine() if where is None else where)
        os.utime(path / inside, (age, age))
    os.utime(path, (age, age))
    return path


def test_the_folder_and_what_is_in_it(temporary):
    with records_folder() as folder:
        assert os.path.dirname(folder) == str(temporary)
        assert mode(folder) == 0o700
        announce(folder, ["python"], 0.0)
        assert {name: mode(os.path.join(folder, name)) for name in os.listdir(folder)} == {
            LOCK: 0o600,
            ABOUT: 0o600,
        }
    assert os.listdir(temporary) == []


def test_marks_of_the_hook_are_private(tmp_path):
    hook = os.path.join(os.path.dirname(records.__file__), "..", "boot", "path")
    environment = {**os.environ, "DTRRUN_RECORDS": str(tmp_path), "PYTHONPATH": hook, "DTRRUN_RUNTIME": "{}"}
    subprocess.run([sys.executable, "-c", "pass"], env=environment, check=True, timeout=300)
    assert {name: mode(tmp_path / name) for name in os.listdir(tmp_path)} == {"python": 0o600}


def test_what_a_killed_launcher_left_goes_at_the_next_start(temporary):
    path = left_behind(temporary, age=time.time())
    with records_folder():
        assert not path.exists()


def test_what_one_of_another_machine_left_goes_a_day_later(temporary):
    """The run may be alive: a network file system may not show locks taken on another machine."""
    old = left_behind(temporary, where="another")
    new = left_behind(temporary, "dtrrun-new", time.time() - 60, where="another")
    clean_up()
    assert not old.exists()
    assert new.exists()


def test_a_folder_is_abandoned_by_a_killed_launcher_alone(temporary):
    with records_folder() as folder:
        assert abandoned_on(folder) is None
    assert abandoned_on(folder) is None
    code = (
        "import os, sys\n"
        "from dtrrun.launch.records import records_folder\n"
        "with records_folder() as folder:\n"
        "    print(folder, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert abandoned_on(done.stdout.strip()) == machine()


def test_what_a_launcher_holds_stays(temporary):
    path = left_behind(temporary)
    with open(path / LOCK) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        clean_up()
        assert path.exists()
    clean_up()
    assert not path.exists()


def test_a_live_launcher_holds_its_folder(temporary):
    with records_folder() as folder:
        for name in (*os.listdir(folder), "."):
            os.utime(os.path.join(folder, name), (LONG_AGO, LONG_AGO))
        clean_up()
        assert os.path.exists(folder)


def test_what_a_process_was_started_with_stays(temporary, monkeypatch):
    path = left_behind(temporary)
    monkeypatch.setattr(records, "folders", lambda: {str(path)})
    clean_up()
    assert path.exists()


def test_what_may_be_someone_elses_stays(temporary, tmp_path_factory):
    victim = left_behind(tmp_path_factory.mktemp("elsewhere"), "victim")
    (temporary / "dtrrun-link").symlink_to(victim)
    shared = left_behind(temporary, "dtrrun-shared")
    shared.chmod(0o777)
    no_lock = left_behind(temporary, "dtrrun-other-program", lock=False)
    other_name = left_behind(temporary, "something")
    clean_up()
    for path in (victim / "1-2.record", temporary / "dtrrun-link", shared, no_lock, other_name):
        assert path.exists()


def test_other_users_folders_stay(temporary, monkeypatch):
    path = left_behind(temporary)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    clean_up()
    assert path.exists()
