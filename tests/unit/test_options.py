"""dtrrun.cli.options"""

import gzip

import pytest

from dtrrun.cli import options
from dtrrun.cli.command import command_of
from dtrrun.cli.options import OPTIONS, collect
from dtrrun.launch.errors import LaunchError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A project's folder, isolated from the user's own settings."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "pyproject.toml").write_text("")
    return tmp_path / "project"


def profile(folder, text):
    (folder / "p.yaml").write_text(text)
    return str(folder / "p.yaml")


def pyproject(folder, text):
    (folder / "pyproject.toml").write_text(f"[tool.dtrrun]\n{text}\n")


def test_each_option_has_a_name_a_variable_and_a_key_and_only_this_table_has_them():
    """One field defines all three: the command's parser is compared with the variables and the keys."""
    typed = {name for param in command_of("run").params for name in param.opts}
    assert typed == {row.names[0] for row in OPTIONS.values()} | {"--show-completion", "--version", "-V"}
    assert {row.variable for row in OPTIONS.values()} == {f"DTRRUN_{key.upper()}" for key in OPTIONS}


def test_with_nothing_said_memory_is_counted_only(folder):
    found = collect({}, {}, folder)
    assert found.settings.budget_bytes is None
    assert found.settings.heuristic == "auto"
    assert (found.json, found.live, found.settings.quiet, found.python, found.warnings) == (
        None,
        "auto",
        False,
        None,
        (),
    )


def test_all_reach_the_settings(folder):
    costs = folder / "known.costs.gz"
    costs.write_bytes(gzip.compress(b'{"signatures": {}}'))
    typed = {
        "budget": "1GB",
        "device": "auto",
        "heuristic": "lru",
        "deallocation": "eager",
        "ignore_small": "1%",
        "sample": True,
        "seed": "7",
        "remember": False,
        "cost": "model",
        "costs": str(costs),
        "over_budget": "warn",
        "host_budget": f"2GB:{folder}",
        "return_memory": "always",
        "compile": "eager",
        "max_slowdown": "2",
        "on_thrash": "stop",
        "on_violation": "stop",
        "max_steps": "5",
        "verify": True,
        "where": True,
        "peak": True,
        "json": "out.json",
        "html": "out.html",
        "trace": "trace.json.gz",
        "live": "never",
        "quiet": True,
        "python": "python3",
        "profile": None,
    }
    assert set(typed) == set(OPTIONS)
    found = collect(typed, {}, folder)
    settings = found.settings
    assert settings.budget_bytes == 10**9
    assert (settings.device, settings.heuristic, settings.deallocation) == ("auto", "lru", "eager")
    assert (settings.ignore_small, settings.sample, settings.seed, settings.cost) == (0.01, True, 7, "model")
    assert (settings.over_budget, settings.max_slowdown, settings.on_thrash) == ("warn", 2.0, "stop")
    assert (settings.return_memory, settings.compile) == ("always", "eager")
    assert (found.html, found.trace, settings.trace_events) == ("out.html", "trace.json.gz", False)
    assert (settings.max_steps, settings.verify, settings.record_dir) == (5, True, None)
    assert (found.json, found.live, settings.quiet, found.python) == ("out.json", "never", True, "python3")
    assert (found.on_violation, settings.host_budget) == ("stop", f"2GB:{folder}")


def test_command_line_then_environment_then_profile_then_pyproject(folder):
    typed, environ = {"profile": profile(folder, "seed: 3\nbudget: 3GB")}, {}
    pyproject(folder, "seed = 4\nbudget = '4GB'\nheuristic = 'lru'")
    steps = []
    for layer in ({}, {"environ": "2"}, {"typed": "1"}):
        if "environ" in layer:
            environ["DTRRUN_SEED"] = layer["environ"]
        if "typed" in layer:
            typed["seed"] = layer["typed"]
        steps.append(collect(typed, environ, folder).settings.seed)
    assert steps == [3, 2, 1]
    settings = collect(typed, environ, folder).settings
    assert settings.budget_bytes == 3 * 10**9
    assert settings.heuristic == "lru"
    assert collect({}, {}, folder).settings.seed == 4


def test_a_switch_of_the_command_line_overrules_a_yes_of_the_environment(folder):
    assert collect({}, {"DTRRUN_SAMPLE": "yes"}, folder).settings.sample
    assert not collect({"sample": False}, {"DTRRUN_SAMPLE": "yes"}, folder).settings.sample


def test_a_profile_that_pyproject_names_yields_to_what_pyproject_says(folder):
    pyproject(folder, f"profile = '{profile(folder, 'seed: 3' + chr(10) + 'cost: model')}'\nseed = 4")
    settings = collect({}, {}, folder).settings
    assert (settings.seed, settings.cost) == (4, "model")
    settings = collect({"profile": "paper"}, {}, folder).settings  # and to a profile on the command line
    assert (settings.seed, settings.cost, settings.sample) == (4, "measured", True)


