"""How a run ends: exit statuses, signals, tracebacks."""

import os
import signal
import subprocess
import sys
import time

import pytest


def test_a_script_that_raises_has_its_own_traceback_and_status(program, plain, dtrrun):
    program(
        "fails.py",
        "import torch\n"
        "def inner(t):\n"
        "    return t.reshape(7)\n"
        "try:\n"
        "    inner(torch.ones(3))\n"
        "except RuntimeError as error:\n"
        "    raise SyntaxError('mine') from ValueError('because')\n",
    )
    without = plain(sys.executable, "fails.py")
    ended = dtrrun("--quiet", "--budget", "1GB", "fails.py")
    assert (ended.status, ended.err) == (1, without.err)


@pytest.mark.parametrize(
    ("text", "status"),
    [("raise SystemExit(42)", 42), ("import os; os._exit(7)", 7), ("import sys; sys.exit('no')", 1)],
)
def test_the_targets_status_is_ours(program, dtrrun, text, status):
    program("ends.py", text)
    assert dtrrun("--budget", "1GB", "ends.py").status == status


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_death_by_signal_is_passed_on_with_the_final_table(program, dtrrun, name):
    program(
        "dies.py", f"import torch, os, signal\ntorch.ones(1000).sum()\nos.kill(os.getpid(), signal.{name})\n"
    )
    ended = dtrrun("--budget", "1GB", "dies.py")
    number = getattr(signal, name)
    assert ended.status == -number  # how `subprocess` reports an end by that signal
    assert ended.report["exit_code"] == 128 + number
    assert "evictions" in ended.err


def test_the_shell_sees_137(program, plain):
    program("dies.py", "import os; os.kill(os.getpid(), 9)")
    ended = plain("sh", "-c", f"{sys.executable} -m dtrrun --budget 1GB dies.py; echo $?")
    assert ended.out == "137\n"


WAITS = """
import os, signal, sys, time
def end(number, frame):
    os.write(1, f"got {signal.Signals(number).name}\\n".encode())  # print may be under way
    sys.exit(5)
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), end)
print("ready", flush=True)
for _ in range(600):  # a signal just before a long sleep is heard of after it
    time.sleep(0.1)
"""


@pytest.fixture
def start(started):
    """Start a program that says when it is ready, in a session of its own."""

    def start(*words):
        child = started("--budget", "1GB", *words, stderr=subprocess.DEVNULL, start_new_session=True)
        assert child.stdout.readline() == "ready\n"
        return child

    return start


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT"])
def test_a_signal_to_us_reaches_the_target_once(program, start, name):
    program("waits.py", WAITS)
    child = start("waits.py", name)
    child.send_signal(getattr(signal, name))
    out, _ = child.communicate(timeout=300)
    assert (child.returncode, out) == (5, f"got {name}\n")


def test_a_signal_that_ends_the_target_ends_us(program, start, tmp_path):
    program("waits.py", WAITS)
    child = start("waits.py")
    child.send_signal(signal.SIGTERM)
    assert child.wait(60) == -signal.SIGTERM
    assert [name for name in os.listdir(tmp_path) if name.startswith("dtrrun-")] == []


TERMINAL = """
import os, pty, signal, sys, time
pid, master = pty.fork()
if pid == 0:
    os.execv(sys.executable, [sys.executable, "-m", "dtrrun", "--live", "never", *sys.argv[1:]])
seen = b""
sent = 0
while True:
    try:
        data = os.read(master, 1000)
    except OSError:
        break
    if not data:
        break
    seen += data
    if seen.count(b"ready") > sent:
        sent += 1
        os.write(master, b"\\x03")
print(seen.decode())
print("status", os.waitpid(pid, 0)[1] >> 8)
"""


def test_ctrl_c_reaches_the_target_once_and_leaves_it_the_decision(program, plain):
    program("terminal.py", TERMINAL)
    program(
        "waits.py",
        "import sys, time\n"
        "for _ in range(2):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('caught', flush=True)\n"
        "        time.sleep(0.3)  # a second one, from us, would come now\n"
        "print('cleaned up', flush=True)\n"
        "sys.exit(4)\n",
    )
    ended = plain(sys.executable, "terminal.py", "waits.py")
    assert ended.out.count("caught") == 2
    assert "cleaned up" in ended.out
    assert "status 4" in ended.out
    assert "Traceback" not in ended.out


