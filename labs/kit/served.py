"""Workers and servers: whose turn it is, and the timeline that follows, without ranks.

Ranks 0 to S-1 are servers, the others workers. A worker takes the weights of all
servers, computes, and sends a gradient to each; a server handles the message that was
sent first, may update, and answers those whose turn it is. Ports are those of the
virtual clock. The order of a pipeline is fixed; here the times decide.
"""

import copy
import heapq
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Annotated

from labs.kit import replica, toy, training
from labs.kit.simulate import MEANING_OF_REPLICAS, Explanation, Ports, steps
from labs.kit.timeline import Link, Op, Span, Timeline


class Turns:
    """Whose gradients make an update, and which workers may pull again.

    together: does an update wait for a gradient of each worker? bound: how many pushes
    a worker may be ahead of the slowest. `pushes` holds the workers that are there.
    """

    def __init__(self, workers, together=True, bound=0):
        self.pushes = dict.fromkeys(workers, 0)
        self.together, self.bound = together, bound
        self.unused, self.held = [], list(workers)

    def expected(self):
        """The workers whose next message can come: all but those that wait."""
        return [worker for worker in self.pushes if worker not in self.held]

    def push(self, worker):
        self.pushes[worker] += 1
        self.unused.append(worker)
        self.held.append(worker)

    def leave(self, worker):
        """A worker has no more samples, or is gone: nobody waits for it."""
        del self.pushes[worker]

    def update(self):
        """Return the workers whose gradients now make an update: none, one or all."""
        if self.together and not self.pushes.keys() <= set(self.unused):
            return []
        ready, self.unused = sorted(self.unused), []
        return ready

    def answer(self):
        """Return the workers that may pull now."""
        most = min(self.pushes.values(), default=0) + self.bound
        free = [worker for worker in self.held if self.pushes[worker] <= most]
        self.held = [worker for worker in self.held if worker not in free]
        return free


def serve(turns, n_workers, seconds, nbytes, n_steps, link, unit=""):
    """Return the Timeline of workers that take `n_steps` steps each.

    turns: the Turns of each server, which are copied.
    seconds(rank, op): what F, B (of a worker's step) or U (of a version) takes.
    nbytes: for each server, of its message to a worker and of one to it.
    """
    run = _Run(copy.deepcopy(turns), n_workers, seconds, nbytes, n_steps, link)
    run.to_the_end()
    clock = "equal operations, stated link"
    return Timeline(run.spans, len(turns) + n_workers, clock=clock, unit=unit)


def rotated(items, start):
    """Return the items as a list that begins with item `start`."""
    items = list(items)
    start %= max(1, len(items))
    return items[start:] + items[:start]


def order(n_servers, worker, together):
    """Return the servers in the order in which a worker sends to them.

    Workers that push together begin with different servers. Others begin with the same
    one: so all servers see them in one order, and in virtual time, where a server waits
    for a message of each worker before it takes the first, none waits for another.
    """
    return rotated(range(n_servers), worker - n_servers if together else 0)


class _Run:
    def __init__(self, turns, n_workers, seconds, nbytes, n_steps, link):
        self.turns, self.seconds = turns, seconds
        self.nbytes, self.n_steps = nbytes, n_steps
        n_ranks = len(turns) + n_workers
        self.time, self.ports = [0.0] * n_ranks, Ports(n_ranks, link)
        self.coming = [[] for _ in range(n_ranks)]  # (begun, server, ...), to a worker
        self.step = [0] * n_ranks
        self.version = [0] * len(turns)
        self.pushed, self.spans = [], []  # a heap of (begun, worker, server, ...)

    def to_the_end(self):
        for server in range(len(self.turns)):
            self.answer(server)
        while self.pushed:
            begun, worker, server, *message = heapq.heappop(self.pushed)
            self.receive(server, worker, begun, *message)
            self.handle(server, worker, *message)

    def handle(self, server, worker, busy, nbytes):
        turns = self.turns[server]
        if nbytes:
            turns.push(worker)
        else:
            turns.leave(worker)
        if turns.update():
            self.version[server] += 1
            self.compute(server, Op("U", self.version[server]))
        self.answer(server)

    def answer(self, server):
        for worker in self.turns[server].answer():
            begun, *message = self.send(server, worker, self.nbytes[server])
            self.coming[worker].append((begun, server, *message))
            if len(self.coming[worker]) == len(self.turns):
                self.work(worker)

    def work(self, worker):
        """Take all servers' weights; then a step, or the word that there is none."""
        for begun, server, *message in sorted(self.coming[worker]):
            self.receive(worker, server, begun, *message)
        self.coming[worker], step = [], self.step[worker]
        self.step[worker] += 1
        last = step == self.n_steps
        for kind in "" if last else "FB":
            self.compute(worker, Op(kind, step))
        for server in order(len(self.turns), worker, self.turns[0].together):
            nbytes = 0 if last else self.nbytes[server]
            begun, *message = self.send(worker, server, nbytes)
            heapq.heappush(self.pushed, (begun, worker, server, *message))

    def compute(self, rank, op):
        start = self.time[rank]
        self.time[rank] = start + self.seconds(rank, op)
        self.spans.append(Span(rank, "compute", *op, start, self.time[rank]))

    def send(self, rank, to, nbytes):
        """Return a message: (begun, port time, bytes)."""
        begun, busy = self.ports.send(rank, nbytes, self.time[rank])
        self._transfer(rank, "send", begun, begun + busy, to, nbytes)
        return begun, busy, nbytes

    def receive(self, rank, source, begun, busy, nbytes):
        now, end = self.time[rank], self.ports.receive(rank, begun, busy)
        if begun > now:
            self.spans.append(Span(rank, "wait", "wait", None, now, begun, source))
        self._transfer(rank, "receive", begun, end, source, nbytes)
        self.time[rank] = max(now, end)

    def _transfer(self, rank, name, start, end, peer, nbytes):
        if end > start:
            self.spans.append(
                Span(rank, "transfer", name, None, start, end, peer, nbytes)
            )


