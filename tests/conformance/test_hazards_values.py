"""Random operators and their generators, several outputs, views that may be the input itself."""

import pytest
import torch
from programs import check, check_stress, plain
from torch import nn
from torch.nn import functional as F


def test_random_operators_and_their_generators():
    def program():
        own = torch.Generator().manual_seed(11)
        x, kept = torch.randn(64, 32), []
        for step in range(5):
            kept += [
                F.dropout(x, 0.3), torch.bernoulli(x.sigmoid()), x.clone().bernoulli_(0.4),
                torch.rand(64, 32, generator=own), torch.randn_like(x),
                torch.randint(0, 9, (64, 32), generator=own), torch.randperm(64),
                torch.multinomial(x.softmax(1), 4), torch.normal(x, x.abs()),
                torch.empty(64, 32).normal_(generator=own), torch.empty(64, 32).exponential_(),
                torch.poisson(x.abs()), torch.rrelu(x, training=True), F.gumbel_softmax(x),
                F.feature_alpha_dropout(x, 0.2), torch.distributions.Gamma(x.abs() + 1, 1.0).sample(),
                torch.full((64, 32), step * 0.1).log_normal_().uniform_(generator=own),
            ]  # fmt: skip
        return kept, own.get_state(), torch.get_rng_state()

    check(program)


def test_rematerialization_leaves_the_generator_where_the_program_put_it():
    def program():
        own, kept = torch.Generator().manual_seed(5), []
        for step in range(4):
            mask = torch.rand(64, 32, generator=own)
            noise = torch.randn(64, 32)
            own.manual_seed(step)
            torch.manual_seed(step)
            kept += [
                mask,
                noise,
                (mask * 2).sum(),
                (noise * 2).sum(),
                torch.rand(3, generator=own),
                torch.rand(3),
            ]
        with torch.random.fork_rng():
            kept.append(torch.rand(64, 32))
        return kept, own.get_state(), torch.rand(4)

    check_stress(program)


def test_several_outputs_of_which_some_are_dropped():
    def program():
        kept = []
        for step in range(3):
            x = torch.sin(torch.randn(32, 32) + step)
            values, _ = x.max(1)
            _, order = x.sort(1)
            var, mean = torch.var_mean(x, 0)
            top = x.topk(3)
            normed, average, deviation = torch.native_layer_norm(x, [32], None, None, 1e-5)
            del average
            first, *_, last = x.split(8)
            part = x.chunk(4)[2]
            q, r = torch.linalg.qr(x)
            del q
            u, s, v = torch.linalg.svd(x)
            del u
            unique, inverse = torch.unique((x * 4).round(), return_inverse=True)
            frame, exponent = torch.frexp(x)
            pooled, where = F.max_pool1d(x[None], 2, return_indices=True)
            a, b = torch.aminmax(x, dim=0)
            kept += [
                values,
                order,
                var,
                top,
                normed,
                deviation,
                first,
                last,
                part,
                r,
                s,
                v,
                inverse,
                exponent,
            ]
            kept += [frame, pooled, where, b, x.unbind()[3], torch.meshgrid(x[0], x[1], indexing="ij")[0]]
            kept += [torch.histc(x), mean * 2, unique.numel(), torch.linalg.slogdet(x + 9 * torch.eye(32)), a]
        return kept

    check(program)


def test_views_that_may_be_their_input():
    def program():
        kept = []
        for step in range(5):
            x = torch.sin(torch.randn(32, 32) + step)
            same = [
                x.contiguous(),
                x.to(torch.float32),
                x.reshape(32, 32),
                x.float(),
                x.cpu(),
                x.expand(32, 32),
            ]
            same += [x.requires_grad_(False), x.type_as(x), x.flatten(0, 0), x.view_as(x), x.resolve_conj()]
            other = [x.t().contiguous(), x.double(), x.t().reshape(-1), x.to(torch.float32, copy=True)]
            x.mul_(2)  # visible to results that are views of it
            kept += [same, other, x, [y * 2 for y in same]]
        return kept

    check(program)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_composite_that_reads_memory_itself(context):
    """One-dimensional max pooling calls no operator if no gradient is needed."""

    def program():
        with context():
            x = torch.randn(4, 16)
            kept = [x.sin(), x.cos()]
            return [F.max_pool1d(one, 2) for one in kept], [nn.MaxPool1d(3)(one) for one in kept], kept

    check_stress(program, plain(program), by_address=True)
