"""Checkpoints during training, also between forward and backward; then training resumes from one."""

import hashlib
import tempfile
from pathlib import Path

import results
import torch
from networks import mlp, rows
from torch.nn.functional import cross_entropy

folder = Path(tempfile.mkdtemp())


def make():
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def train(model, optimizer, steps):
    losses = []
    for index in steps:
        optimizer.zero_grad()
        x, y = rows()
        if index == 3:
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "generator": torch.get_rng_state(),
                    "batch": (x, y),
                },
                folder / "before.pt",
            )
        out = model(x)
        loss = cross_entropy(out, y)
        torch.save({"model": model, "out": out.detach(), "loss": loss}, folder / f"forward{index}.pt")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


torch.manual_seed(0)
model, optimizer = make()
losses = train(model, optimizer, range(6))
files = [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())]

saved = torch.load(folder / "before.pt", mmap=True)
resumed, its_optimizer = make()
resumed.load_state_dict(saved["model"])
its_optimizer.load_state_dict(saved["optimizer"])
torch.set_rng_state(saved["generator"])
its_optimizer.zero_grad()
x, y = saved["batch"]
loss = cross_entropy(resumed(x), y)
loss.backward()
its_optimizer.step()
again = [loss.item(), *train(resumed, its_optimizer, range(4, 6))]
assert again == losses[3:], (again, losses)
whole = torch.load(folder / "forward5.pt", weights_only=False)
results.write(model=model, optimizer=optimizer, losses=losses, files=files, resumed=resumed,
              its_optimizer=its_optimizer, loaded=whole["model"], out=whole["out"])  # fmt: skip
