"""The verb `run`: a program, unmodified, inside a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrrun import __version__
from dtrrun.cli.command import of_run
from dtrrun.cli.messages import to_stdout
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import OPTIONS, collect
from dtrrun.cli.supervise import supervise
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.settings import SETUP, option

USAGE = "[OPTIONS] [run] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun --budget 6GB train.py --epochs 3

dtrrun --budget 50% -m mypackage.train

dtrrun --budget 2GiB --verify torchrun --nproc-per-node 2 train.py

[bold]Other verbs[/bold]: [bold]profile[/bold] finds a budget; [bold]smoke[/bold] checks a script in CI;
[bold]top[/bold] shows the runs in progress; [bold]doctor[/bold] checks this machine; [bold]report[/bold]
makes a page from the JSON of a run; [bold]record[/bold] writes down the operators of a step, and
[bold]simulate[/bold] replays them under other budgets. Each has its own help: dtrrun profile --help.

[bold]Other places for options[/bold]: every option has an environment variable (DTRRUN_BUDGET,
DTRRUN_IGNORE_SMALL) and a key in a profile and in \\[tool.dtrrun] of pyproject.toml (budget, ignore_small).
The command line takes precedence over the environment, that over the profile, and that over pyproject.toml.

[bold]Exit status[/bold]: the target's own, or: 2, wrong usage; 3, --verify found a difference; 4,
--on-violation stop ended the run; 125, dtrrun failed, a report could not be written, or no process of the
target imported torch; 126, the target cannot be executed; 127, it was not found; 128 + n, it was ended by
signal n.
"""


@dataclass(frozen=True)
class Run:
    """The options of `dtrrun run`."""

    of_run: Mapping[str, Any] = of_run(*OPTIONS)
    version: bool = option("Show the version and exit.", SETUP, False, one_way=True, short="-V")


def run(given: Run, target: Sequence[str]) -> int:
    """Run TARGET, an unmodified PyTorch program, inside a memory budget.

    Tensors are evicted when memory runs short and recomputed when they are needed; the results are the same
    to the last bit. TARGET is a script, [bold]-m[/bold] module, [bold]-c[/bold] code, or any command
    that starts Python, such as torchrun. The options of dtrrun end where TARGET begins; the rest is TARGET's.
    """
    if given.version:
        with to_stdout():
            print(f"dtrrun {__version__}")
        return 0
    options = inside_another(collect(given.of_run))
    return supervise(options, resolve(target, lambda: choose(options.python)))
