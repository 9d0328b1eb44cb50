"""torchdiffeq: a neural differential equation, through the solver and by the adjoint method."""

import results
import torch
from torch import nn
from torchdiffeq import odeint, odeint_adjoint

torch.manual_seed(0)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, time, state):
        return self.net(state**3)


model = Field()
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
start, times = torch.rand(200, 2), torch.linspace(0, 1, 10)
losses = []
for step in range(6):
    optimizer.zero_grad()
    solve = odeint_adjoint if step % 2 else odeint
    loss = solve(model, start, times, method="dopri5").abs().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
