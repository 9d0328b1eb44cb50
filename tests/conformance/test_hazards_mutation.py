"""In-place operators, `out=`, writes through views, constants that change, uninitialised memory."""

import pytest
import torch
from programs import batch, chain, check, check_stress, living_nodes, mlp
from torch import nn

import dtrrun
from dtrrun.bindings import load
from dtrrun.runtime import operators

CHAIN_LIMIT = load().CHAIN_LIMIT


def test_chain_of_mutations_whose_old_versions_are_needed():
    def program():
        kept = []
        x = torch.sin(torch.randn(64, 32))
        for step in range(10):
            before = x.exp()  # computed from this version, evicted and recomputed after the next one
            x.mul_(0.9).add_(step * 0.1).clamp_(-2, 2)
            x += before * 0.01
            kept.append(before)
        return kept, x

    check(program)


def test_mutation_with_itself_as_input():
    def program():
        kept = []
        for step in range(8):
            x = torch.cos(torch.randn(64, 32) + step)
            x.add_(x)
            x.mul_(x)
            x.addcmul_(x, x, value=0.5)
            x.sub_(x.detach(), alpha=0.25)
            kept.append(x)
        return kept

    check(program)


def test_mutation_through_views():
    def program():
        kept = []
        for step in range(8):
            x = torch.sin(torch.randn(32, 32) + step)
            y = x * 2
            x[3:9] += y[3:9]
            x[:, ::2].mul_(3)
            x.t()[5].copy_(y[7])
            x.view(-1)[::7].zero_()
            x.diagonal().fill_(0.5)
            x[torch.tensor([1, 4])] = y[torch.tensor([2, 3])]
            x.index_add_(0, torch.tensor([0, 2]), y[:2])
            x.masked_fill_(y > 1, -1.0)
            x.unfold(0, 4, 4)[0].neg_()
            x.transpose_(0, 1).unsqueeze_(0).squeeze_(0)
            kept += [x, y, x[2]]
        return kept

    check(program)


def test_mutation_seen_by_autograd():
    def program():
        w = torch.randn(64, 32, requires_grad=True)
        total = 0.0
        for step in range(6):
            x = torch.sin(w * step)
            x[::2] *= 2
            x = x.clone()
            x.relu_()
            x = (x + 0.1).sqrt_()
            x = torch.nn.functional.hardtanh_(x + 1, -1, 1.7)
            total = total + (x * x.exp()).sum()
        total.backward()
        return total, w.grad

    check(program)


def test_out_arguments():
    def program():
        x, y = (torch.sin(torch.randn(64, 32)) for _ in range(2))
        kept = []
        for step in range(6):
            out, other = torch.empty(64, 32), torch.empty(0)
            torch.add(x, y, alpha=step, out=out)
            older = out * 2
            torch.mul(out, out, out=out)  # `out` is its own input
            values, indices = torch.empty(0), torch.empty(0, dtype=torch.long)
            torch.max(out, 1, out=(values, indices))
            torch.cat([out, older], out=other)  # resized by the operator
            half = torch.zeros(64, 32)
            torch.exp(x[:32], out=half[32:])  # writes only a part of it
            kept += [out, older, values, indices, other, half]
        return kept

    check(program)


def test_foreach_operators():
    def program():
        many = [torch.sin(torch.randn(32, 32) + i) for i in range(6)]
        kept = []
        for step in range(2):
            sums = torch._foreach_add(many, step)
            older = [x.exp() for x in many]
            torch._foreach_mul_(many, 0.5)
            torch._foreach_add_(many, sums, alpha=0.1)
            torch._foreach_addcdiv_(many, sums, older, 0.1)
            torch._foreach_sqrt_(sums[:3])
            torch._foreach_lerp_(many, older, 0.1)
            torch._foreach_copy_(older[2:], many[2:])
            torch._foreach_clamp_max_(many, 3.0)
            kept += [sums, older, torch._foreach_norm(many)]
        return kept, many

    check_stress(program)
    check(lambda: [program(), chain(torch.randn(64, 64), 12)])


