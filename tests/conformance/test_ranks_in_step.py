"""Ranks evict and recompute the same, although what operators cost is measured in each."""

import json
import os
import subprocess
import sys
from pathlib import Path

RANK = """
import json, sys
from dataclasses import replace
import torch
import torch.distributed as dist
from dtrrun import runtime
from dtrrun.settings import RuntimeSettings

folder, rank = sys.argv[1], int(sys.argv[2])
settings = RuntimeSettings.of(budget_bytes=700_000, device="cpu", heuristic="auto", remember=False)
runtime.activate(replace(settings, record_dir=folder))
session = runtime.current()
dist.init_process_group("gloo", store=dist.FileStore(folder + "/store", 3), rank=rank, world_size=3)
torch.manual_seed(0)
layers = [
    layer
    for width in (32, 96, 64, 48, 32)
    for layer in (torch.nn.LazyLinear(width), torch.nn.GELU(), torch.nn.LayerNorm(width))
]
model = torch.nn.Sequential(*layers)
x = torch.randn(256, 16)
model(x)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
decided, before = [], {}
for step in range(9):
    if step == 2:  # as if both had measured something else
        for place, signature in enumerate(session.callbacks.signatures.all()):
            signature.cost, signature.calls = (1000, 1_000_000)[(place + rank) % 2], signature.SETTLED
    model(x).square().mean().backward()
    if rank == 2:
        (torch.sin(model(x)) ** 3).mean().backward()
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
    now = dict(session.dtr.eviction.evicted_by)
    decided.append(sorted([name, count - before.get(name, 0)] for name, count in now.items()))
    decided[-1] = [one for one in decided[-1] if one[1]]
    before = now
    if step == 4 and rank == 0:  # as if it had found a better one
        session._learning._take({"heuristic": "lru", "steps": []}, "searched")
print(json.dumps([decided, session.rule]))
"""


def test_the_others_follow_the_first(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    environment |= {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank)],
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(3)
    ]
    try:
        told = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    (first, its_rule), (second, other_rule), (_, rule_of_another) = told
    assert all(first)
    assert first[2] != second[2]
    assert first[4] == second[4]  # the costs of the third step have been read at the end of the fourth
    assert first[7:] == second[7:]
    assert its_rule["heuristic"] == other_rule["heuristic"] == "lru"
    assert rule_of_another["heuristic"] != "lru"  # its steps are others
    assert its_rule["source"] == other_rule["source"] == "searched"
