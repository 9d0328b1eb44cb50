"""Bits of a small convolutional network inside less and less memory, where cuDNN's workspaces hardly fit."""

import hashlib

import torch
from torch import nn

import dtrrun
from dtrrun.profiling.room import budget_for

SHARES = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4)
DEPTH = 8


def train() -> str:
    """Return a digest of the parameters after three steps."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(DEPTH):
        layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 3, 64, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    content = b"".join(parameter.detach().cpu().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def main() -> None:
    torch.use_deterministic_algorithms(True)
    plain = train()
    print("plain:", plain, "again:", train(), flush=True)
    with dtrrun.budget(None, device="cuda") as session:
        train()
        report = session.report()
    print("tensors", report["peak_bytes"], "overhead", report["overhead_bytes"])
    for share in SHARES:
        torch.cuda.empty_cache()
        budget = budget_for(int(share * report["peak_bytes"]), report["overhead_bytes"])
        try:
            with dtrrun.budget(budget, device="cuda") as session:
                found = train()
                told = session.report()
        except dtrrun.BudgetError as error:
            print(f"{share:.0%}: BudgetError, least {error.least_budget_bytes}", flush=True)
        else:
            same = "same bits" if found == plain else "OTHER BITS"
            warned = [warning["text"][:80] for warning in told["warnings"]]
            print(f"{share:.0%}: {same}, {told['evictions']} evictions, {warned}", flush=True)
        torch.cuda.empty_cache()
        print("    plain again:", "same bits" if train() == plain else "OTHER BITS", flush=True)


if __name__ == "__main__":
    main()
