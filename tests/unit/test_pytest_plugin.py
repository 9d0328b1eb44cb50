"""The markers for pytest: a test that does not fit fails, and says what holds the memory."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as xml

TESTS = """
import pytest, torch
from torch import nn

def step(columns):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    net(torch.ones(columns, 64)).square().mean().backward()

@pytest.mark.dtrrun_budget("700kB", device="cpu")
def test_fits_by_eviction():
    step(512)

@pytest.mark.dtrrun_budget("200kB", device="cpu")
def test_does_not_fit():
    step(512)

@pytest.mark.dtrrun_limit("2MB", device="cpu")
def test_takes_less():
    step(512)

@pytest.mark.dtrrun_limit("700kB", device="cpu")
def test_takes_more():
    step(512)

@pytest.mark.dtrrun_limit("1kB", device="cpu")
def test_fails_by_itself():
    step(1)
    assert "mine" == "yours"

@pytest.mark.dtrrun_budget
def test_without_a_size():
    pass

def test_unmarked():
    pass
"""
WORKS = ("test_fits_by_eviction", "test_takes_less", "test_unmarked")


def pytest_in(folder, *words):
    words = "-p", "no:cacheprovider", "-p", "dtrrun.pytest_plugin", *words
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_markers(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    ended = pytest_in(tmp_path, "--strict-markers", "--junit-xml", "it.xml", ".")
    cases = {case.get("name"): case for case in xml.parse(tmp_path / "it.xml").iter("testcase")}
    failed = {name: case.find("failure") for name, case in cases.items() if case.find("failure") is not None}
    assert set(cases) - set(failed) == set(WORKS), ended.stdout
    assert "budget of 200 kB is too small" in failed["test_does_not_fit"].text
    more = failed["test_takes_more"].text
    assert re.search(r"tensors take [\d.,]+ [kM]B, more than the limit of 700 kB", more)
    assert re.search(r"what [\d.,]+ [kM]B of that was, in the \w+ pass, after aten\.", more)
    assert re.search(r"saved for backward +[\d.]+ [kM]B +\d+ %", more)
    assert "mine" in failed["test_fails_by_itself"].text
    assert "takes a size" in failed["test_without_a_size"].text
    peaks = {name: int(one.get("value")) for name in WORKS[:2] for one in cases[name].iter("property")}
    assert peaks["test_fits_by_eviction"] <= 700_000 < peaks["test_takes_less"] <= 2_000_000


def test_it_costs_nothing_when_unused(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import sys\n\ndef test_it():\n"
        "    ours = {name for name in sys.modules if name.partition('.')[0] in ('dtrrun', 'torch')}\n"
        "    assert ours == {'dtrrun', 'dtrrun.pytest_plugin'}\n"
    )
    ended = pytest_in(tmp_path, ".")
    assert ended.returncode == 0, ended.stdout
