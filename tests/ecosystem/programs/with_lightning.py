"""Lightning: bf16-mixed, gradients accumulated and clipped, a callback that averages weights."""

import lightning
import results
import torch
from networks import convnet, images
from torch.nn.functional import cross_entropy

lightning.seed_everything(0, verbose=False)


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = convnet()
        self.losses = []

    def training_step(self, batch, place):
        pictures, kinds = batch
        loss = cross_entropy(self.net(pictures), kinds)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)]


model = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=1,
    precision="bf16-mixed",
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, torch.utils.data.DataLoader([images() for _ in range(12)], batch_size=None))
results.write(model=model, optimizer=trainer.optimizers[0], losses=model.losses)
