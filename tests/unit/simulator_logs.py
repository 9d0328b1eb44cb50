"""Random operator logs for the simulator's tests."""

from __future__ import annotations

import random

from dtrrun.simulator.log import Call, Constant, Copy, CopyFrom, Instruction, Mutate, Release


def random_log(seed: int, steps: int = 60) -> list[Instruction]:
    """Return something like a training step.

    Forward: calls with several outputs, views, mutations, copies and releases. Backward: every live tensor is
    used once more, last first, and released.
    """
    r = random.Random(seed)
    log: list[Instruction] = [Constant(f"w{i}", r.choice((8, 16))) for i in range(2)]
    live = ["w0", "w1"]
    for step in range(steps):
        inputs = tuple(r.choices(live[-6:], k=r.randint(1, min(3, len(live)))))
        kind = r.random()
        if kind < 0.6:
            outputs = tuple(f"x{step}_{i}" for i in range(r.choice((1, 1, 1, 2, 3))))
            aliases = tuple(r.randrange(len(inputs)) if r.random() < 0.2 else -1 for _ in outputs)
            sizes = tuple(r.choice((0, 8, 8, 16, 24)) for _ in outputs)
            log.append(Call("op", inputs, outputs, sizes, aliases, r.randint(0, 50)))
            live += outputs
        elif kind < 0.7:
            log.append(Mutate("op_", inputs, (r.randrange(len(inputs)),), r.randint(1, 50)))
        elif kind < 0.75:
            log.append(Copy(f"c{step}", inputs[0]))
            live.append(f"c{step}")
        elif kind < 0.8 and len(live) > 2:
            log.append(CopyFrom(r.choice(live), inputs[0]))
        elif len(live) > 4:
            log.append(Release(live.pop(r.randrange(len(live)))))
    log.append(Call("loss", tuple(live[-2:]), ("g",), (8,), (-1,), 1))
    gradient = "g"
    for step, name in enumerate(reversed(live)):
        new = f"g{step}"
        log.append(Call("backward", (gradient, name), (new,), (8,), (-1,), r.randint(0, 50)))
        log += [Release(gradient), Release(name)]
        gradient = new
    return log
