"""Declares options, and defines those that the training process needs.

To add an option of a run, add one field to `RuntimeSettings` if the training process needs its value, or to
`dtrrun.cli.options.Options` if only the command does:

    max_slowdown: float | None = option("Treat a step as ...", LIMITS, read=values.slowdown)

That field defines `--max-slowdown` with its help, the variable `DTRRUN_MAX_SLOWDOWN`, its key in profiles and
`[tool.dtrrun]`, the keyword of `dtrrun.budget`, and the tables on the site. `read`, or else the field's type,
determines how its text is parsed (`dtrrun.values`). A test requires that docs/guide.md describes it. An
option of a single verb is a field of the class in that verb's file in `dtrrun/cli`.

Standard library only: the launcher writes these settings into the environment of the target as one JSON text,
and the injected runtime reads them there, possibly in a Python environment without `dtrrun`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_type_hints

from dtrrun import values
from dtrrun.values import Reader

VARIABLE = "DTRRUN_RUNTIME"
"""Environment variable that passes the settings from the launcher to every process of the target."""

OverBudget = Literal["error", "raise", "warn", "evict"]
Deallocation = Literal["eager", "banish", "ignore"]
CostSource = Literal["measured", "model"]
WarnOrStop = Literal["warn", "stop"]
When = Literal["auto", "always", "never"]
Compile = Literal["auto", "eager"]

BUDGET, POLICY, LIMITS = "Budget", "What to evict", "Limits and checks"
OUTPUT, SETUP = "Output", "Set-up"
"""Headings of the options in the help."""


@dataclass(frozen=True)
class Option:
    """One option, for the command, its help and its documentation."""

    key: str
    """`max_steps` for the option --max-steps, the variable DTRRUN_MAX_STEPS and the key in profiles."""
    field: str
    """The field that holds its value: named like the key, except for `budget`."""
    default: Any
    panel: str
    """Its heading in the help."""
    help: str
    read: Reader
    word: str
    """The placeholder for the value in the help; empty for a switch."""
    short: str = ""
    """Another name on the command line, such as `-o`."""
    argument: bool = False
    """Whether it is positional; if `word` ends in `...`, it takes any number of words."""

    one_way: bool = False
    """Whether a switch has no `--no-...`."""

    @property
    def names(self) -> list[str]:
        """Return its names on the command line; a switch's last one turns it off, unless `one_way`."""
        if self.argument:
            return [self.word]
        long = self.key.replace("_", "-")
        off = [] if self.word or self.one_way else [f"--no-{long}"]
        return [f"--{long}", *([self.short] if self.short else []), *off]

    @property
    def variable(self) -> str:
        return f"DTRRUN_{self.key.upper()}"

    @property
    def default_text(self) -> str:
        """Return the default as text; empty if there is none, or for a switch that is off."""
        if self.default is None or self.default is False:
            return ""
        if isinstance(self.default, tuple):
            return ",".join(self.default)
        return "yes" if self.default is True else str(self.default).removesuffix(".0")


def option(help: str, panel: str = "", default: Any = None, **more: Any) -> Any:
    """Declare a dataclass field that is an option. more: fields of `Option` that differ from the defaults.

    By default the key is the field's name, the field's type selects the reader, and the reader supplies the
    word.
    """
    return field(default=default, metadata={"option": {"help": help, "panel": panel, **more}})


def rows(table: type[Any]) -> list[Option]:
    """Return the options among the fields of a dataclass, in order."""
    found, hints = [], get_type_hints(table)
    for one in fields(table):
        if said := one.metadata.get("option"):
            read = said.get("read") or values.reader_of(hints[one.name])
            row = {"key": one.name, "word": read.word, **said, "read": read}
            found.append(Option(field=one.name, default=one.default, **row))
    return found


