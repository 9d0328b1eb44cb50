"""GPyTorch: an exact Gaussian process fits its kernel's parameters."""

import gpytorch
import results
import torch

torch.manual_seed(0)
x = torch.linspace(0, 1, 400)
y = torch.sin(6 * x) + 0.1 * torch.randn(400)


class Process(gpytorch.models.ExactGP):
    def __init__(self, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, points):
        return gpytorch.distributions.MultivariateNormal(self.mean(points), self.kernel(points))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = Process(likelihood)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
losses = []
for _ in range(6):
    optimizer.zero_grad()
    loss = -objective(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
