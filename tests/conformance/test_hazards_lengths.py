"""Composite operators that read an integer tensor before any operator runs."""

import torch
from programs import check_stress
from torch import nn


def test_packed_sequences_whose_lengths_were_evicted():
    def program():
        kept = []
        for kind in (nn.LSTM, nn.GRU, nn.RNN):
            cells = kind(8, 8)
            x = torch.sin(torch.randn(6, 4, 8))
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 5, 3, 1]))
            kept += [torch.sin(x), packed.data * 2]  # the batch sizes are no longer in memory
            result, _ = cells(packed)
            kept += [result.data.exp(), packed.data * 3]
            kept += nn.utils.rnn.pad_packed_sequence(result)
        return kept

    check_stress(program)


def test_split_points_that_were_evicted():
    def program():
        x = torch.sin(torch.randn(16, 8))
        points = torch.arange(3) * 4 + 2
        kept = [x * 2, x.exp()]
        return [*kept, *torch.tensor_split(x, points), *(x * 3).tensor_split(points + 1)]

    check_stress(program, by_address=True)
