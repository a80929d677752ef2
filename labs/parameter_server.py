"""A parameter server: servers keep the weights, workers compute the gradients.

    phase   a worker                               a server
    pull    receives the weights, and a version    sends its range, as one snapshot
    work    forward, backward on its own samples   nothing
    push    sends its gradient, and that version   takes what comes first, and updates

A worker may pull again when all have pushed (sync: the weights of one process), at once
(async), or if not too far ahead (stale; Ho et al. 2013). All passes one server's port:
time linear in N workers; ranges on N servers make it constant (Li et al. 2014).

    python -m labs.parameter_server --workers 4 --mode async --slowest 3
    torchrun --nproc-per-node 5 -m labs.parameter_server
"""

from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Annotated

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from labs.kit import lab, messages, replica, served, toy, training


class Server:
    """A range of the weights, with the optimizer's state for it, and a version.

    One message after the other is handled: no update is lost, no pull sees half of one.
    staleness: for each push, how many updates its weights were behind."""

    def __init__(self, weights, optimizer, turns):
        self.weights = nn.Parameter(weights.clone())
        self.module = nn.ParameterList([self.weights])
        self.optimizer, self.turns = optimizer(self.module), turns
        self.inbox, self.gradients = messages.Inbox(), {}
        self.version, self.staleness = 0, []

    def serve(self, n_pushes=inf):
        """Handle messages until so many pushes have come, or no worker is left."""
        self.answer()
        while n_pushes > 0 and self.turns.pushes:
            n_pushes -= self.handle()

    def answer(self):
        """Send the weights, and their version, to all that may pull now."""
        version = self.weights.new_full((1,), self.version)  # exact up to 2^24
        snapshot = torch.cat([self.weights.detach(), version])
        for worker in self.turns.answer():
            with suppress(messages.PeerGone):  # the next receive will say so
                messages.isend(snapshot, worker)

    def handle(self):
        """Take one message, and do what it makes possible; return how many pushes."""
        worker, pushed = self.receive()
        if len(pushed):
            self.staleness.append(self.version - int(pushed[-1]))
            self.gradients[worker] = pushed[:-1]
            self.turns.push(worker)
        else:
            self.turns.leave(worker)
        if ready := self.turns.update():
            self.update(self.version + 1, [self.gradients.pop(w) for w in ready])
        self.answer()
        return min(1, len(pushed))

    def update(self, version, gradients):
        """Take the optimizer's step along the mean of the gradients, however many."""
        self.weights.grad = torch.stack(gradients).mean(0)
        self.optimizer.step()
        self.version = version

    def receive(self):
        """Return (worker, message): a gradient and its version, or nothing at the end.
        A worker that is gone sends nothing; only an update of all together needs it."""
        try:
            return self.inbox.take(self.turns.expected())
        except messages.PeerGone as gone:
            if not self.turns.together:
                return gone.peer, torch.empty(0)
            n = self.turns.pushes[gone.peer]
            raise messages.PeerGone(gone.peer, f"it had pushed {n} times") from None


class Worker(replica.Replica):
    """A copy of the model: its weights come from servers, its gradients go there."""

    def __init__(self, module, servers):
        super().__init__(module)
        self.servers, self.inbox, self.versions = servers, messages.Inbox(), {}

    def pull(self):
        """Take the weights of all servers: of each a snapshot, of all perhaps a mix."""
        parts = {}
        while len(parts) < len(self.servers):
            server, part = self.inbox.take([s for s in self.servers if s not in parts])
            parts[server], self.versions[server] = part[:-1], part[-1:]
        flat = torch.cat([part for _, part in sorted(parts.items())])
        vector_to_parameters(flat, replica.trained(self.module))

    def push(self):
        """Send each server its range of the gradient, and the version it belongs to."""
        parts = replica.flat_gradient(self.module).tensor_split(len(self.servers))
        for server in self.servers:
            messages.isend(torch.cat([parts[server], self.versions[server]]), server)

    def leave(self):
        """Take the last weights, and tell all servers that no gradient will follow."""
        self.pull()
        for server in self.servers:
            messages.isend(torch.empty(0), server)


