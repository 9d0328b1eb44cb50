"""dtrrun.cli.messages"""

import os
import subprocess
import sys

import pytest

from dtrrun.cli.messages import LONGEST, say, show_tail
from tests.unit.fake_records import EVIL


def test_one_line_on_stderr(capsys):
    say("error: two\nlines")
    assert capsys.readouterr() == ("", "dtrrun: error: two lines\n")


def test_what_a_terminal_would_obey_is_not_passed_on(capsys):
    say(f"error: no such file: {EVIL}" + 2 * LONGEST * "x")
    shown = capsys.readouterr().err
    assert shown.startswith("dtrrun: error: no such file: [bold red]mine[/]�[2J �dna")
    assert shown[:-1].isprintable()
    assert len(shown) == LONGEST + 1


@pytest.mark.parametrize(("tail", "shown"), [("", ""), ("a\nb\n", "a\nb\n"), ("a\nb", "a\nb\n")])
def test_a_programs_last_words_end_before_ours_begin(capsys, tail, shown):
    show_tail(tail)
    say("error")
    assert capsys.readouterr() == ("", f"{shown}dtrrun: error\n")


@pytest.mark.parametrize("call", ["say('a'); say('b')", "show_tail('a'); show_tail('b')"])
def test_a_stderr_that_nobody_reads_is_no_error(call):
    code = f"from dtrrun.cli.messages import say, show_tail; {call}; print('went on')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"went on\n")
