"""dtrrun.cli.theory, dtrrun.views.theory, dtrrun.research.figures.theory"""

import json
from functools import partial
from xml.etree import ElementTree

import pytest
from fake_records import printed

from dtrrun.research.figures.theory import EVICTED, FORWARD, GRADIENT, resident_tensors
from dtrrun.research.theory import TheoryCell, run_theory
from dtrrun.views.theory import print_theory


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def simulate(command):
    return partial(command, "simulate", "--jobs", "1", "--theory")


def test_linear_rows_and_table(tmp_path, simulate):
    path = tmp_path / "rows.json"
    words = ("linear", "--sizes", "64,16", "--heuristic", "e_star,size", "--limit", "3")
    status, out, err = simulate(*words, "--json", path)
    assert (status, err) == (0, "")
    found = json.loads(path.read_text())
    assert found["schema"] == "dtrrun.theory/1"
    assert [(row["nodes"], row["budget"], row["heuristic"]) for row in found["rows"]] == [
        (16, 8, "e_star"),
        (16, 8, "size"),
        (64, 16, "e_star"),
        (64, 16, "size"),
    ]
    assert found["rows"][2]["operations"] == run_theory(TheoryCell("linear", "e_star", 64, 16)).operations
    assert found["rows"][3]["status"] == "thrash"
    lines = [line.split() for line in out.splitlines()]
    assert lines[2] == ["N", "B", "N/B", "optimum", "heuristic", "operations", "/", "N", "/", "optimum"]
    assert lines[5] == ["64", "16", "4", "176", "e_star", "202", "3.16", "1.15"]
    assert lines[6] == ["size", "thrash"]


def test_adversary_with_budgets(simulate):
    _, out, _ = simulate("adversary", "--sizes", "20,8", "--budgets", "4,8", "--heuristic", "lru")
    lines = [line.split() for line in out.splitlines()]
    assert [line[:5] for line in lines[3:]] == [
        ["8", "4", "2", "7", "lru"],
        ["20", "4", "5", "19", "lru"],
        ["20", "8", "2.5", "19", "lru"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--theory cubic", "--theory: 'cubic' is not one of linear, adversary"),
        ("--theory linear some.log", "cannot be combined with a LOG"),
        ("--theory linear --paper", "cannot be combined with --paper"),
        ("--theory linear --planners search", "cannot be combined with --planners"),
        ("--theory linear --deallocation ignore", "cannot be combined with --deallocation"),
        ("--theory linear --sizes 0", "--sizes: 0 is less than 1"),
        ("--theory linear --sizes many", "--sizes: 'many' is not a whole number"),
        ("--theory linear --budgets 2", "--budgets: 2 is less than 3"),
        ("--theory linear --budgets 0.5", "--budgets: '0.5' is not a whole number"),
        ("--theory adversary --sizes 9 --budgets 9", "--sizes: a network of N nodes"),
        ("--theory linear --heuristic portfolio", "portfolio compares heuristics on a log"),
        ("--theory linear --heuristic h_dt", "did you mean h_dtr?"),
        ("--theory linear --limit 1", "--limit: '1' is not above 1"),
        ("--sizes 64 some.log", "--sizes needs --theory"),
    ],
)
def test_bad_input_is_one_line_and_status_2(refused, words, message):
    assert message in refused("simulate", *words.split())


def test_pictures(tmp_path, simulate):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "pictures"
    for words in (
        "linear --sizes 16,32",
        "linear --sizes 16 --budgets 4,8",
        "adversary --sizes 20,40 --budgets 4",
    ):
        assert simulate(*words.split(), "--figures", folder)[0] == 0
    made = sorted(folder.iterdir())
    assert [path.name for path in made] == ["theory-adversary.svg", "theory-linear.svg", "theory-trace.svg"]
    adversary, linear, trace = ("".join(ElementTree.parse(path).getroot().itertext()) for path in made)
    assert "lru, B = 4" in adversary
    assert "h_chain, B = 8" in linear
    assert "N = 200, B = 30" in trace


def test_the_trace_of_a_run():
    picture, turn = resident_tensors("lru", 4, 8)
    marks = {EVICTED: ".", FORWARD: "t", GRADIENT: "g"}
    assert turn == 4
    # An operation's output is resident from that operation on, and so is what it is the last to read.
    assert ["".join(marks[cell] for cell in line) for line in picture] == [
        "ttttttt" + "g",
        ".tttttgg",
        "..tttgg.",
        "...tgg..",
    ]


def test_the_trace_never_has_more_than_the_budget():
    picture, turn = resident_tensors("e_star", 40, 6)
    assert turn == 40
    assert len(picture[0]) == run_theory(TheoryCell("linear", "e_star", 40, 6)).operations
    held = [sum(cell != EVICTED for cell in column) for column in zip(*picture, strict=True)]
    assert max(held) == 6


def test_an_interrupted_table_has_what_was_done():
    assert "Theorem 2" in printed(print_theory, {"theory": "adversary", "rows": []}, 80)