def step_seconds(n_workers, n_servers, nbytes, compute, link):
    """A synchronous step: others compute already while the last worker pulls. Exact for
    one server, one worker, or equal numbers; else the least. compute: F + B + U."""
    through_a_port = (n_workers / n_servers + 1) * nbytes
    return compute + 2 * link.latency + through_a_port / link.bandwidth


def traffic(n_workers, ranges, n_steps):
    """Bytes that each rank sends, servers first, from those of each server's range;
    each message has 4 bytes more, the version. The last weights are pulled, too."""
    each = [nbytes + 4 for nbytes in ranges]
    out = [n_workers * (n_steps + 1) * nbytes for nbytes in each]
    return out + [n_steps * sum(each)] * n_workers


def memory(n_workers, ranges):
    """Bytes of weights, gradients and momentum; gradients of a round not counted."""
    return [3 * nbytes for nbytes in ranges] + [2 * sum(ranges)] * n_workers


def most_stale(n_workers, bound):
    """The largest staleness, if a gradient makes an update and no worker is more than
    `bound` ahead: meanwhile each other one pushes at most 2 bound + 1 times."""
    return (n_workers - 1) * (2 * bound + 1)


@dataclass(frozen=True)
class Config(served.Config):
    """One run with parameter servers."""

    mode: Annotated[str, "sync, stale (see --bound) or async"] = "sync"
    bound: Annotated[int, "steps ahead of the slowest worker, in mode stale"] = 1
    rate: Annotated[float, "times the usual learning rate"] = 1.0

    def check(self):
        super().check()
        lab.choose("mode", self.mode, ("sync", "stale", "async"))

    def remarks(self):
        own = "Gradients may belong to older weights than those that they change."
        return super().remarks() + [own] * (self.mode != "sync")

    def turns(self, server):
        bound = {"sync": 0, "stale": self.bound, "async": inf}[self.mode]
        return served.Turns(self.workers(server), self.mode == "sync", bound)

    def sgd(self, module):
        parts = 1 if self.mode == "sync" else self.n_workers  # gradients of a batch
        lr = self.rate * toy.LR[self.model] / parts
        return torch.optim.SGD(module.parameters(), lr, toy.MOMENTUM)

    def worker(self, rank):
        module, turns = self.build(), self.turns(rank)
        if rank >= self.n_servers:
            return Worker(module, served.order(self.n_servers, rank, turns.together))
        flat = parameters_to_vector(replica.trained(module)).detach()
        return Server(flat.tensor_split(self.n_servers)[rank], self.sgd, turns)


def measure(config, clock, progress=False):
    """Train on ranks; return a training.Report with prediction and ledger."""
    report = training.train(config, clock, progress)
    run, n, n_servers = report.timeline, config.n_workers, config.n_servers
    size = sum(weight.numel() for weight in replica.trained(config.build()))
    ranges = [4 * part for part in messages.chunk_sizes(size, n_servers)]
    said = served.predict(report, [nbytes + 4 for nbytes in ranges], clock.link)
    every, most = served.interval(said), most_stale(n, config.turns(0).bound)
    if config.mode == "sync":
        nbytes, costs = n_servers * (max(ranges) + 4), training.means(said).values()
        every, most = step_seconds(n, n_servers, nbytes, sum(costs), clock.link), 0
    report.rows = [
        ("bubble", said.bubble(), run.bubble(), "%"),
        ("whole run", said.makespan, run.makespan, run.unit),
        ("an update every", every, served.interval(run), run.unit),
        ("staleness, at most", most, max(map(max, filter(None, report.facts))), ""),
        ("sent", traffic(n, ranges, config.steps), report.sent, "B"),
        ("held", memory(n, ranges), report.held, "B"),
    ]
    return report


if __name__ == "__main__":
    from labs import parameter_server as own  # ranks import it by this name

    lab.main("parameter_server", __doc__, own.Config, own.measure)
