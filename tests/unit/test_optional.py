"""dtrrun.runtime.optional"""

import subprocess
import sys
from types import SimpleNamespace

import pytest

import dtrrun
from dtrrun.runtime import optional
from dtrrun.runtime.observe.training_state import TrainingState
from dtrrun.settings import RuntimeSettings

PARTS = ("lookahead", "plain", "recording_parts", "tracing", "training_state", "verify", "where")
PROGRAM = f"""
import sys
import dtrrun
with dtrrun.budget("1GB"):
    pass
print([name for name in {PARTS} if f"dtrrun.runtime.{{name}}" in sys.modules])
"""


def test_what_is_not_asked_for_is_not_imported():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"verify": True}, lambda session: session.ledger.fingerprints),
        ({"where": True}, lambda session: session._where),
        ({"heuristic": "h_next"}, lambda session: session._lookahead),
    ],
)
def test_what_is_asked_for_is_there(options, part):
    with dtrrun.budget("1GB") as session:
        assert part(session) is None
    with dtrrun.budget("1GB", **options) as session:
        assert part(session) is not None


def test_files_need_a_folder(tmp_path):
    asked = RuntimeSettings(state=True, trace_events=True)
    assert optional.training_state(asked) == optional.tracing(asked, SimpleNamespace()) == []
    asked = RuntimeSettings(state=True, trace_events=True, record_dir=str(tmp_path))
    (state,) = optional.training_state(asked)
    assert isinstance(state, TrainingState)
    assert len(optional.tracing(asked, SimpleNamespace())) == 1
    assert optional.training_state(RuntimeSettings(record_dir=str(tmp_path))) == []
