"""How many examples are searched, and which: environment variables set it, see `test_programs`."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings

NUMBER = int(os.environ.get("PROGRAMS", "110"))
SEED = os.environ.get("PROGRAMS_SEED")
SHRINK = os.environ.get("PROGRAMS_SHRINK") != "no"


def search(examples: int, **more: Any) -> settings:
    """Generate and shrink; always the same examples if no seed is set."""
    return settings(
        max_examples=examples,
        derandomize=SEED is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink) if SHRINK else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        **more,
    )


def seeded(test: Any) -> Any:
    return test if SEED is None else seed(int(SEED))(test)
