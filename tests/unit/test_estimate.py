"""`dtrrun estimate`: cards, the allocator's segments, the verdict, and a program on a GPU that is absent."""

import json
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from fake_records import printed
from rich.cells import cell_len
from view_snapshots import check

from dtrrun.profiling.cards import CARDS, LAUNCH_NS, parse_card
from dtrrun.profiling.estimate import CONTEXT, At, Fit
from dtrrun.profiling.segments import Segments
from dtrrun.views.estimate import print_estimate

MB = 1 << 20


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("NVIDIA H100-PCIe", "H100 PCIe"),
        ("a100", "A100 80GB"),
    ],
)
def test_cards_by_name(text, name):
    chosen = parse_card(text)
    assert (chosen.card.name, chosen.priced_as) == (name, None)


def test_cards_by_size():
    card, priced_as = parse_card("24GB")
    assert priced_as == "RTX 4090"
    assert card.programs_bytes == int(0.98 * (24 << 30))
    assert parse_card("24 GiB") == (card, priced_as)


@pytest.mark.parametrize(
    ("text", "why"), [("RTX 4091", "did you mean RTX 4090?"), ("0GB", "not the memory of")]
)
def test_unknown_cards(text, why):
    with pytest.raises(ValueError, match=why):
        parse_card(text)


def test_the_table_of_cards_is_plausible():
    assert len({one.name for one in CARDS}) == len(CARDS)
    for one in CARDS:
        assert 0.9 * one.gib < one.programs_gib < one.gib
        assert one.fp32 <= one.tf32 <= one.bf16
        assert parse_card(one.name).card == one


def test_what_operators_cost():
    card = parse_card("H100").card
    view, small = ("aten.view", [0, "fp32", 0, 0]), ("aten.add", [0, "fp32", 4096, 0])
    product = "aten.mm", [10**13, "bf16", 10**8, 0]
    assert card.cost(*view) == 0
    assert card.cost(*small) == LAUNCH_NS
    assert card.cost(*product) == pytest.approx(1e13 / (989.4e3 * 0.5))
    # Moving bytes takes longer than computing with few of them.
    assert card.cost("aten.add", [10**9, "fp32", 10**10, 0]) == pytest.approx(1e10 / (3350 * 0.7))


