"""dtrrun.cli.nesting"""

import pytest

from dtrrun.cli.nesting import inside_another
from dtrrun.cli.options import Options
from dtrrun.launch.environment import RECORDS
from dtrrun.settings import RuntimeSettings

MB = 10**6


def options(budget):
    return Options(RuntimeSettings(budget_bytes=budget, device="cpu"), "cpu")


@pytest.fixture
def around(tmp_path):
    """Return the environment that a dtrrun with that budget gives its target."""

    def environment(budget, device="cpu"):
        settings = RuntimeSettings(budget_bytes=budget, device=device, record_dir=str(tmp_path))
        return settings.to_environment() | {RECORDS: str(tmp_path)}

    return environment


@pytest.mark.parametrize(
    ("outer", "ours", "holds", "told"),
    [
        (None, None, None, None),
        (None, 5 * MB, 5 * MB, None),
        (
            8 * MB,
            5 * MB,
            5 * MB,
            "the smaller of the two budgets applies, this one's of 5 MB (5,000,000 bytes)",
        ),
        (
            8 * MB,
            9 * MB,
            8 * MB,
            "the smaller of the two budgets applies, the other one's of 8 MB (8,000,000 bytes)",
        ),
        (8 * MB, None, 8 * MB, "whose budget of 8 MB (8,000,000 bytes) applies"),
    ],
)
def test_which_budget_holds(around, tmp_path, outer, ours, holds, told):
    found = inside_another(options(ours), environ=around(outer))
    assert found.settings.budget_bytes == holds
    assert [told in warning for warning in found.warnings] == ([True] if told else [])
    assert (tmp_path / "nested").exists()


def test_a_verb_that_measures_is_not_limited(around):
    found = inside_another(options(None), limits=False, environ=around(8 * MB))
    assert found.settings.budget_bytes is None
    assert "whose budget of 8 MB (8,000,000 bytes) does not apply" in found.warnings[0]


def test_budgets_of_other_devices_are_not_compared(around):
    found = inside_another(options(9 * MB), environ=around(8 * MB, "cuda:0"))
    assert found.settings.budget_bytes == 9 * MB
    assert "is for cuda:0 and does not apply here" in found.warnings[0]


@pytest.mark.parametrize("change", [{RECORDS: ""}, {RECORDS: "/nowhere"}, {"DTRRUN_RUNTIME": "{"}])
def test_no_other_dtrrun(around, change):
    found = inside_another(options(9 * MB), environ=around(8 * MB) | change)
    assert found == options(9 * MB)
    assert inside_another(options(None), environ={}) == options(None)
