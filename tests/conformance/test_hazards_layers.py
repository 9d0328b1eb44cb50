"""Layers with state, in-place parts, opaque operators or packed inputs."""

import pytest
import torch
from programs import batch, chain, check, check_budget, check_stress, mlp, train
from torch import nn
from torch.nn import functional as F


def test_embedding_renormalised_in_place_by_its_forward():
    def program():
        table = nn.Embedding(64, 32, max_norm=1.0)
        head = mlp(3)
        optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], 0.5)
        losses = []
        for _ in range(3):
            loss = head(table(torch.arange(64))).square().mean() + table(torch.arange(32)).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, table, head

    check(program)


def test_convnet_with_batchnorm_dropout_and_inplace_relu():
    def program():
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(inplace=True),
            nn.Dropout(0.2, inplace=True), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 32),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        result = train(model, lambda: (torch.randn(8, 3, 12, 12), torch.randn(8, 32)), optimizer)
        model.eval()
        with torch.no_grad():
            result["eval"] = model(torch.randn(8, 3, 12, 12))
        return result

    check(program)


def test_residual_network_shares_one_inplace_relu():
    def program():
        layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
        relu = nn.ReLU(inplace=True)

        def forward(x):
            for layer in layers:
                y = layer(x)
                y += x
                x = relu(y)
            return x

        optimizer = torch.optim.SGD(layers.parameters(), 0.01)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = forward(torch.randn(64, 32)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return losses, layers

    check(program)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules(kind):
    def program(layers, *lengths):
        both = layers > 1
        net = kind(16, 24, layers, batch_first=True, dropout=0.1 * both, bidirectional=both)
        optimizer = torch.optim.Adam(net.parameters(), 1e-2)
        losses = []
        for length in lengths:
            each = torch.tensor([length, max(length - 1, 1), 1])
            packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, length, 16), each, batch_first=True)
            output, state = net(packed)
            padded, _ = nn.utils.rnn.pad_packed_sequence(output)
            loss = padded.square().mean()
            if both:
                loss = loss + net(torch.randn(3, length, 16))[0].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses += [loss, state]
        return losses, net

    # If nothing is kept in between, the work at least doubles with every time step.
    check_stress(lambda: program(1, 1 if kind is nn.GRU else 2))
    check_budget(lambda: [chain(torch.randn(64, 64), 12), program(2, 5, 3)])


def test_lstm_inference_uses_one_opaque_operator():
    def program():
        net = nn.LSTM(16, 24, num_layers=2).eval()
        with torch.no_grad():
            outputs = [net(x) for x in chain(torch.randn(12, 4, 16))]
        x = torch.randn(12, 4, 16, requires_grad=True)
        loss = net(x)[0].square().mean()
        loss.backward()
        return outputs, net, x.grad

    check(program)


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_with_dropout_then_its_nested_fast_path(norm_first):
    def program():
        layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.1, batch_first=True, activation="gelu", norm_first=norm_first
        )
        model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=not norm_first)
        mask = torch.zeros(4, 10, dtype=torch.bool)
        mask[1, 6:] = True
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        losses = []
        for _ in range(2):
            loss = model(torch.randn(4, 10, 32), src_key_padding_mask=mask).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss)
        model.eval()
        with torch.no_grad():
            seen = model(torch.sin(torch.randn(4, 10, 32)), src_key_padding_mask=mask)
        return losses, seen, model

    check(program)


@pytest.mark.parametrize("causal", [False, True])
def test_scaled_dot_product_attention_with_dropout(causal):
    def program():
        q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
        x = q * 1.0
        for _ in range(4):
            x = F.scaled_dot_product_attention(x, k, v, dropout_p=0.3, is_causal=causal)
            x = F.scaled_dot_product_attention(x, k, v, is_causal=causal)
        x.square().sum().backward()
        return x, q.grad, k.grad, v.grad

    check(program)


def test_weight_normalisations_that_update_buffers():
    def program():
        model = nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.ReLU(),
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.ReLU(),
            torch.nn.utils.parametrizations.orthogonal(nn.Linear(32, 32)),
        )  # fmt: skip
        return train(model, batch, torch.optim.SGD(model.parameters(), 0.1))

    check(program)


def test_copies_of_a_workspace_are_not_verified():
    """Parts of oneDNN's workspace are never written, but hooks on saved tensors copy them, too."""

    def program():
        model = nn.LSTM(16, 16)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t):
            outputs = [model(torch.randn(6, 8, 16))[0].square().sum() for _ in range(3)]
        sum(outputs).backward()
        return outputs, model

    for _ in range(3):
        check_stress(program)


def test_batch_sizes_that_the_backward_pass_of_packing_looks_into():
    def program():
        x = torch.randn(3, 3, 8).requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(x.sin(), torch.tensor([3, 2, 1]), batch_first=True)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(packed._replace(data=packed.data * 2))
        return torch.autograd.grad(unpacked.square().sum(), x)

    check_stress(program)


@pytest.mark.parametrize("copies", [0, 1, 2])
def test_attention_that_asks_whether_its_inputs_are_one_tensor(copies):
    def program():
        attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
        x = torch.randn(3, 5, 8).sin()
        inputs = [x] * (3 - copies) + [x.view_as(x) for _ in range(copies)]
        with torch.no_grad():
            return attention(*inputs), chain(torch.ones(8))

    check_stress(program)
