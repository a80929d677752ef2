"""Two small models on real data, and the single process that every lab must equal.

    name    model                                    data, nothing to download
    text    transformer: Embedding, 6 Blocks, Head   English of `pydoc_data.topics`
    digits  the usual MNIST CNN, layer by layer      scikit-learn's `load_digits`

Both are an `nn.Sequential`, so a stage is a slice. Layer i draws its weights from
(seed, i) alone: however a model is cut over ranks, it starts from the same weights.
"""

import copy
import operator
import zlib
from collections import OrderedDict
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

VOCAB, CONTEXT, WIDTH, HEADS, BLOCKS = 256, 32, 64, 4, 6
IGNORE = -100  # a target that does not count
# SGD with momentum, so a check sees the gradients themselves. 300 steps bring text
# (size 16) from 5.8 to 2.5 and digits (size 32) from 2.3 to 0.1, 98 % right. At these
# rates float32 runs that differ only in the order of sums stay within 1e-5.
LR = {"text": 0.1, "digits": 0.03}
MOMENTUM = 0.9


class Embedding(nn.Module):
    """What each byte is, plus where it stands: (size, t) -> (size, t, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(places)


class Attention(nn.Module):
    """Each position gathers from itself and those before it; keeps the shape.

    Vaswani et al., 2017, section 3.2, with the causal mask of their decoder.
    """

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(x).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (size, HEADS, t, WIDTH / HEADS)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then an MLP, each added to its input; keeps the shape.

    LayerNorm comes first in each, as in GPT-2 (Radford et al., 2019, section 2.3).
    """

    def __init__(self):
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(WIDTH), Attention())
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class Head(nn.Sequential):
    """A score for each possible next byte: (size, t, WIDTH) -> (size, t, VOCAB)."""

    def __init__(self):
        super().__init__(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB))


# Smooth like LeNet-5 (LeCun et al., 1998, section II.B), with tanh and average pooling:
# at the kinks of ReLU and max pooling, one rounding error sends training another way.
LAYERS = {
    "text": [Embedding, *[Block] * BLOCKS, Head],
    "digits": [
        partial(nn.Conv2d, 1, 32, 3),
        nn.Tanh,
        partial(nn.Conv2d, 32, 64, 3),
        nn.Tanh,
        partial(nn.AvgPool2d, 2),
        nn.Flatten,
        partial(nn.Linear, 256, 128),
        nn.Tanh,
        partial(nn.Linear, 128, 10),
    ],
}
MODELS = tuple(LAYERS)


def n_layers(name):
    """The number of layers that `build(name)` has and a pipeline can cut between."""
    return len(_known(name, LAYERS))


def build(name, seed=0, layers=None):
    """The model `name`, or only the `layers` (a slice or range of indices) of it.

    Weights depend on (seed, layer index), and layers keep their index as their name:
    `build(name, layers=slice(2, 5))` equals `build(name)[2:5]`, state dict included.
    The global random state stays as it was. Raises ValueError for an unknown name or
    a layer that is not there.
    """
    makers = _known(name, LAYERS)
    every = range(len(makers))
    if layers is None:
        layers = every
    elif isinstance(layers, slice):
        layers = every[layers]
    if not set(layers) <= set(every):
        raise ValueError(
            f"{name!r} has no layers {list(layers)}: choose from 0 to {every[-1]}."
        )
    modules = OrderedDict()
    for i in layers:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed(seed, i))
            modules[str(i)] = makers[i]()
    return nn.Sequential(modules)


def batch(name, size, step=0, seed=0):
    """The (inputs, targets) of one step, the same on every rank that asks.

    text:   inputs (size, CONTEXT) int64 bytes; targets (size, CONTEXT), the next bytes
    digits: inputs (size, 1, 8, 8) float32 in [-1, 1]; targets (size,) int64

    Samples are drawn from all the data, with replacement, by (seed, step, size).
    Raises ValueError for an unknown name or a size below 1.
    """
    sample = _known(name, {"text": _sample_text, "digits": _sample_digits})
    if size < 1:
        raise ValueError(f"a batch of size {size}: ask for at least 1 sample.")
    generator = torch.Generator().manual_seed(_seed(seed, step, size))
    return sample(size, generator)


