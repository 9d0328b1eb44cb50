"""The verb `run`: a program, unmodified, inside a memory budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrrun import __version__, values
from dtrrun.cli.command import of_run
from dtrrun.cli.messages import to_stdout
from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import OPTIONS, collect
from dtrrun.cli.supervise import supervise
from dtrrun.launch.interpreter import choose
from dtrrun.launch.target import resolve
from dtrrun.settings import SETUP, option

SUMMARIES = {
    "run": "Run a program inside a budget; the default.",
    "peak": "Show what holds the peak, and what helps.",
    "estimate": "Say whether it fits another GPU.",
    "profile": "Find the least budget, and one to recommend.",
    "smoke": "Check in CI that the results do not change.",
    "top": "Show your runs on this machine.",
    "report": "Make a web page from a run's JSON report.",
    "compare": "Show what changed from one run to another.",
    "doctor": "Check this machine.",
    "record": "Record the operators of a step.",
    "simulate": "Simulate a recorded step inside other budgets.",
}
"""Every verb in a few words, those that most people need first."""

BELOW = "\n\n\b[bold]Verbs[/bold]\n" + "\n".join(
    f"  [bold]{verb:8}[/bold]  {summary}" for verb, summary in SUMMARIES.items()
)
"""Shown in the help below the description. A paragraph that begins with \\b keeps its lines."""

USAGE = "[OPTIONS] [run] [--] TARGET [ARGS]..."
EPILOG = """
[bold]Examples[/bold]

dtrrun --budget 6GB train.py --epochs 3

dtrrun --budget 50% -m mypackage.train

dtrrun --budget 2GiB --verify torchrun --nproc-per-node 2 train.py

[bold]Other places for options[/bold]: every option has an environment variable (DTRRUN_BUDGET,
DTRRUN_IGNORE_SMALL) and a key in a profile and in \\[tool.dtrrun] of pyproject.toml (budget, ignore_small).
The command line takes precedence over the environment, that over the profile, and that over pyproject.toml.

[bold]More[/bold]: each verb has its own help, such as dtrrun profile --help. For completion in the shell, see
dtrrun --show-completion SHELL.

[bold]Exit status[/bold]: the target's own, or: 2, usage error; 3, --verify found a difference; 4,
--on-violation stop ended the run; 125, dtrrun failed, a report could not be written, or no process of the
target imported torch; 126, the target cannot be executed; 127, it was not found; 128 + n, it was ended by
signal n.
"""


@dataclass(frozen=True)
class Run:
    """The options of `dtrrun run`."""

    of_run: Mapping[str, Any] = of_run(*OPTIONS)
    show_completion: str | None = option(
        "Print the script with which a shell completes verbs and options, and exit. In ~/.bashrc, or "
        "~/.zshrc with zsh: "
        'eval "$(dtrrun --show-completion bash)"; in fish: dtrrun --show-completion fish | source.',
        SETUP,
        read=values.choice("bash", "zsh", "fish"),
    )
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
    if given.show_completion:
        from dtrrun.cli.completion import SCRIPTS

        with to_stdout():
            print(SCRIPTS[given.show_completion], end="")
        return 0
    options = inside_another(collect(given.of_run))
    return supervise(options, resolve(target, lambda: choose(options.python)))
