"""dtrrun.cli.main"""

import signal
import subprocess
import sys

import pytest

import dtrrun
from dtrrun.cli import main as module
from dtrrun.cli.command import options_of
from dtrrun.cli.main import VERBS, main, split
from dtrrun.cli.run import SUMMARIES
from dtrrun.launch.errors import LaunchError


@pytest.fixture
def seen(monkeypatch):
    """What the verb `run` receives: its options and its target; nothing is started."""
    calls = []
    monkeypatch.setattr("dtrrun.cli.run.resolve", lambda words, python: words)
    monkeypatch.setattr(
        "dtrrun.cli.run.supervise", lambda options, command: calls.append((options, command)) or 0
    )
    return calls


def status(*words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def test_without_a_word_it_shows_how_to_begin(capsys):
    assert status() == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(line.startswith("dtrrun: ") for line in err.splitlines())
    assert all(word in err for word in ("nothing to run", "--budget 6GB train.py", "profile", "--help"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("help", "[run] [--] TARGET"),
        ("help profile", "dtrrun profile [OPTIONS]"),
        ("help train.py", "[run] [--] TARGET"),
    ],
)
def test_the_help_by_other_names(words, shown, capsys):
    assert status(*words.split()) == 0
    assert shown in capsys.readouterr().out


def test_a_program_called_help(seen, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "help").touch()
    assert status("help", "me") == 0
    assert seen[0][1] == ["help", "me"]


def test_ctrl_c_during_our_imports_shows_nothing():
    """Ctrl-C during the imports, which take a moment, prints nothing, since nothing has begun."""
    code = (
        "import builtins, os, signal, sys\n"
        "real = builtins.__import__\n"
        "def slow(name, *rest, **more):\n"
        "    if name == 'typer':\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    return real(name, *rest, **more)\n"
        "builtins.__import__ = slow\n"
        "sys.argv = ['dtrrun', '--version']\n"
        "from dtrrun.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("train.py", ["train.py"]),
        ("--budget 1GB train.py --budget 2GB", ["train.py", "--budget", "2GB"]),
        ("--budget=1GB train.py --help", ["train.py", "--help"]),
        ("--budget 1GB -m pkg.train -x", ["-m", "pkg.train", "-x"]),
        ("--budget 1GB -mpkg.train", ["-mpkg.train"]),
        ("--budget 1GB -c pass --version", ["-c", "pass", "--version"]),
        ("--budget 1GB -- -m pkg -- a", ["-m", "pkg", "--", "a"]),
        ("--budget 1GB train.py -- a", ["train.py", "--", "a"]),
        ("--budget 1GB run train.py", ["train.py"]),
        ("run --budget 1GB train.py", ["train.py"]),
        ("--quiet run --budget 1GB -- train.py", ["train.py"]),
        ("--budget 1GB run ./run", ["./run"]),
        ("--budget 1GB run run", ["run"]),
        ("--budget 1GB -- run", ["run"]),
        ("--budget 1GB -", ["-"]),
        ("--profile paper --verify --no-sample torchrun --nproc-per-node 2 t.py", None),
        ("--quiet", []),
    ],
)
def test_our_options_end_where_the_target_begins(seen, words, target):
    words = words.split()
    assert status(*words) == 0
    ((_, command),) = seen
    assert command == (target if target is not None else words[words.index("torchrun") :])


def test_the_targets_words_are_not_looked_at(seen):
    words = ["train.py", "", "a\nb", "\udcff", "--budget"]
    assert status("--budget", "1GB", *words) == 0
    assert seen[0][1] == words


def test_options_on_both_sides_of_the_verb_count(seen):
    assert status("--budget", "1GB", "run", "--seed", "3", "train.py") == 0
    settings = seen[0][0].settings
    assert (settings.budget_bytes, settings.seed) == (10**9, 3)