def loss_sum(outputs, targets):
    """Cross entropy summed over the valid targets, a 0-dim tensor.

    outputs (..., classes), targets (...). A sum, because sums of microbatches add up to
    that of their batch, whatever their sizes; means do not.
    """
    scores = outputs.flatten(0, -2)
    return F.cross_entropy(
        scores, targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def n_valid(targets):
    """How many targets count: the divisor that turns the sum into the mean.

    Raises ValueError if no target counts.
    """
    count = int((targets != IGNORE).sum())
    if not count:
        raise ValueError(f"every target is {IGNORE}: a mean needs at least one valid.")
    return count


def reference_step(model, inputs, targets, optimizer=None):
    """One step of one process, the truth for every parallel scheme; returns the loss.

    The loss is the mean over the valid targets of the whole batch. Its gradients stay
    in `.grad`; with an `optimizer`, the weights move too. Raises ValueError if no
    target is valid.
    """
    model.zero_grad()
    loss = loss_sum(model(inputs), targets) / n_valid(targets)
    loss.backward()
    if optimizer:
        optimizer.step()
    return loss.item()


def reference_run(name, steps, size, seed=0, lr=None, momentum=MOMENTUM):
    """The losses of `steps` steps of SGD with momentum in one process, a list.

    Step k trains on `batch(name, size, k, seed)`; `lr` is `LR[name]` unless given.
    """
    model = build(name, seed)
    lr = LR[name] if lr is None else lr
    sgd = torch.optim.SGD(model.parameters(), lr, momentum)
    return [
        reference_step(model, *batch(name, size, step, seed), sgd)
        for step in range(steps)
    ]


def delayed_run(name, steps, size, delay, lr=None, momentum=MOMENTUM):
    """Losses of training on gradients of weights that are `delay` updates old, as if an
    asynchronous scheme had always this staleness; delay 0 is `reference_run`."""
    module, old = build(name), []
    options = {"lr": LR[name] if lr is None else lr, "momentum": momentum}
    optimizer, losses = torch.optim.SGD(module.parameters(), **options), []
    for step in range(steps):
        old = [*old, copy.deepcopy(module)][-delay - 1 :]
        losses.append(reference_step(old[0], *batch(name, size, step)))
        for now, then in zip(module.parameters(), old[0].parameters()):
            now.grad = then.grad
        optimizer.step()
    return losses


def delayed_descent(lr, steps, delay=1, w=1.0):
    """Minimise w^2/2 with gradients that are `delay` updates old; return every w.

    >>> [round(delayed_descent(lr, 60)[-1], 4) for lr in (0.9, 1.2)]
    [0.0066, -262.1229]
    """
    path = [w] * (delay + 1)
    for _ in range(steps):
        path.append(path[-1] - lr * path[-1 - delay])
    return path[delay:]


def layer_costs(name, size):
    """FLOPs of each layer's forward pass on a batch of `size` samples, a list of int.

    Counted by `torch.utils.flop_counter`: matrix products, convolutions and attention
    count, elementwise work is 0. Shapes decide alone, so nothing is computed.
    """
    x = batch(name, size)[0].to("meta")
    costs = []
    for layer in build(name).to("meta"):
        with FlopCounterMode(display=False) as counter:
            x = layer(x)
        costs.append(counter.get_total_flops())
    return costs


def done(name, module, parameters):
    """Share of a backward's FLOPs, 0 to 1, after which `parameters` have gradients.

    A layer counts as done as a whole; backward takes time in proportion to FLOPs.
    """
    costs = _costs(name)
    wanted = {id(parameter) for parameter in parameters}
    first = min(
        number
        for number, layer in enumerate(module)
        if wanted & {id(parameter) for parameter in layer.parameters()}
    )
    return sum(costs[first:]) / sum(costs)


@cache
def _costs(name):
    return layer_costs(name, 1)


def _known(name, table):
    if name not in table:
        raise ValueError(f"no model {name!r}: choose one of {', '.join(MODELS)}.")
    return table[name]


def _seed(*key):
    """One seed from several integers, the same in every process and Python."""
    return zlib.crc32(repr([operator.index(k) for k in key]).encode())


def _sample_text(size, generator):
    text = _text()
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    at = starts + torch.arange(CONTEXT)
    return text[at], text[at + 1]


def _sample_digits(size, generator):
    images, labels = _digits()
    at = torch.randint(len(labels), (size,), generator=generator)
    return images[at], labels[at]


@cache
def _text():
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise RuntimeError(
            "this Python has no pydoc_data.topics, the text that the model reads: "
            "install the full standard library, or use the digits."
        ) from None
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.tensor(list(text.encode()))


@cache
def _digits():
    """What scikit-learn's `load_digits` reads, from its file: importing it would take
    each rank longer than many a training run."""
    package = find_spec("sklearn").submodule_search_locations[0]
    file = Path(package, "datasets", "data", "digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(file, np.float32, delimiter=","))
    images = rows[:, :64].reshape(-1, 1, 8, 8) / 8 - 1  # from 0 to 16
    return images, rows[:, 64].long()
