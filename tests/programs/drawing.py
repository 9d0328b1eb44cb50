"""How programs, and the conditions of their runs, are drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from dtrrun.core.heuristics import ABLATION_NAMES, HEURISTIC_NAMES, make_heuristic
from tests.programs.language import STEPS, Body
from tests.programs.running import Conditions

LONGEST = 20
HEURISTICS = [name for name in (*HEURISTIC_NAMES, *ABLATION_NAMES) if not make_heuristic(name).foresight]
SHARES = (-0.4, -0.1, 0.0, 0.05, 0.1, 0.2, 0.3, 0.5)


def one_step(name: str, body: st.SearchStrategy[Any] | None) -> st.SearchStrategy[Any]:
    _, domains = STEPS[name]
    drawn = [body if domain is Body else st.sampled_from(list(domain)) for domain in domains]
    return st.tuples(st.just(name), *drawn)


flat = st.one_of([one_step(name, None) for name, (_, domains) in STEPS.items() if Body not in domains])
nested = [
    one_step(name, st.lists(flat, min_size=1, max_size=5).map(tuple))
    for name, (_, domains) in STEPS.items()
    if Body in domains
]
programs = st.lists(st.one_of(flat, flat, flat, flat, flat, *nested), min_size=8, max_size=LONGEST).map(tuple)


conditions = st.builds(
    Conditions,
    share=st.sampled_from(SHARES),
    heuristic=st.sampled_from(HEURISTICS),
    first=st.sampled_from((0, 0, 0, 2, 5)),
    left_out=st.sampled_from((0, 0, 0, 3, 6)),
    careful=st.sampled_from((True, False, False)),
    turns=st.just(()),
    host=st.sampled_from((False, False, True)),
    counted=st.just(False),
)
