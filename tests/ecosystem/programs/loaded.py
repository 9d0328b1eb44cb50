"""Fine-tunes a Hugging Face model, loaded from safetensors, with Trainer: loaded.py llama."""

import sys
import tempfile

import results
import torch
import transformers
from transformers import Trainer, TrainingArguments, set_seed

TOKENS, LENGTH, WIDTH = 500, 48, 96
TEXT = {"vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "num_hidden_layers": 4}
MODELS = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "num_attention_heads": 4}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": TOKENS,
            "d_model": WIDTH,
            "d_kv": 24,
            "d_ff": 3 * WIDTH,
            "num_layers": 3,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{name: TEXT[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 4,
            "num_labels": 10,
        },
    ),
}

set_seed(0)
model_name, config_name, settings = MODELS[sys.argv[1]]
make = getattr(transformers, model_name)
with tempfile.TemporaryDirectory() as folder:
    make(getattr(transformers, config_name)(**settings)).save_pretrained(folder)
    model = make.from_pretrained(folder)

if sys.argv[1] == "vit":
    data = [{"pixel_values": torch.rand(3, 32, 32), "labels": place % 10} for place in range(64)]
else:
    texts = torch.randint(2, TOKENS, (64, LENGTH))
    data = [{"input_ids": text, "labels": text} for text in texts]

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
    ),
    train_dataset=data,
)
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
results.write(model=model, buffers=dict(model.named_buffers()), optimizer=trainer.optimizer, losses=losses)
