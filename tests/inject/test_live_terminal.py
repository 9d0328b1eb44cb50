"""The live table on a real terminal emulator (tmux): the script's output survives beside it.

`live/driver.py` replaces the launcher, and `live/script.py` writes its own record: no runtime is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("tqdm")
pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux as the terminal")

HERE = Path(__file__).parent / "live"
ROOT = Path(__file__).parents[2]
DEADLINE = 20.0
TITLE = "── dtrrun · auto · cpu ──"


class Tmux:
    """One terminal on a separate tmux server, in which commands run one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records = 0

    def do(self, *words: str) -> str:
        command = ["tmux", "-S", str(self.folder / "socket"), "-f", "/dev/null", *words]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}
        environment.pop("TMUX", None)
        return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    def open(self, columns: int = 80, rows: int = 24) -> None:
        (self.folder / "rc").write_text("PS1='$ '\n")
        shell = f"bash --noprofile --rcfile {self.folder}/rc"
        self.do("-u", "new-session", "-d", "-x", str(columns), "-y", str(rows), shell)
        self.until(lambda: "$" in self.screen())

    def run(self, what: str, mode: str = "live", redirect: str = "") -> None:
        self.records += 1
        folder = self.folder / f"records{self.records}"
        folder.mkdir()
        if mode == "plain":  # there is no table to wait for
            (folder / "seen").touch()
        words = [
            sys.executable,
            str(HERE / "driver.py"),
            mode,
            str(folder),
            str(HERE / "script.py"),
            str(folder),
        ]
        # The command comes from a file, so that where it wraps does not depend on the length of these paths.
        (self.folder / "go").write_text(f"clear; {shlex.join([*words, what])} {redirect}\n")
        self.type(f". {self.folder}/go", "Enter")

    def seen(self) -> None:
        """Let the script continue, which waits until its table has been seen."""
        (self.folder / f"records{self.records}" / "seen").touch()

    def type(self, *keys: str) -> None:
        self.do("send-keys", *keys)

    def screen(self, *more: str) -> str:
        return self.do("capture-pane", "-p", *more)

    def transcript(self) -> list[str]:
        """Return all lines since the command was typed, including scrolled-away ones, without the prompt."""
        text = self.screen("-S", "-").split("/go\n")[-1].split("[exit ")[0]
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def until(self, holds: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not holds():
            assert time.monotonic() < end, self.screen()
            time.sleep(0.05)

    def until_shown(self, *texts: str) -> str:
        last = ""

        def holds() -> bool:
            nonlocal last
            last = self.screen()
            return all(text in last for text in texts)

        self.until(holds)
        return last


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path)
    terminal.open()
    yield terminal
    terminal.do("kill-server")


def without_final(lines: list[str]) -> list[str]:
    """Return the lines before the final table."""
    end = next((i for i, line in enumerate(lines) if line.startswith("dtrrun ──")), len(lines))
    return lines[:end]


def timeless(lines: list[str]) -> list[str]:
    """Return the lines without the speed in tqdm's."""
    return [re.sub(r"\[[\d:]+<[\d:]+,.*\]", "[]", line) for line in lines]


@pytest.mark.parametrize("what", ["bar", "nested", "lines", "halves"])
def test_what_is_left_is_what_is_left_without_us(tmux: Tmux, what: str) -> None:
    tmux.run(what, "plain")
    tmux.until_shown("[exit 0]")
    plain = tmux.transcript()
    tmux.type("clear", "Enter")
    tmux.do("clear-history")
    tmux.run(what)
    tmux.until_shown(TITLE)
    tmux.seen()
    tmux.until_shown("[exit 0]")
    assert timeless(without_final(tmux.transcript())) == timeless(plain)
    assert TITLE not in tmux.screen("-S", "-")
    assert len(plain) > 1


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (120, 30)])
def test_a_bar_and_the_table(tmux: Tmux, columns: int, rows: int) -> None:
    tmux.do("resize-window", "-x", str(columns), "-y", str(rows))
    tmux.run("bar")
    lines = tmux.until_shown(TITLE, "loss 10 損失", "aten.[red]mm[/]").splitlines()
    bar = next(i for i, line in enumerate(lines) if line.startswith("épochs ░:"))
    table = next(i for i, line in enumerate(lines) if line.startswith(TITLE))
    assert lines[bar - 1] == "loss 10 損失"
    assert bar < table
    assert len(lines[table]) == columns
    assert len(lines) == rows  # down to the last row
    assert lines[table + 1].startswith("tensors  ██████")
    assert lines[table + 1].rstrip(" ").find("150 MB of 200 MB") > 0
    assert not any(line.startswith("épochs") for line in lines[bar + 1 :])
    tmux.seen()
    tmux.until_shown("[exit 0]")


