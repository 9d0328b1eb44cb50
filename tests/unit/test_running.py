"""dtrrun.telemetry.run, dtrrun.launch.running and dtrrun.views.running: `dtrrun top`."""

import io
import json
import os
import re
import signal
import time

import psutil
import pytest
from rich.console import Console
from rich.text import Text

from dtrrun.cli.top import Ending
from dtrrun.launch import running
from dtrrun.launch.environment import RECORDS
from dtrrun.telemetry.fields import COUNTERS
from dtrrun.telemetry.record import Writer
from dtrrun.telemetry.run import ABOUT, Run, announce, read_run
from dtrrun.views.rates import Rates
from dtrrun.views.running import COLUMNS, run_picture, runs_table, target
from tests.unit.fake_records import EVIL, snapshot


def shown(what, width=120):
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(what)
    return console.file.getvalue()


@pytest.fixture
def folder(tmp_path):
    announce(str(tmp_path), ["python", "train.py"], 1000.0)
    writer = Writer(str(tmp_path), {"device": "cpu"})
    writer.counters[COUNTERS.index("steps")] = 3
    writer.publish({})
    yield str(tmp_path)
    writer.close()


def test_what_the_launcher_leaves_is_read(folder):
    run = read_run(folder)
    assert (run.pid, run.command, run.start) == (os.getpid(), ["python", "train.py"], 1000.0)
    assert [one.counters["steps"] for one in run.snapshots] == [3]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "command": [], "start": 0}'])
def test_what_is_no_run_is_passed_over(text, tmp_path):
    assert read_run(str(tmp_path)) is None
    (tmp_path / ABOUT).write_text(text)
    assert read_run(str(tmp_path)) is None
    assert read_run(str(tmp_path / "nowhere")) is None


class Process:
    def __init__(self, uid, environ):
        self.uid, self.environ_ = uid, environ

    def uids(self):
        return type("uids", (), {"real": self.uid})

    def environ(self):
        if isinstance(self.environ_, Exception):
            raise self.environ_
        return self.environ_


def test_runs_are_found_by_the_environment_of_ones_own_processes(folder, tmp_path, monkeypatch):
    mine = os.getuid()
    empty = tmp_path / "empty"
    empty.mkdir()
    processes = [
        Process(mine, {}),
        Process(mine, {RECORDS: folder}),
        Process(mine, {RECORDS: folder}),
        Process(mine, {RECORDS: str(empty)}),
        Process(mine, {RECORDS: ""}),
        Process(mine, psutil.AccessDenied()),
        Process(mine, psutil.NoSuchProcess(1)),
        Process(mine + 1, {RECORDS: "/somebody/else"}),
    ]
    monkeypatch.setattr(running.psutil, "process_iter", lambda: processes)
    [run] = running.find()
    assert run.command == ["python", "train.py"]


def a_run(*snapshots, command=("/usr/bin/python3", "train.py", "--lr", "1")):
    return Run(4000, list(command), time.time() - 65, list(snapshots))


def test_a_line_a_run():
    text = shown(runs_table([a_run(snapshot()), a_run(snapshot(1, 0), snapshot(2, 1))], 120))
    assert "200 MB" in text
    assert "train.py --lr 1" in text
    assert "python3" not in text
    assert "65 s" in text
    assert len(text.splitlines()) == 3
    assert shown(runs_table([], 120)).strip() == "no dtrrun run is in progress"


def test_one_process_is_shown_beside_its_budget_and_what_has_become_of_the_others():
    living = [snapshot(1, 0), snapshot(2, 1, resident_bytes=190_000_000, peak_bytes=195_000_000)]
    others = [
        snapshot(3, 2, alive=False, resident_bytes=999_000_000, peak_bytes=999_000_000),
        snapshot(4, 3, alive=False, ended=True),
        snapshot(5, 4, alive=False, ended=True, tables={"error": {"operator": "aten.mm"}}),
    ]
    header, line = shown(runs_table([a_run(*living, *others)], 160), 160).splitlines()
    row = dict(zip(header.split(), re.split(r" {2,}", line.strip()), strict=True))
    assert row["procs"] == "2, 1 killed, 1 without room"
    assert (row["budget"], row["tensors"], row["peak"]) == ("200 MB", "190 MB", "200 MB")
    header, line = shown(runs_table([a_run(others[0])], 160), 160).splitlines()
    assert line.split()[1] == "0,"


