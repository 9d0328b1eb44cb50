"""How much is recomputed: no more than the recipes of what is evicted."""

import weakref

import pytest
import torch
from faults import check_accounts
from programs import assert_same, batch, in_memory, plain, run_inside, train

import dtrrun
from tests.kernels import use_replays

MIB = 1 << 20


def tensor():
    return torch.rand(512, 512)  # 1 MiB


def ladder(x, rungs):
    for _ in range(rungs):
        x = (x.tanh() + 1) * (x.sigmoid() + 2)
    return x


def test_a_replay_runs_nothing_twice_as_long_as_memory_suffices():
    foot = tensor()
    expected = ladder(foot, 12)
    # What was used last is evicted first, so anything that a replay does not protect is lost at once.
    with dtrrun.budget(64 * MIB, heuristic="programs:most_recent") as session:
        top = ladder(foot, 12)
        session.set_budget(MIB)  # as much as is pinned
        assert session.report()["evictions"] == 1
        session.set_budget(7 * MIB)
        assert torch.equal(top, expected)
        assert session.report()["rematerializations"] == 12 * 5


def test_dear_inputs_of_a_cheap_evicted_storage_outlive_their_release():
    a, b = tensor(), tensor()
    expected = torch.cat([a @ b, a @ b])
    with dtrrun.budget(64 * MIB, cost="model") as session:
        dear = a @ b
        cheap = torch.cat([dear, dear])
        assert torch.equal(cheap, expected)
        session.set_budget(session.report()["resident_bytes"] - MIB)
        memory = weakref.ref(torch._C.TensorBase.untyped_storage(dear))
        del dear
        alive = memory() is not None
        assert alive
        session.set_budget(64 * MIB)
        assert torch.equal(cheap, expected)
        recomputed = {operator["name"] for operator in session.report()["operators"]}
        assert recomputed == {"aten.cat"}
        alive = memory() is not None  # a storage in the assertion would be printed byte by byte
        assert not alive, "kept although what it was kept for is back"


@pytest.mark.parametrize("both", [False, True])
def test_dear_inputs_are_found_through_what_has_been_released(both):
    """They are found unless they are evicted themselves."""
    a, b, rest = tensor(), tensor(), tensor()
    expected = rest - 0.5 * (a @ b)
    with dtrrun.budget(64 * MIB, cost="model") as session:
        dear = a @ b
        cheap = rest - 0.5 * dear
        assert torch.equal(cheap, expected)
        session.set_budget(session.report()["resident_bytes"] - (2 if both else 1) * MIB)
        memory = weakref.ref(torch._C.TensorBase.untyped_storage(dear))
        del dear
        alive = memory() is not None
        assert alive is not both
        session.set_budget(64 * MIB)
        assert torch.equal(cheap, expected)
        recomputed = {operator["name"] for operator in session.report()["operators"]}
        assert recomputed == {"aten.mul", "aten.sub", *(["aten.mm"] if both else [])}
        alive = memory() is not None
        assert not alive


def conjugate_gradients():
    """Make a graph of gradients that each iteration reads, and vectors derived from the previous ones."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
    parameters, x = list(net.parameters()), torch.randn(256, 64)
    for _ in range(2):
        gradients = torch.autograd.grad(net(x).square().mean(), parameters, create_graph=True)
        solution = [torch.zeros_like(one) for one in parameters]
        rest = [one.detach().clone() for one in gradients]
        direction = [one.clone() for one in rest]
        square = sum((one * one).sum() for one in rest)
        for _ in range(6):
            slope = sum((one * other).sum() for one, other in zip(gradients, direction, strict=True))
            product = torch.autograd.grad(slope, parameters, retain_graph=True)
            product = [one + 0.1 * other for one, other in zip(product, direction, strict=True)]
            length = square / sum((one * other).sum() for one, other in zip(direction, product, strict=True))
            solution = [one + length * other for one, other in zip(solution, direction, strict=True)]
            rest = [one - length * other for one, other in zip(rest, product, strict=True)]
            former, square = square, sum((one * one).sum() for one in rest)
            direction = [one + square / former * other for one, other in zip(rest, direction, strict=True)]
        with torch.no_grad():
            for one, step in zip(parameters, solution, strict=True):
                one -= 0.1 * step
    return parameters


def test_conjugate_gradients_do_not_recompute_earlier_iterations():
    """An iteration's results are cheap while the last product exists, and expensive once it is released."""
    expected = plain(conjugate_gradients)
    _, counted = run_inside(conjugate_gradients, None, cost="model")
    for share, most in ((0.75, 200), (0.7, 400)):
        found, report = run_inside(
            conjugate_gradients, int(share * counted["peak_bytes"]), cost="model", careful=False
        )
        assert_same(expected, found, f"at {share:.0%} of the peak")
        assert 0 < report["rematerializations"] < most


