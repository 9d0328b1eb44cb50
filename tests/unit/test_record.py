"""`telemetry.record`: others read what a process wrote, whatever happens to the process."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

import pytest

from dtrrun.telemetry import record
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer, read_all

PEAK = COUNTERS.index("peak_bytes")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def test_reads_what_was_written(folder: str) -> None:
    writer = Writer(folder, {"device": "cpu", "settings": {"heuristic": "lru"}})
    writer.counters[PEAK] = 123
    writer.publish({"warnings": [{"text": "é", "count": 2}], "error": None})
    [snapshot] = read_all(folder)
    assert snapshot.pid == os.getpid()
    assert snapshot.meta["ppid"] == os.getppid()
    assert snapshot.meta["argv"] == sys.argv
    assert snapshot.meta["settings"] == {"heuristic": "lru"}
    assert snapshot.counters["peak_bytes"] == 123
    assert list(snapshot.counters) == list(COUNTERS)
    assert snapshot.tables == {"warnings": [{"text": "é", "count": 2}], "error": None}
    assert snapshot.alive
    assert not snapshot.ended
    assert snapshot.counters["wall_ns"] > 0
    writer.close("ended")
    assert read_all(folder)[0].ended
    assert read_all(folder)[0].status == "ended"


def test_a_quick_look_leaves_out_the_tables(folder: str) -> None:
    writer = Writer(folder, {})
    writer.publish({"pinned": []})
    writer.counters[PEAK] = 5
    [snapshot] = read_all(folder, tables=False)
    assert (snapshot.counters["peak_bytes"], snapshot.tables) == (5, {})
    writer.close()


def test_a_process_says_how_its_numbers_are_to_be_read(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    Writer(folder, {}).close()
    meta = read_all(folder)[0].meta
    assert (meta["cuda_visible_devices"], meta["pid_namespace"]) == ("GPU-1", record.pid_namespace())
    assert str(record.pid_namespace()).startswith("pid:[")


def test_file_is_private(folder: str) -> None:
    writer = Writer(folder, {})
    assert stat.S_IMODE(os.stat(writer.path).st_mode) == 0o600
    writer.close()


def test_rank_comes_from_the_environment(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    Writer(folder, {}).close()
    assert read_all(folder)[0].meta["rank"] == 3


def test_otherwise_from_the_group_that_it_joins(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    writer = Writer(folder, {})
    writer.publish({"group": None})
    assert read_all(folder)[0].meta["rank"] is None
    writer.publish({"group": {"rank": 2, "world": "7 4"}})
    [found] = read_all(folder)
    assert (found.meta["rank"], found.meta["world"]) == (2, "7 4")


def test_newest_tables_win_and_wall_time_grows(folder: str) -> None:
    writer = Writer(folder, {})
    walls = []
    for index in range(5):
        writer.publish({"step": {"index": index}})
        [snapshot] = read_all(folder)
        assert snapshot.tables["step"]["index"] == index
        walls.append(snapshot.counters["wall_ns"])
    assert walls == sorted(set(walls))
    writer.close()


def test_counters_of_a_killed_process_survive(folder: str) -> None:
    program = (
        "import os, signal, sys; from dtrrun.telemetry.record import Writer\n"
        f"w = Writer(sys.argv[1], {{}}); w.publish({{'pinned': []}}); w.counters[{PEAK}] = 77\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    child = subprocess.run([sys.executable, "-c", program, folder])
    assert child.returncode == -signal.SIGKILL
    [snapshot] = read_all(folder)
    assert snapshot.counters["peak_bytes"] == 77
    assert snapshot.tables == {"pinned": []}
    assert not snapshot.ended
    assert not snapshot.alive


def test_writer_needs_only_the_standard_library() -> None:
    program = "import sys, dtrrun.telemetry.record as r; print('rich' in sys.modules, 'torch' in sys.modules)"
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output.split() == ["False", "False"]


def test_discard_removes_the_record(folder: str) -> None:
    writer = Writer(folder, {})
    writer.discard()
    writer.publish({})
    writer.discard()
    assert os.listdir(folder) == []


def test_forked_child_leaves_the_parents_record_alone(folder: str) -> None:
    writer = Writer(folder, {})
    writer.counters[PEAK] = 1
    kept = writer.counters
    pid = os.fork()
    if pid == 0:
        try:
            writer.forked()
            writer.counters[PEAK] += 1  # goes to the child's private memory
            writer.publish({"pinned": ["child"]})
            writer.close("child")
            writer.discard()
            ok = writer.counters[PEAK] == 2 and isinstance(writer.counters, array)
            try:
                kept[PEAK] = 5
            except ValueError:
                os._exit(0 if ok else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.counters[PEAK] += 10
    [snapshot] = read_all(folder)
    assert snapshot.counters["peak_bytes"] == 11
    assert snapshot.tables == {}
    assert not snapshot.ended
    writer.close()


def test_reader_never_sees_a_torn_table(folder: str) -> None:
    """One process publishes tables of every length as fast as it can; all entries of a table are equal."""
    program = (
        "import sys; from dtrrun.telemetry.record import Writer\n"
        "w = Writer(sys.argv[1], {}); w.publish({'x': [0]}); print(flush=True); i = 0\n"
        "while True: i += 1; w.publish({'x': [i] * (1 + i * 7919 % 20000)})"
    )
    child = subprocess.Popen([sys.executable, "-c", program, folder], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        seen: list[int] = []
        deadline = time.monotonic() + 60
        # On a busy machine the child may not be scheduled during the first 300.
        while (len(seen) < 300 or seen[-1] == seen[0]) and time.monotonic() < deadline:
            values = read_all(folder)[0].tables["x"]
            assert set(values) == {values[0]}
            seen.append(values[0])
    finally:
        child.kill()
        child.communicate()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_a_table_is_never_older_than_one_that_was_seen(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the reads of the two blocks, one is replaced and the other begins to be rewritten."""
    writer = Writer(folder, {})
    for number in (1, 2, 3):
        writer.publish({"x": number})
    assert read_all(folder)[0].tables == {"x": 3}
    read_block = record._read_block

    def slow(descriptor: int, index: int) -> Any:
        block = read_block(descriptor, index)
        if index == 1 and writer._sequence == 3:
            assert block is not None
            assert block[1] == {"x": 2}
            writer.publish({"x": 4})
            at = record.BLOCKS_AT + 2 * record.BLOCK_BYTES
            writer._map[at + record.BLOCK.size] ^= 1  # the fifth table
        return block

    monkeypatch.setattr(record, "_read_block", slow)
    assert read_all(folder)[0].tables == {"x": 4}
    writer.close()


