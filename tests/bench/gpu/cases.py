"""The models, their sizes, and the paper's prototype's measurements of them: only data, without torch.

The prototype's figures are from the data that the authors published with it (the paper's Fig. 4 and Table 1:
NVIDIA Titan V, CUDA 10.1; medians). Ratios are to unmodified PyTorch; a share is the peak allocation, which
in the prototype could exceed its budget, over that of unmodified PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prototype:
    """`budgets` and `plain_peak` in GB; `shares` and `ratios` correspond to `budgets`."""

    plain_ms: int
    plain_peak: float
    budgets: tuple[int, ...]
    shares: tuple[float, ...]
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class Largest:
    """A search for the largest `parameter`, in steps of `unit`, inside 12 GB (Table 1).

    `size` is what else differs from the case's size. From the paper: unmodified PyTorch's largest, DTR's, and
    DTR's time there in ms.
    """

    parameter: str
    unit: int
    paper_plain: int
    paper_dtr: int
    paper_ms: int
    size: dict[str, Any]


@dataclass(frozen=True)
class Case:
    """`size`: the arguments of `models/MODULE.task`; `tiny`: those for a test on a CPU."""

    name: str
    title: str
    module: str
    size: dict[str, Any]
    tiny: dict[str, Any]
    blocks: str = ""
    """The block of per-block checkpointing; empty: the model has none."""
    prototype: Prototype | None = None
    own_shares: tuple[float, ...] = ()
    largest: Largest | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        """Return the shares of the plain peak to run at, largest first; the prototype's if it ran it."""
        return tuple(sorted(self.prototype.shares if self.prototype else self.own_shares, reverse=True))

    def prototype_ratio(self, share: float) -> float | None:
        if self.prototype is None:
            return None
        return dict(zip(self.prototype.shares, self.prototype.ratios, strict=True)).get(share)


CASES = (
    Case(
        "inception_v4",
        "InceptionV4 (64), 299 × 299",
        "inception_v4",
        {"batch_size": 64, "size": 299, "classes": 1000},
        {"batch_size": 2, "size": 75, "classes": 10, "a": 1, "b": 1, "c": 1},
        "inception block",
        Prototype(632, 11.27, (10, 8, 6, 4), (0.89, 0.72, 0.55, 0.38), (1.07, 1.10, 1.15, 1.25)),
    ),
    Case(
        "densenet121",
        "DenseNet-121 (84), 224 × 224",
        "densenet",
        {"batch_size": 84, "size": 224, "layers": (6, 12, 24, 16), "growth": 32, "classes": 1000},
        {"batch_size": 4, "size": 64, "layers": (3, 3), "growth": 8, "classes": 10},
        "layer",
        Prototype(344, 11.03, (10, 8, 6, 4), (0.91, 0.73, 0.55, 0.39), (1.16, 1.22, 1.29, 1.52)),
    ),
    Case(
        "resnet1202",
        "ResNet-1202 (64), 32 × 32",
        "resnet",
        {"batch_size": 64, "size": 32, "n": 200},
        {"batch_size": 8, "size": 16, "n": 3},
        "residual block",
        Prototype(723, 8.91, (8, 6, 4, 2), (0.90, 0.67, 0.45, 0.23), (1.28, 1.35, 1.42, 1.47)),
        largest=Largest("batch_size", 4, 64, 140, 1394, {}),
    ),
    Case(
        "transformer",
        "Transformer (10), length 512",
        "transformer",
        {"batch_size": 10, "length": 512, "target_length": 20},
        {
            "batch_size": 4,
            "length": 32,
            "target_length": 8,
            "width": 32,
            "heads": 4,
            "encoders": 3,
            "decoders": 1,
            "inner": 64,
        },
        "layer",
        Prototype(285, 9.87, (8, 6, 4, 2), (0.82, 0.63, 0.43, 0.24), (1.11, 1.14, 1.19, 1.59)),
        largest=Largest("batch_size", 2, 30, 90, 1079, {"length": 256}),
    ),
    Case(
        "unet",
        "U-Net (6), 416 × 608",
        "unet",
        {"batch_size": 6, "height": 416, "width": 608, "base": 64},
        {"batch_size": 2, "height": 32, "width": 32, "base": 8},
        "two convolutions",
        Prototype(419, 8.42, (8, 7, 6, 4), (0.98, 0.99, 0.75, 0.82), (1.07, 1.09, 1.14, 1.25)),
        largest=Largest("batch_size", 1, 7, 10, 1155, {}),
    ),
    Case(
        "lstm",
        "LSTM (256 steps), in 512, hidden 1700",
        "lstm",
        {"batch_size": 512, "length": 256, "inputs": 512, "hidden": 1700},
        {"batch_size": 16, "length": 24, "inputs": 16, "hidden": 64},
        prototype=Prototype(1412, 11.12, (10, 8, 6, 4), (0.90, 0.72, 0.54, 0.36), (1.23, 1.25, 1.29, 1.41)),
    ),
    Case(
        "treelstm",
        "TreeLSTM (depth 9), node 640, hidden 300",
        "treelstm",
        {"batch_size": 640, "depth": 9, "inputs": 100, "hidden": 300},
        {"batch_size": 32, "depth": 4, "inputs": 16, "hidden": 32},
        prototype=Prototype(1262, 8.93, (8, 6, 4, 2), (0.90, 0.67, 0.45, 0.22), (1.65, 1.85, 2.09, 3.02)),
        largest=Largest("depth", 1, 6, 9, 7890, {"batch_size": 1024, "inputs": 300, "hidden": 1024}),
    ),
    Case(
        "unrolled_gan",
        "Unrolled GAN (512), 60 steps, 2048",
        "unrolled_gan",
        {"batch_size": 512, "unroll": 60, "latent": 4096, "hidden": 2048},
        {"batch_size": 64, "unroll": 4, "latent": 32, "hidden": 32},
        prototype=Prototype(6056, 11.17, (10, 8, 6), (0.90, 0.72, 0.54), (1.09, 1.10, 1.17)),
    ),
    Case(
        "gpt2",
        "GPT-2 124M (8), length 1024, bf16",
        "gpt2",
        {"batch_size": 8},
        {"batch_size": 4, "vocabulary": 100, "context": 32, "width": 32, "heads": 2, "depth": 3},
        "layer",
        own_shares=(0.90, 0.70, 0.55, 0.40),
    ),
)

BY_NAME = {case.name: case for case in CASES}