@pytest.mark.parametrize(("width", "left_out"), [(60, 5), (80, 2), (120, 0)])
def test_where_there_is_little_room_the_script_is_shown_before_other_figures(width, left_out):
    command = [
        "/usr/bin/python",
        "/some/where/far/away/in/a/deep/folder/train.py",
        "--data",
        "/in/some/folder/x",
    ]
    run = a_run(snapshot(tables={"step_slowdown": 1.8}), command=command)
    header, line = shown(runs_table([run], width), width).splitlines()
    names = header.split()
    assert [name for name in COLUMNS if name in names] == names
    assert len(COLUMNS) - len(names) <= left_out
    cells = dict(zip(names, re.split(r" {2,}", line.strip()), strict=True))
    assert cells["pid"] == "4000"
    assert cells["target"].startswith("train.py")
    assert {"peak": "200 MB", "slowdown": "1.80 ×"}.items() <= cells.items()  # none is cut
    assert max(map(len, (header, line))) <= width


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-u", "/far/train.py", "-m", "x"], "train.py -m x"),
        (["/usr/bin/python3.11", "-m", "pkg.train", "--lr", "1"], "pkg.train --lr 1"),
        (
            ["/bin/torchrun", "--nproc-per-node", "2", "/far/train.py", "-x"],
            "train.py -x (torchrun --nproc-per-node 2)",
        ),
        (["/usr/bin/env", "make", "-m"], "env make -m"),
        (["python"], "python"),
    ],
)
def test_a_run_is_called_by_its_script(command, name):
    assert target(a_run(snapshot(), command=command)) == name


def test_the_script_is_told_in_the_narrowest_window():
    command = ["torchrun", "--nproc-per-node", "2", "/a/train_transformer.py", "--lr", "1"]
    runs = [a_run(snapshot(1, 1), snapshot(2, 0), command=command), a_run(snapshot())]
    for width in (40, 60, 80):
        lines = shown(runs_table(runs, width), width).splitlines()
        assert "train_transformer.py" in lines[1]
        assert "train.py" in lines[2]
        assert "peak" in lines[0]
        assert max(map(len, lines)) <= width


def test_ranks_are_in_order():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    ranks = [snapshot(pid, rank) for pid, rank in ((1, 10), (2, None), (3, 2), (4, 0))]
    text = run_picture(a_run(*ranks), Rates(), stream, 100, 40).plain
    assert re.findall(r"^(rank \d+|pid \d+|all 4)", text, re.MULTILINE) == [
        "rank 0",
        "rank 2",
        "rank 10",
        "pid 2",
        "all 4",
    ]


class Sent(list):
    def __call__(self, pid, number):
        if pid == 4002:
            raise ProcessLookupError(3, "No such process")
        self.append((pid, number))


def runs_of(*pids):
    return [Run(pid, ["python", f"train{pid}.py"], 0.0, [snapshot()]) for pid in pids]


def press(keys, runs):
    """Press these keys one after the other; return what is sent, the last line, and whether top goes on."""
    sent = Sent()
    ending = Ending(sent)
    on = [ending.press(key, runs) for key in keys]
    return sent, ending.line, all(on)


def test_a_run_is_ended_by_a_key_that_is_confirmed():
    one, three = runs_of(4000), runs_of(4000, 4001, 4002)
    told = "end 4000 train4000.py? y: yes, any other key: no"
    assert press("e", one) == ([], told, True)
    assert press(["e", "", ""], one) == ([], told, True)  # nobody hurries
    assert press("ey", one)[0] == [(4000, signal.SIGTERM)]
    assert press("ey", one)[1].startswith("4000 is asked to end")
    for keys in ("y", "en", "e1", "eqy", "ee", "eyy"):
        assert press(keys, one)[0] == ([(4000, signal.SIGTERM)] if keys == "eyy" else [])
    assert (
        press("e", three)[1]
        == "end which? 1: 4000 train4000.py   2: 4001 train4001.py   3: 4002 train4002.py"
    )
    assert press("e2y", three)[0] == [(4001, signal.SIGTERM)]
    for keys in ("e2", "e4y", "e0y", "ey", "e2ny"):
        assert press(keys, three)[0] == []
    assert press("e3y", three)[1].startswith("4002 cannot be ended: No such process")
    assert [press(keys, one)[2] for keys in ("q", "eq", "eqq", "x")] == [False, True, False, True]
    assert press("e", []) == ([], Ending.KEYS, True)


def test_a_run_that_has_ended_meanwhile_is_asked_about_no_more():
    sent = Sent()
    ending = Ending(sent)
    ending.press("e", runs_of(4000))
    ending.press("", runs_of(4001))
    assert ending.line == Ending.KEYS
    ending.press("y", runs_of(4001))
    assert sent == []


def test_what_the_script_is_called_cannot_play_tricks():
    text = shown(runs_table([a_run(snapshot(), command=["x", EVIL])], 120))
    assert "\x1b" not in text
    assert "[bold red]mine[/]" in text
    assert target(a_run(snapshot(), command=[])) == ""
    assert target(a_run(snapshot(), command=["./train"])) == "train"


def test_the_picture_of_one_run():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    picture = run_picture(a_run(snapshot()), Rates(), stream, 100, 40)
    assert isinstance(picture, Text)
    assert "4000  train.py --lr 1" in picture.plain
    assert "187 MB of 200 MB" in picture.plain
    assert "aten.convolution" in picture.plain


def test_the_file_is_whole_or_not_there(tmp_path):
    announce(str(tmp_path), ["a"], 1.0)
    announce(str(tmp_path), ["b"], 2.0)
    assert [path.name for path in tmp_path.iterdir()] == [ABOUT]
    assert json.loads((tmp_path / ABOUT).read_text())["command"] == ["b"]
