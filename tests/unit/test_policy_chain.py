"""dtrrun.core.chain: the names of our rules and their parameters."""

import pytest

from dtrrun.core.chain import NAMED, RELEASED, Settings, parse
from dtrrun.core.heuristics import make_heuristic


@pytest.mark.parametrize(
    "settings",
    [Settings(), Settings("e_star", 0.0, 1.0, False), Settings("ancestors", 0.25, 1.5), *NAMED.values()],
)
def test_a_name_is_read_as_what_it_stands_for(settings):
    found = parse(settings.name)
    assert found is not None
    assert found._replace(staleness=0, next=0) == settings._replace(staleness=0, next=0)
    assert (found.staleness, found.next) == pytest.approx((settings.staleness, settings.next), abs=1e-3)
    assert make_heuristic(settings.name).name == settings.name


@pytest.mark.parametrize(
    "name",
    [
        "h_chain()",
        "h_chain(c=eqclass,s=0,next=0,released=first)",
        "h_chain(c=e_star,s=2,next=0,released=first)",
        "h_chain(c=e_star,s=0,next=-1,released=first)",
        "h_chain(c=e_star,s=0,next=3,released=first)",
        "h_chain(c=e_star,s=0,next=0,released=last)",
    ],
)
def test_another_name_is_none_of_ours(name):
    assert parse(name) is None
    with pytest.raises(ValueError, match="unknown heuristic"):
        make_heuristic(name)


def test_the_settings_make_the_heuristic():
    heuristic = make_heuristic("h_chain(c=e_star,s=.5,next=.25,released=first)")
    assert (heuristic.neighbourhood, heuristic.powers, heuristic.foresight) == ("e_star", (1, 1, 0.5), 0.25)
    assert heuristic.released == RELEASED
    ageless = make_heuristic("h_chain(c=ancestors,s=0,next=0,released=alike)")
    assert (ageless.powers, ageless.released) == ((1, 1, 0), 1)
