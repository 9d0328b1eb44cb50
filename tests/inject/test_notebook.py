"""The recipe for notebooks (docs/howto/notebook.md) in a real kernel, where one is installed."""

import json
import re
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs a notebook's kernel (make ecosystem installs it)")
pytest.importorskip("ipykernel", reason="needs a notebook's kernel (make ecosystem installs it)")

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "notebook.md"
MODEL = """
import gc, sys, weakref
import torch
layers = [part for _ in range(12) for part in (torch.nn.Linear(256, 256), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())
graphs = []
def train():
    for _ in range(2):
        hidden = model(torch.randn(2048, 256))
        graphs.append(weakref.ref(hidden))
        optimizer.zero_grad()
        hidden.square().mean().backward()
        optimizer.step()
def left():
    gc.collect()
    return any(graph() is not None for graph in graphs)
"""


@pytest.fixture
def notebook(tmp_path, environment, monkeypatch):
    """Run cells in a kernel of this Python; return what each prints, or the name of its error."""
    from nbformat.v4 import new_code_cell, new_notebook

    folder = tmp_path / "kernels" / "this"
    folder.mkdir(parents=True)
    start = f"import sys; sys.path[:] = {sys.path!r}; from ipykernel import kernelapp as app"
    command = [sys.executable, "-c", f"{start}; app.launch_new_instance()", "-f", "{connection_file}"]
    kernel = {"argv": command, "display_name": "this", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(kernel))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))

    def run(*cells):
        made = new_notebook(cells=[*map(new_code_cell, cells)])
        client = nbclient.NotebookClient(
            made,
            kernel_name="this",
            allow_errors=True,
            timeout=120,
            resources={"metadata": {"path": str(tmp_path)}},
        )
        client.execute(env=environment | {"JUPYTER_PATH": str(tmp_path)})
        return ["".join(map(told, cell.outputs)) for cell in made.cells]

    return run


def told(output):
    if output.output_type == "error":
        return output.ename
    if output.output_type == "stream":
        return output.text if output.name == "stdout" else ""
    return output.data["text/plain"]


def test_the_recipe(notebook):
    caught, report, harmless = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    small = caught.replace("20MB", "10MB")
    escapes = "with dtrrun.budget('10MB'):\n    train()"
    printed = notebook(
        MODEL,
        small,
        "left()",
        caught,
        report,
        "left()",
        escapes,
        "del sys.last_value, sys.last_traceback; left()",
        harmless,
        "left()",
        "with dtrrun.budget('20MB'):\n    raise KeyboardInterrupt",
        caught,
        "model(torch.ones(1, 256));",
        "len(Out), any(isinstance(one, torch.Tensor) for one in Out.values())",
    )
    assert printed[1].startswith("CPU out of memory. dtrrun's budget of 10 MB is too small: ")
    assert printed[2:4] == ["False", ""]
    peak, evictions, rematerializations = map(int, printed[4].split())
    assert peak <= 20_000_000
    assert min(evictions, rematerializations) > 0
    assert printed[5:10] == ["False", "BudgetError", "True", "ZeroDivisionError", "False"]
    assert printed[10:13] == ["KeyboardInterrupt", "", ""]
    assert printed[13].endswith("False)")


def test_the_magic_of_the_page(notebook):
    load, cell = re.findall(r"^    (%.*\n(?:    .*\n)*)", PAGE.read_text(), re.MULTILINE)
    cell = cell.replace("\n    ", "\n")
    printed = notebook(load, MODEL, cell, "left()", cell.replace("20MB", "10MB"), "left()", cell + "7 * 6")
    assert "of the budget of 20 MB)" in printed[2]
    assert "evictions" in printed[2]
    assert printed[3:6] == ["False", printed[4], "False"]
    assert printed[4].endswith("BudgetError")
    assert "budget too small" in printed[4]
    assert printed[6].endswith("42")