def test_ctrl_c_three_times_ends_a_target_that_does_not_hear(program, plain):
    """The third Ctrl-C ends a target that ignores it, or whose main thread waits in native code."""
    program("terminal.py", TERMINAL)
    program(
        "waits.py",
        "import os, signal, time\n"
        "presses = []\n"
        "def hear(*_):\n"
        "    time.sleep(0.1)  # or else all are over before a busy launcher has seen three\n"
        "    presses.append(os.write(1, b'ready\\n'))\n"
        "signal.signal(signal.SIGINT, hear)\n"
        "print('ready', flush=True)\n"
        "while len(presses) < 50:\n"
        "    time.sleep(0.05)\n",
    )
    ended = plain(sys.executable, "terminal.py", "waits.py")
    assert 3 <= ended.out.count("ready") < 50
    assert "Traceback" not in ended.out


def test_a_keyboard_interrupt_ends_as_it_does_without_us(program, start):
    program("waits.py", "import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    child = start("waits.py")
    time.sleep(0.1)
    child.send_signal(signal.SIGINT)
    assert child.wait(60) == -signal.SIGINT


def test_bad_input_is_one_clear_line_before_anything_runs(program, plain, tmp_path):
    program("ok.py", "open('ran', 'w')\n")
    ended = plain(sys.executable, "-m", "dtrrun", "--json", "no/x", "ok.py")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "dtrrun: error: --json: no/x cannot be written: No such file or directory\n"
    assert not (tmp_path / "ran").exists()


def test_nothing_that_imports_torch(program, dtrrun):
    """dtrrun does not import torch either: a fake torch, first on every path, would reveal it."""
    program("watch/torch.py", "import os\nos.write(2, b'torch was imported')\n")
    began = time.monotonic()
    ended = dtrrun("--budget", "1GB", "true", env={"PYTHONPATH": "watch"})
    assert ended.status == 125
    assert ended.ours[-1].startswith("error: no process ran under dtrrun: the target started no Python")
    assert "torch was imported" not in ended.err
    assert time.monotonic() - began < 10


def test_a_script_that_never_imports_torch(program, dtrrun):
    program("ok.py", "print('done')")
    ended = dtrrun("--budget", "1GB", "ok.py")
    assert (ended.status, ended.out) == (125, "done\n")
    assert ended.ours[-1] == "error: no process ran under dtrrun: the program never imported torch"


@pytest.mark.parametrize(
    ("heuristic", "files", "reason"),
    [
        ("nosuchmodule:score", {}, "nosuchmodule"),
        ("os:system", {}, "os:system"),
        ("lru", {"torch.py": "ones = None\n"}, "torch.py, which is not PyTorch; give that file another name"),
    ],
)
def test_a_runtime_that_cannot_start_ends_the_process(program, dtrrun, heuristic, files, reason):
    for name, text in files.items():
        program(name, text)
    program(
        "train.py",
        "try:\n    import torch\nexcept BaseException:\n    pass\nprint('trains without a budget')\n",
    )
    ended = dtrrun("--quiet", "--budget", "1GB", "--heuristic", heuristic, "train.py")
    assert (ended.status, ended.out) == (125, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("dtrrun: error: a process could not be put under the budget: ")
    assert reason in line


def test_loading_shape_functions_is_no_thrashing(program, dtrrun):
    """The first shape function written in Python imports sympy in the middle of the first step."""
    program(
        "train.py",
        "import time, torch\n"
        "weight = torch.nn.Parameter(torch.randn(64, 64))\n"
        "time.sleep(0.3)\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "kept = [weight.exp() for _ in range(8)]\n"
        "sum(kept).sum().backward()\n"
        "optimizer.step()\n"
        "print('done')\n",
    )
    ended = dtrrun("--budget", "120kB", "--max-slowdown", "1.3", "--on-thrash", "stop", "train.py")
    assert (ended.status, ended.out) == (0, "done\n"), ended.err
    assert ended.report["evictions"]


def test_a_budget_error_that_torchscript_hides_is_shown(program, dtrrun):
    program(
        "scripted.py",
        "import torch\n"
        "def many(x):\n"
        "    return torch.stack([x] * 30)\n"
        "torch.jit.trace(many, torch.ones(2))(torch.ones(100_000))\n",
    )
    ended = dtrrun("--quiet", "--budget", "1MB", "scripted.py")
    assert ended.status == 1
    assert "BudgetError" not in ended.err.partition("dtrrun: ")[0]
    assert ended.err.count("It was: CPU out of memory. dtrrun's budget of 1 MB is too small: aten.stack") == 1


def test_native_code_that_reads_an_evicted_tensor_is_explained(program, dtrrun):
    """Only where something is evicted: programs also empty storages themselves."""
    program("reads.py", "raise RuntimeError('elements, but its data is not allocated yet.\\nIf')\n")
    program("train.py", "import torch\nkept = [torch.ones(100_000) * n for n in range(4)]\nimport reads\n")
    for budget, times in (("1MB", 1), ("1GB", 0)):
        told = dtrrun("--budget", budget, "train.py").err
        assert told.count("warning: native code read an evicted tensor") == times
