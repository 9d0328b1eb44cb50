"""`make bench-gpu` end to end: two tiny models on the CPU, and its error messages."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch

from tests.bench.gpu import bench, parts
from tests.bench.gpu.cases import BY_NAME
from tests.bench.gpu.children import Run, Setting, run
from tests.bench.gpu.parts import Clock, measure_time
from tests.bench.gpu.store import save

SETTING = Setting("cpu", tiny=True, warm_up=0, steps=2)
LSTM_PEAK, LSTM_BUDGET = 1_068_096, 750_000
"""Bytes: the tiny LSTM's plain peak, and a smaller budget."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder with the results of a model with blocks and of one without; and the results."""
    folder = tmp_path_factory.mktemp("results")

    def with_blocks():
        case = replace(BY_NAME["gpt2"], own_shares=())  # one share is enough: what checkpointing takes
        return measure_time(case, SETTING, Clock(300), lambda _: None, lambda _: None)

    def without():  # fewer child processes than a whole part
        plain = run(SETTING, "lstm", 100)
        ours = run(SETTING, "lstm", 100, budget=LSTM_BUDGET)
        shares = [{"share": 0.72, "run": ours}]
        return {"case": "lstm", "kind": "time", "plain": [plain], "shares": shares, "left_out": []}

    with ThreadPoolExecutor(2) as both:
        started = both.submit(with_blocks), both.submit(without)
        found = {"gpt2": started[0].result(), "lstm": started[1].result() | {"peak": LSTM_PEAK}}
    for name, result in found.items():
        save(folder, name, result | {"machine": "a CPU"})
    return folder, found


def test_blocks_end_well_inside_their_budgets(results):
    result = results[1]["gpt2"]
    ours, checkpointed = result["as_checkpointed"], result["checkpointed"]
    assert ours.ok, ours.said
    assert 0 < ours.allocated <= ours.capped == checkpointed.allocated < result["peak"]
    assert ours.report["evictions"] > 0
    assert len(ours.steps_ms) == 2
    # The losses are bit for bit the plain run's: the tiny models have only deterministic operators.
    first, again = result["plain"]
    assert ours.losses == checkpointed.losses == again.losses == first.losses


def test_a_model_without_blocks_does(results):
    result = results[1]["lstm"]
    ours = result["shares"][0]["run"]
    assert ours.ok, ours.said
    assert 0 < ours.allocated <= LSTM_BUDGET
    assert ours.report["evictions"] > 0
    assert ours.losses == result["plain"][0].losses


def test_the_page_is_written_and_says_whether_something_is_missed(results, tmp_path):
    page = tmp_path / "new" / "page.md"  # its folder is created: no error after all measurements
    status = bench.main(["--table", "--results", str(results[0]), "--page", str(page)])
    text = page.read_text()
    assert "GPT-2 124M" in text
    assert status == (1 if "Missed" in text else 0)


def test_a_run_without_end_is_ended():
    found = run(SETTING, "lstm", 1.0, steps=10**6)
    assert (found.status, found.said) == ("no end", "no end")
    assert found.seconds < 25


def test_a_run_that_fails_says_why():
    found = run(SETTING, "lstm", 60, size={"no_such_size": 1})
    assert found.status == "failed"
    assert "no_such_size" in found.said


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["densenet"], bench.USAGE, "no part is called densenet; there are inception_v4, densenet121"),
        (["--device", "cpu"], bench.USAGE, "add --tiny"),  # full sizes are too large for the CPU
        (["--table", "--results", "none"], 1, "no results in none"),
        pytest.param(
            ["unet"],
            bench.NO_GPU,
            "no NVIDIA GPU that PyTorch can use (torch.cuda.is_available() is False)",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_line(capsys, arguments, status, text):
    assert bench.main(arguments) == status
    [line] = capsys.readouterr().err.splitlines()
    assert text in line


def test_an_interruption_keeps_what_there_is(tmp_path, capsys, monkeypatch):
    ended = [Run("ok", "plain", 1.0, steps_ms=[1.0], losses=["0x1p+0"], parameters="abc")]

    def run(*_, **__):
        if not ended:
            raise KeyboardInterrupt
        return ended.pop()

    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(bench, "_machine", lambda device: "a CPU")
    arguments = ["lstm-bits", "--device", "cpu", "--tiny", "--results", str(tmp_path)]
    assert bench.main(arguments) == bench.INTERRUPTED
    assert f"interrupted; what was measured is in {tmp_path}" in capsys.readouterr().out
    left = json.loads((tmp_path / "lstm-bits.json").read_text())
    assert (left["machine"], [one["status"] for one in left["plain"]]) == ("a CPU", ["ok"])


def test_an_interruption_ends_the_child():
    def interrupt(*_):
        raise KeyboardInterrupt

    others = psutil.Process().children(recursive=True)  # of other tests: multiprocessing's tracker stays
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.5)
        with pytest.raises(KeyboardInterrupt):
            run(SETTING, "lstm", 60, steps=10**6)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert set(psutil.Process().children(recursive=True)) <= set(others)
