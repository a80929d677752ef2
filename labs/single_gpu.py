"""One training step on one device: where its time and its memory go.

    phase       what happens                      what it costs
    load L      the next batch is drawn           time: so many samples/s
    forward F   outputs, loss; keeps activations  2 FLOPs per parameter and token
    backward B  gradients; frees activations      4 FLOPs per parameter and token
    update U    parameters follow the gradients   time to read and write them all

Run it with one of
    python -m labs.single_gpu --model digits --microbatches 4
    torchrun --nproc-per-node 1 -m labs.single_gpu
"""

from dataclasses import dataclass
from itertools import chain, count
from math import ceil, inf
from typing import Annotated

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from labs.kit import clock, lab, messages, split, toy, training, world
from labs.kit.timeline import Op


class Trainer:
    """A whole model, updated by hand; `batches` yields (inputs, targets).
    `live` keeps a microbatch's loss, and so its activations, up to backward."""

    def __init__(self, module, batches, lr, momentum):
        self.module, self.batches, self.rates = module, batches, (lr, momentum)
        self.momenta, self.live = [], {}

    def load(self):
        return [tensor.to(messages.device) for tensor in next(self.batches)]

    def forward(self, microbatch, inputs, targets, valid):
        """Return a microbatch's part of the mean over `valid` targets."""
        loss = toy.loss_sum(self.module(inputs), targets) / valid
        self.live[microbatch] = (loss,)
        return loss.detach()

    def backward(self, microbatch):
        """Add to the parameters' gradients, and free the activations."""
        self.live.pop(microbatch)[0].backward()

    def update(self):
        parameters = list(self.module.parameters())
        self.momenta = self.momenta or [torch.zeros_like(w) for w in parameters]
        update(parameters, self.momenta, *self.rates)


def accumulate(trainer, inputs, targets, n_microbatches):
    """Add up a batch's gradient, microbatch by microbatch; return its loss.
    Each part is divided by all valid targets, so sizes need not be equal."""
    valid, loss = toy.n_valid(targets), 0.0
    parts = zip(*(x.tensor_split(n_microbatches) for x in (inputs, targets)))
    for i, part in enumerate(parts):
        loss += trainer.forward(i, *part, valid)
        trainer.backward(i)
    return loss


@torch.no_grad()
def update(parameters, momenta, lr, momentum):
    """SGD with momentum, in place: v = momentum v + gradient, w -= lr v."""
    for w, v in zip(parameters, momenta):
        v.mul_(momentum).add_(w.grad)
        w.sub_(v, alpha=lr)


RULES = {  # bytes per parameter: parameters, gradients, fp32 copy, moments
    "SGD with momentum": (4, 4, 0, 4),  # 12
    "Adam": (4, 4, 0, 8),  # 16
    "mixed, 16-bit gradients": (2, 2, 4, 8),  # 16, of them 12 copy and moments
    "mixed, fp32 gradients": (2, 4, 4, 8),  # 18
    "mixed, gradients in both": (2, 6, 4, 8),  # 20
    "mixed, 8-bit moments": (2, 4, 4, 2),  # 12
}


def memory(n_parameters, rule):
    """Bytes of parameters, gradients and optimizer states (with the fp32 copy)."""
    lab.choose("rule", rule, RULES)
    parameters, gradients, copy, moments = RULES[rule]
    return [n_parameters * each for each in (parameters, gradients, copy + moments)]


def activations(model, batch, size):
    """Bytes kept for the backward of `size` samples, and the whole batch's data.

    A block keeps 16 vectors of each token: in and out of two LayerNorms, q, k, v, what
    attention gives, 4 + 4 in the MLP (Korthikanti et al. 2023, eq. 2: and dropout)."""
    if model == "digits":  # two convolutions, pool, hidden layer, scores
        return 4 * size * (32 * 36 + 64 * 16 + 256 + 128 + 10) + batch * (256 + 8) + 8
    block = 16 * toy.WIDTH + 4 + toy.HEADS  # mean and deviation twice, softmax's sums
    values = toy.CONTEXT * (toy.BLOCKS * block + 2 * toy.WIDTH + 2 + toy.VOCAB)
    return 4 * size * values + 8 * toy.CONTEXT * (2 * batch + 1) + 8


