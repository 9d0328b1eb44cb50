from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtrrun.core.heuristics import ABLATION_NAMES, HEURISTIC_NAMES, check_heuristic, make_heuristic
from tests.model import ModelPolicy, Node


@pytest.mark.parametrize(
    ("name", "score", "neighbourhood"),
    [
        ("h_dtr", 21 / (1000 * 50), "e_star"),
        ("h_dtr_eq", 21 / (1000 * 50), "eqclass"),
        ("h_dtr_local", 7 / (1000 * 50), "none"),
        ("lru", 1 / 50, "none"),
        ("size", 1 / 1000, "none"),
        ("msps", 21 / 1000, "ancestors"),
        ("e_star", 21 / 1000, "e_star"),
        ("h_chain", 21 / (1000 * 50 ** (1 / 3)), "ancestors"),
        ("h'(s=yes,m=yes,c=e_star)", 21 / (1000 * 50), "e_star"),
        ("h'(s=no,m=yes,c=eqclass)", 21 / 1000, "eqclass"),
        ("h'(s=yes,m=no,c=eqclass)", 21 / 50, "eqclass"),
        ("h'(s=yes,m=yes,c=local)", 7 / (1000 * 50), "none"),
        ("h'(s=yes,m=yes,c=no)", 1 / (1000 * 50), "none"),
        ("h'(s=no,m=no,c=e_star)", 21, "e_star"),
        ("h'(s=no,m=no,c=no)", 1, "none"),
        ("h′(s=no, m=yes, c=no)", 1 / 1000, "none"),
    ],
)
def test_formula(name: str, score: float, neighbourhood: str) -> None:
    heuristic = make_heuristic(name)
    assert heuristic.neighbourhood == neighbourhood
    policy = ModelPolicy(heuristic)
    parent = Node(0, 8, cost=14)
    node = Node(1, 1000, cost=7, inputs=[parent])
    policy.insert(node)
    parent.resident = False
    policy.evicted(parent)
    assert policy.score(node, now=50) == score


def test_every_name_can_be_made() -> None:
    assert len(ABLATION_NAMES) == len(set(ABLATION_NAMES)) == 16
    for name in (*HEURISTIC_NAMES, *ABLATION_NAMES):
        check_heuristic(name)
        heuristic = make_heuristic(name)
        assert heuristic.name == name


def test_random_is_reproducible() -> None:
    draws = [[make_heuristic("random", seed).score(1, 1, 1, 1) for _ in range(3)] for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    "name", ["", "h_dtr_equ", "h'(s=yes,m=yes)", "h'(s=maybe,m=no,c=no)", "a:b:c", "x y:z"]
)
def test_unknown_name(name: str) -> None:
    for make in (check_heuristic, make_heuristic):
        with pytest.raises(ValueError, match="unknown heuristic") as caught:
            make(name)
        assert repr(name) in str(caught.value)
        assert all(known in str(caught.value) for known in HEURISTIC_NAMES)
        assert "\n" not in str(caught.value)


@pytest.fixture
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_own_scores.py").write_text(
        "def biggest(size, staleness, cost, projected_cost):\n"
        "    return -size\n"
        "def exact(size, staleness, cost, projected_cost):\n"
        "    return projected_cost\n"
        "exact.neighbourhood = 'e_star'\n"
        "def wrong(size, staleness, cost, projected_cost):\n"
        "    return projected_cost\n"
        "wrong.neighbourhood = 'everything'\n"
        "def too_few(size):\n"
        "    return size\n"
        "def nothing(size, staleness, cost, projected_cost):\n"
        "    pass\n"
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_own_scores", raising=False)
    return "users_own_scores"


def test_function_of_the_user(users_module: str) -> None:
    biggest = make_heuristic(f"{users_module}:biggest")
    assert biggest.score(5, 1, 1, 1) == -5
    assert biggest.neighbourhood == "eqclass"
    assert biggest.powers is None
    assert make_heuristic(f"{users_module}:exact").neighbourhood == "e_star"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent", "AttributeError"),
        ("number", "not callable"),
        ("too_few", "TypeError"),
        ("nothing", "TypeError"),
        ("wrong", "its attribute neighbourhood is 'everything'"),
    ],
)
def test_function_of_the_user_that_cannot_be_used(users_module: str, function: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_heuristic(f"{users_module}:{function}")


def test_checking_a_name_imports_nothing(users_module: str) -> None:
    check_heuristic(f"{users_module}:biggest")
    assert users_module not in sys.modules


def test_module_that_ends_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script_of_theirs.py").write_text("raise SystemExit(3)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="SystemExit: 3"):
        make_heuristic("a_script_of_theirs:score")


def test_module_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="no_such_module_at_all"):
        make_heuristic("no_such_module_at_all:score")
