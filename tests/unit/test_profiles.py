"""dtrrun.cli.profiles"""

from pathlib import Path

import pytest

from dtrrun.cli import profiles
from dtrrun.cli.options import OPTIONS, Options
from dtrrun.cli.profiles import find_profile, read_profile, read_pyproject
from dtrrun.launch.errors import LaunchError
from dtrrun.settings import RuntimeSettings

KEYS = ("budget", "ignore_small", "sample", "max_steps")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "dtrrun" / "profiles"


def test_values_are_text_and_know_their_place(tmp_path):
    path = write(tmp_path / "p.yaml", "# why\nbudget: 6GB\nignore-small: 1%\nsample: true\nmax_steps: ~\n")
    found = read_profile(path, KEYS)
    assert {key: given.text for key, given in found.items()} == {
        "budget": "6GB",
        "ignore_small": "1%",
        "sample": "true",
    }
    assert found["ignore_small"].where == f"{path}:3: ignore_small"


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("a: 1\nb: [1\n", 2, "malformed YAML"),
        ("a: 1\nb: c: 2\n", 2, "malformed YAML"),
        ("\tbudget: 1GB\n", 1, "malformed YAML"),
        ("budget: 1GB\nbugdet: 2GB\n", 2, "'bugdet'; did you mean budget?"),
        ("xyzzy: 2\n", 1, "there are budget, ignore_small, max_steps, sample"),
        ("budget: 1GB\nbudget: 2GB\n", 2, "is given twice"),
        ("sample: [yes]\n", 1, "not a list or a table"),
        ("- budget\n", 1, "lines of the form"),
        ("\nprofile: paper\n", 2, "cannot name another profile"),
    ],
)
def test_what_is_wrong_is_told_with_file_and_line(tmp_path, text, line, hint):
    path = write(tmp_path / "p.yaml", text)
    with pytest.raises(LaunchError) as caught:
        read_profile(path, KEYS)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "read", "text"),
    [
        ("p.yaml", read_profile, "".join(" " * n + "a:\n" for n in range(3000))),
        ("pyproject.toml", lambda path, keys: read_pyproject(path.parent, keys), "x = " + "[" * 20_000),
    ],
)
def test_what_is_nested_too_deeply(tmp_path, name, read, text):
    path = write(tmp_path / name, f"# dtrrun\n{text}")
    with pytest.raises(LaunchError, match="nested too deeply") as caught:
        read(path, KEYS)
    assert str(caught.value).startswith(f"{path}: malformed ")


def test_an_empty_profile(tmp_path):
    assert read_profile(write(tmp_path / "p.yaml", "# nothing\n"), KEYS) == {}


def test_names_are_looked_up_in_the_users_folder_first(user_folder):
    assert find_profile("paper") == profiles.SHIPPED / "paper.yaml"
    own = write(user_folder / "paper.yaml", "")
    assert find_profile("paper") == own


def test_a_path_is_a_path(tmp_path, monkeypatch, user_folder):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "mine.yaml", "")
    assert find_profile("mine.yaml") == Path("mine.yaml")
    assert find_profile(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"
    with pytest.raises(ValueError, match="no such file"):
        find_profile("./other")


@pytest.mark.parametrize(("name", "hint"), [("papre", "did you mean paper?"), ("xyzzy", "ci-smoke, default")])
def test_an_unknown_name(user_folder, name, hint):
    with pytest.raises(ValueError, match=r".") as caught:
        find_profile(name)
    assert hint in str(caught.value)


@pytest.mark.parametrize("path", sorted(profiles.SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_profiles_are_valid_and_say_what_for(path):
    assert path.read_text().startswith("# ")
    Options.of(read_profile(path, OPTIONS))


def test_shipped_profiles_are_those_that_were_promised():
    assert {path.stem for path in profiles.SHIPPED.glob("*.yaml")} >= {
        "default",
        "ci-smoke",
        "low-memory",
        "paper",
    }


def test_the_default_profile_changes_nothing():
    assert Options.of(read_profile(profiles.SHIPPED / "default.yaml", OPTIONS)).settings == RuntimeSettings()


def test_the_papers_settings():
    settings = Options.of(read_profile(profiles.SHIPPED / "paper.yaml", OPTIONS)).settings
    assert (settings.heuristic, settings.sample, settings.ignore_small) == ("h_dtr_eq", True, 0.01)


def test_nearest_pyproject_counts(tmp_path):
    write(tmp_path / "pyproject.toml", "[tool.dtrrun]\nbudget = '1GB'\n")
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert read_pyproject(inner, KEYS)["budget"].text == "1GB"
    path = write(
        tmp_path / "a" / "pyproject.toml",
        "[project]\nname = 'dtrrun-user'\n[tool.dtrrun]\nsample = true\nmax-steps = 3\nignore_small = 0.01\n",
    )
    found = read_pyproject(inner, KEYS)
    assert {key: given.text for key, given in found.items()} == {
        "sample": "true",
        "max_steps": "3",
        "ignore_small": "0.01",
    }
    assert found["max_steps"].where == f"{path}:5: max_steps"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("[tool.dtrrun]\n\nbugdet = '1GB'\n", ":3: there is no option named 'bugdet'; did you mean budget?"),
        ("[tool.dtrrun]\nbudget = [1]\n", ":2: budget: expected a single value"),
        ("[tool.dtrrun\nbudget = 1\n", "malformed TOML"),
        ("[tool]\ndtrrun = 3\n", "is not a table"),
    ],
)
def test_a_bad_table_in_pyproject(tmp_path, text, hint):
    write(tmp_path / "pyproject.toml", text)
    with pytest.raises(LaunchError) as caught:
        read_pyproject(tmp_path, KEYS)
    assert hint in str(caught.value)
    assert "pyproject.toml" in str(caught.value)


@pytest.mark.parametrize("text", ["[project]\nname = 'x'\n", "this is [not TOML\n"])
def test_somebody_elses_pyproject_is_none_of_our_business(tmp_path, text):
    write(tmp_path / "pyproject.toml", text)
    assert read_pyproject(tmp_path, KEYS) == {}
