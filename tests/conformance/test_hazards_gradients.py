"""Gradients, graphs that are used several times, hooks, checkpointing."""

import pytest
import torch
from programs import batch, check, check_budget, check_stress, in_memory, mlp, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import dtrrun
from dtrrun.runtime.access import Access


def test_gradients_are_read_after_the_weights_changed():
    def program():
        model = mlp(5)
        kept = []
        for _ in range(3):
            inputs, targets = batch()
            loss = F.l1_loss(model(inputs), targets)
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    gradient = parameter.grad
                    parameter -= 0.1 * gradient
                    kept += [gradient, gradient * 2]
                    parameter.grad = None
        return kept, model

    check_stress(program)


def test_gradients_stay_in_memory():
    """A gradient is pinned from its arrival: reading its address brings nothing back."""
    with dtrrun.budget(1, over_budget="evict") as session:
        model = mlp(3)
        leaf = torch.randn(64, 32, requires_grad=True)
        made = torch.randn(64, 32).sin().requires_grad_()  # a leaf that the ledger knew before it became one
        (model(leaf) * made).sum().backward()
        torch.randn(64, 32).exp()
        before = session.report()["rematerializations"]
        for tensor in [leaf, made, *model.parameters()]:
            assert in_memory(tensor.grad)
        assert session.report()["rematerializations"] == before
        assert session.report()["evictions"] > 0


@pytest.mark.parametrize("budget", [None, 1])
def test_gradients_arrive_natively(extension, budget, monkeypatch):
    """Python pins only gradients that are unknown, sparse or evicted, or all while operators are observed."""
    in_python = []
    pin = Access.pin
    monkeypatch.setattr(Access, "pin", lambda self, *what: in_python.append(what) or pin(self, *what))
    with dtrrun.budget(budget, over_budget="evict") as session:
        model = mlp(3)
        words = nn.Embedding(16, 32, sparse=True)
        (model(torch.randn(64, 32)).sum() + words(torch.arange(4)).sum()).backward()
        del in_python[:]
        (model(torch.randn(64, 32)).sum() + words(torch.arange(4)).sum()).backward()
        assert [gradient.layout for gradient, _ in in_python] == [torch.sparse_coo]
        pins = {session.callbacks.version_of(one.grad).pin for one in model.parameters()}
        assert pins == {"gradient"}
        del in_python[:]
        session.callbacks.reasons.add("a test")
        model(torch.randn(64, 32)).sum().backward()
        assert len(in_python) == len(list(model.parameters()))


def test_leaves_that_no_module_has():
    def program():
        leaves = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
        late = torch.randn(32, 32).sin().requires_grad_()
        seen = []
        for step in range(3):
            x = (late * (step + 1)).repeat(8, 1)
            for leaf in leaves:
                x = torch.tanh(x @ leaf)
            x.sum().backward()
            seen.append([leaf.grad.clone() for leaf in leaves])
            with torch.no_grad():
                for leaf in [*leaves, late]:
                    leaf -= leaf.grad.sign() * 0.1
                    if step == 1:
                        leaf.grad.zero_()
        return seen, leaves, late, late.grad

    check(program)


def test_retained_graph_and_nonleaf_gradients():
    def program():
        model = mlp(5)
        inputs, targets = batch()
        hidden = model[:4](inputs)
        hidden.retain_grad()
        loss = F.l1_loss(model[4:](hidden), targets)
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]
        loss.backward(retain_graph=True)
        (loss * 2).backward()
        return first, hidden.grad, model, loss

    check(program)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_double_backward_gradient_penalty(optimizer):
    def program():
        critic = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
        opt = optimizer(critic.parameters(), 1e-2)
        losses = []
        for _ in range(3):
            x = torch.randn(64, 32, requires_grad=True)
            score = critic(x)
            (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = score.mean() + ((gradient.norm(dim=1) - 1) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses += [loss, gradient]
        return losses, critic

    check(program)


def test_maml_inner_steps_by_functional_call():
    def program(inner_steps=3):
        model = mlp(2)
        outer = torch.optim.Adam(model.parameters(), 1e-2)
        losses = []
        for _ in range(2):
            fast = dict(model.named_parameters())
            inputs, targets = batch()
            for _ in range(inner_steps):
                inner = F.mse_loss(torch.func.functional_call(model, fast, (inputs,)), targets)
                gradients = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
                fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), gradients, strict=True)}
            loss = F.mse_loss(torch.func.functional_call(model, fast, (inputs,)), targets)
            outer.zero_grad()
            loss.backward()
            outer.step()
            losses.append(loss)
        return losses, model

    check_budget(program)
    check_stress(lambda: program(1))  # if nothing is kept in between, the work grows exponentially with depth


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    def program():
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.3), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )
        head = mlp(2)
        optimizer = torch.optim.SGD([*blocks.parameters(), *head.parameters()], 0.1)
        losses = []
        for _ in range(2):
            x = torch.randn(64, 32, requires_grad=True)
            y = x
            for block in blocks:
                y = checkpoint(block, y, use_reentrant=reentrant)
            y = checkpoint_sequential(head, 2, y, use_reentrant=reentrant)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss, x.grad]
        return losses, blocks, head

    check(program)


def test_hooks_see_and_replace_tensors():
    def program():
        model = mlp(4)
        seen = []
        model[2].register_forward_hook(lambda _m, _i, output: seen.append(output) or output * 1.5)
        model[4].register_full_backward_hook(lambda _m, gi, go: seen.extend([*gi, *go]))
        model[0].weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 0.5)
        model[2].weight.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.clone()))
        result = train(model, batch, torch.optim.SGD(model.parameters(), 0.1))
        return result, seen

    check_stress(program)


def with_saved_tensors_hooks(pack, unpack):
    def program():
        model = mlp(4)
        inputs, targets = batch()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone() + 0, lambda t: t * 1):
            first = F.l1_loss(model(inputs), targets)
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            second = F.l1_loss(model(inputs), targets)
        with torch.autograd.graph.save_on_cpu():
            third = F.l1_loss(model(inputs), targets)
        (first + second + third).backward()
        return first, second, third, model

    return program


def test_saved_tensors_hooks():
    check(with_saved_tensors_hooks(lambda t: t.detach() * 2, lambda t: t / 2))


def test_saved_tensors_hooks_that_hand_the_memory_out():
    """What was handed out stays, and so does all that is computed from it: little is left to evict."""
    check_stress(with_saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy))


def test_lazy_modules_whose_parameters_have_no_size_yet():
    def program():
        model = torch.nn.Sequential(torch.nn.LazyLinear(32), torch.nn.Tanh(), torch.nn.LazyLinear(32))
        model(torch.zeros(1, 32))
        return train(model, batch, torch.optim.SGD(model.parameters(), 0.1))

    check_stress(program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_noticed_once_where_dtrrun_recomputes_as_well(reentrant, capsys):
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)) for _ in range(6))
    optimizer = torch.optim.SGD(blocks.parameters(), 0.1)

    def train(checkpointing):
        for _ in range(3):
            x = torch.randn(512, 64, requires_grad=True)
            for block in blocks:
                x = checkpoint(block, x, use_reentrant=reentrant) if checkpointing else block(x)
            x.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for budget, checkpointing, times in ((None, True, 0), (1_600_000, False, 0), (1_200_000, True, 1)):
        with dtrrun.budget(budget) as session:
            train(checkpointing)
        report = session.report()
        assert budget is None or report["rematerializations"]
        assert [warning["count"] for warning in report["warnings"]] == [1] * times
        assert capsys.readouterr().err.count("uses gradient checkpointing") == times
