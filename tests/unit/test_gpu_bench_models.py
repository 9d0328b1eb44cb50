"""The models of tests/bench/gpu have the published sizes, and each trains, checkpointed or not."""

import importlib
import math

import pytest
import torch
from torch import nn

from tests.bench.gpu.cases import BY_NAME, CASES
from tests.bench.gpu.models.densenet import DenseNet
from tests.bench.gpu.models.gpt2 import GPT2
from tests.bench.gpu.models.inception_v4 import InceptionV4
from tests.bench.gpu.models.lstm import LSTM
from tests.bench.gpu.models.resnet import ResNet
from tests.bench.gpu.models.transformer import Transformer
from tests.bench.gpu.models.treelstm import Node, TreeLSTM
from tests.bench.gpu.models.unet import UNet
from tests.bench.gpu.models.unrolled_gan import UnrolledGAN, adam, mlp

PUBLISHED = {
    "InceptionV4": (lambda: InceptionV4(1000), 42_679_816),
    "DenseNet-121": (lambda: DenseNet((6, 12, 24, 16), 32, 1000), 7_978_856),
    "ResNet-110": (lambda: ResNet(18), 1_727_962),  # 1.7 M in He et al., Table 6
    "ResNet-1202": (lambda: ResNet(200), 19_421_274),  # 19.4 M there
    "U-Net": (lambda: UNet(3, 1, bilinear=False), 31_037_633),
    "U-Net, bilinear": (lambda: UNet(3, 1), 17_262_977),
    "GPT-2": (GPT2, 124_439_808),
}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    build, published = PUBLISHED[name]
    with torch.device("meta"):
        assert count(build()) == published


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_transformer_is_as_large_as_pytorchs_own():
    with torch.device("meta"):
        assert count(Transformer()) == count(nn.Transformer(nhead=16, num_encoder_layers=12))


def test_full_sizes_have_the_published_shapes():
    with torch.device("meta"):
        size = BY_NAME["inception_v4"].size["size"]
        assert InceptionV4(1000)(torch.empty(2, 3, size, size)).shape == (2, 1000)
        assert UNet(3, 1)(torch.empty(1, 3, 416, 608)).shape == (1, 1, 416, 608)
        features = []
        block = InceptionV4(1000).blocks
        x = torch.empty(1, 3, size, size)
        for one in block:
            x = one(x)
            features.append((x.shape[1], x.shape[2]))
        # Figs. 3 and 9 of the paper: after the stem, after each reduction, at the end.
        assert (features[2], features[7], features[15], features[-1]) == (
            (384, 35),
            (1024, 17),
            (1536, 8),
            (1536, 8),
        )


def test_lstm_is_the_published_one():
    ours, theirs = LSTM(5, 7), nn.LSTM(5, 7)
    with torch.no_grad():
        # PyTorch orders the gates as input, forget, candidate, output.
        order = torch.cat([torch.arange(7) + 7 * gate for gate in (0, 1, 3, 2)])
        ours.cell.x.weight.copy_(theirs.weight_ih_l0[order])
        ours.cell.x.bias.copy_((theirs.bias_ih_l0 + theirs.bias_hh_l0)[order])
        ours.cell.h.weight.copy_(theirs.weight_hh_l0[order])
    sequence = torch.randn(4, 3, 5)
    _, (_, cell) = theirs(sequence)
    torch.testing.assert_close(ours(sequence), cell[0])


def test_attention_is_pytorchs():
    layer = Transformer(width=8, heads=2, encoders=1, decoders=0, inner=16, dropout=0.0).encoders[0]
    theirs = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    ours = layer.attentions[0]
    with torch.no_grad():
        parts = (ours.query, ours.key, ours.value)
        theirs.self_attn.in_proj_weight.copy_(torch.cat([part.weight for part in parts]))
        theirs.self_attn.in_proj_bias.copy_(torch.cat([part.bias for part in parts]))
    theirs.self_attn.out_proj.load_state_dict(ours.out.state_dict())
    theirs.linear1.load_state_dict(layer.feed[0].state_dict())
    theirs.linear2.load_state_dict(layer.feed[3].state_dict())
    x = torch.randn(3, 5, 8)
    torch.testing.assert_close(layer(x), theirs(x))


def test_trees_are_complete():
    def nodes(node):
        return 1 + sum(map(nodes, node.children))

    assert nodes(Node(5, 1, 1, "cpu")) == 2**6 - 1
    assert TreeLSTM(3, 4)(Node(2, 6, 3, "cpu")).shape == (6, 4)


def test_unrolled_steps_are_adams():
    torch.manual_seed(1)  # some gradients are almost 0, so that it matters where epsilon is added
    network = mlp(2, 4, 1)
    x = torch.randn(6, 2)
    state = {n: (p, torch.zeros_like(p), torch.zeros_like(p)) for n, p in network.named_parameters()}
    for step in (1, 2, 3):
        loss = torch.func.functional_call(network, {n: s[0] for n, s in state.items()}, (x,)).square().mean()
        gradients = torch.autograd.grad(loss, [s[0] for s in state.values()], create_graph=True)
        state = adam(state, gradients, step, lr=1e-2)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2, betas=(0.5, 0.999))
    values = {name: one[0].detach() for name, one in state.items()}
    for _ in range(3):
        optimizer.zero_grad()
        network(x).square().mean().backward()
        optimizer.step()
    for name, parameter in network.named_parameters():
        torch.testing.assert_close(values[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_the_generators_gradient_goes_through_all_unrolled_steps():
    torch.manual_seed(0)
    model = UnrolledGAN(3, 4)
    state = model.unrolled(8, "cpu", unroll=3, lr=0.1)
    gradients = torch.autograd.grad(sum(one[0].sum() for one in state.values()), model.generator.parameters())
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_trains_and_checkpointing_saves_less_and_changes_no_bits(case):
    module = importlib.import_module(f"tests.bench.gpu.models.{case.module}")
    losses, saved = {}, {}
    for checkpointing in (False, True) if case.blocks else (False,):
        torch.manual_seed(0)
        task = module.task("cpu", checkpointing, **case.tiny)
        kept = {}

        def note(tensor, kept=kept):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            first = float(task.step())
        losses[checkpointing] = (first, float(task.step()))
        saved[checkpointing] = sum(kept.values())
        assert all(map(math.isfinite, losses[checkpointing]))
        assert len(set(losses[checkpointing])) == 2
    assert len(set(losses.values())) == 1
    assert not case.blocks or saved[True] < saved[False]


def test_the_prototypes_figures_are_whole():
    for case in CASES:
        assert case.shares
        assert all(0 < share < 1 for share in case.shares)
        assert list(case.shares) == sorted(case.shares, reverse=True)
        if case.prototype:
            given = case.prototype
            assert len(given.budgets) == len(given.shares) == len(given.ratios)
            assert all(case.prototype_ratio(share) in given.ratios for share in case.shares)
