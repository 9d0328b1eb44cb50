"""x-transformers: an autoregressive decoder with rotary positions."""

import results
import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
layers = Decoder(dim=96, depth=4, heads=4, rotary_pos_emb=True, attn_dropout=0.1, ff_glu=True)
model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
for _ in range(6):
    loss = model(torch.randint(0, 256, (8, 65)))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
results.write(model=model, optimizer=optimizer, losses=losses)
