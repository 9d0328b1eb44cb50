"""Lightning's strategy for FSDP2, started by torchrun."""

import lightning
import results
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from networks import mlp, rows
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

lightning.seed_everything(0, verbose=False)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None
        self.losses = []

    def configure_model(self):
        if self.net is None:
            self.net = mlp()
            for block in self.net:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, place):
        inputs, kinds = batch
        loss = cross_entropy(self.net(inputs), kinds)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
    max_epochs=1,
    logger=False,
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader([rows() for _ in range(8)], batch_size=None))
shards = {name: parameter.to_local() for name, parameter in model.named_parameters()}
results.write(shards=shards, losses=model.losses)