def test_autograd_sees_what_a_foreach_operator_overwrites():
    """PyTorch counts these writes in the operators called in turn, which a dispatch mode hides."""

    def program():
        seen = []
        for mutate in (torch._foreach_mul_, torch._foreach_add_):
            for scalar in (2.0, [torch.full((), 2.0)] * 2):
                weights = [torch.ones(64, 32, requires_grad=True) for _ in range(2)]
                saved = [weight.exp() for weight in weights]
                loss = sum(one.sum() for one in saved)
                with torch.no_grad():
                    mutate(saved, scalar)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
                seen += [saved, [one._version for one in saved]]
        return seen

    check(program)


def test_views_that_autograd_has_given_up():
    """Autograd cannot even say whether several views of an overwritten tensor are leaves."""

    def program():
        kept = []
        for step in range(4):
            x = torch.randn(9, 32, requires_grad=True).sin()
            first, second, third = x.split(3)
            with torch.no_grad():
                x.mul_(2 + step)
                kept += [first + 1, *torch._foreach_add([second, third], 1.0)]
                second.mul_(2)
                kept += [x * 2, third.detach().sin()]
            with pytest.raises(RuntimeError, match="returns multiple views"):
                first + 1
        return kept

    check_stress(program)


def test_what_is_overwritten_takes_what_the_allocator_rounds_it_to():
    """When a replay makes it again, 32 bytes take 64."""
    with dtrrun.budget("1MB", cost="model") as session:
        x = torch.empty(8)
        x.zero_()
        version = session.callbacks.version_of(x)
        assert session.dtr.eviction.evict_if_possible(version)
        session.set_budget(session.report()["resident_bytes"] + 63)
        with pytest.raises(dtrrun.BudgetError):
            session.dtr.rematerializer.materialize([version])
        assert not version.resident
        session.set_budget("1MB")
    assert x.tolist() == [0.0] * 8


def test_uninitialised_memory_becomes_replayable_when_it_is_overwritten():
    def program():
        source = torch.sin(torch.randn(64, 32))
        kept = []
        for step in range(5):
            made = [torch.empty(64, 32) for _ in range(6)]
            made[0].fill_(step)
            made[1].copy_(source)
            made[2].normal_()
            made[3][:32] = source[:32]  # in parts
            made[3][32:] = 1.0
            torch.mul(source, 3, out=made[4])
            made[5].t().zero_()
            like = torch.empty_like(source).bernoulli_(0.3)
            new = source.new_empty(32, 64).t().uniform_()
            strided = torch.empty_strided((64, 32), (1, 64)).copy_(source)
            made[1].add_(made[0])
            kept += [*made, like, new, strided, torch.zeros(64, 32), torch.full((64, 32), 2.5)]
        return kept

    report = check_stress(program)
    assert report["pinned_bytes"] <= 5 * 8192 + 4096, "only what is written in parts can't be replayed"
    check(program)


def test_what_an_operator_overwrites_in_part_or_reads_itself():
    """They have as many elements as the memory, but some elements overlap."""

    def program():
        kept = []
        for _ in range(4):
            whole = torch.arange(64.0).sin()
            whole.as_strided((8, 8), (1, 1)).fill_(7)
            square = torch.arange(64.0).cos().view(8, 8)
            square.copy_(square.as_strided((8, 8), (1, 1)))
            kept += [whole, square]
        return kept

    check_stress(program)


def test_a_recipe_has_so_many_mutations_at_most():
    with dtrrun.budget("1GB") as session:
        total = torch.ones(64) * 2
        longest = 0
        for _ in range(3 * CHAIN_LIMIT):
            total.add_(1)
            version = session.callbacks.version_of(total)
            length = 0
            while version.operation is not None and version.operation.inputs:
                [version] = version.operation.inputs
                length += 1
            longest = max(length, longest)
        assert longest == CHAIN_LIMIT + 1  # plus the product


def test_weights_change_while_what_they_made_is_evicted():
    def program():
        weight = nn.Parameter(torch.randn(32, 32))
        buffer = torch.randn(32, 32)
        kept = []
        for step in range(5):
            x = torch.randn(64, 32)
            first = x @ weight
            second = torch.sin(first) @ buffer
            third = second.tanh()  # two recipes away from the weight
            kept += [first, second, third]
            with torch.no_grad():
                weight -= 0.1 * step
                buffer.mul_(0.5)
                weight.data.clamp_(-1, 1)
        return kept, weight, buffer

    check_stress(program)
    check(lambda: [program(), chain(torch.randn(64, 64))])