def test_what_was_dear_to_bring_back_is_known_to_be():
    """All its inputs had been evicted, which its recipe alone does not show."""
    foot = tensor()
    expected = ladder(foot, 3)
    with dtrrun.budget(64 * MIB, cost="model", heuristic="programs:most_recent") as session:
        top = ladder(foot, 3)
        session.set_budget(MIB)  # as much as is pinned
        version = session.callbacks.version_of(top)
        own = version.cost
        session.set_budget(7 * MIB)
        before = session.ledger.clock
        assert torch.equal(top, expected)
        reading = session.ledger.clock - before - version.cost
        assert version.cost > 10 * own
        assert 0 <= reading < own  # the cost of the comparison itself


def test_a_perceptron_trains_in_two_fifths_of_its_peak():
    """A gradient in the backward pass is cheap while the previous one exists, and expensive afterwards."""

    def program():
        model = torch.nn.Sequential(
            *[m for _ in range(14) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
        )
        return train(model, lambda: batch(1024, 64), torch.optim.SGD(model.parameters(), 0.1))

    expected = plain(program)
    _, counted = run_inside(program, None)
    found, report = run_inside(program, int(counted["peak_bytes"] * 0.4), cost="model")
    assert_same(expected, found, "inside the budget")
    assert 0 < report["rematerializations"] < 400


def test_a_kept_input_outlives_the_replay_that_reads_it_again():
    a, b = tensor(), tensor()
    expected = torch.cat([a @ b, a @ b])[512:] @ (a @ b)
    with dtrrun.budget(64 * MIB, cost="model") as session:
        dear = a @ b
        cheap = torch.cat([dear, dear])
        product = cheap[512:] @ dear
        for one in (cheap, product):
            version = session.callbacks.version_of(one)
            assert session.dtr.eviction.evict_if_possible(version)
        memory = weakref.ref(torch._C.TensorBase.untyped_storage(dear))
        del dear
        assert torch.equal(product, expected)
        assert session.report()["rematerializations"] == 2
        alive = memory() is not None
        assert not alive, "kept although no replay reads it any more"


def test_a_lower_budget_evicts_what_was_too_small_for_the_one_before():
    with dtrrun.budget(2 * MIB) as session:
        larger = [tensor().tanh() for _ in range(3)]  # memory runs short
        session.set_budget(None)
        small = [torch.full((8,), float(step)) for step in range(64)]
        session.set_budget(session.report()["pinned_bytes"] + 10 * 64)
        assert session.report()["resident_bytes"] <= 10 * 64
        session.set_budget(None)
    assert [one.sum().item() for one in small] == [8.0 * step for step in range(64)]
    assert len(larger) == 3


def test_at_the_end_only_the_programs_own_tensors_are_in_memory():
    with dtrrun.budget(64 * MIB) as session:
        released = tensor().tanh()
        kept = [released + 1, released * 2]
        del released
        session.set_budget(MIB // 2)
    assert session.report()["evictions"] == 2
    assert session.report()["resident_bytes"] == sum(one.untyped_storage().nbytes() for one in kept)


def evict_all(session, tensors):
    for one in tensors:
        version = session.callbacks.version_of(one)
        assert session.dtr.eviction.evict_if_possible(version)


def test_what_was_recomputed_beside_the_target_is_kept_to_a_share():
    foot = tensor()
    with dtrrun.budget(64 * MIB, cost="model") as session:
        x, kept = foot, []
        for _ in range(16):
            x = x.tanh()
            kept.append(x * 2)
        del x
        expected = kept[-1].clone()
        evict_all(session, kept)
        session.set_budget(48 * MIB)
        assert torch.equal(kept[-1], expected)
        assert session.report()["rematerializations"] == 17
        assert MIB <= session.ledger.scratch_bytes <= 48 * MIB // 8
        check_accounts(session)


@pytest.mark.parametrize("calls", [1, 3])
def test_outputs_that_are_there_are_left_alone(calls):
    """This holds for the first call, handled in Python, and for a later one."""
    foot = tensor()
    expected = foot.sort(1)
    with dtrrun.budget(64 * MIB) as session:
        for _ in range(calls):
            values, indices = foot.sort(1)
        address = torch._C.TensorBase.data_ptr(indices)
        evict_all(session, [values])
        assert torch.equal(values, expected.values)
        assert torch._C.TensorBase.data_ptr(indices) == address
        check_accounts(session)


@pytest.mark.parametrize("needed", ["both", "one"])
def test_an_operation_with_two_results_runs_once_for_what_needs_them(needed):
    foot = tensor()
    values, indices = foot.sort(1)
    expected = values.gather(1, indices) if needed == "both" else values * 2
    with dtrrun.budget(64 * MIB, cost="model") as session:
        for _ in range(3):
            values, indices = foot.sort(1)
            made = values.gather(1, indices) if needed == "both" else values * 2
            other = indices + 1  # so that its recipe has both outputs
            del values, indices
        evict_all(session, [made, other])
        assert torch.equal(made, expected)
        assert session.dtr.rematerializer.by_operator["aten.sort"][0] == 1
        others = [version.operation.signature.operator.name for version in session.ledger.scratch]
        assert others == (["aten.sort"] if needed == "both" else []), "what another recipe reads may stay"


@pytest.mark.parametrize("view", ["view", "detach"])
def test_a_view_is_a_use_of_what_it_shows_unless_it_is_for_autograd_alone(view):
    with dtrrun.budget("1GB") as session:
        made = tensor().tanh()
        for _ in range(2):
            made.view(-1), made.detach()
        evict_all(session, [made])
        getattr(made, view)(*([-1] if view == "view" else []))
        assert in_memory(made) == (view == "view")


@pytest.mark.parametrize("mutated", [False, True])
def test_room_is_made_for_what_a_replay_makes_and_copies(mutated):
    foot = tensor()
    expected = foot.tanh() * (2 if mutated else 1)
    limit = (3 if mutated else 2) * MIB + MIB // 2
    with dtrrun.budget(64 * MIB, cost="model") as session:
        for _ in range(3):
            made = foot.tanh()
            reader = made.exp()  # so that the old version is copied
            if mutated:
                made.mul_(2)
            other = foot.sigmoid()
        evict_all(session, [made, reader])
        session.set_budget(limit)
        session.ledger.peak_bytes = session.ledger.step_peak_bytes = 0
        made.view(-1)
        assert MIB < session.ledger.peak_bytes <= limit
        assert not in_memory(other)
        check_accounts(session)
    assert torch.equal(made, expected)


@pytest.mark.parametrize("read", [False, True])
def test_a_mutation_that_runs_again_takes_a_memory_that_nothing_else_reads(read):
    foot = tensor()
    expected = foot.tanh()
    with dtrrun.budget(64 * MIB, cost="model") as session:
        for _ in range(3):
            made = foot.tanh()
            reader = made.exp() if read else foot.sigmoid()
            made.mul_(2)
        evict_all(session, [made, reader])
        session.ledger.peak_bytes = session.ledger.step_peak_bytes = 0
        made.view(-1)
        assert session.ledger.peak_bytes == (3 if read else 2) * MIB
        check_accounts(session)
        reader.view(-1)
        assert session.dtr.rematerializer.by_operator["aten.tanh"][0] == 1
        check_accounts(session)
    assert torch.equal(made, expected * 2)
    assert torch.equal(reader, expected.exp() if read else foot.sigmoid())


def test_what_a_replay_makes_in_vain_is_part_of_the_peak():
    foot = tensor()
    with dtrrun.budget(64 * MIB, cost="model") as session:
        for _ in range(3):
            made = foot.sort(1)[0] * 2
        evict_all(session, [made])
        session.ledger.peak_bytes = session.ledger.step_peak_bytes = 0
        made.view(-1)
        assert session.ledger.peak_bytes == 4 * MIB  # including the indices


def test_a_replay_that_makes_other_bytes_gives_them_to_nobody():
    with dtrrun.budget("1GB", cost="model") as session:
        made = [torch.ones(64) * 2 for _ in range(3)][-1]
        evict_all(session, [made])
        version = session.callbacks.version_of(made)
        version.nbytes += 64
        with pytest.raises(AssertionError, match="mul, run again, made 256 bytes in place of 320"):
            made.sum()
        version.nbytes -= 64
        assert made.sum() == 128
        check_accounts(session)


def test_what_only_one_recipe_reads_goes_at_once():
    foot = tensor()
    with dtrrun.budget(64 * MIB) as session:
        top = foot.tanh().add(1).tanh().add(1).tanh()
        expected = top.clone()
        evict_all(session, [top])
        assert torch.equal(top, expected)
        assert session.report()["rematerializations"] == 5
        assert not session.ledger.scratch


def test_known_operators_keep_to_the_budget():
    with dtrrun.budget(8 * MIB) as session:
        kept = [tensor()]
        for _ in range(30):
            kept.append(kept[-1].tanh())
        assert not session.callbacks.reasons.any
        report = session.report()
    assert report["evictions"] > 20
    assert report["peak_bytes"] <= 8 * MIB


def test_what_dies_while_it_is_recomputed_is_counted_once(monkeypatch):
    """This happens when another thread drops it."""
    x = tensor()

    def dies(_name, compute):
        kept.clear()
        compute()

    use_replays(monkeypatch, dies)
    with dtrrun.budget(None) as session:
        kept = [x.sin()]
        result = kept[0].exp()
        version = session.callbacks.version_of(kept[0])
        assert session.dtr.eviction.evict_if_possible(version)
        version.locks += 1
        session.dtr.rematerializer.materialize([version])
        version.locks -= 1
        check_accounts(session)
        assert torch.equal(result, x.sin().exp())


@pytest.mark.parametrize("recorded", ["known", "first"])
def test_what_a_cycle_alone_holds_may_go_while_room_is_made_for_its_reader(recorded):
    """The collector runs before a budget is found to be too small, and may free such an input."""
    a, others = torch.arange(250_000.0), [torch.ones(250_000) for _ in range(2)]
    expected = (a * 2).sin().sum()
    with dtrrun.budget(4_300_000) as session:
        for _ in range(3 if recorded == "known" else 0):
            (a * 2).sin()
        x = a * 2
        y = x.sin()
        cycle = [x, others.pop()]
        cycle.append(cycle)
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(y))
        for constant in (*others, cycle[1]):
            session.callbacks.version_of(constant)
        del x, cycle, constant
        assert torch.equal(y.sum(), expected)
        assert session.report()["rematerializations"] >= 1
        check_accounts(session)


def test_the_memory_of_one_dependent_lives_as_long_as_the_recipe_of_another():
    """The rescue reaches `result` before `middle`, whose memory only the recipe of `result` keeps alive."""
    with dtrrun.budget("1GB", cost="model") as session:
        session.ledger.begin_pressure()
        dtr, version_of = session.dtr, session.callbacks.version_of
        weight = torch.ones(1024)
        first, second = weight.sin(), weight.cos()
        middle = first.tan()
        result = middle + second
        evicted = middle.exp()
        for dear in (middle, evicted):
            version_of(dear).cost = 10**9
        for one in (evicted, result):
            assert dtr.eviction.evict_if_possible(version_of(one))
        assert len(version_of(result).operation.kept_inputs) == 1
        del first, second, middle
        dtr.ledger.collect_dead()
        # Restored by other means than its own rematerialization, which would release what was kept for it.
        dtr.ledger.restored(version_of(result))
        dtr.mutation.rescue_dependents(version_of(weight))
        assert version_of(result).operation is None
        dtr.rematerializer.materialize((version_of(evicted),), locked=False)
        assert torch.equal(evicted, weight.sin().tan().exp())
