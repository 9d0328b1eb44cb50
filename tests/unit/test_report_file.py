"""dtrrun.cli.report_file"""

import json
import os
import stat

import pytest

from dtrrun.cli.report_file import file_writer, report_writer
from dtrrun.launch.errors import LaunchError


def test_a_new_file_is_for_its_owner_only(tmp_path):
    path = tmp_path / "report.json"
    with report_writer(str(path)) as write:
        write({"schema": "x"})
    assert json.loads(path.read_text()) == {"schema": "x"}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_old_file_stays_until_the_report_is_there(tmp_path):
    path = tmp_path / "report.json"
    path.write_text("x" * 1000)
    with report_writer(str(path)) as write:
        assert path.read_text() == "x" * 1000
        write({"a": 1})
    assert json.loads(path.read_text()) == {"a": 1}


def test_nothing_is_left_of_a_run_without_a_report(tmp_path):
    with report_writer(str(tmp_path / "report.json")):
        assert (tmp_path / "report.json").exists()
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("path", ["missing/report.json", "."])
def test_what_cannot_be_written_is_found_before_the_run(tmp_path, path):
    with pytest.raises(LaunchError, match="cannot be written") as caught, report_writer(str(tmp_path / path)):
        pytest.fail("the run would have started")
    assert caught.value.exit_status == 2


def test_a_full_disk_is_found_afterwards():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    with report_writer("/dev/full") as write, pytest.raises(LaunchError, match="No space left") as caught:
        write({})
    assert caught.value.exit_status == 125


def test_standard_output_is_appended_to(tmp_path, capfd):
    with report_writer("-") as write:
        os.write(1, b"from the target\n")
        write({"a": 1})
    out = capfd.readouterr().out
    assert out.startswith("from the target\n")
    assert json.loads(out.removeprefix("from the target\n")) == {"a": 1}


def test_nowhere():
    with report_writer(None) as write:
        write({})


def test_lists_of_numbers_take_a_line_and_strings_stay_as_they_are(tmp_path):
    report = {"columns": [1, 2.5, -3e-9], "text": "[\n1,\n  2\n]", "names": ["a", "b"], "none": []}
    with report_writer(str(tmp_path / "x.json")) as write:
        write(report)
    text = (tmp_path / "x.json").read_text()
    assert '"columns": [ 1, 2.5, -3e-09 ]' in text
    assert json.loads(text) == report


def test_an_option_is_named_in_its_error(tmp_path):
    with (
        pytest.raises(LaunchError, match=r"--html: .* cannot be written"),
        file_writer(str(tmp_path), "--html"),
    ):
        pytest.fail("the run would have started")
