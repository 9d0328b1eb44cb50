"""docs/howto/insurance.md: the demonstration works as the page shows it, with the figure that it gives."""

import re
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "howto" / "insurance.md").read_text()


def test_the_long_batch_ends_the_program_and_not_the_one_under_dtrrun(plain, tmp_path):
    """Each command of the page prints what is shown, except the last digits of a loss (machine-dependent)."""
    shutil.copytree(DOCS / "howto", tmp_path / "docs" / "howto")
    _, limit, *rest = re.split(r"^\$ ", re.search(r"```console\n(.*?)```", PAGE, re.DOTALL)[1], flags=re.M)
    assert limit.startswith("ulimit -d ")
    results = []
    for command, _, shown in (part.partition("\n") for part in rest):
        ended = plain("bash", "-c", f"{limit.strip()}\nexec {command}")
        printed = ended.out.splitlines()
        lines = [line for line in shown.splitlines() if line.startswith("batch")]
        assert [line[:-5] for line in printed] == [line[:-5] for line in lines], ended.err
        results.append((ended.status, printed, ended.err))
    (plainly, before, error), (status, printed, said) = results
    assert (plainly, status, said) == (1, 0, "")
    assert before == printed[: len(before)]
    _, refused, _ = next(line for line in PAGE.splitlines() if line.startswith("RuntimeError")).split("…")
    assert refused.strip() in error


def test_the_figure_is_what_was_measured():
    least, most = re.search(r"(\d\.\d+) to (\d\.\d+)\s+times as long", PAGE).groups()
    section = (DOCS / "measurements.md").read_text().partition("\n## 3.")[2].partition("\n## ")[0]
    ample = re.findall(r"^\| \w+ \| \d+ ms \| (\d\.\d+) \(", section, re.M)
    assert (len(ample), min(ample), max(ample)) == (9, least, most)
