"""dtrrun.views.profile, and the results that it shows (dtrrun.profiling.result)."""

import gzip
import io
import stat
from dataclasses import replace

import pytest
from fake_records import EVIL, printed
from view_snapshots import check

from dtrrun.cli.options import OPTIONS, Options
from dtrrun.cli.profile import _at_minimum, _why
from dtrrun.cli.profiles import read_profile
from dtrrun.profiling.curve import Forecast, Point
from dtrrun.profiling.result import study_result, variation_result, write_profile
from dtrrun.profiling.study import Study
from dtrrun.profiling.trial import MeasuredStep, Trial
from dtrrun.profiling.variation import Variation
from dtrrun.settings import RuntimeSettings
from dtrrun.views.markdown import of_profile
from dtrrun.views.profile import Bar, print_profile

PEAK = 1_000_000_000


def trial(status="ok", slowdown=1.1, peak=PEAK // 2, evictions=40):
    own, over = 10**9, int((slowdown - 1) * 10**9)
    steps = [
        MeasuredStep(number, own + over, over, own, over // 4, part, part and part + 3)
        for number, part in enumerate((evictions, 0, 0, 0, 0), 2)
    ]
    least = 310_000_000 if status == "too small" else None
    return Trial(status, 0 if status == "ok" else 1, 9.5, peak, tuple(steps), least, "")


def point(budget, slowdown, measured=None, status="ok", heuristic="h_dtr_eq"):
    forecast = Forecast(status, slowdown, 123, 150, 3)
    return Point(budget, heuristic, forecast, measured)


@pytest.fixture
def study(tmp_path):
    (tmp_path / "costs.gz").write_bytes(gzip.compress(b'{"signatures": {}}'))
    (tmp_path / "costs.gz").chmod(0o600)
    found = Study(["python", "train.py"], RuntimeSettings(), tmp_path)
    found.plain = trial(peak=PEAK, slowdown=1.01, evictions=0)
    points = [
        point(900_000_000, 1.01),
        point(700_000_000, 1.03, trial(slowdown=1.04)),
        point(500_000_000, 1.09, trial(slowdown=1.12), heuristic="h_chain"),
        point(400_000_000, 1.31, trial(slowdown=1.38, evictions=1234), heuristic="h'(s=no,m=yes,c=eqclass)"),
        point(380_000_000, 1.6, trial("too small")),
        point(300_000_000, None, status="too small"),
        point(200_000_000, None, status="thrash"),
    ]
    found.points = {one.budget_bytes: one for one in points}
    found.worked = {700_000_000: True, 500_000_000: True, 400_000_000: True, 380_000_000: False}
    found.recommended = 500_000_000
    found.complete = True
    found.started, found.ended = 0.0, 95.0
    return found


def shown(result, width=80):
    return printed(print_profile, result, width)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table(study, width):
    result = study_result(study, ["train.py", "--lr", "1"])
    result["run"] = ["dtrrun", "--profile", "train", "train.py", "--lr", "1"]
    result["run_minimum"] = _at_minimum(result, "train", ["train.py", "--lr", "1"])
    check(f"profile_{width}", shown(result, width))


def test_what_is_needed_on_the_host(study, tmp_path):
    least = study.points[400_000_000]
    least.trial = replace(least.trial, host_bytes=123_400_000)
    study.points[300_000_000] = replace(
        study.points[300_000_000], predicted=Forecast("ok", 2.5, 200, 250, 3, 223_400_000)
    )
    result = study_result(study, ["train.py"])
    lines = shown(result).splitlines()
    assert "40 % of the peak, needs 124 MB of host memory" in " ".join(" ".join(lines).split())
    (header,) = (line for line in lines if "measured" in line)
    cells = {line.split()[0]: line for line in lines if " % " in line}
    assert header.index("on host") + len("on host") == cells["40"].index("124 MB") + len("124 MB")
    assert "224 MB" in cells["30"]
    assert cells["50"].split().count("MB") == 1
    assert "needs 124 MB of host memory" in of_profile(result)
    study.settings = RuntimeSettings(host_budget=f"1GB:{tmp_path}")
    study.recommended = 400_000_000
    write_profile(tmp_path / "train.yaml", study, ["train.py"])
    given = read_profile(tmp_path / "train.yaml", OPTIONS)
    assert given["host_budget"].text == f"1GB:{tmp_path}"
    assert "needs 124 MB of host memory" in (tmp_path / "train.yaml").read_text()


def test_the_command_for_the_minimum(study):
    """It names the heuristic that the minimum was found with, since the default is another."""
    result = study_result(study, ["train.py"])
    assert result["minimum_heuristic"] == "h'(s=no,m=yes,c=eqclass)"
    options = ["--budget", "400000000B", "--heuristic", "h'(s=no,m=yes,c=eqclass)"]
    assert _at_minimum(result, "train", ["train.py"]) == [
        "dtrrun",
        "--profile",
        "train",
        *options,
        "train.py",
    ]
    study.recommended = 400_000_000
    assert _at_minimum(study_result(study, ["train.py"]), "train", ["train.py"]) is None


def test_what_a_gpu_takes_for_itself_is_said(study):
    """Of a small program, most of the peak is not its tensors."""
    study.plain = replace(study.plain, peak_bytes=116 * 10**6, overhead_bytes=434 * 10**6)
    result = study_result(study, ["train.py"])
    reserve = result["plain_reserve_bytes"]
    assert reserve == (64 + 22) << 20
    assert result["plain_peak_bytes"] == 116 * 10**6 + result["plain_overhead_bytes"] + reserve
    assert "of that      434 MB CUDA itself, 90.2 MB kept free as a reserve\n" in shown(result)


def test_a_budget_that_works_below_one_that_does_not_is_marked(study):
    study.points[380_000_000].trial = trial(slowdown=1.6)
    study.points[400_000_000].trial = trial("too small")
    study.worked |= {380_000_000: True, 400_000_000: False}
    result = study_result(study, ["train.py"])
    assert result["minimum_bytes"] == 500_000_000
    assert "ok  larger failed\n" in shown(result)


def test_why_nothing_is_recommended(study):
    study.points = {
        980_000_000: point(980_000_000, 1.0, trial("too small")),
        950_000_000: point(950_000_000, 1.0),
    }
    study.worked = {980_000_000: False}
    assert _why(study) == "no budget below the peak worked; tried: 98 % (too small)"
    study.points[950_000_000].trial = trial()
    study.worked[950_000_000] = True
    assert _why(study) == (
        "above each budget that worked, a larger one failed; tried: 98 % (too small), 95 % (ok)"
    )
    study.points, study.worked = {}, {}
    assert _why(study) == "the time limit was reached before a budget could be tried"


def test_what_was_known_when_it_was_interrupted(study):
    study.worked = {700_000_000: True}
    study.recommended = None
    result = study_result(study, ["train.py"])
    assert (result["minimum_bytes"], result["minimum_certified"]) == (700_000_000, False)
    text = shown(result)
    assert "least so far  700 MB" in text
    assert "recommended" not in text
    study.plain, study.points, study.worked = None, {}, {}
    assert "nothing was found yet" in shown(study_result(study, ["train.py"]))


def test_values_of_an_option():
    settings = RuntimeSettings(budget_bytes=8 * 10**9, max_steps=3)
    variation = Variation(["python", "train.py"], settings, ["--batch-size", "{}"], 8, 512, 3.0)
    variation.tried = {8: trial(), 16: trial(slowdown=1.3), 32: trial("too small"), 24: trial("failed")}
    variation.best, variation.complete = 16, True
    variation.with_margin, variation.certain = {16: trial("too small"), 15: trial()}, 15
    result = variation_result(variation, ["train.py"])
    assert [row["value"] for row in result["values"]] == [8, 16, 24, 32]
    assert result["largest"] == 16
    check("profile_vary_80", shown(result))


def test_what_the_script_is_called_cannot_harm_the_terminal(study):
    result = study_result(study, [EVIL])
    result["run"] = ["dtrrun", "--profile", EVIL, EVIL]
    text = shown(result)
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_profile_is_read_again_by_a_run(study, tmp_path):
    path = tmp_path / "profiles" / "train.yaml"
    write_profile(path, study, ["train.py", EVIL])
    assert sorted(file.name for file in path.parent.iterdir()) == ["train.costs.gz", "train.yaml"]
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert path.read_text().isprintable() or "\x1b" not in path.read_text()
    settings = Options.of(read_profile(path, OPTIONS)).settings
    assert settings.budget_bytes == 500_000_000
    assert settings.heuristic == "h_chain"
    assert settings.costs == str(path.parent / "train.costs.gz")
    study.recommended = 400_000_000
    write_profile(path, study, ["train.py"])  # overwrites the one before
    settings = Options.of(read_profile(path, OPTIONS)).settings
    assert settings.heuristic == "h'(s=no,m=yes,c=eqclass)"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_bar_is_for_terminals(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for name, stream, quiet in (
        ("terminal", Terminal(), False),
        ("file", io.StringIO(), False),
        ("quiet", Terminal(), True),
    ):
        with Bar(stream, quiet=quiet) as bar:
            bar.update(f"50 % {EVIL}", 10.0, 50.8)
        shown[name] = stream.getvalue()
    assert "50 %" in shown["terminal"]
    assert "about 51 s left" in shown["terminal"]
    assert "\u202e" not in shown["terminal"]
    assert (shown["file"].strip(), shown["quiet"]) == ("", "")


def test_every_point_has_what_was_measured(study):
    result = study_result(study, ["train.py"])
    assert [row["budget_bytes"] for row in result["points"]] == sorted(study.points, reverse=True)
    by_budget = {row["budget_bytes"]: row for row in result["points"]}
    assert by_budget[900_000_000]["measured"] is None
    assert by_budget[900_000_000]["share"] == 0.9
    measured = by_budget[500_000_000]["measured"]
    assert measured["slowdown"] == pytest.approx(1.12)
    assert measured["steps"][0]["evictions"] == 40
    failed = by_budget[380_000_000]["measured"]
    assert (failed["status"], failed["slowdown"], failed["least_budget_bytes"]) == (
        "too small",
        None,
        310_000_000,
    )
    assert (result["minimum_bytes"], result["minimum_certified"]) == (400_000_000, True)
    assert (result["recommended_bytes"], result["recommended_heuristic"]) == (500_000_000, "h_chain")
