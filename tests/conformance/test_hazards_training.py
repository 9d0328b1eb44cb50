"""Whole small training loops, with optimizers and idioms that most scripts use."""

import copy

import pytest
import torch
from programs import batch, check, check_stress, mlp, train
from torch import nn
from torch.nn import functional as F

OPTIMIZERS = {
    "sgd momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True, amsgrad=True),
    "adam fused": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2, foreach=False),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer):
    def program():
        model = mlp(5)
        return train(model, lambda: batch(256), OPTIMIZERS[optimizer](model.parameters()))

    check(program)


def test_lbfgs_closure_runs_several_times_a_step():
    def program():
        model = mlp(2)
        inputs, targets = batch()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs), targets)
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(2)]
        return losses, model

    check(program)


def test_sparse_gradients():
    def program():
        table = nn.Embedding(50, 32, sparse=True)
        head = mlp(6)
        first = torch.optim.SparseAdam(list(table.parameters()), 1e-2)
        second = torch.optim.SGD(head.parameters(), 0.05)
        losses = []
        for _ in range(3):
            words = torch.randint(0, 50, (128,))
            loss = head(table(words)).square().mean()
            first.zero_grad()
            second.zero_grad()
            loss.backward()
            first.step()
            second.step()
            losses.append(loss.item())
        return losses, list(table.parameters()), table.weight.grad, head

    check(program)


def test_accumulation_clipping_scheduler_and_average():
    def program():
        model = mlp(5)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        seen = []
        for _ in range(3):
            for _ in range(2):
                inputs, targets = batch()
                (F.mse_loss(model(inputs), targets) / 2).backward()
            seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            optimizer.zero_grad(set_to_none=False)
        return seen, model, average, optimizer

    check(program)


def test_target_network_and_state_dicts():
    def program():
        online, target = mlp(4), mlp(4)
        target.load_state_dict(online.state_dict())
        optimizer = torch.optim.Adam(online.parameters(), 1e-2)
        losses, kept = [], []
        for step in range(4):
            x = torch.randn(256, 32)
            with torch.no_grad():
                goal = target(x)
            loss = F.smooth_l1_loss(online(x), goal + 1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(target.parameters(), online.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
            losses.append(loss)
            if step == 1:
                kept.append(copy.deepcopy(online.state_dict()))
                kept.append({name: value.clone() for name, value in online.state_dict().items()})
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        final = {name: value.clone() for name, value in online.state_dict().items()}
        online.load_state_dict(kept[1])
        restored = {name: value.clone() for name, value in online.state_dict().items()}
        return losses, kept, final, restored, target, optimizer

    check(program)


def test_gradient_scaler():
    def program():
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        losses = []
        for step in range(4):
            inputs, targets = batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(inputs).float(), targets) * (1e38 if step == 1 else 1.0)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss)
        return losses, model, scaler.get_scale()

    check(program)


def test_losses_and_gradients_that_are_kept_over_steps():
    def program():
        model = mlp(4)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        kept = []
        for _ in range(4):
            inputs, targets = batch()
            hidden = model[:3](inputs)
            loss = F.mse_loss(model[3:](hidden), targets)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            kept += [
                loss,
                hidden,
                [p.grad for p in model.parameters()],
                [p.grad * 2 for p in model.parameters()],
            ]
            optimizer.step()
        return kept

    check_stress(program)


class Averaging(nn.Module):
    """Has buffers that every forward pass replaces or partly overwrites."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.register_buffer("history", torch.zeros(8, 32))

    def forward(self, x):
        y = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.history = torch.roll(self.history, 1, 0)
        self.history[0] = self.mean
        return y + self.mean


def test_buffers_that_every_forward_replaces_and_tied_weights():
    def program():
        model = nn.Sequential(Averaging(), nn.ReLU(), Averaging(), nn.ReLU(), *mlp(4))
        model[4].weight = model[0].layer.weight
        return train(model, lambda: batch(256), torch.optim.SGD(model.parameters(), 0.1))

    check(program)


def test_a_memory_of_earlier_steps():
    """As in reinforcement learning: results of earlier weights are used again steps later."""

    def program():
        model, memory, losses = mlp(3), [], []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            with torch.no_grad():
                state = model(torch.randn(64, 32))
                memory.append((state, state.mean()))
            inputs = torch.stack([state for state, _ in memory[-3:]]).mean(0)
            reward = torch.tensor([reward for _, reward in memory])
            loss = (model(inputs) - reward.mean()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
            flat = nn.utils.parameters_to_vector(model.parameters())
            nn.utils.vector_to_parameters(flat * 0.99, model.parameters())
        return losses, memory, model

    check_stress(program)
