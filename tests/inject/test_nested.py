"""Unusual processes: a dtrrun inside another, images replaced by exec, pool workers."""

import sys

from modes import TRAINS


def test_dtrrun_dtrrun(program, dtrrun, plain, tmp_path):
    script = program("train.py", TRAINS)
    run = dtrrun(
        "--budget", "1GB", sys.executable, "-m", "dtrrun", "--budget", "2GB", "--json", "i.json", script
    )
    assert (run.status, run.out) == (0, "trained\n"), run.err
    (warning,) = [line for line in run.ours if line.startswith("warning")]
    assert "the smaller of the two budgets applies, the other one's of 1 GB (1,000,000,000 bytes)" in warning
    assert run.ours[-1].startswith("the target ran dtrrun itself")
    assert run.processes == []
    assert '"steps": 2' in (tmp_path / "i.json").read_text()


def test_a_script_that_calls_dtrrun(program, dtrrun):
    program("fails.py", "import torch\nraise SystemExit(6)\n")
    program(
        "calls.py",
        "import subprocess, sys\n"
        "sys.exit(subprocess.run([sys.executable, '-m', 'dtrrun', '--quiet', 'fails.py']).returncode)\n",
    )
    run = dtrrun("calls.py")
    assert run.status == 6
    assert not [line for line in run.ours if line.startswith("error")]


def test_an_image_that_exec_replaces_was_not_killed(program, dtrrun):
    program("train.py", TRAINS)
    program(
        "first.py",
        "import os, sys, torch\n"
        "torch.ones(3).sum()\n"
        "os.execv(sys.executable, [sys.executable, 'train.py'])\n",
    )
    run = dtrrun("--budget", "1GB", "first.py")
    assert (run.status, run.out) == (0, "trained\n"), run.err
    assert [process["status"] for process in run.processes] == ["replaced", "ended"]


def test_workers_of_a_pool_were_not_killed(program, dtrrun):
    program(
        "pool.py",
        "import multiprocessing, time, torch\n"
        "def work(n):\n"
        "    return torch.ones(n).sum().item()\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.Pool(2) as pool:\n"
        "        print(pool.map(work, [1, 2]))\n"
        "        for _ in range(2):\n"
        "            pool.apply_async(time.sleep, (600,))\n"  # an idle worker may exit by itself
        "        time.sleep(1)\n",
    )
    run = dtrrun("--budget", "1GB", "pool.py")
    assert (run.status, run.out) == (0, "[1.0, 2.0]\n"), run.err
    assert sorted(process["status"] for process in run.processes) == ["ended", "stopped", "stopped"]
    assert "killed" not in run.err
