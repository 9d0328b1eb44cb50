"""A small GPT-2 learns random text with Hugging Face's Trainer, sharded by FSDP2 through accelerate."""

import os
import tempfile

import results
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

TOKENS, LENGTH = 1000, 64
make = AcceleratorState.__init__


def make_sharded(state, *args, fsdp_plugin=None, **kwargs):
    """accelerate shards models on GPUs only."""
    make(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        state.fsdp_plugin = fsdp_plugin
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = make_sharded
set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4))
texts = torch.randint(0, TOKENS, (64, LENGTH))
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",
        fsdp=True,
        fsdp_config={"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["GPT2Block"]},
    ),
    train_dataset=[{"input_ids": text, "labels": text} for text in texts],
)
trainer.train()
assert isinstance(trainer.model_wrapped, torch.distributed.fsdp.FSDPModule)
shards = {name: parameter.to_local() for name, parameter in trainer.model_wrapped.named_parameters()}
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
results.write(shards=shards, losses=losses, rank=os.environ["RANK"])
dist.destroy_process_group()
