"""Train a toy model with a parallel scheme and, for comparison, in one process.

A lab describes its scheme as a Config: what each rank's worker is, and what it does in
one step. `train` does the rest, which is the same for every scheme.
"""

from dataclasses import dataclass, field
from typing import Annotated

import torch

from labs.kit import clock, messages, toy, world
from labs.kit.meter import Meter
from labs.kit.simulate import simulate
from labs.kit.timeline import Timeline


@dataclass(frozen=True)
class Config:
    """What every lab can choose. A lab adds its own fields and these methods:

    check()        raises ValueError, before any rank starts, for what cannot run
    n_ranks()      how many ranks it needs
    worker(rank)   an object with `module`, the layers that this rank updates
    step(worker, rank, inputs, targets)   one forward and backward; the loss or None
    watched        {method: name}: the worker's methods that are compute
    """

    watched = {"forward": "F", "backward": "B"}

    model: Annotated[str, "text (a transformer) or digits (a CNN)"] = "text"
    batch: Annotated[int, "samples per step"] = 32
    steps: Annotated[int, "training steps; the last one is recorded"] = 3


@dataclass
class Report:
    """What a run gave: lists are in rank order."""

    config: Config
    timeline: Timeline  # of the last step
    losses: list  # one per step
    truth: list  # the same of one process
    peaks: list  # bytes of activations at the peak of the last step
    sent: list  # bytes sent in the last step
    weights_gap: float  # largest difference to the weights of one process, relative
    predicted: Timeline = None
    rows: list = field(default_factory=list)

    @property
    def loss_gap(self):
        """The largest difference of a loss to that of one process."""
        return max(abs(a - b) for a, b in zip(self.losses, self.truth))

    def timelines(self):
        return self.predicted, self.timeline

    def invariant(self):
        """Ledger rows: the last loss and the weights, beside those of one process."""
        return [
            ("loss of the last step", self.truth[-1], self.losses[-1], ""),
            ("weights off by (relative)", 0.0, self.weights_gap, ""),
        ]


def train(config, clk):
    """Run `config.steps` steps on ranks and in one process; return a Report.

    clk: a clock of labs.kit.clock, which records the last step.
    """
    config.check()
    results = world.launch(_train, config.n_ranks(), config, clk)
    truth, weights = reference(config)
    ours = {name: w for result in results for name, w in result["weights"].items()}
    gaps = [(ours[n] - w).abs().max() / w.abs().max() for n, w in weights.items()]
    spans = [result["spans"] for result in results]
    return Report(
        config,
        Timeline.merge(
            spans, clock=clk.phrase, hardware=results[0]["hardware"], unit=clk.unit
        ),
        next(result["losses"] for result in results if result["losses"]),
        truth,
        [result["peak"] for result in results],
        [sum(s.nbytes for s in one if s.name == "send") for one in spans],
        float(max(gaps)),
    )


def _train(rank, n_ranks, config, clk):
    """One rank's training: all steps, the last one under the clock and the meter."""
    worker = config.worker(rank)
    worker.module.to(messages.device)
    optimizer = sgd(worker.module, config.model)
    losses = []
    for step in range(config.steps):
        batch = toy.batch(config.model, config.batch, step)
        batch = [tensor.to(messages.device) for tensor in batch]
        if step < config.steps - 1:
            losses.append(_step(config, worker, rank, batch, optimizer))
            continue
        meter = Meter(worker.module)
        messages.barrier()
        with meter, clock.recording(clk, rank):
            clock.watch(meter.watch(worker), **config.watched)
            losses.append(_step(config, worker, rank, batch, optimizer))
    return {
        "losses": [loss for loss in losses if loss is not None],
        "weights": worker.module.state_dict(),
        "spans": clk.spans,
        "peak": meter.peak,
        "hardware": world.here(),
    }


def _step(config, worker, rank, batch, optimizer):
    worker.module.zero_grad()
    loss = config.step(worker, rank, *batch)
    if optimizer:
        optimizer.step()
    return loss


def sgd(module, model):
    """SGD with momentum, so that a check sees gradients; None without parameters."""
    parameters = list(module.parameters())
    if not parameters:
        return None
    return torch.optim.SGD(parameters, toy.LR[model], toy.MOMENTUM)


def reference(config):
    """Return (losses, weights) of the same steps in this one process."""
    module = toy.build(config.model)
    optimizer = sgd(module, config.model)
    batches = (toy.batch(config.model, config.batch, s) for s in range(config.steps))
    losses = [toy.reference_step(module, *batch, optimizer) for batch in batches]
    return losses, module.state_dict()


def predict(order, measured):
    """Simulate a schedule with equal operations: each kind at its mean in the run, so
    that prediction and run stand on one axis."""
    mean = {}
    for kind in {op.kind for row in order for op in row}:
        spans = [s for s in measured.spans if s.lane == "compute" and s.name == kind]
        mean[kind] = sum(s.end - s.start for s in spans) / len(spans)
    clk = "equal operations, free links"
    return simulate(order, mean, clock=clk, unit=measured.unit)
