"""Train a toy model with a parallel scheme and, for comparison, in one process.

A lab describes its scheme as a Config: what each rank's worker is, and what it does in
one step. `train` does the rest, which is the same for every scheme.
"""

import contextlib
import copy
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Annotated

import torch

from labs.kit import clock, messages, simulate, split, toy, world
from labs.kit.meter import Meter
from labs.kit.timeline import Timeline

# Convolutions on a GPU would round to ten bits: a run could not equal another one.
_exact = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


@dataclass(frozen=True)
class Config:
    """What every lab can choose. A lab adds its own fields and these methods:

    n_ranks()      how many ranks it needs
    worker(rank)   an object with `module`, the layers that this rank updates
    step(worker, rank, inputs, targets)   one forward and backward; this rank's part
                   of the loss, or None: what the ranks return adds up to it

    `watched` names the worker's methods that compute, {method: kind of operation}.
    Override `build` to train another model, on the same data; `optimizer` where the
    worker updates its weights itself (and then has an `optimizer`, if it uses one);
    `finish` for what follows an update.
    """

    watched = {"forward": "F", "backward": "B"}
    within = False  # may a rank communicate within an operation?
    whole = False  # is the whole run recorded, and not its last step alone?
    budget = None  # bytes that a rank may hold

    model: Annotated[str, "text (a transformer) or digits (a CNN)"] = "text"
    batch: Annotated[int, "samples per step"] = 32
    steps: Annotated[int, "training steps; the last one is recorded"] = 3

    def check(self):
        """Raise ValueError, before any rank starts, for what cannot run."""
        for name, default in ((one.name, one.default) for one in fields(self)):
            value = getattr(self, name)
            if type(default) is int and (type(value) is not int or value < 1):
                raise ValueError(
                    f"{name} must be a whole number from 1 up, not {value!r}."
                )
            number = isinstance(value, (int, float)) and 0 < value < math.inf
            if type(default) is float and not number:
                raise ValueError(f"{name} must be a number above 0, not {value!r}.")
        toy.n_layers(self.model)  # it knows which models there are

    def build(self, layers=None):
        """Return the model, or only some `layers` of it (a slice or range)."""
        return toy.build(self.model, layers=layers)

    def data(self, step):
        """Return the (inputs, targets) of a step."""
        return toy.batch(self.model, self.batch, step)

    def optimizer(self, module):
        """Return what updates a worker's weights after each step, or None."""
        return sgd(module, self.model)

    def finish(self, worker, rank, step):
        """What a rank does at the end of a step, when its weights are updated."""

    def facts(self, worker):
        """Return what a rank has to tell at the end; Report.facts holds it."""

    def slow(self):
        """Return {rank: how many times as long its operations take}; virtual time."""
        return {}

    def remarks(self):
        """Return sentences that say why a run need not equal that of one process."""
        return split.remarks(self.build())

    def costs(self):
        """Return what an operation of each kind costs, in units of one forward."""
        return {"F": 1.0, "B": 2.0}


@dataclass
class Report:
    """What a run gave: lists are in rank order."""

    config: Config
    timeline: Timeline  # of the last step, or of all
    losses: list  # one per step
    truth: list  # the same of one process
    peaks: list  # bytes of activations at the peak of what was recorded
    sent: list  # bytes sent in it
    weights_gap: float  # distance of any rank's from those of one process, relative
    remarks: list  # sentences: why this run need not equal that of one process
    held: list = ()  # bytes of parameters, gradients and optimizer state
    parts: list = ()  # [rank][step]: what it returned, a part of the loss or None
    facts: list = ()  # what each rank has to tell besides
    hardware: str = ""  # of rank 0
    predicted: Timeline = None
    rows: list = field(default_factory=list)
    explain: Callable = simulate.explain  # of two timelines: where the bubble is from

    @property
    def loss_gap(self):
        """The largest difference of a loss to that of one process."""
        return _largest(abs(a - b) for a, b in zip(self.losses, self.truth))

    def timelines(self):
        return self.predicted, self.timeline

    def invariant(self):
        """Ledger rows: the last loss and the weights, beside those of one process.
        Where there are remarks, equality is not claimed."""
        gap, claim = self.weights_gap, f"below {ROUNDING:g}"
        return [
            ("loss of the last step", self.truth[-1], self.losses[-1], ""),
            (
                "weights off by (relative)",
                "(no claim)" if self.remarks else claim,
                claim if gap < ROUNDING else gap,
                "",
            ),
        ]


ROUNDING = 1e-6  # what float32 may lose between two orders of the same sums


def train(config, clk, progress=False):
    """Run `config.steps` steps on ranks and in one process; return a Report.

    clk: a clock of labs.kit.clock, which records the last step, or the whole run.
    progress: print the loss, or how far it is, about ten times, to stderr.
    """
    config.check()
    results = world.launch(_train, config.n_ranks(), config, clk, progress)
    losses = [sum(filter(None, step)) for step in zip(*(r["losses"] for r in results))]
    device = world.plan(config.n_ranks()).devices[0]
    truth, weights = reference(config, device, progress)
    parts = [result["weights"] for result in results]
    ours = {name: w for part in parts for name, w in part.items()}
    spans = [result["spans"] for result in results]
    return Report(
        config,
        Timeline.merge(
            spans,
            clock=clk.phrase,
            hardware=results[0]["hardware"] if clk.measured else "",
            unit=clk.unit,
        ),
        losses,
        truth,
        [result["peak"] for result in results],
        [sum(s.nbytes for s in one if s.name == "send") for one in spans],
        _largest(distance({**ours, **part}, weights) for part in parts),
        config.remarks() + _diverged(losses),
        [result["held"] for result in results],
        [result["losses"] for result in results],
        [result["facts"] for result in results],
        results[0]["hardware"],
    )


