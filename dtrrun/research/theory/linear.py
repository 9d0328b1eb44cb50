"""The linear feedforward network of App. A, as a program's stream of operations."""

from __future__ import annotations

from collections.abc import Callable

from .engine import Engine, H


def linear(
    engine: Engine[H], layers: int, watch: Callable[[list[H | None], list[H | None]], None] | None = None
) -> H:
    """Run t_1 … t_N, then t̂_N … t̂_1, releasing each tensor after its last use. Returns t̂_1.

    Liveness is that of App. A: t_N is released once it is computed, t_{N-1} after t̂_N, then t_{i-1} and
    t̂_{i+1} after t̂_i. There is no input t_0, so neither f_1 nor f̂_1 takes it. `watch` is called after each
    operation with the tensors t_1 … t_N and t̂_1 … t̂_N, None for those already released or not yet computed,
    to draw the paper's picture of the trace. Raises ValueError if there is no layer.
    """
    if layers < 1:
        raise ValueError("a network has at least one layer")
    forward: list[H | None] = [None] * layers
    backward: list[H | None] = [None] * layers

    def step(values: list[H | None], i: int, inputs: list[H | None]) -> H:
        made = engine.compute([value for value in inputs if value is not None])
        values[i] = made
        return made

    def let_go(values: list[H | None], i: int) -> None:
        if 0 <= i < layers and (value := values[i]) is not None:
            values[i] = None
            engine.release(value)

    for i in range(layers):
        step(forward, i, [forward[i - 1]] if i else [])
        if i == layers - 1:
            let_go(forward, i)
        if watch:
            watch(forward, backward)
    made = None
    for i in reversed(range(layers)):
        inputs = [forward[i - 1] if i else None, backward[i + 1] if i + 1 < layers else None]
        made = step(backward, i, inputs)
        let_go(forward, i - 1)
        let_go(backward, i + 1)
        if watch:
            watch(forward, backward)
    assert made is not None
    return made
