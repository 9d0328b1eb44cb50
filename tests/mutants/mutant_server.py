"""Runs tests in forked children, each with one line of the runtime replaced.

A server, so that PyTorch is imported once: it reads orders from its standard input, one JSON object a line,
and answers each with one: {"applied", "exit", "signal", "errors"}. It never imports dtrrun itself.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import CodeType
from typing import Any

import numpy  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).parents[2]


class Patched(importlib.machinery.SourceFileLoader):
    """Compiles a module with one text in it replaced."""

    def __init__(self, name: str, path: str, old: str, new: str, told: dict[str, Any]) -> None:
        super().__init__(name, path)
        self.old, self.new, self.told = old, new, told

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text()
        assert source.count(self.old) == 1
        self.told["applied"] = True
        return compile(source.replace(self.old, self.new), self.path, "exec")


class Finder(importlib.abc.MetaPathFinder):
    """Gives one module the loader above."""

    def __init__(self, loader: Patched) -> None:
        self.loader = loader

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.loader.name:
            return None
        return importlib.util.spec_from_file_location(name, self.loader.path, loader=self.loader)


class Witness:
    """Notes the types of what tests fail with."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        yield
        if call.excinfo is not None:
            self.errors.append(f"{call.excinfo.typename}: {str(call.excinfo.value)[:200]}")


def child(order: dict[str, Any], answer: str) -> None:
    told: dict[str, Any] = {"applied": False}
    if order["module"]:
        path = ROOT.joinpath(*order["module"].split(".")).with_suffix(".py")
        loader = Patched(order["module"], str(path), order["old"], order["new"], told)
        sys.meta_path.insert(0, Finder(loader))
    witness = Witness()
    # The crashes that are meant to happen need no report.
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", *order["tests"]]
    told["exit"] = int(pytest.main(words, plugins=[witness]))
    Path(answer).write_text(json.dumps(told | {"errors": witness.errors, "signal": 0}))


def answered(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer"), Path(folder, "log")
        pid = os.fork()
        if pid == 0:
            with log.open("w") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
                try:
                    child(order, str(answer))
                finally:
                    sys.stdout.flush()
                    os._exit(0)
        until = time.monotonic() + order["seconds"]
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return {"applied": True, "exit": None, "signal": 0, "errors": ["hangs"]}
            time.sleep(0.02)
        if not answer.exists():
            number = os.WTERMSIG(ended[1]) if os.WIFSIGNALED(ended[1]) else 0
            return {"applied": True, "exit": None, "signal": number, "errors": [log.read_text()[-2000:]]}
        return json.loads(answer.read_text()) | {"log": log.read_text()[-3000:]}


def main() -> None:
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for line in sys.stdin:
        print(json.dumps(answered(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
