"""stable-baselines3: proximal policy optimization on a pole that has to be balanced."""

import results
import torch
from stable_baselines3 import PPO

torch.set_num_threads(1)
model = PPO(
    "MlpPolicy",
    "CartPole-v1",
    n_steps=256,
    batch_size=64,
    n_epochs=2,
    seed=0,
    device="cpu",
    policy_kwargs={"net_arch": [256, 256]},
)
model.learn(512)
results.write(model=model.policy, optimizer=model.policy.optimizer)