def test_segments():
    """As `memory_reserved` of a real allocator has it for the same requests."""
    allocator = Segments()
    small = [allocator.allocate(MB // 2) for _ in range(5)]
    assert allocator.taken == 4 * MB
    middle = allocator.allocate(3 * MB)
    assert allocator.taken == 24 * MB
    assert allocator.allocate(5 * MB).pool is middle.pool  # from the rest of that segment
    large = allocator.allocate(11 * MB)
    assert allocator.taken == 24 * MB
    allocator.allocate(13 * MB)
    assert allocator.taken == 38 * MB  # rounded to 2 MB
    allocator.free(large)
    allocator.allocate(9 * MB)
    assert allocator.taken == 38 * MB
    for one in small:
        allocator.free(one)
    allocator.allocate(MB)
    assert allocator.taken == 38 * MB


def fit(needed, *, slowdown=1.2, host=0, gpu="24GB"):
    return Fit(
        parse_card(gpu),
        3,
        needed,
        needed + 10**9,
        needed + 3 * 10**9,
        412_000_000,
        At(25_264_913_448, slowdown, host),
        At(8 * 10**9, 1.9),
        10**9,
        ["recurrent layers count step by step: with cuDNN they take less"],
    )


def test_verdicts():
    room = parse_card("24GB").card.programs_bytes - CONTEXT
    assert fit(room - 4 * 10**9).verdict == "fits"
    assert fit(room - 2 * 10**9).verdict == "tight"
    assert fit(room).verdict == "budget"
    assert fit(room, slowdown=None).verdict == "no"


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize(
    ("name", "one"),
    [
        ("fits", fit(10**10, gpu="RTX 4090")),
        ("budget", fit(4 * 10**10)),
        ("host", fit(4 * 10**10, slowdown=3.4, host=12 * 10**9)),
        ("no", fit(4 * 10**10, slowdown=None)),
    ],
)
def test_looks_as_it_did(name, one, width):
    result = json.loads(json.dumps(one.values(["train.py"]))) | {"run": ["dtrrun", "train.py"]}
    text = printed(print_estimate, result, width)
    assert all(cell_len(line) <= width for line in text.splitlines())
    if width == 80 or name == "budget":  # others are wrapped like it
        check(f"estimate_{name}_{width}", text)


# -- programs --------------------------------------------------------------------------------------------

WIDTH, ROWS = 512, 2048
PROGRAM = f"""
import torch
from torch import nn
from torch.nn import functional as F
assert torch.cuda.is_available() and "4090" in torch.cuda.get_device_name()
torch.cuda.synchronize()
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear({WIDTH}, {WIDTH}, bias=False), nn.Linear({WIDTH}, {WIDTH}, bias=False)
        self.tied = self.two.weight
    def forward(self, x):
        return F.linear(F.silu(self.two(torch.sigmoid(self.one(x)))), self.tied)
net = Net().cuda()
assert net.tied is net.two.weight and net.tied.is_cuda
optimizer = torch.optim.Adam(net.parameters(), foreach=False)
scaler = torch.amp.GradScaler("cuda")
generator = torch.Generator(device="cuda")
assert torch.ones(4, device="cuda").bool().all() and not torch.zeros(4, device="cuda").view(2, 2).any()
mask = torch.randn(4, device="cuda", generator=generator) > 0
assert mask.nonzero().shape == (4, 1) and torch.ones(4, device="cuda")[mask].shape == (4,)
del mask
q = torch.randn(2, 4, 16, 8, device="cuda", requires_grad=True)
out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
assert "Efficient" in out.grad_fn.name() and "Dropout" in F.dropout(q, 0.5).grad_fn.name()
del q, out
for step in range(10):
    x = torch.randn({ROWS}, {WIDTH}).to("cuda", non_blocking=True)
    loss = net(x).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert not torch.isnan(loss).any() and torch.isfinite(loss).all() and loss.detach().cpu().numpy() == 1
    print(f"{{loss:.3f}} {{loss.item()}}", x.cpu().shape, torch.cuda.max_memory_allocated())
"""
CASES = {
    "no step": ("import torch; torch.ones(2, device='cuda')", 125, "made no optimizer step"),
    "cpu": (
        "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]).step()",
        125,
        "put nothing on the GPU",
    ),
    "fails": ("import torch; raise SystemExit(7)", 7, "failed (exit status 7)"),
}


@pytest.fixture
def estimated(command, tmp_path):
    def estimated(program, *words):
        (tmp_path / "train.py").write_text(dedent(program))
        return command("estimate", "--python", sys.executable, *words, tmp_path / "train.py")

    return estimated


def test_a_program(tmp_path, estimated):
    path = tmp_path / "found.json"
    status, out, _ = estimated(PROGRAM, "--gpu", "RTX 4090", "--json", path)
    assert status == 0
    found = json.loads(path.read_text())
    weights, tensor = 2 * WIDTH * WIDTH * 4, ROWS * WIDTH * 4
    # At its peak, when `square` is differentiated: weights and their two averages; x, what sigmoid, two, silu
    # and the last product have made; the gradient, a power, and two products of these.
    assert found["tensors_bytes"] == pytest.approx(3 * weights + 9 * tensor, rel=0.001)
    assert found["state_bytes"] == pytest.approx(4 * weights + tensor, rel=0.001)  # with gradients
    assert (found["verdict"], found["steps"], found["gpu"]) == ("fits", 3, "RTX 4090")
    assert found["notes"] == [
        f"aten.{name} counts as if it chose all elements: how many it chooses depends on values"
        for name in ("nonzero", "index")
    ]
    assert found["step_seconds"] > 0
    assert "It fits" in out


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_told(estimated, name):
    program, status, said = CASES[name]
    code, _, err = estimated(program, "--gpu", "24GB")
    assert code == status
    assert said in err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--gpu", "Voodoo 2", "x.py"], "'Voodoo 2' is not in the table"), (["x.py"], "needs --gpu")],
)
def test_bad_options(refused, words, said):
    assert said in refused("estimate", *words)


def test_the_page_has_the_table_of_cards():
    page = (Path(__file__).parents[2] / "docs" / "estimate.md").read_text()
    for one in CARDS:
        row = (
            f"| {one.name} | {one.gib} | {one.programs_gib:g} | {one.bandwidth:,} "
            f"| {one.fp32:g} | {one.tf32:g} | {one.bf16:g} |"
        )
        assert row in page


def test_state_that_does_not_fit_leaves_for_the_host(tmp_path):
    program = """
    import torch
    from torch import nn
    net = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(8)))
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        net(torch.randn(64, 4096, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """
    path = tmp_path / "found.json"
    assert estimated(tmp_path, program, "--gpu", "2GB", "--json", str(path)) == 1
    found = json.loads(path.read_text())
    weights = 8 * 4096 * 4096 * 4
    assert found["state_bytes"] == pytest.approx(4 * weights, rel=0.01)
    assert found["state_bytes"] > found["gpu_bytes"]
    assert found["verdict"] == "budget"
    assert 0.5 * weights < found["host_bytes"] < 4 * weights
    assert found["slowdown"] > 1.5  # so small a step takes less time than the copies
