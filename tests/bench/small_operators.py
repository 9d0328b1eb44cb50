"""Ten training loops whose steps are many small operators: dtrrun's own work is what a budget costs there."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[], object]


def rows_in_place() -> Step:
    """Distributional Q-learning that moves probabilities row by row: 5,300 operators, 4,000 of them views."""
    net = nn.Sequential(nn.Linear(4, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 202))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    atoms, count = torch.linspace(-1, 1, 101), 512

    def step():
        x = torch.randn(count, 4)
        with torch.no_grad():
            p = net(x).view(count, 2, 101).softmax(-1)[:, 0]
            b = ((torch.randn(count, 1) + 0.99 * atoms).clamp(-1, 1) + 1) * 50
            low, high = b.floor().clamp(0, 100), b.ceil().clamp(0, 100)
            to_low, to_high = (high + (low == high).float() - b) * p, (b - low) * p
            target = torch.zeros_like(p)
            for i in range(count):
                target[i].index_add_(0, low[i].long(), to_low[i])
                target[i].index_add_(0, high[i].long(), to_high[i])
        logs = net(x).view(count, 2, 101).softmax(-1)[:, 0].clamp(1e-5, 1).log()
        optimizer.zero_grad()
        (-(target * logs).sum(-1)).mean().backward()
        optimizer.step()

    return step


def wave() -> Step:
    """Waveform inversion: finite differences, a record that is written to line by line."""
    size, times = 24, 120
    speed = nn.Parameter(torch.full((size, size), 1.65))
    optimizer = torch.optim.Adam([speed], lr=0.01)
    stencil = torch.tensor([[0.0, 1.0, 0.0], [1.0, -4.0, 1.0], [0.0, 1.0, 0.0]])[None, None]
    observed = torch.randn(times, 2, size) * 0.01

    def step():
        field = torch.zeros(2, size, size)
        before, record = torch.zeros_like(field), field.new_zeros(times, 2, size)
        for time in range(times):
            bend = F.conv2d(field[:, None], stencil, padding=1)[:, 0]
            after = (2 * field - before + (0.25 * speed).square() * bend) * 0.99
            after = after.clone()
            after[:, 5, 8] += float(torch.exp(torch.tensor(-((time * 0.1 - 1) ** 2))))
            record[time] = after[:, 12]
            before, field = field * 0.99, after
        optimizer.zero_grad()
        (record - observed).square().sum().backward()
        optimizer.step()

    return step


def cells() -> Step:
    """LSTM cells over 40 words, AdamW one tensor at a time."""
    words, width, length = 60, 24, 40
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words)
    layers = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(2))
    everything = nn.ModuleList([embedding, head, layers])
    optimizer = torch.optim.AdamW(everything.parameters(), foreach=False)
    text = torch.randint(0, words, (8, length + 1))

    def step():
        states = [torch.zeros(2, 8, width).unbind() for _ in layers]
        logits = []
        for word in text[:, :-1].T:
            x = embedding(word)
            for place, layer in enumerate(layers):
                states[place] = layer(x, states[place])
                x = states[place][0]
            logits.append(head(x))
        optimizer.zero_grad()
        F.cross_entropy(torch.stack(logits, 1).flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(everything.parameters(), 1.0)
        optimizer.step()

    return step


def distributions() -> Step:
    """A variational autoencoder over `torch.distributions`, one sample at a time."""
    encoder, decoder = nn.Linear(16, 8), nn.Sequential(nn.Linear(4, 16), nn.Softplus(), nn.Linear(16, 16))
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    data = torch.rand(24, 16).round()
    normal, bernoulli = torch.distributions.Normal, torch.distributions.Bernoulli

    def step():
        loss = torch.zeros(())
        for x in data:
            mean, log_scale = encoder(x).chunk(2)
            posterior = normal(mean, log_scale.exp())
            z = posterior.rsample()
            loss = loss - bernoulli(logits=decoder(z)).log_prob(x).sum()
            prior = normal(torch.zeros_like(mean), torch.ones_like(mean))
            loss = loss + torch.distributions.kl_divergence(posterior, prior).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def episodes() -> Step:
    """Policy gradients: actions are sampled one by one, and read with `item()`."""
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(net.parameters())

    def step():
        state, logs, rewards = torch.zeros(4), [], []
        for _ in range(100):
            choice = torch.distributions.Categorical(logits=net(state))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            state = (state + 0.1 * (action.item() - 1)).clamp(-2, 2)
            rewards.append(-state.square().sum().item())
        gains = torch.tensor(rewards).flip(0).cumsum(0).flip(0)
        optimizer.zero_grad()
        (-(torch.stack(logs) * (gains - gains.mean())).sum()).backward()
        optimizer.step()

    return step


def tokens() -> Step:
    """Sampling token by token with a growing cache, then a loss over what was sampled."""
    words, width, length = 40, 32, 24
    embedding, head = nn.Embedding(words, width), nn.Linear(width, words)
    query, key, value = (nn.Linear(width, width) for _ in range(3))
    everything = nn.ModuleList([embedding, head, query, key, value])
    optimizer = torch.optim.AdamW(everything.parameters())

    def step():
        with torch.no_grad():
            said, keys, values = [torch.zeros(4, dtype=torch.long)], [], []
            for _ in range(length):
                x = embedding(said[-1])
                keys.append(key(x))
                values.append(value(x))
                past = torch.stack(keys, 1)
                weights = (query(x)[:, None] @ past.mT / width**0.5).softmax(-1)
                y = (weights @ torch.stack(values, 1))[:, 0]
                said.append(torch.multinomial(head(y).softmax(-1), 1)[:, 0])
                if any(word == words for word in said[-1].tolist()):
                    break
        text = torch.stack(said, 1)
        x = embedding(text[:, :-1])
        y = F.scaled_dot_product_attention(query(x), key(x), value(x), is_causal=True)
        optimizer.zero_grad()
        F.cross_entropy(head(y).flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def trajectory() -> Step:
    """A neural differential equation, by Runge-Kutta steps."""
    field = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(field.parameters(), lr=1e-3)
    start, goal = torch.randn(8, 2), torch.randn(8, 2)

    def step():
        y, h = start, 0.05
        for _ in range(25):
            k1 = field(y)
            k2 = field(y + h / 2 * k1)
            k3 = field(y + h / 2 * k2)
            k4 = field(y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        optimizer.zero_grad()
        (y - goal).square().mean().backward()
        optimizer.step()

    return step


def graph() -> Step:
    """Messages along the edges of small graphs, one graph at a time."""
    inward, outward = nn.Linear(6, 16), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*inward.parameters(), *outward.parameters()])
    graphs = [(torch.randn(9, 6), torch.randint(0, 9, (2, 20))) for _ in range(30)]

    def step():
        losses = []
        for nodes, (source, target) in graphs:
            h = inward(nodes)
            for _ in range(2):
                messages = torch.zeros_like(h).index_add(0, target, h[source])
                degree = torch.zeros(len(nodes)).scatter_add(0, target, torch.ones(len(target)))
                h = (h + messages / degree.clamp(min=1)[:, None]).relu()
            losses.append(outward(h.mean(0)).square())
        optimizer.zero_grad()
        torch.cat(losses).sum().backward()
        optimizer.step()

    return step


def hooks() -> Step:
    """A deep and narrow network whose gradients are watched by hooks, and logged."""
    layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(60))
    optimizer = torch.optim.RMSprop(layers.parameters(), foreach=False)
    data, norms = torch.randn(16, 12), []
    for layer in layers:
        layer.register_full_backward_hook(lambda module, into, out: norms.append(out[0].norm()))

    def step():
        x = data
        for layer in layers:
            y = layer(x)
            y.register_hook(lambda gradient: gradient.clamp(-1, 1))
            x = x + y.tanh()
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()
        torch.stack(norms).max().item()
        norms.clear()

    return step


def filtering() -> Step:
    """A Kalman filter: products and inverses of 3 × 3 matrices along a series."""
    move, noise = nn.Parameter(torch.eye(3) * 0.9), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.Adam([move, noise], lr=1e-3)
    series, seen = torch.randn(60, 2), torch.eye(3)[:2]

    def step():
        mean, spread, loss = torch.zeros(3), torch.eye(3), torch.zeros(())
        for point in series:
            mean, spread = move @ mean, move @ spread @ move.T + torch.diag(noise.exp())
            error, size = point - seen @ mean, seen @ spread @ seen.T + 0.1 * torch.eye(2)
            gain = spread @ seen.T @ torch.linalg.inv(size)
            mean, spread = mean + gain @ error, spread - gain @ seen @ spread
            loss = loss + error @ torch.linalg.solve(size, error) + torch.logdet(size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


PROGRAMS = (
    rows_in_place,
    wave,
    cells,
    distributions,
    episodes,
    tokens,
    trajectory,
    graph,
    hooks,
    filtering,
)
