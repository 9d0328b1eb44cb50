"""Trains a program on a GPU, and prints a digest of all that should be equal: `on_a_gpu.py NAME`.

Libraries of others train small models of theirs. Widths are small and batches large, so that activations are
most of the peak, as in large models, and a CPU computes them in seconds. Run by tests/bench/gpu_bits.py.
"""

import ctypes
import gc
import hashlib
import json
import sys
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

DEVICE, STEPS = "cuda", 8


def train(model, loss_of, optimizer=None):
    """Take steps with `loss_of(model)`. Return the losses, and what the optimizer changes."""
    model.to(DEVICE).train()
    weights = [one for one in model.parameters() if one.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(weights, 1e-3)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *weights, *model.buffers()]


def nano_gpt():
    """The model and the loop of nanoGPT: float16 with a GradScaler, gradients accumulated and clipped."""
    heads, width, length, vocabulary = 2, 32, 128, 64  # a CPU has no fast products in half precision

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
            self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.dropout = nn.Dropout(0.1)

        def forward(self, x):
            parts = self.attend(self.norms[0](x)).split(width, dim=2)
            q, k, v = (one.view(*x.shape[:2], heads, width // heads).transpose(1, 2) for one in parts)
            found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            x = x + self.dropout(self.project(found.transpose(1, 2).contiguous().view_as(x)))
            return x + self.dropout(self.shrink(F.gelu(self.grow(self.norms[1](x)))))

    class GPT(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(3)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
            self.tokens.weight = self.head.weight

        def forward(self, tokens):
            x = self.tokens(tokens) + self.places(torch.arange(length, device=tokens.device))
            return self.head(self.norm(self.blocks(x)))

    model = GPT().to(DEVICE)
    scaler, optimizer = torch.amp.GradScaler(DEVICE), torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    losses = []
    for _ in range(STEPS):
        for _ in range(2):
            tokens = (
                torch.randint(0, vocabulary, (288, length + 1)).pin_memory().to(DEVICE, non_blocking=True)
            )
            with torch.autocast(DEVICE, torch.float16):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return [torch.tensor(losses), *model.parameters()]


def trainer():
    """GPT-2 with Hugging Face's Trainer, in bfloat16."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    model = GPT2LMHeadModel(GPT2Config(vocab_size=500, n_positions=128, n_embd=64, n_layer=4, n_head=2))
    texts = torch.randint(0, 500, (64 * STEPS, 128))
    options = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "logging_steps": 1}
    options |= {"per_device_train_batch_size": 64, "max_steps": STEPS}
    with tempfile.TemporaryDirectory() as folder:
        made = Trainer(
            model=model,
            args=TrainingArguments(folder, bf16=True, full_determinism=True, **options),
            train_dataset=[{"input_ids": one, "labels": one} for one in texts],
        )
        made.train()
    losses = [entry["loss"] for entry in made.state.log_history if "loss" in entry]
    return [torch.tensor(losses), *model.parameters()]


def peft():
    """LoRA on a Llama."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    config._attn_implementation = "eager"
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=8, lora_dropout=0.1, task_type="CAUSAL_LM"))

    def loss_of(model):
        tokens = torch.randint(0, 500, (32, 128), device=DEVICE)
        return model(input_ids=tokens, labels=tokens).loss

    return train(model, loss_of)


def accelerate():
    """BERT with Accelerate: its data loader, mixed precision, gradients accumulated."""
    from accelerate import Accelerator
    from transformers import BertConfig, BertForMaskedLM

    helper = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    config = BertConfig(
        vocab_size=500, hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=384
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    texts = torch.utils.data.TensorDataset(torch.randint(0, 500, (64 * 2 * STEPS, 96)))
    loader = torch.utils.data.DataLoader(texts, 64, shuffle=True)
    model, optimizer, loader = helper.prepare(model, optimizer, loader)
    losses = []
    for (tokens,) in loader:
        with helper.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            helper.backward(loss)
            if helper.sync_gradients:
                helper.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(helper.gather(loss.detach()).mean())
    return [torch.stack(losses), *model.parameters()]


def diffusers():
    """A denoising UNet, with an exponential average of its weights."""
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel

    model = UNet2DModel(
        sample_size=32,
        layers_per_block=1,
        block_out_channels=(32, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    ).to(DEVICE)
    average = EMAModel(model.parameters(), decay=0.9)
    schedule = DDPMScheduler(num_train_timesteps=100)

    def loss_of(model):
        clean, noise = torch.randn(2, 24, 3, 32, 32, device=DEVICE)
        times = torch.randint(0, 100, (24,), device=DEVICE)
        found = F.mse_loss(model(schedule.add_noise(clean, noise, times), times).sample, noise)
        average.step(model.parameters())
        return found

    return [*train(model, loss_of), *average.shadow_params]


def timm_vit():
    """A vision transformer of timm, with stochastic depth."""
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=64,
        patch_size=4,
        embed_dim=64,
        depth=6,
        num_heads=2,
        num_classes=10,
        drop_path_rate=0.1,
    )

    def loss_of(model):
        images = torch.randn(32, 3, 64, 64, device=DEVICE).to(memory_format=torch.channels_last)
        return F.cross_entropy(model(images), torch.randint(0, 10, (32,), device=DEVICE))

    return train(model, loss_of)


def detection():
    """An SSDlite of torchvision: anchors matched to boxes of varying number."""
    from torchvision.models.detection import ssdlite320_mobilenet_v3_large

    def loss_of(model):
        counts = torch.randint(1, 5, (4,)).tolist()
        corners = [torch.rand(n, 2, device=DEVICE) * 200 for n in counts]
        extents = [30 + 80 * torch.rand(n, 2, device=DEVICE) for n in counts]
        boxes = [torch.cat([one, one + far], 1) for one, far in zip(corners, extents, strict=True)]
        images = list(torch.rand(4, 3, 320, 320, device=DEVICE))
        kinds = [torch.randint(1, 5, (n,), device=DEVICE) for n in counts]
        targets = [{"boxes": one, "labels": kind} for one, kind in zip(boxes, kinds, strict=True)]
        return sum(model(images, targets).values())

    model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=5)
    return train(model, loss_of, torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9))


