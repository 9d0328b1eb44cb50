"""A small GPT-2 learns random text with Hugging Face's Trainer, optionally with gradient checkpointing."""

import os
import sys
import tempfile

import results
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

TOKENS, LENGTH = 1000, 64

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4))
texts = torch.randint(0, TOKENS, (64, LENGTH))

trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        gradient_checkpointing="--checkpointing" in sys.argv,
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
results.write(model=model, optimizer=trainer.optimizer, losses=losses)
