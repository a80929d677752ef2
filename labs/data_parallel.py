"""Data parallelism: every rank has the whole model, and computes on its own samples.

    phase     each rank does                                  all exchange
    start     takes the weights of rank 0                     broadcast
    forward   computes the loss of its shard of the batch     number of targets
    backward  computes gradients; full buckets leave at once  all-reduce of each bucket
    update    takes the same step as all others               nothing

The average of the ranks' gradients is the batch's, so the weights are those of a single
process. Each step moves all gradients, 2(N-1)/N of their bytes per rank, and each rank
holds everything (Li et al. 2020, arXiv 2006.15704).

    python -m labs.data_parallel --workers 4 --bucket 200000
    torchrun --nproc-per-node 4 -m labs.data_parallel
"""

from dataclasses import dataclass
from itertools import cycle, islice
from typing import Annotated

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from labs.kit import lab, messages, replica, simulate, toy, training
from labs.kit.clock import ring_seconds
from labs.kit.replica import gradient


def indices(n_samples, n_ranks, rank, epoch=0, seed=0):
    """Return the samples of a rank in an epoch: all ranks get equally many.

    All ranks draw one permutation from seed + epoch, repeat its beginning until it can
    be dealt evenly, and take turns (as torch's DistributedSampler does).

    >>> [indices(5, 2, rank, epoch) for epoch in (0, 1) for rank in (0, 1)]
    [[4, 1, 2], [0, 3, 4], [0, 2, 1], [4, 3, 0]]
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(n_samples, generator=generator).tolist()
    n_each = -(-n_samples // n_ranks)
    return list(islice(cycle(order), rank, n_each * n_ranks, n_ranks))


def broadcast_start(module):
    """Give all ranks the parameters and buffers of rank 0."""
    for tensor in module.state_dict().values():
        messages.broadcast(tensor)


def average(tensors):
    """Replace tensors by their average over all ranks, in one message."""
    flat = parameters_to_vector(tensors).detach()
    vector_to_parameters(messages.all_reduce(flat, "avg"), tensors)


def average_flat(parameters):
    """Average the gradients over all ranks, in one message."""
    average([gradient(parameter) for parameter in parameters])


def buckets(parameters, nbytes):
    """Return lists of parameters, in the order in which a backward reaches them (the
    reverse), each of at most `nbytes`, unless a single parameter is larger."""
    groups, size = [[]], 0
    for parameter in reversed(list(parameters)):
        if groups[-1] and size + messages.nbytes(parameter) > nbytes:
            groups.append([])
            size = 0
        groups[-1].append(parameter)
        size += messages.nbytes(parameter)
    return groups


class Reducer:
    """Averages gradients in buckets; while `on`, beside the backward. A bucket leaves
    when its last gradient is there and the buckets before it have left: messages are
    paired by their order, which has to be that of all ranks (sec. 3.2.3)."""

    def __init__(self, parameters, nbytes):
        self.buckets = buckets(parameters, nbytes)
        self.number = {p: i for i, bucket in enumerate(self.buckets) for p in bucket}
        for parameter in self.number:
            parameter.register_post_accumulate_grad_hook(self.arrived)
        self.begin()

    def begin(self):
        self.missing, self.sent = [len(bucket) for bucket in self.buckets], []
        self.on = False

    def arrived(self, parameter):
        """A parameter's gradient is there: send the buckets that are complete."""
        if self.on:
            self.missing[self.number[parameter]] -= 1
            while 0 in self.missing[len(self.sent) :][:1]:
                self.send()

    def send(self):
        gradients = [gradient(p) for p in self.buckets[len(self.sent)]]
        flat, name = parameters_to_vector(gradients), f"bucket {len(self.sent)}"
        self.sent.append((messages.iall_reduce(flat, "avg", name), gradients))

    def finish(self):
        """Send what is left, such as parameters that had no use here; wait for all."""
        while len(self.sent) < len(self.buckets):
            self.send()
        for reduction, gradients in self.sent:
            vector_to_parameters(reduction.wait(), gradients)
        self.begin()


