"""For all tests."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

# As the Makefile does, and before PyTorch is imported. A child of os.fork() would wait forever for OpenMP
# threads that it does not have.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dtrrun.extensions import build
from dtrrun.monitor.gpus import choose

# Background jobs of a shell, and nohup, start with these ignored, and every test process would inherit it.
USUAL = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGQUIT: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}
for number, handler in USUAL.items():
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def sessions_of_the_cpu(monkeypatch):
    """Put sessions on the CPU, where the programs compute, unless a test names another device."""
    if "torch" in sys.modules:
        monkeypatch.setattr(
            "dtrrun.runtime.device.choose_by_name",
            lambda device, *how: "cpu" if device == "auto" else choose(device, *how),
        )


@pytest.fixture(autouse=True)
def no_searches(monkeypatch, request):
    """Keep the heuristic of the first steps in a default session, unless a test is marked `learns`.

    A search would take a processor from the other tests, and its result would depend on their speed.
    """
    if "torch" in sys.modules and not request.node.get_closest_marker("learns"):
        monkeypatch.setattr("dtrrun.runtime.optional.learning", lambda *_: None)


def _raised(why):
    raise why


@pytest.fixture(autouse=True)
def no_advice_fails(monkeypatch):
    """Raise what goes wrong while a budget is worked out. Users get a BudgetError that says so."""
    if "torch" in sys.modules:
        monkeypatch.setattr("dtrrun.runtime.session.unnamed", _raised)


@pytest.fixture(autouse=True)
def cheap_collections():
    """Keep the objects of the whole test run out of the collections that sessions make before errors."""
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_modifyitems(config, items):
    """Leave slow tests out, unless SLOW is set or tests are named."""
    if os.environ.get("SLOW") or any("::" in arg for arg in config.args):
        return
    lines = (Path(__file__).parent / "slow.txt").read_text().splitlines()
    slow = {line for line in lines if not line.startswith("#")}
    files = {item.nodeid.partition("::")[0] for item in items}
    found = {}
    for item in items:
        file, function = item.nodeid.partition("::")[0], item.nodeid.partition("[")[0]
        found[item] = {file, function, item.nodeid} & slow
    stale = {line for line in slow if line.partition("::")[0] in files}.difference(*found.values())
    if stale:
        raise pytest.UsageError(f"tests/slow.txt: there is no {min(stale)}")
    config.hook.pytest_deselected(items=[item for item in items if found[item]])
    items[:] = [item for item in items if not found[item]]


build.build(print)


@pytest.fixture(scope="session")
def extension():
    """The native extension."""
    return build.load(print)


@pytest.fixture(autouse=True)
def spoiled():
    """Overwrite what is evicted, so that reads at its former address get other bits."""
    if "torch" in sys.modules:
        build.load(print).spoil_evicted(True)
