"""dtrrun.telemetry.state"""

import pytest

from dtrrun.telemetry.state import SUFFIX, read_state, write_state

STATE = {"step": 3, "digests": {"Linear.weight": "ab"}}


def test_what_was_written_last_is_read(tmp_path):
    write_state(str(tmp_path), 7, {"step": 2, "digests": {}})
    write_state(str(tmp_path), 7, STATE)
    assert read_state(str(tmp_path), 7) == STATE
    assert read_state(str(tmp_path), 8) is None
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o77 == 0


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"step": 3}', '{"step": null, "digests": {}}'])
def test_what_is_no_state(tmp_path, text):
    (tmp_path / f"7{SUFFIX}").write_text(text)
    assert read_state(str(tmp_path), 7) is None