@dataclass(frozen=True)
class Config(replica.Config):
    """Ranks 0 to n_servers - 1 are servers, the others workers. A lab adds:

    turns(server)   the Turns of a server
    worker(rank)    a server with serve(n_pushes=inf), staleness; or a worker with
                    numbers (of its steps), pull(), forward, backward, push(), leave()
    """

    watched = {"forward": "F", "backward": "B", "update": "U"}
    whole = True
    steps: Annotated[int, "training steps, all of them recorded"] = 3
    n_servers: Annotated[int, "ranks that keep the weights, a range each"] = 1
    slowest: Annotated[int, "times as long as others the last worker takes"] = 1

    def n_ranks(self):
        return self.n_servers + self.n_workers

    def costs(self):
        return {"F": 1.0, "B": 2.0, "U": 0.25}

    def workers(self, server):
        """The workers; servers begin with different ones, so not all send to one."""
        start = server * self.n_workers // self.n_servers
        return rotated(range(self.n_servers, self.n_ranks()), start)

    def slow(self):
        return {self.n_ranks() - 1: self.slowest} if self.slowest > 1 else {}

    def optimizer(self, module):
        return None  # the servers have their own

    def step(self, worker, rank, *batch):
        if rank < self.n_servers:
            return worker.serve(self.n_workers)
        worker.pull()
        number, shard = next(worker.numbers), self.shard(rank - self.n_servers, *batch)
        valid = toy.n_valid(batch[1]) / self.n_workers  # servers take the mean
        loss = worker.forward(number, *shard, valid)
        worker.backward(number)
        worker.push()
        return loss.item() / self.n_workers

    def finish(self, worker, rank, step):
        if step == self.steps - 1:
            worker.serve() if rank < self.n_servers else worker.leave()

    def facts(self, worker):
        return getattr(worker, "staleness", None)


def predict(report, nbytes, link):
    """Give a report its explanation and its prediction, and return the latter.

    nbytes: of each server's messages; link: as stated, or free.
    """
    config, run = report.config, report.timeline
    turns = [config.turns(server) for server in range(config.n_servers)]
    mean = {"U": 0.0, **training.means(run)}

    def again(seconds, link):
        n, n_steps = config.n_workers, config.steps
        return serve(turns, n, seconds, nbytes, n_steps, link, run.unit)

    report.predicted = again(lambda rank, op: mean[op.kind], link)
    report.explain = partial(explain, again=again, link=link)
    return report.predicted


def interval(timeline):
    """Return the time from one update of the first server to the next, on average;
    None where there are fewer than two."""
    ends = [span.end for span in timeline.ops(0)]
    return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None


def losses(report):
    """Return (time, loss on the worker's own samples) of all steps, in order."""
    n, parts = report.config.n_workers, report.parts
    forwards = [span for span in report.timeline.spans if span.name == "F"]
    return sorted((s.end, n * parts[s.rank][s.microbatch]) for s in forwards)


def explain(predicted, measured, again, link):
    """Where the bubble of a run comes from; again(seconds, link) -> its Timeline.

    link: the one that was predicted. Where none was stated, as in wall time, the run's
    messages tell how fast one was.
    """
    spans = [span for rank in range(measured.n_ranks) for span in measured.ops(rank)]
    took = {(span.rank, span.op): span.end - span.start for span in spans}
    own = lambda rank, op: took[rank, op]
    found = link if link != Link() else Link(0.0, _rate(measured))
    bubbles = [
        predicted.bubble(),
        again(own, link).bubble(),
        again(own, found).bubble(),
        measured.bubble(),
    ]
    return Explanation(steps(bubbles), MEANING_OF_REPLICAS)


def _rate(timeline):
    """Return the bytes per time of a run's transfers."""
    received = [span for span in timeline.spans if span.name == "receive"]
    busy = sum(span.end - span.start for span in received)
    return sum(span.nbytes for span in received) / busy if busy else inf
