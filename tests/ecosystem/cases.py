"""The cases: programs of this folder, how they are started, and expectations besides equal bits."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """`percent`: the budget to try first, in % of the plain peak; 60 where feasible. `warns`: how each of
    dtrrun's warnings begins."""

    name: str
    title: str
    program: str
    arguments: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    processes: int = 1
    packages: tuple[str, ...] = ("torch",)
    percent: int = 60
    warns: tuple[str, ...] = ()


TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (
    *("accelerate", "launch", "--cpu", "--num_processes", "1", "--num_machines", "1"),
    *("--mixed_precision", "no", "--dynamo_backend", "no"),
)
HUGGING_FACE = {"packages": ("transformers", "accelerate")}
CHECKPOINTING = {
    "arguments": ("--checkpointing",),
    "warns": ("the program uses gradient checkpointing",),
    **HUGGING_FACE,
}
TWO = {"launcher": TORCHRUN, "processes": 2}

CASES = (
    Case("bert", "BERT (masked tokens), `Trainer`", "bert.py", **HUGGING_FACE),
    Case("bert-checkpointing", "BERT, `gradient_checkpointing`", "bert.py", **CHECKPOINTING, percent=90),
    Case("gpt2", "GPT-2, `Trainer`, gradients accumulated", "gpt2.py", **HUGGING_FACE),
    Case("gpt2-checkpointing", "GPT-2, `gradient_checkpointing`", "gpt2.py", **CHECKPOINTING, percent=80),
    Case("gpt2-ddp", "GPT-2, `Trainer` by `torchrun`, 2 processes", "gpt2.py", **HUGGING_FACE, **TWO),
    Case("accelerate", "BERT by `accelerate launch`", "bert.py", launcher=ACCELERATE, **HUGGING_FACE),
    Case(
        "find-batch",
        "`find_executable_batch_size` of accelerate",
        "find_batch.py",
        packages=("accelerate",),
        percent=20,
    ),
    Case("gcn", "GCN of torch_geometric", "gcn.py", packages=("torch_geometric",), percent=80),
    Case("ddp", "DDP by `torchrun`, gloo, 2 processes", "ddp.py", **TWO),
    Case("fsdp", "FSDP2 (`fully_shard`) by `torchrun`, gloo, 2 processes", "fsdp.py", **TWO, percent=70),
    Case(
        "gpt2-fsdp",
        "GPT-2, `Trainer` with `fsdp`, FSDP2, 2 processes",
        "trainer_fsdp.py",
        **HUGGING_FACE,
        **TWO,
    ),
    Case(
        "lightning-fsdp",
        "Lightning, `ModelParallelStrategy` (FSDP2), 2 processes",
        "lightning_fsdp.py",
        packages=("lightning",),
        **TWO,
    ),
    Case("pipeline", "`torch.distributed.pipelining`, 1F1B, 2 stages", "pipeline.py", **TWO),
    Case("functional", "`torch.func`: vmap, grad, jacrev, functional_call", "functional.py"),
    Case("compile", "`torch.compile`", "compiled.py"),
    Case("autocast", "`torch.autocast`, bfloat16", "autocast.py"),
    Case("channels-last", "`channels_last`", "channels_last.py"),
    Case("data-parallel", "`nn.DataParallel` on the CPU", "data_parallel.py"),
    Case("checkpoint", "`torch.save` in mid-training, `torch.load`, resuming", "checkpoint.py", percent=70),
    Case("averages", "EMA by `deepcopy`, `AveragedModel`", "averages.py"),
    *(
        Case(
            f"{model}-loaded",
            f"{title}, loaded weights, `Trainer`",
            "loaded.py",
            arguments=(model,),
            packages=("transformers", "safetensors"),
        )
        for model, title in (("llama", "Llama"), ("mixtral", "Mixtral"), ("t5", "T5"), ("vit", "ViT"))
    ),
    Case("lora", "LoRA on a loaded Llama", "lora.py", packages=("peft", "transformers")),
    *(
        Case(package, title, f"with_{package.replace('-', '_')}.py", packages=(package,))
        for package, title in (
            ("lightning", "Lightning, bf16-mixed, gradients accumulated"),
            ("diffusers", "diffusers, a denoising UNet with EMA"),
            ("gpytorch", "GPyTorch, exact inference"),
            ("pyro-ppl", "Pyro, variational inference"),
            ("torchdiffeq", "torchdiffeq, solver and adjoint"),
            ("opacus", "Opacus, gradients by sample"),
            ("skorch", "skorch, a classifier"),
            ("x-transformers", "x-transformers, a decoder"),
            ("stable-baselines3", "stable-baselines3, PPO"),
            ("e3nn", "e3nn, scripted tensor products"),
        )
    ),
)