def test_a_block_cut_short_by_death_gives_way_to_the_one_before(folder: str) -> None:
    writer = Writer(folder, {})
    writer.publish({"x": "before"})
    writer.publish({"x": "newest"})
    writer.close()
    whole = Path(writer.path).read_bytes()
    assert whole.count(b"newest") == 1
    Path(writer.path).write_bytes(whole.replace(b"newest", b"new---"))
    assert read_all(folder)[0].tables == {"x": "before"}


def test_a_reader_that_is_lapped_reads_again(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(folder, {})
    writer.publish({"x": 1})
    read, torn = record._read_block, [1, 2, 1, 2]  # reads that find a block being written

    def often_torn(descriptor: int, index: int) -> tuple[int, dict[str, object]] | None:
        return torn.pop() and None if index and torn else read(descriptor, index)

    monkeypatch.setattr(record, "_read_block", often_torn)
    assert read_all(folder)[0].tables == {"x": 1}
    assert torn == []
    writer.close()


def test_tables_too_long_are_shortened(folder: str) -> None:
    writer = Writer(folder, {"argv": ["x" * 1_000_000]})
    writer.publish({"warnings": [{"text": "w" * 1000, "count": n} for n in range(5000)], "error": None})
    [snapshot] = read_all(folder)
    warnings = snapshot.tables["warnings"]
    assert 0 < len(warnings) < 5000
    assert warnings == [{"text": warnings[0]["text"], "count": n} for n in range(len(warnings))]
    assert warnings[0]["text"].startswith("www")
    assert snapshot.meta["argv"][0].startswith("xxx")
    writer.close()


def test_tables_that_are_no_json_are_published_all_the_same(folder: str) -> None:
    writer = Writer(folder, {})
    writer.publish({"settings": object()})
    assert "object" in read_all(folder)[0].tables["settings"]
    writer.close()


def test_foreign_and_half_written_files_are_skipped(folder: str) -> None:
    Writer(folder, {}).close()
    [name] = os.listdir(folder)
    whole = Path(folder, name).read_bytes()
    assert len(whole) == record.FILE_BYTES
    ends = (0, 7, 100, record.BLOCKS_AT, record.BLOCKS_AT + 20)
    for index, end in enumerate(ends):
        Path(folder, f"cut{index}.record").write_bytes(whole[:end])
    Path(folder, "unborn.record").write_bytes(bytes(len(record.MAGIC)) + whole[len(record.MAGIC) :])
    Path(folder, "newer.record").write_bytes(record.MAGIC[:-1] + b"\x02" + whole[len(record.MAGIC) :])
    Path(folder, "notes.txt").write_text(json.dumps({}))
    Path(folder, "folder.record").mkdir()
    os.mkfifo(Path(folder, "pipe.record"))
    os.symlink(Path(folder, name), Path(folder, "link.record"))
    assert [snapshot.pid for snapshot in read_all(folder)] == [os.getpid()]


def test_no_folder_no_records(tmp_path: Path) -> None:
    assert read_all(str(tmp_path / "gone")) == []


def test_oldest_process_comes_first(folder: str) -> None:
    for start in (3.0, 1.0, 2.0):
        Writer(folder, {"start": start}).close()
    assert [snapshot.meta["start"] for snapshot in read_all(folder)] == [1.0, 2.0, 3.0]
