"""The authors' results; REFERENCE_LOGS names the folder with their logs and expected.json."""

import json
import os
from pathlib import Path

import pytest

from dtrrun.simulator.replay import simulate
from dtrrun.simulator.schedule import read_schedule

FOLDER = os.environ.get("REFERENCE_LOGS")


@pytest.mark.skipif(
    not FOLDER, reason="REFERENCE_LOGS names no folder: the authors' logs are not ours to keep"
)
@pytest.mark.parametrize("heuristic", ["h_dtr", "h_dtr_eq", "h_dtr_local", "lru", "size", "msps"])
@pytest.mark.parametrize("log", ["resnet32", "unet"])
def test_every_result_is_equal(log, heuristic):
    expected = json.loads((Path(FOLDER) / "expected.json").read_text())[f"{log}/{heuristic}"]
    schedule = read_schedule(Path(FOLDER) / f"{log}.log")
    assert schedule.peak_bytes == expected["baseline_memory"]
    assert schedule.cost == expected["baseline_compute"]
    for row in expected["rows"]:
        found = simulate(schedule, int(schedule.peak_bytes * row["ratio"]), heuristic)
        assert found.status == row["status"]
        if found.status == "ok":  # their clock starts at 1
            assert found.time + 1 == round(row["overhead"] * schedule.cost)
