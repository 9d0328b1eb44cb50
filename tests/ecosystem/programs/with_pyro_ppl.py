"""Pyro: stochastic variational inference of a Bayesian network's weights."""

import pyro
import results
import torch
from pyro.distributions import Normal
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDiagonalNormal
from pyro.nn import PyroModule, PyroSample
from torch import nn

pyro.set_rng_seed(0)


class Network(PyroModule):
    def __init__(self):
        super().__init__()
        self.first = PyroModule[nn.Linear](8, 64)
        self.first.weight = PyroSample(Normal(0.0, 1.0).expand([64, 8]).to_event(2))
        self.second = PyroModule[nn.Linear](64, 64)
        self.third = PyroModule[nn.Linear](64, 1)
        self.third.weight = PyroSample(Normal(0.0, 1.0).expand([1, 64]).to_event(2))

    def forward(self, x, y=None):
        hidden = torch.tanh(self.first(x))
        for _ in range(3):
            hidden = torch.tanh(self.second(hidden))
        mean = self.third(hidden).squeeze(-1)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", Normal(mean, 0.1), obs=y)


x = torch.randn(2000, 8)
model = Network()
guide = AutoDiagonalNormal(model)
inference = SVI(model, guide, pyro.optim.Adam({"lr": 1e-2}), Trace_ELBO(num_particles=4))
losses = [inference.step(x, x.sum(1)) for _ in range(6)]
results.write(guide=guide, losses=losses)
