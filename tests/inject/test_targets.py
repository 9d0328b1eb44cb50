"""Every kind of target runs under the budget and sees the interpreter as it is without dtrrun."""

import json
import sys

import pytest
from modes import MODES

WHO = (
    MODES
    + """
import json, os, pickle, sys
class Local: pass
def main():
    print(json.dumps({
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "flags": list(sys.flags),
        "name": __name__,
        "file": globals().get("__file__"),
        "spec": repr(__spec__ and (__spec__.name, __spec__.origin)),
        "package": __package__,
        "main": sys.modules["__main__"].main is main,
        "pickle": pickle.dumps(Local()).hex(),
        "round trip": isinstance(pickle.loads(pickle.dumps(Local())), Local),
        "site": sorted(name for name in sys.modules if "sitecustomize" in name),
        "ours": sorted(name for name in sys.modules if "dtrrun" in name and not os.environ.get("WITH_TORCH")),
        "stdin": sys.stdin.read(),
    }))
if os.environ.get("WITH_TORCH"):
    sys.path.append("/later")  # the program may change it before torch is there
    import torch
    assert modes() == (["dtrrun"] if os.environ.get("DTRRUN_RUNTIME") else []), modes()
main()
"""
)

TARGETS = {
    "script": ["who.py", "a", "--help", "--", "-m"],
    "script by path": ["./sub/who.py", "-I"],
    "module": ["-m", "package.who", "-c", "x"],
    "package": ["-m", "package", "--budget", "1GB"],
    "code": ["-c", WHO, "-m", "x"],
    "standard input": ["-", "a"],
    "folder": ["sub", "a"],
}


@pytest.fixture
def programs(program):
    for name in ("who.py", "sub/who.py", "sub/__main__.py", "package/__main__.py", "package/who.py"):
        program(name, WHO)
    program("package/__init__.py", "")


@pytest.mark.parametrize("words", TARGETS.values(), ids=TARGETS.keys())
def test_the_same_interpreter_as_without_us(programs, plain, dtrrun, words):
    stdin = WHO if words[0] == "-" else "typed"
    without = plain(sys.executable, *words, stdin=stdin)
    ended = dtrrun("--budget", "1GB", *words, stdin=stdin)
    assert without.status == 0, without.err
    assert json.loads(ended.out) == json.loads(without.out)
    assert ended.out == without.out
    assert (ended.status, ended.processes) == (125, [])  # it never imported torch


@pytest.mark.parametrize(
    "line", ["{} <(cat who.py) a", "cat who.py | {} /dev/stdin a", "{} /dev/stdin < who.py"]
)
def test_a_script_that_a_shell_hands_over(programs, plain, line):
    without = plain("bash", "-c", line.format(sys.executable))
    assert without.status == 0, without.err
    within = plain("bash", "-c", line.format(f"{sys.executable} -m dtrrun --quiet"))
    assert within.out == without.out


@pytest.mark.parametrize("words", [["who.py"], ["-m", "package"]], ids=["script", "module"])
def test_the_same_after_torch_was_imported(programs, plain, dtrrun, words):
    env = {"WITH_TORCH": "1", "PYTHONPATH": "/some:/where"}
    without = plain(sys.executable, *words, env=env)
    ended = dtrrun("--budget", "1GB", *words, env=env)
    assert json.loads(ended.out) == json.loads(without.out)
    assert (ended.status, len(ended.processes)) == (0, 1), ended.err


def test_the_other_wishes_of_pythons_are_honoured(programs, plain, dtrrun):
    env = {"PYTHONPATH": "/some::/where:", "PYTHONSAFEPATH": "1", "PYTHONOPTIMIZE": "1"}
    for command in (["who.py"], ["python", "-P", "-u", "-X", "dev", "who.py"]):
        prefix = [] if command[0] == "python" else [sys.executable]
        assert dtrrun("--budget", "1GB", *command, env=env).out == plain(*prefix, *command, env=env).out != ""


def test_a_shell_script_and_a_program_with_a_first_line(program, dtrrun, tmp_path):
    program("train.py", f"import torch{MODES}\nprint(modes())")
    program("train", f"#!{sys.executable}\nimport torch{MODES}\nprint(modes())")
    program("all.sh", "#!/bin/sh\necho start\npython train.py && ./train\n")
    for name in ("all.sh", "train"):
        (tmp_path / name).chmod(0o755)
    ended = dtrrun("--budget", "1GB", "run", "./all.sh")
    assert ended.out == "start\n['dtrrun']\n['dtrrun']\n"
    assert (ended.status, len(ended.processes)) == (0, 2)


def test_the_budget_is_kept_and_the_report_written(program, plain, dtrrun):
    program(
        "train.py",
        "import torch\n"
        "torch.manual_seed(0)\n"
        "layers = [torch.nn.Linear(64, 64) for _ in range(8)]\n"
        "model = torch.nn.Sequential(*[m for layer in layers for m in (layer, torch.nn.Tanh())])\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "x = torch.randn(4096, 64)\n"
        "for _ in range(3):\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(x).square().mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(loss.item().hex())\n",
    )
    without = plain(sys.executable, "train.py")
    ended = dtrrun("--budget", "10MB", "--device", "cpu", "--verify", "train.py")
    assert (ended.status, ended.out) == (0, without.out), ended.err
    assert ended.report["evictions"] > 0
    assert ended.report["rematerializations"] > 0
    assert ended.report["peak_bytes"] <= ended.report["budget_bytes"] == 10**7
    assert ended.report["steps"] == 3
    assert ended.ours[0] == "budget 10 MB (10,000,000 bytes) on cpu, heuristic auto"


def test_max_steps_ends_a_script_cleanly(program, dtrrun):
    program(
        "train.py",
        "import torch\n"
        "weight = torch.nn.Parameter(torch.ones(3))\n"
        "optimizer = torch.optim.SGD([weight], 0.1)\n"
        "for step in range(100):\n"
        "    weight.sum().backward()\n"
        "    optimizer.step()\n"
        "    print(step)\n",
    )
    ended = dtrrun("--max-steps", "2", "--quiet", "train.py")
    assert (ended.status, ended.err) == (0, "")
    assert ended.report["steps"] == 2
    assert ended.out in ("0\n", "0\n1\n")
