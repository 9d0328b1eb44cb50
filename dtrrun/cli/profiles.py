"""Options from files: a profile's YAML, and `[tool.dtrrun]` in a project's pyproject.toml.

Values stay text, with the place where they stand, so that one set of readers and one form of error serve
every source of options.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import yaml

from dtrrun.cli.values import existing_file
from dtrrun.launch.errors import LaunchError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILES = ("costs",)
"""Options whose values are paths."""
SHIPPED = Path(__file__).resolve().parent.parent / "profiles"


@dataclass(frozen=True)
class Given:
    """An option's value as it was written, and where: `--budget`, `DTRRUN_BUDGET`, `paper.yaml:3: budget`."""

    text: str
    where: str


def folders() -> list[Path]:
    """Where a profile's name is looked up: the user's folder, then the profiles that came with dtrrun."""
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return [Path(base, "dtrrun", "profiles"), SHIPPED]


def find_profile(name: str) -> Path:
    """The file of profile `name`, a path if it has a slash or ends in .yaml. Raises ValueError."""
    if "/" in name or name.endswith((".yaml", ".yml")):
        existing_file(name)
        return Path(name).expanduser()
    for folder in folders():
        if (path := folder / f"{name}.yaml").is_file():
            return path
    known = sorted({path.stem for folder in folders() for path in folder.glob("*.yaml")})
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise ValueError(f"there is no profile named {name!r}; {hint}")


def read_profile(path: Path, keys: Sequence[str]) -> dict[str, Given]:
    """The options in a YAML profile. Raises LaunchError with the file and line of whatever is wrong."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        # What is never closed is noticed at the end of the file: the place where it was opened helps more.
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
            f"{path}:{root.start_mark.line + 1}: a profile is lines of the form `option: value`"
        )
    found: dict[str, Given] = {}
    for name, value in root.value:
        place = f"{path}:{name.start_mark.line + 1}"
        key = _key(str(name.value), keys, place)
        if not isinstance(value, yaml.ScalarNode):
            raise LaunchError(f"{place}: {key}: one value is wanted, not a list or a table")
        if key in found:
            raise LaunchError(f"{place}: {key} stands here for the second time")
        found[key] = Given(_placed(key, value.value, path), f"{place}: {key}")
        if value.tag == "tag:yaml.org,2002:null":
            del found[key]
    return found


def read_pyproject(folder: Path, keys: Sequence[str]) -> dict[str, Given]:
    """The options in `[tool.dtrrun]` of the nearest pyproject.toml, from `folder` upwards. LaunchError."""
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
        return {}  # someone else's file: whatever is wrong with it is not our business
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
            raise LaunchError(f"{place}: {key}: one value is wanted, not a list or a table")
        text_of = str(value).lower() if isinstance(value, bool) else _placed(key, str(value), path)
        found[key] = Given(text_of, f"{place}: {key}")
    return found


def _placed(key: str, text: str, path: Path) -> str:
    """A file's name in a file is relative to that."""
    return str(path.parent / Path(text).expanduser()) if key in FILES and text else text


def _key(name: str, keys: Iterable[str], place: str) -> str:
    """The option's key; `-` and `_` are the same."""
    key = name.replace("-", "_")
    if key in keys:
        return key
    if key == "profile":
        raise LaunchError(f"{place}: a profile cannot name another profile")
    near = get_close_matches(key, list(keys), 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(keys))}"
    raise LaunchError(f"{place}: there is no option named {name!r}; {hint}")


def _line(text: str, name: str) -> int:
    """Line of key `name` in [tool.dtrrun]: the TOML reader does not say."""
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("["):
            inside = line.strip().startswith("[tool.dtrrun]")
        elif inside and re.match(rf"""\s*["']?{re.escape(name)}["']?\s*=""", line):
            return number
    return 1