def transformer_flops(n_tokens, n_layers, width, vocab, context):
    """Model FLOPs, forward and backward (Korthikanti et al. 2023, eq. 7)."""
    return 3 * n_tokens * width * (n_layers * (24 * width + 4 * context) + 2 * vocab)


def training_time(n_parameters, n_tokens, rate, factor=6):
    """Seconds at `rate` FLOP/s; factor 8: recompute (Narayanan et al. 2021, eq. 4)."""
    return factor * n_parameters * n_tokens / rate


def mfu(flops, seconds, peak):
    """Model FLOPs per second, as a part of the peak (Chowdhery et al. 2022, app. B)."""
    return flops / seconds / peak


def throughput(load, train, prefetch=False):
    """Samples per time: of loading and training in turn or, with prefetch, at once."""
    return min(load, train) if prefetch else 1 / (1 / load + 1 / train)


@dataclass(frozen=True)
class Config(training.Config):
    """One run on one device."""

    watched = {"load": "L", "forward": "F", "backward": "B", "update": "U"}
    n_microbatches: Annotated[int, "pieces of the batch; more keep less"] = 1

    def check(self):
        super().check()
        split.even(self.batch, self.n_microbatches, "samples", "microbatches")

    def n_ranks(self):
        return 1

    def costs(self):
        return {"L": 0.5, "F": 1.0, "B": 2.0, "U": 0.5}

    def order(self):
        pairs = ((Op("F", i), Op("B", i)) for i in range(self.n_microbatches))
        return [Op("L"), *chain(*pairs), Op("U")]

    def worker(self, rank):
        batches = map(self.data, count())
        return Trainer(self.build(), batches, toy.LR[self.model], toy.MOMENTUM)

    def optimizer(self, module):
        return None  # the trainer updates by hand

    def step(self, trainer, rank, *batch):
        batch = trainer.load()  # the same one again, under the clock
        loss = accumulate(trainer, *batch, self.n_microbatches)
        trainer.update()
        return float(loss)


def weigh(rank, n_ranks, config):
    """Take steps; return (bytes by category, peak of a GPU's allocator, FLOPs)."""
    trainer = config.worker(rank)
    trainer.module.to(messages.device)
    for _ in range(2):  # in the second, gradients and momenta are there throughout
        config.step(trainer, rank)
    peak, weights = torch.cuda.max_memory_allocated(), list(trainer.module.parameters())
    with sdpa_kernel(SDPBackend.MATH):  # fused kernels may have no count
        step = lambda: config.step(trainer, rank)
        _, flops = clock.Flops(1)(rank, "step", None, step)
    tensors = weights, [w.grad for w in weights], trainer.momenta
    return [sum(map(messages.nbytes, some)) for some in tensors], peak, flops


def measure(config, clk, progress=False):
    """Train; return a training.Report with prediction and ledger."""
    report = training.train(config, clk, progress)
    timeline, batch = report.timeline, config.batch
    report.predicted = training.predict([config.order()], timeline)
    [(found, peak, flops)] = world.launch(weigh, 1, config)
    n = sum(w.numel() for w in config.build().parameters())
    said = memory(n, "SGD with momentum")
    said.append(activations(config.model, batch, ceil(batch / config.n_microbatches)))
    names = "parameters", "gradients", "optimizer states", "activations"
    loading = sum(s.end - s.start for s in timeline.ops(0) if s.name == "L")
    load = batch / loading if loading else inf
    train, both = batch / (timeline.compute() - loading), batch / timeline.makespan
    per = f"samples/{timeline.unit or 'unit'}"
    report.rows = [
        *zip(names, said, found + report.peaks, "BBBB"),
        *[("peak on the GPU", sum(said), peak, "B")] * (peak > 0),
        ("FLOPs, 6ND", 6.0 * n * config.data(0)[1].numel(), flops, ""),
        (f"loading, training, {per}", None, [load, train], ""),
        (f"in turn, {per}", throughput(load, train), both, ""),
        ("bottleneck", None, "loading" if load < train else "training", ""),
        ("idle", 0.0, timeline.bubble(), "%"),
    ]
    return report


if __name__ == "__main__":
    from labs import single_gpu  # ranks import it by this name

    lab.main("single_gpu", __doc__, single_gpu.Config, single_gpu.measure)