class Replica(replica.Replica):
    """A rank's copy of the model, whose gradients leave in buckets."""

    def __init__(self, module, nbytes, overlap):
        super().__init__(module)
        broadcast_start(module)
        self.reducer, self.overlap = Reducer(module.parameters(), nbytes), overlap

    def backward(self, piece, last=True):
        """Add to the gradients; those of the last piece may leave at once."""
        self.reducer.on = self.overlap and last
        super().backward(piece)


@dataclass(frozen=True)
class Config(replica.Config):
    """One run of data parallelism."""

    within = True
    bucket: Annotated[int, "most bytes in a message; 1: each gradient alone"] = 200_000
    after: Annotated[bool, "exchange after the backward, not beside it"] = False
    n_pieces: Annotated[int, "pieces of a shard, with one exchange after all"] = 1
    every: Annotated[int, "steps; above 1, weights are averaged so often instead"] = 1

    def remarks(self):
        own = f"Each rank takes {self.every} steps by itself: another way to train."
        return super().remarks() + [own] * (self.every > 1)

    def worker(self, rank):
        return Replica(self.build(), self.bucket, not self.after and self.every == 1)

    def cut(self, batch, rank):
        shard = batch.tensor_split(self.n_workers)[rank]
        return [piece.clone() for piece in shard.tensor_split(self.n_pieces)]

    def step(self, worker, rank, inputs, targets):
        pieces, share = list(zip(self.cut(inputs, rank), self.cut(targets, rank))), 0.0
        valid = sum((wanted != toy.IGNORE).sum() for _, wanted in pieces).float()
        if self.every == 1:  # per rank on average, for shards need not be equal
            messages.all_reduce(valid, "avg")
        valid = valid.item() or 1.0  # a rank by itself may have none
        for i, piece in enumerate(pieces):
            share += worker.forward(i, *piece, valid) / self.n_workers
            worker.backward(i, i == self.n_pieces - 1)
        if self.every == 1:
            worker.reducer.finish()
        return float(share)

    def finish(self, worker, rank, step):
        if self.every > 1 and (step + 1) % self.every == 0:
            average(list(worker.module.parameters()))


def measure(config, clock, progress=False):
    """Train on ranks; return a training.Report with prediction and ledger."""
    report = training.train(config, clock, progress)
    n, run, worker = config.n_workers, report.timeline, config.worker(0)
    sizes = [sum(map(messages.nbytes, bucket)) for bucket in worker.reducer.buckets]
    ready = [config.after or toy.done(config.model, worker.module, bucket)
             for bucket in worker.reducer.buckets]  # fmt: skip
    exchange = [(None, 4), *zip(ready, sizes)]
    if config.every > 1:
        exchange = [(1.0, sum(sizes))] * (config.steps % config.every == 0)
    exchange *= n > 1
    ring = lambda nbytes: ring_seconds(clock.link, "all_reduce", n, nbytes)
    report.predicted = replica.predict(run, exchange, ring, config.n_pieces)
    report.explain = simulate.explain_replicas
    moved = [span.nbytes for span in run.lane(0, "transfer")]
    largest = [len(config.cut(config.data(0)[0], rank)[0]) for rank in range(n)]
    report.rows = [
        ("step", report.predicted.makespan, run.makespan, run.unit),
        ("idle", report.predicted.bubble(), run.bubble(), "%"),
        ("messages", len(exchange), len(moved), ""),
        ("all-reduced", sum(size for _, size in exchange), sum(moved), "B"),
        ("activations", training.activations(config, largest), report.peaks, "B"),
        ("weights, gradients, momenta", [3 * sum(sizes)] * n, report.held, "B"),
    ]
    return report


if __name__ == "__main__":
    from labs import data_parallel  # ranks import it by this name

    lab.main("data_parallel", __doc__, data_parallel.Config, data_parallel.measure)
