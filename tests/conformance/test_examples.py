"""Examples, unchanged, inside half of their plain peak: the same bits, and never over the budget.

`make smoke` runs all of them inside 60 %.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bench.runs import difference, inside, plain

SMALL = {
    "treelstm": ["--batch-size", "128", "--max-leaves", "70"],
    "unrolled_gan": ["--batch-size", "2048"],
    "vae": ["--batch-size", "32"],
}
"""Run two steps of these: they take seconds, and most of their memory is still activations."""


@pytest.mark.parametrize("example", ["treelstm", "unrolled_gan"])
def test_half_the_peak_gives_the_same_bits(example):
    arguments = ["--steps", "2", *SMALL[example]]
    with ThreadPoolExecutor(2) as pool:  # one per core
        first = pool.submit(plain, example, *arguments)
        second = pool.submit(inside, None, example, *arguments)
        reference, counted = first.result(), second.result()
    assert reference.exit_code == 0, reference.stderr
    assert counted.exit_code == 0, counted.stderr
    assert difference(reference, counted) == ""

    budget = counted.report["peak_bytes"] // 2
    run = inside(budget, example, *arguments)
    assert run.exit_code == 0, run.stderr
    assert run.report["rematerializations"] > 0
    assert run.report["peak_bytes"] <= budget
    assert difference(reference, run) == ""


def test_budget_too_small_is_said_clearly():
    run = inside(3_000_000, "vae", "--steps", "1", *SMALL["vae"])
    assert run.infeasible
    assert run.report["exit_code"] == 1
    assert run.report["peak_bytes"] <= 3_000_000 < run.report["least_budget_bytes"]
