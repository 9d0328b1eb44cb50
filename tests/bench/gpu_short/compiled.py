"""A small GPT compiled with Triton's kernels: bits, ms and peaks, plainly and inside shares of its peak."""

import gc
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import dtrrun

STEPS = 8
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        heads = self.qkv(self.norms[0](x)).view(b, t, 3, self.heads, c // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)) / (c // self.heads) ** 0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.dropout(F.gelu(self.up(self.norms[1](x))), 0.1))


def trained() -> tuple[list[str], list[float]]:
    """Return the losses and the parameters' sum, exactly, and the ms of the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(6)]).cuda()
    compiled = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    bits, took = [], []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(torch.randn(8, 512, 768, device="cuda")).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append(loss.item().hex())
        torch.cuda.synchronize()
        took.append((time.perf_counter() - started) * 1e3)
    bits.append(sum(parameter.double().sum() for parameter in model.parameters()).item().hex())
    return bits, took


def fresh() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def main() -> None:
    fresh()
    plain, took = trained()
    peak = torch.cuda.max_memory_allocated()
    print(f"plain: {min(took):.1f} ms, the first {took[0]:.0f}; peak {peak / 1e9:.2f} GB", flush=True)
    fresh()
    print("deterministic:", plain == trained()[0], flush=True)
    fresh()
    free, total = torch.cuda.mem_get_info()
    overhead = total - free - torch.cuda.memory_reserved()
    budgets: dict[str, Any] = {"counting": None}
    for share in (0.7, 0.55):
        budgets[f"{share:.0%}"] = int(overhead + share * peak * 1.05 + 86 * MIB)
    for label, budget in budgets.items():
        fresh()
        try:
            with dtrrun.budget(budget, device="cuda") as session:
                bits, took = trained()
                report = session.report()
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {error}"[:600], flush=True)
            continue
        figures = {name: report[name] for name in ("evictions", "rematerializations", "oom_retries")}
        same = "same bits" if bits == plain else "OTHER BITS"
        print(f"{label}: {same}, {min(took):.1f} ms, the first {took[0]:.0f}", figures, flush=True)
        print(
            "   ",
            report.get("compiled"),
            [warning["text"][:100] for warning in report["warnings"]],
            flush=True,
        )


if __name__ == "__main__":
    main()
