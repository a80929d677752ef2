"""A whole copy of the model on each rank, which sees only its shard of the batch.

What schemes share in which gradients are summed after the backward: the worker, the
step, and the timeline to expect.
"""

from dataclasses import dataclass
from itertools import count
from typing import Annotated

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from labs.kit import messages, simulate, toy, training
from labs.kit.timeline import Op


class Replica:
    """A model, and the loss of each piece between its forward and its backward."""

    def __init__(self, module):
        self.module, self.live = module, {}
        self.numbers = count()  # of its steps, where a whole run is recorded

    def forward(self, piece, inputs, targets, n_valid):
        """Return a piece's part of the batch's mean loss, over n_valid targets."""
        loss = toy.loss_sum(self.module(inputs), targets) / n_valid
        self.live[piece] = (loss,)
        return loss.detach()

    def backward(self, piece):
        """Add to the gradients of the weights."""
        self.live.pop(piece)[0].backward()


def trained(module):
    return [weight for weight in module.parameters() if weight.requires_grad]


def gradient(parameter):
    """Return a parameter's gradient: zeros if this rank did not use it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def flat_gradient(module):
    """Return all gradients as one flat tensor. A weight that this rank has not used
    counts with zeros: others may have used it."""
    return parameters_to_vector([gradient(weight) for weight in trained(module)])


def sum_gradients(module, all_reduce):
    """Add up the gradients of all ranks, as one flat tensor; all_reduce is in place."""
    flat = flat_gradient(module)
    all_reduce(flat)
    vector_to_parameters(flat, [weight.grad for weight in trained(module)])


@dataclass(frozen=True)
class Config(training.Config):
    """Data parallelism. A lab adds these methods:

    all_reduce(tensor)       sum a tensor over all ranks, in place
    expected(nbytes, link)   how long that takes, and the bytes that each rank sends
    """

    n_workers: Annotated[int, "ranks, each with a copy of the model"] = 4

    def n_ranks(self):
        return self.n_workers

    def worker(self, rank):
        return Replica(self.build())

    def shard(self, number, *batch):
        """Return a worker's samples of a batch; there may be none."""
        return [data.tensor_split(self.n_workers)[number] for data in batch]

    def step(self, worker, rank, inputs, targets):
        """Compute on this rank's shard, which may be empty; then add gradients up."""
        shard = self.shard(rank, inputs, targets)
        loss = worker.forward(0, *shard, toy.n_valid(targets))
        worker.backward(0)
        sum_gradients(worker.module, self.all_reduce)
        return loss.item()


def measure(config, clock, progress=False):
    """Train on ranks; return a training.Report with prediction and ledger."""
    report = training.train(config, clock, progress)
    nbytes = sum(map(messages.nbytes, trained(config.build())))
    seconds, sent = config.expected(nbytes, clock.link)
    run = report.timeline
    computed = max(span.end for span in run.spans if span.lane == "compute")
    exchange = [(1.0, nbytes)] if seconds else []
    report.predicted = predict(run, exchange, lambda nbytes: seconds)
    report.explain = simulate.explain_replicas
    report.rows = [
        ("bubble", report.predicted.bubble(), run.bubble(), "%"),
        ("all-reduce", seconds, run.makespan - computed, run.unit),
        ("sent", sent, report.sent, "B"),
    ]
    return report


def predict(measured, exchange, seconds, n_pieces=1):
    """Return the timeline of equal replicas: forwards and backwards as long as they are
    on average in the run, and messages that take what a formula says.

    exchange: for each message, how much of the last backward is done when it can leave
    (None: the first forward waits for it), and its bytes; seconds: of so many bytes.
    """
    mean = training.means(measured)
    ops = [(Op(kind, i), mean[kind]) for i in range(n_pieces) for kind in "FB"]
    start = sum(seconds(nbytes) for share, nbytes in exchange if share is None)
    end = start + sum(duration for _, duration in ops)
    transfers = [
        (
            "all_reduce",
            0.0 if share is None else end - (1 - share) * mean["B"],
            seconds(nbytes),
            nbytes,
        )
        for share, nbytes in exchange
    ]
    clock, unit = "equal operations, formula of the messages", measured.unit
    return simulate.replicas(measured.n_ranks, ops, transfers, start, clock, unit)
