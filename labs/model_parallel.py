"""Model parallelism: a model too large for one device, cut by layers over several.

    phase     stage s, when its turn comes                       sends
    forward   receive from s-1, compute, keep input and output   output to s+1
    backward  receive from s+1, compute gradients                input's gradient to s-1
    update    one optimizer step on its own layers               nothing

One stage works at a time: d stages idle (d-1)/d of their time, wherever they are cut,
and a step takes as long as on one device, plus transfers. What falls is the memory per
rank (the naive strategy in Huang et al. 2019, arXiv 1811.06965, fig. 2b).

    python -m labs.model_parallel --stages 4 --partition cost
    torchrun --nproc-per-node 4 -m labs.model_parallel
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from labs.kit import lab, messages, meter, split, toy, training
from labs.kit.timeline import Op

NONE, INTEGER, TENSOR = range(3)


def send(values, to):
    """Send a tuple of tensors, integers and None. One float tensor goes as
    it is; else a row (kind, integer) per value goes first, as int64."""
    if not (len(values) == 1 and is_float(values[0])):
        rows = [(kind(v), v if kind(v) == INTEGER else 0) for v in values]
        messages.send(torch.tensor(rows, dtype=torch.int64), to)
    for value in values:
        if kind(value) == TENSOR:
            messages.send(value, to)  # which refuses all but tensors


def receive(source):
    """Return the tuple that rank `source` sends next."""
    first = messages.receive(source)
    if is_float(first):
        return (first,)
    rows, take = first.tolist(), messages.receive
    return tuple(take(source) if k == TENSOR else (None, i)[k] for k, i in rows)


def kind(value):
    return NONE if value is None else INTEGER if type(value) is int else TENSOR


def is_float(value):
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class Stage:
    """Some layers; the last stage ends in `loss`, of its layers' output."""

    def __init__(self, module, loss=None):
        self.module, self.loss, self.live = module, loss, {}

    def forward(self, batch, x):
        """Return the output for input x, both tuples; its graph begins here."""
        x = tuple(v.detach().requires_grad_() if is_float(v) else v for v in x)
        y = self.loss(self.module(*x)) if self.loss else self.module(*x)
        y = y if isinstance(y, tuple) else (y,)
        self.live[batch] = x + y
        return tuple(v.detach() if is_float(v) else v for v in y)

    def backward(self, batch, gradients):
        """Add to the weights' gradients; return those of x, None if none."""
        kept, n = self.live.pop(batch), len(gradients)
        ends = [(y, g) for y, g in zip(kept[-n:], gradients)
                if g is not None and y.requires_grad]  # fmt: skip
        if ends:  # else there is nothing to train up to here
            torch.autograd.backward(*zip(*ends))
        return tuple(x.grad if is_float(x) else None for x in kept[:-n])


def in_turn(stage, inputs):
    """Run a batch through all stages and back; return the loss (last stage)."""
    rank, last = messages.rank(), messages.n_ranks() - 1
    x = receive(rank - 1) if rank > 0 else (inputs,)
    y = stage.forward(0, x)
    if rank < last:
        send(y, rank + 1)
    gradients = receive(rank + 1) if rank < last else (torch.ones_like(y[0]),)
    gradients = stage.backward(0, gradients)
    if rank > 0:
        send(gradients, rank - 1)
    return y[0].item() if rank == last else None


def order(n_stages):
    """Return the same as data, a schedule: the whole batch is its microbatch 0.

    >>> [" ".join(map(str, stage)) for stage in order(2)]
    ['F0 B0', 'F0 B0']
    """
    return [[Op("F", 0), Op("B", 0)]] * n_stages


def idle_fraction(n_stages, computing=1.0):
    """Idle part of all ranks' time; computing: the part in which one does."""
    return 1 - computing / n_stages


def step_time(computing, boundary, link):
    """Time of a step; boundary: bytes of each stage's input, sent there and back."""
    return computing + 2 * sum(link.seconds(nbytes) for nbytes in boundary[1:])


def traffic(boundary):
    """Bytes that each stage sends per step, activations on and gradients back."""
    inner = [0, *boundary[1:], 0]
    return [back + on for back, on in zip(inner, inner[1:])]


def memory(weights, activations=0, copies=3):
    """Bytes that a rank holds; copies: weights, gradients, momenta (Adam: 4)."""
    return copies * weights + activations


@dataclass(frozen=True)
class Config(training.Config):
    """One run of model parallelism."""

    n_stages: Annotated[int, "stages, one per rank; more need less memory each"] = 4
    partition: Annotated[str, "even, cost (FLOPs), or layers of each: 1,2,2,3"] = "even"
    budget: Annotated[int, "bytes that a device holds"] = 16_000_000_000

    def check(self):
        super().check()
        split.check(self.build(), self.sizes(), self.data(0)[0][:2])
        for stage, (weights, kept, _) in enumerate(self.needs()):
            if memory(weights, kept) > self.budget:
                raise ValueError(
                    f"stage {stage} needs {memory(weights, kept):,} B, but a device "
                    f"holds {self.budget:,} B: take more stages, or a smaller batch."
                )

    def n_ranks(self):
        return self.n_stages

    def remarks(self):  # BatchNorm sees the whole batch here, as in one process
        return [said for said in super().remarks() if "Dropout" in said]

    def sizes(self):
        """Layers per stage."""
        d, words = self.n_stages, self.partition.split(",")
        if self.partition == "cost":
            return split.by_cost(toy.layer_costs(self.model, 1), d)
        if len(words) == d and all(word.isdecimal() and int(word) for word in words):
            return list(map(int, words))
        lab.choose("partition", self.partition, ("even", "cost", f"{d} layer counts"))
        return split.even(len(self.build()), d)

    def needs(self):
        """Yield the bytes of each stage's weights, activations and input."""
        x, targets = self.data(0)
        for rank in range(self.n_stages):
            stage = Stage(self.worker(rank).module, self.loss(rank, targets))
            with meter.Meter(stage.module) as kept:
                [y] = kept.watch(stage).forward(0, (x,))
            weights = sum(map(messages.nbytes, stage.module.parameters()))
            yield weights, kept.peak, messages.nbytes(x)
            x = y

    def loss(self, rank, targets):
        mean = lambda y: toy.loss_sum(y, targets) / toy.n_valid(targets)
        return mean if rank == self.n_stages - 1 else None

    def worker(self, rank):
        return Stage(self.build(split.ranges(self.sizes())[rank]))

    def step(self, stage, rank, inputs, targets):
        stage.loss = self.loss(rank, targets)
        return in_turn(stage, inputs)


def measure(config, clock, progress=False):
    """Train on ranks; return a training.Report with prediction and ledger."""
    report = training.train(config, clock, progress)
    d, run = config.n_stages, report.timeline
    report.predicted = training.predict(order(d), run)
    weights, kept, boundary = zip(*config.needs())
    time = step_time(run.compute(), boundary, clock.link)
    report.rows = [
        ("step", time, run.makespan, run.unit),
        ("idle", idle_fraction(d, run.compute() / time), run.bubble(), "%"),
        ("weights, gradients, momenta", [*map(memory, weights)], report.held, "B"),
        ("activations", kept, report.peaks, "B"),
        ("sent", traffic(boundary), report.sent, "B"),
    ]
    return report


if __name__ == "__main__":
    from labs import model_parallel  # ranks import it by this name

    lab.main("model_parallel", __doc__, model_parallel.Config, model_parallel.measure)
