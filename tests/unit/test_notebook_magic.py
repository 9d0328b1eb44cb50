"""`%%dtrrun`: the extension for notebooks, with a stand-in for IPython's shell (which is tried by hand)."""

import ast
import codeop
import gc
import linecache
import sys
import weakref

import pytest
import torch

import dtrrun

TRAIN = """
layers = [part for _ in range(8) for part in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model = torch.nn.Sequential(*layers)
def train():
    hidden = model(torch.randn(512, 64, generator=torch.Generator().manual_seed(0)))
    made.append(weakref.ref(hidden))
    hidden.square().mean().backward()
    return hidden.sum().item()
"""
MAGIC = "# a line magic\n"


class Compiler(codeop.Compile):
    def cache(self, source, number):
        name = f"cell {number}"
        linecache.cache[name] = len(source), None, source.splitlines(True), name
        return name

    def ast_parse(self, source, filename):
        return ast.parse(source, filename)


class Shell:
    """What the extension asks of `IPython.core.interactiveshell.InteractiveShell`."""

    def __init__(self):
        self.user_ns = {"torch": torch, "weakref": weakref, "made": []}
        self.compile, self.execution_count, self.magics = Compiler(), 0, {}

    def register_magic_function(self, function, kind, name):
        self.magics[kind, name] = function

    def transform_cell(self, cell):
        return cell.replace("%time ", MAGIC)

    def transform_ast(self, tree):
        return tree

    def run(self, line, cell):
        self.execution_count += 1
        return self.magics["cell", "dtrrun"](line, cell)


@pytest.fixture
def shell():
    made = Shell()
    dtrrun.load_ipython_extension(made)
    exec(TRAIN, made.user_ns)
    return made


def test_a_cell_runs_inside_the_budget_with_the_table_below(shell, capsys):
    expected = shell.user_ns["train"]()
    found = shell.run("--budget 1.5MB --cost model --verify", "%time x = 3\nf'{train()} {x}'")
    assert found == f"{expected} 3"
    assert shell.user_ns["x"] == 3
    out = capsys.readouterr().out
    assert out.startswith("dtrrun ──")
    assert "of the budget of 1.5 MB)" in out
    assert "compared, all equal" in out
    assert dtrrun.current() is None
    assert shell.run("", "train();") is None
    assert "(no budget)" in capsys.readouterr().out
    assert shell.run("--device cpu", "") is None


def test_a_budget_that_is_too_small_is_told_and_nothing_is_left(shell, capsys):
    shell.user_ns["made"].clear()
    with pytest.raises(dtrrun.BudgetError) as caught:
        shell.run("--budget 500kB", "y = 1\ntrain()")
    assert "too small" in str(caught.value)
    assert str(caught.value).endswith("The cell was at: train()")
    assert "budget too small" in capsys.readouterr().out
    gc.collect()  # the test and pytest hold the error that was raised, and no more
    assert [graph() for graph in shell.user_ns["made"] if graph() is not None] == []
    assert {"model", "train", "y"} <= shell.user_ns.keys()
    assert torch.isfinite(shell.user_ns["model"](torch.ones(1, 64))).all()


def test_the_cells_own_errors_are_its_own(shell, capsys):
    with pytest.raises(KeyError, match="mine"):
        shell.run("--budget 100MB", "train()\nraise KeyError('mine')")
    assert "of the budget of 100 MB)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--bugdet 1GB", "unrecognized arguments: --bugdet 1GB"),
        ("--budget 1XB", "'1XB' has an unknown unit"),
        ("--max-steps 3", "unrecognized arguments"),
        ("--over-budget x", "over_budget: 'x' is not one of"),
    ],
)
def test_a_wrong_option_is_told_as_ipython_tells_it(shell, line, message, monkeypatch):
    class UsageError(Exception):
        pass

    with pytest.raises(ValueError, match=message):
        shell.run(line, "train()")
    monkeypatch.setitem(sys.modules, "IPython.core.error", type("module", (), {"UsageError": UsageError}))
    with pytest.raises(UsageError, match=message):
        shell.run(line, "train()")
    assert dtrrun.current() is None


def test_help_runs_nothing(shell, capsys):
    assert shell.run("--help", "1/0") is None
    assert "--over-budget" in capsys.readouterr().out
