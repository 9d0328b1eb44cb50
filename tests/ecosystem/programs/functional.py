"""torch.func: gradients of every sample at once (vmap over grad over functional_call), clipped one by one."""

import results
import torch
from networks import mlp, rows
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
model = mlp(width=32, depth=3)
weights = dict(model.named_parameters())
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def loss_of(weights, x, y):
    return cross_entropy(functional_call(model, weights, (x[None],)), y[None])


by_sample = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0), randomness="different")
losses = []
for _ in range(6):
    x, y = rows(64, 32)
    gradients, values = by_sample({name: weight.detach() for name, weight in weights.items()}, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    scale = (1 / norms).clamp(max=1)
    for name, weight in weights.items():
        weight.grad = torch.einsum("b,b...->...", scale, gradients[name]) / len(x)
    optimizer.step()
    losses.append(values.mean().item())
model.eval()
jacobian = jacrev(lambda x: functional_call(model, weights, (x,)))(x[:4])
of_norm = grad(lambda x: functional_call(model, weights, (x,)).square().sum())(x)
results.write(model=model, losses=losses, jacobian=jacobian, of_norm=of_norm)