def test_input_mutated_by_the_program_after_its_use():
    def program():
        pages, kept = torch.randn(64, 32), []
        for step in range(6):
            kept.append((pages * step).sin())
            kept.append(kept[-1].exp())
            pages.normal_()  # every batch uses the same memory
            pages[0] = step
        return kept, pages

    check_stress(program)


@pytest.mark.parametrize("budget_bytes", [80_000, 400_000])  # more would be ample, and only counted
def test_kept_losses_do_not_pile_up_records(budget_bytes):
    """There are as many records and operators after 50 steps as after 10, apart from the kept losses."""
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    kept, counts = [], {}

    with dtrrun.budget(budget_bytes, over_budget="evict") as session:
        for step in range(50):
            inputs, targets = batch()
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            kept.append(loss)
            if step in (9, 29, 49):
                counts[step] = sum(living_nodes(session)) - len(kept)
        assert (session.report()["evictions"] > 0) == (budget_bytes < 100_000)
        assert session.report()["live_storages"] < 100 + len(kept)
    assert counts[49] <= counts[9] + 10, counts


@pytest.mark.parametrize("keep", ["loss", "activation"])
def test_dead_graphs_are_freed_with_their_storages(keep):
    """What a step leaves behind does not stay in memory because part of it is kept."""
    model = mlp(4, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    kept, resident = [], []
    with dtrrun.budget(1 << 20, over_budget="evict") as session:
        for _ in range(12):
            hidden = model[:2](torch.randn(64, 64))
            loss = model[2:](hidden).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kept.append(loss.detach() if keep == "loss" else hidden.detach())
            session.report()
            resident.append(session.report()["resident_bytes"])
    each = 64 if keep == "loss" else 64 * 64 * 4
    assert resident[-1] - resident[3] <= 8 * each, resident


def test_a_loss_that_is_held_over_a_step_does_not_hold_the_logits():
    """A local variable still has them when the weights change, so they become constants."""
    weight = torch.randn(64, 512, requires_grad=True)
    with dtrrun.budget(8 << 20) as session:
        for _ in range(3):
            logits = torch.randn(512, 64) @ weight
            shares = logits.softmax(-1)
            loss = shares.exp().square().mean()
            assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(shares))
            loss.backward()
            with torch.no_grad():
                weight -= weight.grad
            weight.grad = None
            held = loss.detach()
            del loss, logits, shares
            assert session.report()["resident_bytes"] < 512 * 512 * 4
        assert held.isfinite()


def test_failed_mutation_leaves_a_constant():
    def program():
        kept = []
        for _ in range(6):
            x = torch.sin(torch.randn(64, 32))
            y = x.exp()
            with pytest.raises(RuntimeError):
                x.add_(torch.ones(7))
            with pytest.raises(IndexError):
                x.index_add_(5, torch.tensor([0]), y)
            x.mul_(2)
            kept += [x, y]
        return kept

    check(program)


HALF_WRITTEN = {
    "scatter_": lambda x, y, rows: x.scatter_(0, rows[:, None].expand(3, 32), y[:3]),
    "index_put_": lambda x, y, rows: x.index_put_((rows,), y[:3]),
    "index_copy_": lambda x, y, rows: x.index_copy_(0, rows, y[:3]),
    "index_fill_": lambda x, y, rows: x.index_fill_(0, rows, 5.0),
}


@pytest.mark.parametrize("write", HALF_WRITTEN.values(), ids=HALF_WRITTEN.keys())
def test_mutation_that_fails_half_way(write):
    """The rows before the bad index have been written when the operator raises."""

    def program():
        kept = []
        for step in range(4):
            x = torch.sin(torch.randn(64, 32) + step)
            y = x.exp()
            before = x.clone()
            with pytest.raises((RuntimeError, IndexError)):
                write(x, y, torch.tensor([0, 1, 99]))
            assert not torch.equal(x, before)
            kept += [x, y, x * 2]
        return kept

    check(program)