@dataclass(frozen=True)
class RuntimeSettings:
    """One training process's options, and further information from the launcher; sizes in bytes."""

    budget_bytes: int | None = option(
        "The most memory that tensors may take: 6GB or 6G (10^9), 6GiB or 6Gi (2^30), 512MB, or 50% of the "
        "device's memory. Without a budget, memory is counted and nothing is evicted.",
        BUDGET,
        read=values.amount,
        key="budget",
    )
    device: str = option(
        "Device that the budget is for: auto (the GPU, if any), cpu, cuda or cuda:N.",
        BUDGET,
        "auto",
        read=values.device,
    )
    heuristic: str = option(
        "Which storage to evict first: auto, the heuristic that suits the program, as learned from its first "
        "steps; or h_dtr_eq, h_chain, h_next, h_dtr, h_dtr_local, lru, size, msps, "
        "random, e_star; one of the paper's App. D, such as h'(s=no,m=yes,c=eqclass); or a function of your "
        "own, module:function.",
        POLICY,
        "auto",
        read=values.heuristic,
    )
    deallocation: Deallocation = option(
        "What to do when the program releases a storage: evict it (eager). The paper's other policies, "
        "banish and ignore, exist in the simulator only.",
        POLICY,
        "eager",
        read=values.deallocation,
    )
    ignore_small: float = option(
        "Evict storages smaller than this share of the mean size last, such as 1% (App. E.2).",
        POLICY,
        0.0,
        read=values.share,
    )
    sample: bool = option(
        "Search a random sample of √n of the n evictable storages instead of all (App. E.2).", POLICY, False
    )
    remember: bool = option(
        "Keep what --heuristic auto learns in the user's cache, and begin with it in the next run; keep the "
        "program's peak, too, for advice.",
        POLICY,
        True,
    )
    seed: int = option("Seed of the random heuristic and of --sample.", POLICY, 0, read=values.whole_number())
    cost: CostSource = option(
        "Cost of an operator: its measured time, or a fixed model, with which every run makes the same "
        "evictions.",
        POLICY,
        "measured",
    )
    costs: str | None = option(
        "Read operator costs from a file that dtrrun profile has written.", POLICY, read=values.costs
    )
    over_budget: OverBudget = option(
        "What to do when nothing is left to evict: give the script an out-of-memory error (error); raise the "
        "budget to what is needed, if there is memory, and lower it if the device has less (raise); warn, "
        "and raise the limit to what does not fit; or go over the budget, evicting all that can be (evict).",
        BUDGET,
        "error",
    )
    host_budget: str = option(
        "How much may be copied out of the device: weights, gradients and optimizer state once nothing else "
        "can be evicted, and what takes longer to recompute than to copy. 20GB of pinned memory for a GPU; "
        "20GB:FOLDER of a file in that folder for a budget on the CPU; none; or, for what cannot be "
        "recomputed only, half of what is free for a GPU and none on the CPU (auto).",
        BUDGET,
        "auto",
        read=values.host_budget,
    )
    compile: Compile = option(
        "What torch.compile does: compile, with each generated kernel as an operator (auto), or nothing, so "
        "that everything runs eagerly (eager).",
        SETUP,
        "auto",
    )
    return_memory: When = option(
        "On a CPU, which free memory to return to the system: what exceeds the budget by more than an "
        "eighth (auto), all that exceeds it (always; slower), or none (never).",
        BUDGET,
        "auto",
    )
    max_slowdown: float | None = option(
        "Treat a step as thrashing when recomputation makes it take more than X times as long as its own "
        "work.",
        LIMITS,
        read=values.slowdown,
    )
    on_thrash: WarnOrStop = option(
        "What to do about a step that thrashes: warn, or stop the script.", LIMITS, "warn"
    )
    max_steps: int | None = option("End the script after N optimizer steps, with exit status 0.", LIMITS)
    verify: bool = option(
        "Compare each rematerialized storage with what was evicted; exit with status 3 if any differs.",
        LIMITS,
        False,
    )
    where: bool = option("Show from which module and line recomputed operators were called.", OUTPUT, False)
    peak: bool = option(
        "Show what holds memory when tensors take the most: classes, modules, lines and variables.",
        OUTPUT,
        False,
    )
    quiet: bool = option(
        "Print only errors, and warnings that results may differ or that the budget does not hold.",
        OUTPUT,
        False,
    )

    gpu: tuple[str, int] | None = None
    """The name and the bytes of a GPU that the program is to find, and that is absent (`dtrrun estimate`)."""
    log: str | None = None
    """Where to write the log of a step (`dtrrun record`)."""
    log_first: int = 2
    log_last: int = 2
    """The first and the last step of the log, counted from 1."""
    log_rank: int = 0
    """The rank that writes it."""
    peak_bytes: int | None = None
    """What tensors take at most, where an earlier run has told (`dtrrun peak`)."""
    peak_only: bool = False
    """End the script once it is known what holds the peak."""
    plain: bool = False
    """Leave the program unchanged, and only count its steps."""
    state: bool = False
    """Write digests of the training state at each step's end (`runtime.observe.training_state`)."""
    trace_events: bool = False
    """Record evictions and rematerializations with their times (`runtime.observe.tracing`)."""
    manual_seed: int | None = None
    """Seed for the random generators of PyTorch, Python and NumPy, set before the program begins."""
    record_dir: str | None = None
    """The private folder for the record of each training process (`telemetry`); None: no record."""

    @classmethod
    def of(cls, **given: Any) -> RuntimeSettings:
        """Make settings from values by field name; text and numbers are read as on the command line.

        Raises ValueError for an invalid value, and TypeError for an unknown name.
        """
        for name in given.keys() - {one.name for one in fields(cls)}:
            near = values.meant(name, [row.field for row in rows(cls)[1:]])
            raise TypeError(f"there is no option {name!r}{near}")
        for row in rows(cls):
            if isinstance(value := given.get(row.field), (str, int, float)) and row.key != "budget":
                try:
                    given[row.field] = row.read(str(value))
                except ValueError as error:
                    raise ValueError(f"{row.field}: {error}") from None
        return cls(**given)

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self), separators=(",", ":"))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> RuntimeSettings | None:
        """Return the settings from the launcher, or None if it did not start this process."""
        text = environ.get(VARIABLE)
        if not text:
            return None
        return cls.from_values(json.loads(text))

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> RuntimeSettings:
        """Make settings from the result of `asdict`, possibly from another version of dtrrun."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})
