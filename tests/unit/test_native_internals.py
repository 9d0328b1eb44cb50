"""The PyTorch internals that the native extension imports are those listed in docs/design/native.md."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "design" / "native.md"
INTERNAL = re.compile(
    r"THP|ParameterClass|torch::(?!Library|CppFunction)|vtable|typeinfo|TLS|.*\b(impl|detail|raw)::"
)
LISTED_FOR = (2, 13)


def imported(path):
    """Return the names of the functions and variables that a library imports from PyTorch."""
    table = subprocess.check_output(["nm", "-DC", "--undefined-only", path], text=True)
    for line in table.splitlines():
        name = line.split(maxsplit=1)[1].partition("(")[0]
        if not re.search(r"@|^_?Py|\bstd::|__cxxabiv1", name):  # the C and C++ libraries, and Python
            yield name


@pytest.mark.skipif(not shutil.which("nm"), reason="no binutils")
def test_the_page_lists_what_the_extension_imports(extension):
    found = {name for name in imported(extension.__file__) if INTERNAL.match(name)}
    section = PAGE.read_text().partition("## What of PyTorch it relies on")[2].partition("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    listed = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert found - listed == set()
    if tuple(map(int, torch.__version__.split(".")[:2])) == LISTED_FOR:
        assert listed - found == set()