@_exact
def _train(rank, n_ranks, config, clk, progress):
    """One rank's training; the clock and the meter run in the last step, or in all."""
    worker = config.worker(rank)
    worker.module.to(messages.device)
    optimizer, meter = config.optimizer(worker.module), Meter(worker.module)
    if config.budget:
        meter.allow(config.budget, needed(config, worker.module))
    losses = []
    with contextlib.ExitStack() as stack:
        for step in range(config.steps):
            batch = [tensor.to(messages.device) for tensor in config.data(step)]
            _begin(config, worker, step, meter, clk, stack)
            losses.append(_step(config, worker, rank, step, batch, optimizer))
            if step == config.steps - 1:
                stack.close()
            if progress and _due(step, config.steps):
                _tell(config, step, losses[-1])
    return {
        "losses": losses,
        "weights": worker.module.state_dict(),
        "spans": clk.spans,
        "peak": meter.peak,
        "held": held(worker.module, optimizer or getattr(worker, "optimizer", None)),
        "facts": config.facts(worker),
        "hardware": world.here(),
    }


def _begin(config, worker, step, meter, clk, stack):
    """Start the meter and the clock in their first steps, until `stack` closes."""
    recorded = 0 if config.whole else config.steps - 1
    has = {m: kind for m, kind in config.watched.items() if hasattr(worker, m)}
    if step == (0 if config.budget else recorded):
        stack.enter_context(meter)
        if has.keys() >= {"forward", "backward"}:  # a server has none
            meter.watch(worker)
    if step == recorded:
        messages.barrier()
        stack.enter_context(clock.recording(clk, messages.rank()))
        clock.watch(worker, **has)


def _step(config, worker, rank, step, batch, optimizer):
    worker.module.zero_grad()
    loss = config.step(worker, rank, *batch)
    if optimizer:
        optimizer.step()
    config.finish(worker, rank, step)
    return loss


def _due(step, steps):
    """Is this one of about ten steps at which to print?"""
    return (step + 1) % max(1, steps // 10) == 0


def _tell(config, step, loss):
    """Rank 0 prints the loss, for its lines appear at once. It may be on another rank,
    so all of them take part; but not in a run that is recorded as a whole."""
    said = f"step {step + 1} of {config.steps}"
    if not config.whole:
        part = torch.tensor(loss or 0.0)
        said += f": loss {messages.all_reduce(part, name='loss').item():.4f}"
    if messages.rank() == 0:
        print(said, file=sys.stderr)


def needed(config, module):
    """Return the bytes that `held` will find after a step, without taking them."""
    shape = copy.deepcopy(module).to("meta")
    optimizer = config.optimizer(shape)
    for weight in shape.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    if optimizer:
        optimizer.step()
    return held(shape, optimizer)


def held(module, optimizer=None):
    """Return the bytes of parameters, gradients and optimizer state, as tensors."""
    parameters = list(module.parameters())
    states = optimizer.state.values() if optimizer else []
    found = [value for state in states for value in state.values()]
    found += parameters + [p.grad for p in parameters]
    return sum(messages.nbytes(t) for t in found if isinstance(t, torch.Tensor))


def sgd(module, model):
    """SGD with momentum, so that a check sees gradients; None without parameters."""
    parameters = list(module.parameters())
    if not parameters:
        return None
    return torch.optim.SGD(parameters, toy.LR[model], toy.MOMENTUM)


@_exact
def reference(config, device="cpu", progress=False):
    """Return (losses, weights) of the same steps in this one process."""
    module, losses = config.build().to(device), []
    optimizer = sgd(module, config.model)
    if progress and messages.rank() == 0:
        print("and the same steps in one process, to compare", file=sys.stderr)
    for step in range(config.steps):
        batch = [tensor.to(device) for tensor in config.data(step)]
        losses.append(toy.reference_step(module, *batch, optimizer))
    return losses, {name: w.cpu() for name, w in module.state_dict().items()}


def distance(ours, theirs):
    """Return the Euclidean distance of two state dicts, relative to the second."""
    apart = torch.stack([(ours[n] - w).double().norm() for n, w in theirs.items()])
    size = torch.stack([w.double().norm() for w in theirs.values()])
    return float(apart.norm() / size.norm())


def _largest(values):
    """Return the largest value; nan if there is one, which max() may pass over."""
    return float(torch.tensor(list(values)).max())


def _diverged(losses):
    """Say in which step the loss stopped to be a number, if it did."""
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    return [
        f"The loss of step {step} is {losses[step]}: training has diverged, and from "
        "there on two runs cannot be compared."
        for step in bad[:1]
    ]


def predict(order, measured):
    """Simulate a schedule with equal operations: each kind at its mean in the run, so
    that prediction and run stand on one axis."""
    clk = "equal operations, free links"
    return simulate.simulate(order, means(measured), clock=clk, unit=measured.unit)


def means(measured):
    """Return what an operation of each kind takes in a run, on average."""
    spans = [s for s in measured.spans if s.lane == "compute"]
    times = {kind: [s.end - s.start for s in spans if s.name == kind]
             for kind in {s.name for s in spans}}  # fmt: skip
    return {kind: sum(all_of) / len(all_of) for kind, all_of in times.items()}


def activations(config, n_samples):
    """Return the bytes that forwards of so many samples keep for their backwards, from
    those of a whole batch in one process; n_samples: a number per rank."""
    module = config.build()
    inputs, targets = config.data(0)
    with Meter(module) as meter:
        loss = toy.loss_sum(module(inputs), targets)
    del loss
    return [meter.peak * n / config.batch for n in n_samples]
