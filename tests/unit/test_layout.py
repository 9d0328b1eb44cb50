"""The properties of the layout that others rely on; see docs/design/overview.md."""

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "dtrrun"

ARROWS = {
    "__init__": {"runtime", "notebook"},
    "__main__": {"cli"},
    "cli": {
        "launch",
        "monitor",
        "extensions",
        "smoke",
        "views",
        "core",
        "profiling",
        "research",
        "simulator",
        "telemetry",
        "settings",
        "sizes",
        "values",
    },
    "smoke": {"launch", "telemetry", "settings", "sizes"},
    "launch": {"monitor", "telemetry", "settings"},
    "monitor": {"telemetry", "sizes"},
    "profiling": {"launch", "simulator", "core", "telemetry", "settings", "sizes"},
    "views": {"telemetry", "settings", "sizes"},
    "boot": {"runtime", "extensions", "settings"},
    "bindings": {"core", "extensions"},
    "runtime": {"core", "bindings", "extensions", "simulator", "monitor", "telemetry", "settings", "sizes"},
    "native": {"extensions"},
    "extensions": set(),
    "simulator": {"core", "bindings"},
    "research": {"simulator", "core"},
    "core": set(),
    "telemetry": {"sizes"},
    "pytest_plugin": {"telemetry", "sizes"},
    "notebook": {"views", "telemetry", "settings", "sizes"},
    "settings": {"values"},
    "values": {"core", "sizes"},
    "sizes": set(),
}
"""What each part may import from the others; all may import the names at the package's top level."""

INJECTED = {
    "__init__": {"torch"},  # when one of its names is asked for
    "boot": {"torch"},  # boot/trial.py, in a separate process
    "runtime": {"torch"},
    "native": {"torch"},
    "extensions": {"torch"},
    "bindings": set(),
    "simulator": set(),
    "core": set(),
    "monitor": set(),
    "telemetry": set(),
    "settings": set(),
    "values": set(),
    "sizes": set(),
}
"""Parts that run in the program's processes, where our dependencies may be missing; their other imports."""

OWN_PATH = {"sitecustomize", "_dtrrun_hook"}
"""Top-level modules, since boot/path is put on Python's path; the first shadows the user's."""


def parts():
    return sorted({path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()})


def sources(part=None):
    found = [path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts]
    return [p for p in found if part is None or p.relative_to(PACKAGE).parts[0].removesuffix(".py") == part]