def test_later_verbs_have_their_place(monkeypatch, seen):
    """A word in VERBS is a verb; after `run` or `--` it is a target."""
    monkeypatch.setattr(module, "VERBS", ("run", "later"))
    assert status("run", "later") == 0
    assert status("--", "later") == 0
    assert [command for _, command in seen] == [["later"], ["later"]]
    monkeypatch.delenv("DTRRUN_DEBUG", raising=False)
    assert status("later", "train.py") == 125  # its file does not exist yet


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--bugdet 1GB train.py", "No such option: --bugdet"),
        ("--budget", "requires an argument"),
        ("--quiet=yes train.py", "--quiet"),
        (
            "-O train.py",
            "No such option: -O (see dtrrun --help; for an option of Python, write: dtrrun python -O ...)",
        ),
        ("simulate --budget 50% step.log", "--budgets, --host-budget, --quiet) (see dtrrun simulate --help)"),
        ("--quiet smoke --budgte 50% train.py", "(see dtrrun smoke --help)"),
        ("smoke --steps 0 train.py", "--steps: 0 is less than 1"),
        ("smoke --steps x train.py", "--steps: 'x' is not a whole number"),
        ("smoke --max-slowdown 1 train.py", "--max-slowdown: '1' is not above 1"),
        ("smoke --budget 7 train.py", "--budget: '7' has no unit"),
        ("smoke --timeout -1 train.py", "--timeout: -1 is less than 1"),
        ("record train.py", "record needs -o PATH, the file to write the log to"),
        ("record -o x.log --step zero train.py", "'zero' is neither a number nor a range"),
        ("record -o x.log --step 3-2 train.py", "'3-2' is not a range of steps"),
        ("record -o /nowhere/x.log train.py", "/nowhere is not a writable folder"),
    ],
)
def test_usage_errors_are_one_line_and_status_2(seen, refused, words, message):
    assert message in refused(*words.split())
    assert not seen


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("doktor", "no such script or command: doktor; did you mean the verb doctor?"),
        ("15MB train.py", "no such script or command: 15MB; did you mean --budget 15MB?"),
        ("--quiet simulat step.log", "no such script or command: simulat; did you mean the verb simulate?"),
        ("-- doktor", "no such script or command: doktor"),
        ("./top1", "no such script or command: ./top1"),
        ("nosuch", "no such script or command: nosuch"),
    ],
)
def test_a_verb_that_is_nearly_one(refused, words, message):
    assert refused(*words.split(), status=127) == message


def test_a_launch_error_brings_its_own_status(monkeypatch, refused):
    def fail(options, command):
        raise LaunchError("it is so", 126)

    monkeypatch.setattr("dtrrun.cli.run.supervise", fail)
    assert refused("true", status=126) == "it is so"


def test_a_mistake_of_ours_is_one_line_and_125(monkeypatch, refused):
    monkeypatch.setattr("dtrrun.cli.run.supervise", lambda *_: 1 / 0)
    monkeypatch.delenv("DTRRUN_DEBUG", raising=False)
    said = refused("true", status=125)
    assert said == "ZeroDivisionError: division by zero (DTRRUN_DEBUG=1 shows where)"
    monkeypatch.setenv("DTRRUN_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        main(["true"])


def test_split_leaves_an_unknown_option_to_the_parser():
    assert split(["--what", "train.py"], "run") == (["--what"], ["train.py"])


def test_help_names_every_option_and_the_exit_statuses(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert status("--help") == 0
    text = capsys.readouterr().out
    for row in options_of("run"):
        assert all(name in text for name in row.names)
    for word in ("TARGET", "DTRRUN_BUDGET", "125", "126", "127", "pyproject.toml", "torchrun"):
        assert word in text


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_first_screen_of_the_help_has_every_verb(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert status("--help") == 0
    screen = [line.split() for line in capsys.readouterr().out.splitlines()[:24]]
    begun = screen.index(["Verbs"])
    listed = screen[begun + 1 : begun + 1 + len(VERBS)]
    assert {line[0] for line in listed} == set(VERBS) == set(SUMMARIES)
    assert [" ".join(line[1:]) for line in listed] == [*SUMMARIES.values()]  # each on one line


@pytest.mark.parametrize("name", ["-V", "--version"])
def test_version(name, capsys):
    assert status(name) == 0
    assert capsys.readouterr().out == f"dtrrun {dtrrun.__version__}\n"


def test_the_command_line_loads_no_torch():
    code = "import sys, dtrrun.cli.main, dtrrun.cli.run; print('torch' in sys.modules, 'yaml' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False True\n"


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "1>&- 2>&-"])
def test_closed_streams(closed, tmp_path):
    command = f'"{sys.executable}" -m dtrrun --json "{tmp_path}/report.json" sh -c "exit 5" {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (5, "")
    assert ("dtrrun:" in done.stderr) == ("2" not in closed)
    assert (tmp_path / "report.json").exists()
