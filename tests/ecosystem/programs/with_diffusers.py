"""diffusers: a small UNet learns to denoise, with an exponential average of its weights."""

import results
import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(32, 64),
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    norm_num_groups=8,
)
average = EMAModel(model.parameters(), decay=0.9)
schedule = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(6):
    clean, noise = torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16)
    times = torch.randint(0, 100, (8,))
    predicted = model(schedule.add_noise(clean, noise, times), times).sample
    loss = torch.nn.functional.mse_loss(predicted, noise)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, average=average.shadow_params, losses=losses)
