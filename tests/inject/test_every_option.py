"""Every option and every verb with programs that are eager, compiled, threaded, and of two processes."""

import json
import sys

import pytest

PROGRAM = """
import os, sys, threading, zlib, torch
from torch import nn
torch.set_num_threads(1)
kind = sys.argv[1]
STEPS = 4

def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(8)))

def train(net, run, seed, told):
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(seed))
    for _ in range(STEPS):
        loss = run(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(f"{seed} {loss.item().hex()}")
    kept = torch.cat([one.detach().reshape(-1) for one in net.parameters()])
    told.append(f"{zlib.crc32(bytes(kept.view(torch.uint8).tolist())):08x}")

told = []
if kind == "threads":
    nets, several = [model(seed) for seed in range(2)], [[], []]
    threads = [threading.Thread(target=train, args=(nets[i], nets[i], i, several[i])) for i in range(2)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    told = several[0] + several[1]
elif kind == "processes":
    torch.distributed.init_process_group("gloo")
    rank, net = torch.distributed.get_rank(), model(0)
    train(net, nn.parallel.DistributedDataParallel(net), rank, told)
    torch.distributed.destroy_process_group()
    os.write(1, f"told {rank} {told}\\n".encode())  # at once: the other process writes there, too
else:
    net = model(0)
    train(net, torch.compile(net) if kind == "compiled" else net, 0, told)
if kind != "processes":
    print("told", *told)
"""

KINDS = ("eager", "compiled", "threads", "processes")
TIGHT = ("--budget", "2MB")
OPTIONS = {
    "watched": (*TIGHT, "--where", "--verify", "--trace", "run.trace.gz", "--html", "run.html"),
    "limited": (
        *(*TIGHT, "--heuristic", "h_dtr_eq", "--on-thrash", "stop", "--max-slowdown", "500"),
        *("--return-memory", "always", "--cost", "model", "--ignore-small", "1%", "--live", "always"),
    ),
    "exceeded": (
        *("--budget", "300kB", "--over-budget", "warn", "--heuristic", "lru", "--return-memory", "never"),
        *("--sample", "--seed", "3", "--on-violation", "stop"),
    ),
    "eager": (*TIGHT, "--compile", "eager", "--heuristic", "h_next", "--quiet", "--remember"),
    "peak": (*TIGHT, "--peak", "--where"),
    "stopped": (*TIGHT, "--max-steps", "2", "--heuristic", "h'(s=no,m=yes,c=eqclass)"),
}


def words_of(kind):
    target = ("train.py", kind)
    return ("torchrun", "--standalone", "--nproc-per-node", "2", *target) if kind == "processes" else target


def told(ended):
    return sorted(line for line in ended.out.splitlines() if line.startswith("told"))


@pytest.fixture(autouse=True)
def graphs(environment, tmp_path_factory):
    """Let runs share what has been compiled."""
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.getbasetemp() / "graphs")


@pytest.fixture
def expected(program, plain):
    """Return what a program tells without dtrrun."""
    program("train.py", PROGRAM)

    def tell(kind):
        words = words_of(kind)
        ended = plain(*words) if kind == "processes" else plain("python", *words)
        assert ended.status == 0, ended.err
        return told(ended)

    return tell


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_options(expected, dtrrun, tmp_path, kind, options):
    ended = dtrrun(*OPTIONS[options], *words_of(kind))
    assert ended.status == 0, ended.err
    assert len(ended.processes) == (2 if kind == "processes" else 1)
    if options == "stopped":
        assert not told(ended)
    else:
        assert told(ended) == expected("eager" if (kind, options) == ("compiled", "eager") else kind)
    for process in ended.processes:
        assert process["evictions"] > 0
        assert process["warnings"] == [] or options == "exceeded", process["warnings"]
        assert options == "exceeded" or process["peak_bytes"] <= process["budget_bytes"]
        assert bool(process["compiled"]["kernels"]) == (kind == "compiled" and options != "eager")
        assert bool(process["places"]) == (options in ("watched", "peak"))
    if options == "watched":
        assert (tmp_path / "run.html").stat().st_size > 10_000
        assert (tmp_path / "run.trace.gz").stat().st_size > 1000


@pytest.mark.parametrize("kind", KINDS)
def test_verbs(expected, dtrrun, plain, tmp_path, kind):
    def verb(*words):
        ended = plain(sys.executable, "-m", "dtrrun", *words)
        assert ended.status == 0, ended.err + ended.out

    expected(kind)
    target = words_of(kind)
    verb("record", "-o", "step.log", *target)
    verb("simulate", "--budgets", "90%", "--heuristic", "h_dtr_eq", "--json", "simulated.json", "step.log")
    [row] = json.loads((tmp_path / "simulated.json").read_text())["rows"]
    assert row["status"] == "ok"
    # Threads are in different places after fewer steps, with and without dtrrun.
    verb("smoke", *(("--steps", "8") if kind == "threads" else ()), *target)
    assert dtrrun(*TIGHT, *target).status == 0
    verb("peak", "--json", "peak.json", "--html", "peak.html", *target)
    holds = json.loads((tmp_path / "peak.json").read_text())["holds"]
    assert holds["bytes"] >= 0.98 * holds["step_bytes"] > 0
    verb("report", "report.json", "-o", "run.html")
    assert (tmp_path / "run.html").stat().st_size > 10_000
    verb("profile", "--checks", "1", "--steps", "2", "-o", "mine.yaml", *target)
    assert dtrrun("--profile", "./mine.yaml", *target).processes[0]["evictions"] > 0
