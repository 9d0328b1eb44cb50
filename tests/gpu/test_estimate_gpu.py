"""What `dtrrun estimate` says that tensors take, and what a session counts for the same steps."""

import json
import os
import subprocess
import sys

import pytest
from gpu_programs import DEVICE

import dtrrun

pytestmark = pytest.mark.usefixtures("gpu")
PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.out = nn.RMSNorm(width), nn.Linear(width, width)
        self.inputs = nn.Linear(width, 3 * width)
        self.conv, self.batch = nn.Conv1d(width, width, 3, padding=1), nn.BatchNorm1d(width)
    def forward(self, x):
        q, k, v = self.inputs(self.norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.1).transpose(1, 2).flatten(2))
        return x + F.dropout(F.silu(self.batch(self.conv(x.mT))).mT, 0.1)

def train(steps):
    blocks = [Block(128) for _ in range(3)]
    net = nn.Sequential(nn.Embedding(3000, 128), *blocks, nn.Linear(128, 3000)).cuda()
    optimizer = torch.optim.AdamW(net.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(steps):
        x = torch.randint(3000, (4, 257)).cuda()
        with torch.autocast("cuda", torch.float16):
            loss = F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
"""


def test_tensors_take_what_was_estimated(tmp_path):
    script, found = tmp_path / "train.py", tmp_path / "found.json"
    script.write_text(PROGRAM + "\ntrain(9)\n")
    options = ["--gpu", "H100", "--quiet", "--json", str(found), "--python", sys.executable]
    subprocess.run(
        [sys.executable, "-m", "dtrrun", "estimate", *options, str(script)],
        env={name: text for name, text in os.environ.items() if name != "LD_PRELOAD"},
        check=True,
    )
    names = {}
    exec(compile(PROGRAM, "train.py", "exec"), names)
    with dtrrun.budget(None, DEVICE) as session:
        names["train"](3)
        counted = session.report()["peak_bytes"]
    assert json.loads(found.read_text())["tensors_bytes"] == pytest.approx(counted, rel=0.01)
