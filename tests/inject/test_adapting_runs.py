"""`--over-budget raise`, as its users run it: the budget is raised to what is needed, and the run goes on."""

import re

PROGRAM = """
import dtrrun
dtrrun.current().on_step(lambda figures: print(figures["step"], figures["budget_bytes"]))
import torch
torch.manual_seed(0)
layers = (layer for _ in range(12) for layer in (torch.nn.Linear(256, 256), torch.nn.Tanh()))
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())
for step in range(4):
    optimizer.zero_grad()
    loss = model(torch.randn(1024, 256)).square().mean()
    loss.backward()
    optimizer.step()
"""
LINE = re.compile(r"the budget is raised from ([\d.]+) MB to ([\d.]+) MB: (aten\.\w+), with what must stay, ")
LARGEST = 37_000_000  # bytes: without a budget


def test_a_budget_that_is_too_small_is_raised_to_what_is_needed(dtrrun, program, tmp_path):
    script = program("train.py", PROGRAM)
    run = dtrrun("--budget", "9MB", "--over-budget", "raise", "--html", "page.html", script)
    assert run.status == 0
    changes, told = run.report["budget_changes"], [found for line in run.ours if (found := LINE.search(line))]
    assert 1 <= len(changes) == len(told) <= 3
    assert [float(line[2]) for line in told] == [round(one["to_bytes"] / 1e6, 1) for one in changes]
    assert [line[3] for line in told] == [one["operator"] for one in changes]
    assert changes[0]["from_bytes"] == run.report["budget_bytes"] == 9_000_000
    now = changes[-1]["to_bytes"]
    assert 0.5 * now < run.report["peak_bytes"] <= now < LARGEST
    assert (run.report["over_budget"], run.report["error"], run.report["warnings"]) == (0, None, [])
    (process,) = run.processes
    assert process["budget_bytes"] == now
    of_steps = [
        next(one["to_bytes"] for one in reversed(changes) if one["step"] <= step) for step in range(1, 5)
    ]
    assert run.out == "".join(f"{step} {nbytes}\n" for step, nbytes in enumerate(of_steps, 1))
    assert all(1 <= one["step"] <= 4 and 0 < one["seconds"] < 60 for one in changes)
    assert re.search(r"^budget +9 MB to [\d.]+ MB in step \d, after ", run.err, re.MULTILINE)
    (share,) = re.findall(r"^peak .*\(([\d.]+) % of the budget", run.err, re.MULTILINE)
    assert float(share) <= 100
    page = (tmp_path / "page.html").read_text()
    assert "<h2>Changes of the budget</h2>" in page
    assert "raised from 9 MB" in page
    assert f"{changes[0]['operator']}, with what must stay, takes" in page
