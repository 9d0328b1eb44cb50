"""A small BERT learns masked tokens with Hugging Face's Trainer, optionally with gradient checkpointing."""

import sys
import tempfile

import results
import torch
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainingArguments, set_seed

TOKENS, LENGTH, MASK = 1000, 64, 1

set_seed(0)
config = BertConfig(
    vocab_size=TOKENS,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=512,
    max_position_embeddings=LENGTH,
)
model = BertForMaskedLM(config)


def sample():
    labels = torch.randint(2, TOKENS, (LENGTH,))
    masked = torch.rand(LENGTH) < 0.15
    return {
        "input_ids": labels.where(~masked, MASK),
        "attention_mask": torch.ones(LENGTH, dtype=torch.long),
        "labels": labels.where(masked, -100),
    }


trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing="--checkpointing" in sys.argv,
    ),
    train_dataset=[sample() for _ in range(64)],
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
results.write(model=model, optimizer=trainer.optimizer, losses=losses)
