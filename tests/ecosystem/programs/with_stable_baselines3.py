"""stable-baselines3: proximal policy optimization on a pole that has to be balanced."""

import results
import torch
from stable_baselines3 import PPO

torch.set_num_threads(1)
model = PPO(
    "MlpPolicy",
    "CartPole-v1",
    n_steps=1024,
    batch_size=512,
    n_epochs=2,
    seed=0,
    device="cpu",
    policy_kwargs={"net_arch": [64, 64, 64, 64]},
)
model.learn(2048)
results.write(model=model.policy, optimizer=model.policy.optimizer)