def imports(path, text=None):
    """Yield the full name of every module that a file imports anywhere, also those for type checkers."""
    package = ["dtrrun", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from dtrrun import runtime` names a part, `from dtrrun import __version__` does not.
            yield from (f"{module}.{alias.name}" if module == "dtrrun" else module for alias in node.names)


def ours(name):
    """Return the part of dtrrun that an imported name belongs to, or None."""
    top, _, rest = name.partition(".")
    part = rest.partition(".")[0]
    return part if top == "dtrrun" and part in ARROWS else None


def test_every_part_is_listed():
    assert set(parts()) == set(ARROWS)


@pytest.mark.parametrize("part", ARROWS)
def test_arrows_point_one_way(part):
    for path in sources(part):
        used = {other for name in imports(path) if (other := ours(name))} - {part}
        assert used <= ARROWS[part], f"{path} imports {used - ARROWS[part]}"


def test_no_arrow_leads_back():
    left = dict(ARROWS)
    while left:
        ends = {part for part, used in left.items() if not used & set(left)}
        assert ends, f"a circle among {sorted(left)}"
        left = {part: used for part, used in left.items() if part not in ends}


INCLUDED = {"core": set(), "bindings": {"core"}, "native": {"core", "bindings"}}
"""The same for the C++. Only `native` knows PyTorch, and `core` does not know Python either."""
LIBRARIES = {
    "core": set(),
    "bindings": {"Python", "pybind11"},
    "native": {"Python", "pybind11", "torch", "ATen", "c10"},
}


@pytest.mark.parametrize("part", INCLUDED)
def test_includes_point_one_way(part):
    for path in [*(PACKAGE / part).rglob("*.h"), *(PACKAGE / part).rglob("*.cpp")]:
        lines = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("#include ")]
        for name in lines:
            if name.startswith('"'):
                other = (path.parent / name.strip('"')).resolve().relative_to(PACKAGE).parts[0]
                assert other in INCLUDED[part] | {part}, f"{path} includes {name}"
            known = name[1:-1].partition("/")[0].partition(".")[0]
            if known in {"Python", "pybind11", "torch", "ATen", "c10"}:
                assert known in LIBRARIES[part], f"{path} includes {name}"


OVERVIEW = (PACKAGE.parent / "docs" / "design" / "overview.md").read_text()


def test_the_parts_of_the_core_depend_on_those_above_them_in_the_overview():
    table = OVERVIEW.split("\n### `core`\n")[1].split("\nWhat is rarely needed")[0]
    rows = [re.findall(r"core/(\w+\.h)\)", row) for row in table.splitlines() if row.startswith("| [")]
    known = set()
    for names in rows:
        known.update(names)
        for name in names:
            included = set(re.findall(r'#include "(\w+\.h)"', (PACKAGE / "core" / name).read_text()))
            listed = included & {other for row in rows for other in row}
            assert listed <= known, f"{name} includes {listed - known}"
    assert len(known) > 12


def test_all_headers_of_the_core_are_in_the_overview():
    tables = OVERVIEW.split("\n### `core`\n")[1].split("\n### `runtime`\n")[0]
    headers = {path.name for folder in ("core", "core/policy") for path in (PACKAGE / folder).glob("*.h")}
    assert headers - {*re.findall(r"[/\w]*/(\w+\.h)\)", tables)} == {"clock.h"}  # the time


def test_all_files_of_the_native_extension_are_in_its_table():
    page = (PACKAGE.parent / "docs" / "design" / "native.md").read_text()
    cells = " ".join(row.split("|")[1] for row in page.splitlines() if row.startswith("| `"))
    files = {path.name for end in ("h", "cpp") for path in (PACKAGE / "native").glob(f"*.{end}")}
    listed = {*re.findall(r"`(\w+\.(?:h|cpp))`", cells)}
    assert {name for name in files - listed if name.replace(".cpp", ".h") not in listed} == set()


def test_what_the_overview_names_exists():
    """Functions, classes and fields; whether paths exist, `test_docs.py` tests."""
    code = [*sources(), *PACKAGE.rglob("*.h"), *PACKAGE.rglob("*.cpp")]
    words = set(re.findall(r"\w+", " ".join(path.read_text() for path in code)))
    named = re.findall(r"`([A-Za-z_]\w*(?:(?:::|\.)\w+)*)`", OVERVIEW)
    assert len(named) > 80
    parts = {*ARROWS, "release", "profiles", "tests", *(path.stem for path in sources()), "h", "html"}
    parts |= {path.name for path in PACKAGE.parent.joinpath("tests").iterdir()}
    assert [name for name in named if not {*re.split(r"::|\.", name)} <= words | parts] == []


def test_files_that_comments_and_design_pages_name_exist():
    root = PACKAGE.parent
    folders = ("dtrrun", "tests", "docs", "release")
    known = [path.as_posix() for folder in folders for path in (root / folder).rglob("*.*")]
    naming = [
        *sources(),
        *PACKAGE.rglob("*.h"),
        *PACKAGE.rglob("*.cpp"),
        *(root / "docs/design").glob("*.md"),
    ]
    for path in naming:
        for name in re.findall(r"`([\w./-]+\.(?:py|h|cpp))`", path.read_text()):
            is_pytorchs = name.startswith(("ATen/", "c10/", "native/cudnn/")) or name == "version.py"
            assert is_pytorchs or any(one.endswith(f"/{name.lstrip('./')}") for one in known), (
                f"{path}: {name}"
            )


@pytest.mark.parametrize("part", INJECTED)
def test_injected_code_needs_no_package_but_torch(part):
    allowed = {"dtrrun", *sys.stdlib_module_names, *INJECTED[part], *(OWN_PATH if part == "boot" else ())}
    for path in sources(part):
        used = {name.partition(".")[0] for name in imports(path)}
        assert used <= allowed, f"{path} imports {used - allowed}"


def test_injected_code_reaches_injected_code_only():
    for part in INJECTED:
        of_notebooks = {"notebook"} if part == "__init__" else set()  # which have our dependencies
        assert ARROWS[part] - of_notebooks <= set(INJECTED), part


def test_all_forms_of_import_are_seen():
    text = """
import numpy.linalg
from dtrrun import cli
from . import rng
from .. import views
from ..launch.pty import Terminal
if TYPE_CHECKING:
    from dtrrun.cli.main import main
def later():
    import yaml
"""
    seen = set(imports(PACKAGE / "runtime" / "imagined.py", text))
    assert seen == {
        "numpy.linalg",
        "dtrrun.cli",
        "dtrrun.runtime",
        "dtrrun.views",
        "dtrrun.launch.pty",
        "dtrrun.cli.main",
        "yaml",
    }
    assert [ours(name) for name in ("dtrrun.cli.main", "dtrrun.__version__", "torch")] == ["cli", None, None]


def test_test_files_have_names_of_their_own():
    """No two test files share a name, since pytest imports them by name alone."""
    names = [path.name for path in PACKAGE.parent.joinpath("tests").rglob("test_*.py")]
    assert len(names) == len(set(names))