def test_the_users_default_profile_counts_where_no_other_is_named(folder, tmp_path):
    own = tmp_path / "config" / "dtrrun" / "profiles"
    own.mkdir(parents=True)
    (own / "default.yaml").write_text("heuristic: lru\n")
    assert collect({}, {}, folder).settings.heuristic == "lru"
    assert collect({"profile": "paper"}, {}, folder).settings.heuristic == "h_dtr_eq"


@pytest.mark.parametrize(
    ("typed", "environ", "message"),
    [
        ({"budget": "200"}, {}, "--budget: '200' has no unit"),
        ({"max_steps": "0"}, {}, "--max-steps: 0 is less than 1"),
        ({}, {"DTRRUN_SAMPLE": "maybe"}, "DTRRUN_SAMPLE: 'maybe' is neither yes nor no"),
        ({}, {"DTRRUN_ON_VIOLATION": "kill"}, "DTRRUN_ON_VIOLATION: 'kill' is not one of warn, stop"),
        ({}, {"DTRRUN_LIVE": "sometimes"}, "DTRRUN_LIVE: 'sometimes' is not one of auto, always, never"),
        ({"profile": "papre"}, {}, "--profile: there is no profile named 'papre'"),
        ({"heuristic": "portfolio"}, {}, "--heuristic: portfolio stands for several heuristics"),
        ({}, {"DTRRUN_HEURISTIC": "paper"}, "DTRRUN_HEURISTIC: paper stands for several heuristics"),
        ({}, {"DTRRUN_PROFILE": "papre"}, "DTRRUN_PROFILE: there is no profile named 'papre'"),
    ],
)
def test_an_error_names_the_place_of_the_value(folder, typed, environ, message):
    with pytest.raises(LaunchError) as caught:
        collect(typed, environ, folder)
    assert str(caught.value).startswith(message)


def test_a_bad_value_in_a_profile_is_told_with_its_line(folder):
    path = profile(folder, "# mine\nbudget: much\n")
    with pytest.raises(LaunchError, match=f"{path}:2: budget: 'much' is not a size"):
        collect({"profile": path}, {}, folder)
    path = profile(folder, "heuristic: portfolio\n")
    with pytest.raises(LaunchError, match=f"{path}:1: heuristic: portfolio stands for several heuristics"):
        collect({"profile": path}, {}, folder)


def test_a_value_that_is_overruled_need_not_be_right(folder):
    assert collect({"seed": "1"}, {"DTRRUN_SEED": "x"}, folder).settings.seed == 1


def test_an_empty_variable_is_none(folder):
    assert collect({}, {"DTRRUN_BUDGET": ""}, folder).settings.budget_bytes is None


def test_a_variable_that_looks_like_ours_is_warned_of(folder):
    found = collect({}, {"DTRRUN_BUGDET": "1GB", "DTRRUN_RUNTIME": "{}", "DTRRUN_DEBUG": "1"}, folder)
    assert found.warnings == ("DTRRUN_BUGDET is not a variable of dtrrun; did you mean DTRRUN_BUDGET?",)


def test_a_percentage_is_of_the_device(folder, monkeypatch):
    monkeypatch.setattr(options, "total_bytes", lambda device, build: {"cpu": 1000}[device])
    found = collect({"budget": "50%", "device": "cpu"}, {}, folder)
    assert (found.settings.budget_bytes, found.device, found.warnings) == (500, "cpu", ())


@pytest.mark.parametrize("size", ["6G", "6g", "6 GB", "6gb"])
def test_a_size_is_read_alike_wherever_it_is_given(folder, size):
    pyproject(folder, f"budget = '{size}'")
    named = {"profile": profile(folder, f"budget: {size}\n")}
    given = [({}, {}), (named, {}), ({}, {"DTRRUN_BUDGET": size}), ({"budget": size}, {})]
    found = [collect(typed, environ, folder).settings.budget_bytes for typed, environ in given]
    assert found == [6 * 10**9] * 4


def test_a_device_that_is_not_there(folder, monkeypatch):
    monkeypatch.setattr(options, "target_build", lambda python: "cuda")
    with pytest.raises(LaunchError, match="DTRRUN_DEVICE: no CUDA device 77: "):
        collect({}, {"DTRRUN_DEVICE": "cuda:77"}, folder)


def test_a_budget_larger_than_the_device_is_warned_of(folder, monkeypatch):
    monkeypatch.setattr(options, "total_bytes", lambda device, build: 1000)
    assert collect({"budget": "1000B"}, {}, folder).warnings == ()
    (warning,) = collect({"budget": "1001B", "device": "cpu"}, {}, folder).warnings
    assert warning == "the budget of 1,001 bytes is more than the 1,000 bytes of this machine"
