"""dtrrun.values"""

import pytest

from dtrrun import values
from dtrrun.core.heuristics import HEURISTIC_NAMES


@pytest.mark.parametrize(
    ("reader", "text", "value"),
    [
        (values.flag, "yes", True),
        (values.flag, "TRUE", True),
        (values.flag, "1", True),
        (values.flag, "off", False),
        (values.choice("error", "warn"), "warn", "warn"),
        (values.whole_number(), "-3", -3),
        (values.whole_number(least=1), "1", 1),
        (values.slowdown, "1.5", 1.5),
        (values.slowdown, "3x", 3.0),
        (values.share, "0.01", 0.01),
        (values.share, "1%", 0.01),
        (values.share, "0", 0.0),
        (values.device, "cuda:3", "cuda:3"),
        (values.deallocation, "eager", "eager"),
        (values.heuristic, "h'(s=yes,m=no,c=e_star)", "h'(s=yes,m=no,c=e_star)"),
        (values.heuristic, "a_module_that_is_not.here:score", "a_module_that_is_not.here:score"),
        *[(values.heuristic, name, name) for name in HEURISTIC_NAMES],
    ],
)
def test_good_values(reader, text, value):
    assert reader(text) == value


@pytest.mark.parametrize(
    ("reader", "text", "hint"),
    [
        (values.flag, "maybe", "neither yes nor no"),
        (values.choice("error", "warn"), "stop", "not one of error, warn"),
        (values.whole_number(), "1.5", "not a whole number"),
        (values.whole_number(least=1), "0", "less than 1"),
        (values.slowdown, "1", "not above 1"),
        (values.slowdown, "nan", "not a number"),
        (values.slowdown, "inf", "not a number"),
        (values.slowdown, "fast", "not a number"),
        (values.share, "2", "not between 0 and 1"),
        (values.share, "-1%", "not between 0 and 1"),
        (values.share, "%", "not a number"),
        (values.device, "gpu", "not one of auto, cpu, cuda, cuda:N"),
        (values.device, "cuda:", "not one of auto, cpu, cuda, cuda:N"),
        (values.deallocation, "banish", "simulator only"),
        (values.deallocation, "ignore", "simulator only"),
        (values.deallocation, "lazy", "not one of eager, banish, ignore"),
        (values.heuristic, "h_dtr_qe", "did you mean h_dtr_eq?"),
        (values.heuristic, "best", "unknown heuristic 'best': choose one of h_dtr,"),
        (values.heuristic, "h'(s=yes,m=no,c=maybe)", "unknown heuristic"),
        (values.heuristic, "my module:score", "unknown heuristic"),
        *[(values.heuristic, name, "a run uses one") for name in ("portfolio", "paper", "ablations")],
    ],
)
def test_bad_values_say_why(reader, text, hint):
    with pytest.raises(ValueError, match=r".") as caught:
        reader(text)
    assert hint in str(caught.value)