def test_nested_bars_and_the_table(tmux: Tmux) -> None:
    tmux.run("nested")
    lines = tmux.until_shown(TITLE, "outer:  33%", "inner:").splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["outer", "inner"]
    assert not any(re.match("outer|inner", line) for line in lines[2:])
    tmux.seen()
    tmux.until_shown("[exit 0]")


def test_a_new_size_while_it_runs(tmux: Tmux) -> None:
    tmux.run("wait")
    tmux.until_shown(TITLE, "waiting")
    for columns, rows in ((100, 40), (70, 20), (120, 24)):
        tmux.do("resize-window", "-x", str(columns), "-y", str(rows))

        def settled(columns: int = columns, rows: int = rows) -> bool:
            lines = tmux.screen().splitlines()
            titles = [i for i, line in enumerate(lines) if TITLE in line]
            child = f"columns={columns}, lines={titles[0] if titles else 0})"
            return len(titles) == 1 and len(lines[titles[0]]) == columns and child in "".join(lines)

        tmux.until(settled)
    tmux.type("C-c")
    tmux.until_shown("KeyboardInterrupt", "[exit -2]")


def test_ctrl_c_reaches_the_script_and_leaves_a_clean_terminal(tmux: Tmux) -> None:
    tmux.run("wait")
    tmux.until_shown(TITLE)
    tmux.type("C-c")
    text = tmux.until_shown("KeyboardInterrupt", "[exit -2]")
    assert TITLE not in text
    tmux.type("clear; seq 30; stty -a | grep -c ' icanon.* echo '", "Enter")  # scrolls the whole screen
    lines = tmux.until_shown("30\n1\n").splitlines()
    assert len(lines) - 1 == lines.index("30") + 2 or lines[-1] == "$"
    assert "22" in lines


def test_ctrl_z(tmux: Tmux) -> None:
    tmux.run("wait")
    tmux.until_shown(TITLE)
    tmux.type("C-z")
    tmux.until_shown("Stopped")
    tmux.type("bg", "Enter")
    tmux.until(lambda: TITLE not in tmux.screen())  # in the background: the terminal belongs to the shell
    tmux.type("fg", "Enter")
    tmux.until_shown(TITLE)
    tmux.type("C-c")
    tmux.until_shown("[exit -2]")


def test_a_question_is_answered(tmux: Tmux) -> None:
    tmux.run("ask")
    tmux.until_shown(TITLE, "name?")
    tmux.type("bo")
    time.sleep(0.6)  # the table is drawn meanwhile
    tmux.type("b", "Enter")
    tmux.until_shown("[exit 0]")
    assert without_final(tmux.transcript()) == ["name? bob", "hello bob"]


def test_stdout_to_a_file_and_a_script_that_is_killed(tmux: Tmux, tmp_path: Path) -> None:
    tmux.run("files", redirect=f"> {tmp_path}/out")
    tmux.until_shown(TITLE, "to the terminal")
    tmux.seen()
    tmux.until_shown("[exit -9]")
    assert TITLE not in tmux.screen()
    assert "190 MB" in tmux.screen()  # the final table, although the script was killed
    assert (tmp_path / "out").read_bytes() == b"to\tthe file\nFalse True True\n"
