"""Options from files: a profile's YAML, and `[tool.dtrrun]` in a project's pyproject.toml.

Values stay text, with their place, so that all sources of options share the same readers and errors.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrrun.launch.errors import LaunchError
from dtrrun.values import Reader, existing_file, meant

SHIPPED = Path(__file__).resolve().parent.parent / "profiles"


@dataclass(frozen=True)
class Given:
    """An option's value as written, and its place: `--budget`, `DTRRUN_BUDGET`, `paper.yaml:3: budget`."""

    text: str
    where: str
    folder: Path = Path()
    """The profile's folder, to which the path of a file to read is relative."""

    def read(self, read: Callable[[str], Any]) -> Any:
        """Parse the value with a reader of `dtrrun.values` or a similar function. Raises LaunchError."""
        relative = isinstance(read, Reader) and read.file and self.text
        try:
            return read(str(self.folder / Path(self.text).expanduser()) if relative else self.text)
        except ValueError as error:
            raise LaunchError(f"{self.where}: {error}") from None


def folders() -> list[Path]:
    """Return where profiles are looked up by name: the user's folder, then the profiles of dtrrun."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(base, "dtrrun", "profiles"), SHIPPED]


def names() -> list[str]:
    """Return the profiles that can be given by name."""
    return sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})


def find_profile(name: str) -> Path:
    """Return the file of profile `name`, a path if it has a slash or ends in .yaml. Raises ValueError."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        existing_file(name)
        return Path(name).expanduser()
    for folder in folders():
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = names()
    raise ValueError(f"there is no profile named {name!r}{meant(name, known, _there_are(known))}")


def read_profile(path: Path, keys: Iterable[str]) -> dict[str, Given]:
    """Read the options in a YAML profile. Raises LaunchError with the file and line of an error."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # An unclosed bracket is detected at the end of the file: its beginning is more helpful.
        unclosed = "<stream end>" in str(error.problem)
        mark = (error.context_mark if unclosed else None) or error.problem_mark
        raise LaunchError(f"{path}:{mark.line + 1 if mark else 1}: malformed YAML: {error.problem}") from None
    except RecursionError:
        raise LaunchError(f"{path}: malformed YAML: nested too deeply") from None
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"{path}: not a text file: {' '.join(str(error).split())}") from None
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise LaunchError(
            f"{path}:{root.start_mark.line + 1}: a profile consists of lines of the form `option: value`"
        )
    found: dict[str, Given] = {}
    keys = [key for key in keys if key != "profile"]
    for name, value in root.value:
        place = f"{path}:{name.start_mark.line + 1}"
        key = _key(str(name.value), keys, place)
        if not isinstance(value, yaml.ScalarNode):
            raise LaunchError(f"{place}: {key}: expected a single value, not a list or a table")
        if key in found:
            raise LaunchError(f"{place}: {key} is given twice")
        found[key] = Given(value.value, f"{place}: {key}", path.parent)
        if value.tag == "tag:yaml.org,2002:null":
            del found[key]
    return found


def read_pyproject(folder: Path, keys: Iterable[str]) -> dict[str, Given]:
    """Read the options in `[tool.dtrrun]` of the nearest pyproject.toml, from `folder` upwards.

    Raises LaunchError.
    """
    path = next(
        (p for parent in (folder, *folder.parents) if (p := parent / "pyproject.toml").is_file()), None
    )
    if path is None:
        return {}
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    if "dtrrun" not in text:
        return {}  # errors in another tool's file are not reported here
    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise LaunchError(f"{path}: malformed TOML: {error}") from None
    except RecursionError:
        raise LaunchError(f"{path}: malformed TOML: nested too deeply") from None
    table = tool.get("dtrrun", {}) if isinstance(tool, dict) else {}
    if not isinstance(table, dict):
        raise LaunchError(f"{path}: tool.dtrrun is not a table")
    found = {}
    for name, value in table.items():
        place = f"{path}:{_line(text, name)}"
        key = _key(name, keys, place)
        if not isinstance(value, (str, int, float)):
            raise LaunchError(f"{place}: {key}: expected a single value, not a list or a table")
        text_of = str(value).lower() if isinstance(value, bool) else str(value)
        found[key] = Given(text_of, f"{place}: {key}", path.parent)
    return found


def _key(name: str, keys: Iterable[str], place: str) -> str:
    """Return the option's key; `-` and `_` are equivalent."""
    key = name.replace("-", "_")
    if key in keys:
        return key
    if key == "profile":
        raise LaunchError(f"{place}: a profile cannot name another profile")
    hint = meant(key, keys, _there_are(sorted(keys)))
    raise LaunchError(f"{place}: there is no option named {name!r}{hint}")


def _there_are(names: Iterable[str]) -> str:
    return f"; there are {', '.join(names)}"


def _line(text: str, name: str) -> int:
    """Return the line of key `name` in [tool.dtrrun], which the TOML reader does not report."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("["):
            inside = line.strip().startswith("[tool.dtrrun]")
        elif inside and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line):
            return number
    return 1