def test_resize_set_data_and_swap():
    def program():
        kept = []
        for step in range(6):
            x, y = (torch.sin(torch.randn(32, 32) + step) for _ in range(2))
            first = x * 2
            x.data = y.exp()
            second = x * 3
            x.resize_(16, 32)
            third = x + 1
            x.resize_(64, 32).fill_(step)
            z = torch.cos(y)
            z.set_(first)
            fourth = z * 4
            z.set_(second.untyped_storage(), 32, (8, 4), (4, 1))
            w = torch.randn(3).resize_as_(first).copy_(first)
            torch.utils.swap_tensors(fourth, third)
            kept += [x, y, z, w, first, second, third, fourth, z * 5]
        return kept

    check(program)


def test_parameters_replaced_by_data_and_swap():
    def program():
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        losses = []
        for step in range(3):
            inputs, targets = batch()
            optimizer.zero_grad()
            loss = nn.functional.l1_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss)
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.9
                parameter.grad.data = parameter.grad.data + 1
            other = nn.Linear(32, 32)
            torch.utils.swap_tensors(model[0].weight, other.weight)
            if step == 1:
                model.double().float()
        return losses, model

    check_stress(program)


def test_a_workspace_that_an_operator_leaves_changed_beside_its_results(monkeypatch):
    """As in backward passes of cuDNN's batch normalization, which take running statistics but ignore them."""
    name = "dtrrun_test_backward"
    statistics = operators.RunningStatistics((1, 2), None, False)
    monkeypatch.setitem(operators._STATISTICS, f"aten::{name}", statistics)
    monkeypatch.setattr(operators, "_WRITES_UNSAID", {f"aten::{name}": (3,)})

    def backward(x, _mean, _variance, reserve):
        result = x * 2 + reserve
        reserve.mul_(3)
        return result

    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x, Tensor? mean, Tensor? variance, Tensor reserve) -> Tensor")
        library.impl(name, backward, "CPU")

        def program():
            kept = []
            mean, variance = torch.zeros(32), torch.ones(32)
            for _ in range(12):
                x = torch.randn(32, 32).sin()
                reserve = x.exp()
                kept += [x, reserve, getattr(torch.ops.aten, name)(x, mean, variance, reserve)]
                mean += 1
            return kept

        check(program)


def test_what_is_overwritten_becomes_a_constant_while_room_is_made():
    """Its own input is gone, and what was computed from it is evicted for the operator that changes it."""

    def program(source, copied):
        for _ in range(2):  # so that C++ knows the calls
            warm = torch.ones(1000) * 2
            warm.mul_(2.0).add_(1.0)
            torch.ones(1000).copy_(warm)
        copied.sum().item()
        changed = source.pop() * 2
        changed.mul_(2.0)
        copied.copy_(changed)
        changed.add_(1.0)
        return changed.sum().item(), copied.sum().item()

    source, copied = torch.rand(1000), torch.rand(1000)
    expected = program([source.clone()], copied.clone())
    for budget in (1, 4000, 8000):
        given = [source.clone()], copied.clone()
        with dtrrun.budget(budget, over_budget="evict", quiet=True):
            assert program(*given) == expected


def test_of_several_that_are_overwritten_one_was_computed_from_another():
    def program():
        rows = torch.rand(64, 1000)
        values = torch.rand(1000)
        for _ in range(3):
            torch.max(rows, 0, out=(torch.rand(1000), torch.zeros(1000, dtype=torch.long)))
        places = (values * 1000).long()
        tripled = places * 3
        after = tripled + 1
        total = rows.exp().sum()
        torch.max(rows, 0, out=(values, places))
        return tripled, after, values, places, total

    check_stress(program)


@pytest.mark.parametrize("operator", [torch.add, torch.mul])
def test_an_out_that_is_too_large_keeps_its_rest(operator):
    def program():
        base = torch.rand(3000)
        made = []
        for step in range(4):
            out = torch.cat([base, base * 3]) + step
            rest = out[3000:]
            operator(base * 1.5, base + 2, out=out)
            made += [out, rest, base.exp().sin()]
        return made

    with pytest.warns(UserWarning, match="resized"):
        check(program)
