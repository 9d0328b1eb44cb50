"""LoRA by peft: a loaded Llama is frozen, and small matrices beside its weights are trained."""

import tempfile

import results
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=500, hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
model = get_peft_model(model, LoraConfig(r=8, lora_dropout=0.1, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
model.train()
losses = []
for _ in range(6):
    tokens = torch.randint(0, 500, (16, 48))
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
