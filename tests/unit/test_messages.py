"""dtrrun.cli.messages"""

import os
import subprocess
import sys

from dtrrun.cli.messages import say


def test_one_line_on_stderr(capsys):
    say("error: two\nlines")
    assert capsys.readouterr() == ("", "dtrrun: error: two lines\n")


def test_a_stderr_that_nobody_reads_is_no_error():
    code = "from dtrrun.cli.messages import say; say('a'); say('b'); print('went on')"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=write)
    os.close(write)
    assert (done.returncode, done.stdout) == (0, b"went on\n")