def whisper():
    """OpenAI's Whisper, from random spectrograms to random text."""
    from whisper.model import ModelDimensions, Whisper

    sizes = ModelDimensions(
        n_mels=80,
        n_audio_ctx=200,
        n_audio_state=64,
        n_audio_head=2,
        n_audio_layer=3,
        n_vocab=500,
        n_text_ctx=64,
        n_text_state=64,
        n_text_head=2,
        n_text_layer=3,
    )
    model = Whisper(sizes)
    with torch.no_grad():  # which the model leaves as they are
        model.decoder.positional_embedding.normal_(0, 0.02)

    def loss_of(model):
        mel = torch.randn(32, 80, 400, device=DEVICE)
        tokens = torch.randint(0, 500, (32, 64), device=DEVICE)
        return F.cross_entropy(model(mel, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return train(model, loss_of)


def open_clip():
    """CLIP of open_clip, with its own loss."""
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    model = CLIP(
        64,
        CLIPVisionCfg(layers=4, width=64, head_width=32, patch_size=8, image_size=64),
        CLIPTextCfg(context_length=32, vocab_size=500, width=64, heads=2, layers=4),
    )
    loss = ClipLoss()

    def loss_of(model):
        images = torch.randn(96, 3, 64, 64, device=DEVICE)
        texts = torch.randint(1, 500, (96, 32), device=DEVICE)
        return loss(*model(images, texts)[:3])

    return train(model, loss_of)


def torchdiffeq():
    """A neural differential equation, through the solver and by the adjoint method."""
    from torchdiffeq import odeint, odeint_adjoint

    class Field(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))

        def forward(self, time, state):
            return self.net(state**3)

    step = iter(range(STEPS))

    def loss_of(model):
        solve = odeint_adjoint if next(step) % 2 else odeint
        start, times = torch.rand(20_000, 2, device=DEVICE), torch.linspace(0, 1, 5, device=DEVICE)
        return solve(model, start, times, method="dopri5").abs().mean()

    return train(Field(), loss_of)


PROGRAMS = {
    "nanoGPT, fp16": nano_gpt,
    "HF Trainer, bf16": trainer,
    "PEFT": peft,
    "Accelerate, bf16": accelerate,
    "diffusers": diffusers,
    "timm": timm_vit,
    "torchvision, detection": detection,
    "Whisper": whisper,
    "open_clip": open_clip,
    "torchdiffeq": torchdiffeq,
}


def digest(tensors):
    found = hashlib.sha256()
    for one in tensors:
        if isinstance(one, torch.Tensor):
            one = one.detach().to_dense().cpu().contiguous()
            found.update(f"{one.dtype} {tuple(one.shape)}".encode())
            found.update(one.view(-1).view(torch.uint8).numpy().tobytes() if one.numel() else b"")
        else:
            found.update(repr(one).encode())
    return found.hexdigest()


def main(name):
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(0)
    found = digest([*PROGRAMS[name](), torch.rand(1, device=DEVICE)])
    peak = ctypes.CDLL(None).hollow_peak
    peak.restype, peak.argtypes = ctypes.c_uint64, [ctypes.c_int]
    gc.collect()
    free, total = torch.cuda.mem_get_info()
    figures = {
        "digest": found,
        "driver": peak(0),
        "peak": torch.cuda.max_memory_allocated(),
        "beside": total - free - torch.cuda.memory_reserved(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
