"""Every verb, given a wrong kind of file, prints one line that says so, exits with 2, and runs nothing."""

import gzip
import json
import os

import pytest

FOLDER, PIPE = "folder", "pipe"
TEXT = '{"INSTRUCTION":"RELEASE","NAME":"x"}\n' * 3
FILES = {
    "empty": b"",
    "binary": b"\xff\x00\xfe" * 100,
    "deep.json": b"[" * 100_000,
    "costs.gz": gzip.compress(json.dumps({"signatures": {}}).encode()),
    "cut.gz": gzip.compress(TEXT.encode())[:-20],
    "deep.gz": gzip.compress(b"[" * 100_000),
    "half.json": b'{"schema": "dtrrun.report/1"}',
    "start.log": b'{"INSTRUCTION":"ANNOTATE","ANNOTATION":"START"}\n{"INSTRUCTION":"RELEASE","NAME":"x"}\n',
}
NO_COSTS = "is not a complete file of costs written by dtrrun profile"

CASES = [
    ("simulate nowhere", "nowhere: No such file or directory"),
    ("simulate folder", "folder: there is no *.log or *.log.gz in this folder"),
    ("simulate pipe", "pipe: not a regular file, and a log is read several times"),
    ("simulate empty", "empty: the log is empty"),
    ("simulate start.log", "start.log: the log has no operator"),
    ("simulate binary", "binary: not a text file (invalid start byte at byte 0)"),
    ("simulate deep.json", "deep.json, line 1: JSON that is nested too deeply"),
    ("simulate cut.gz", "cut.gz: not a complete gzip file: the log was cut off after line 0"),
    ("--costs nowhere true", "--costs: no such file: 'nowhere'"),
    ("--costs folder true", "--costs: 'folder' is a folder, not a file"),
    ("--costs pipe true", "--costs: 'pipe' is not a regular file"),
    ("--costs= true", "--costs: the path is empty"),
    ("--costs empty true", f"--costs: 'empty' {NO_COSTS}"),
    ("--costs binary true", f"--costs: 'binary' {NO_COSTS}"),
    ("--costs cut.gz true", f"--costs: 'cut.gz' {NO_COSTS}"),
    ("--costs deep.gz true", f"--costs: 'deep.gz' {NO_COSTS}"),
    ("--profile ./nowhere true", "--profile: no such file: './nowhere'"),
    ("--profile ./folder true", "--profile: './folder' is a folder, not a file"),
    ("--profile ./pipe true", "--profile: './pipe' is not a regular file"),
    ("--profile ./binary true", "binary: not a text file: "),
    ("--profile ./deep.json true", "deep.json: malformed YAML: nested too deeply"),
    ("report nowhere -o x.html", "nowhere cannot be read: No such file or directory"),
    ("report folder -o x.html", "no file *.json in folder is the report of a run"),
    ("report empty -o x.html", "empty is not JSON"),
    ("report binary -o x.html", "binary is not JSON"),
    ("report deep.json -o x.html", "deep.json is not JSON"),
    ("report half.json -o x.html", "half.json is damaged: it has no 'command'"),
    ("report half.json -o x.html --profile-json binary", "binary is not JSON"),
    ("record -o folder true", "-o: folder is not a regular file"),
    ("record -o pipe true", "-o: pipe is not a regular file"),
    ("record --output= true", "-o: the path is empty"),
    ("--json= true", "--json: the path is empty"),
    ("--json folder true", "--json: folder cannot be written: Is a directory"),
    ("--html pipe true", "--html: pipe cannot be written: no process reads this pipe"),
    ("smoke --json x --junit ./x true", "--json and --junit both write to ./x"),
    ("--json - --html - true", "--json and --html both write to standard output"),
    ("top eleven", "PID: 'eleven' is not a whole number"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / FOLDER).mkdir()
    os.mkfifo(tmp_path / PIPE)
    return tmp_path


@pytest.mark.parametrize(("words", "told"), CASES, ids=[words for words, _ in CASES])
def test_one_line_and_status_2(here, refused, words, told):
    before = sorted(os.listdir(here))
    assert refused(*words.split()).startswith(told)
    assert sorted(os.listdir(here)) == before


def test_a_file_of_costs(here):
    from dtrrun.values import costs

    assert costs("costs.gz") == str(here / "costs.gz")
