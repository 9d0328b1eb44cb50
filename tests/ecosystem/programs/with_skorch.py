"""skorch: a network as a scikit-learn estimator, with validation between epochs."""

import numpy
import results
import torch
from networks import mlp, rows
from skorch import NeuralNetClassifier

torch.manual_seed(0)
numpy.random.seed(0)
x, y = rows()
net = NeuralNetClassifier(
    mlp(),
    criterion=torch.nn.CrossEntropyLoss,
    optimizer=torch.optim.Adam,
    max_epochs=3,
    batch_size=len(x) // 4,
    verbose=0,
)
net.fit(x.numpy(), y.numpy())
results.write(model=net.module_, optimizer=net.optimizer_, losses=net.history[:, "train_loss"])
