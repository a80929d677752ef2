"""GPipe: cut the model into stages and the batch into microbatches, and keep all busy.

    phase   stage s does, for each microbatch i                       sends
    fill    F(s, i): receive from s-1, forward, keep input, output    output to s+1
    drain   B(s, i): receive from s+1, backward, add to gradients     gradient to s-1
    update  one optimizer step on its own layers                      nothing

Microbatch gradients add up to the batch's, so the weights are a single process's. The
price of d stages and m microbatches: a bubble of (d-1)/(m+d-1) of all time, m of them
alive on every stage (Huang et al. 2019, arXiv 1811.06965, section 2.3).

    python -m labs.gpipe --stages 4 --microbatches 8
    torchrun --nproc-per-node 4 -m labs.gpipe
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from labs.kit import lab, messages, rng, split, toy, training
from labs.kit.timeline import Op


def gpipe(n_stages, n_microbatches):
    """Return the order of operations of each stage: all forwards, then all backwards.

    Backwards run in reverse, the newest microbatch first (Huang et al. 2019, fig. 2c).

    >>> [" ".join(map(str, order)) for order in gpipe(2, 3)]
    ['F0 F1 F2 B2 B1 B0', 'F0 F1 F2 B2 B1 B0']
    """
    forwards = [Op("F", i) for i in range(n_microbatches)]
    backwards = [Op("B", i) for i in reversed(range(n_microbatches))]
    return [forwards + backwards] * n_stages


SCHEDULES = {"gpipe": gpipe}


class Stage:
    """A stage of the model, and what it keeps of each microbatch until its backward.

    loss: on the last stage, a function (outputs, microbatch) -> this microbatch's share
    of the batch's loss. recompute: keep only the input, and run the forward again."""

    def __init__(self, module, loss=None, recompute=False):
        self.module, self.loss, self.recompute = module, loss, recompute
        self.live = {}

    def forward(self, microbatch, x):
        """Return the output for input x; its graph begins at this stage."""
        x = x.detach().requires_grad_(x.is_floating_point())
        random = rng.state(x.device) if self.recompute else None
        with torch.set_grad_enabled(not self.recompute):
            y = self._compute(microbatch, x)
        self.live[microbatch] = x, random or y
        return y.detach()

    def backward(self, microbatch, gradient=None):
        """Add to the weights' gradients; return the gradient of the stage's input."""
        x, kept = self.live.pop(microbatch)
        if self.recompute:
            with rng.again(kept):  # the same dropout as in the first forward
                kept = self._compute(microbatch, x)
        return backward(x, kept, gradient)

    def _compute(self, microbatch, x):
        y = self.module(x)
        return self.loss(y, microbatch) if self.loss else y


def backward(x, y, gradient=None):
    """Run a stage backward: from the gradient of its output y to that of its input x.

    gradient: what the next stage sent; None on the last stage, whose y is the loss.
    Weights' gradients add up in `.grad`. Returns that of x (None for tokens).
    """
    if y.requires_grad:  # else there is nothing to train up to here
        torch.autograd.backward(y, gradient)
    return x.grad


def run(order, stage, inputs):
    """Execute a stage's operations on microbatches `inputs` (read by stage 0); return
    the losses (last stage). Sends do not block: the next operation begins meanwhile."""
    rank, last, losses = messages.rank(), messages.n_ranks() - 1, []
    for kind, i in order:
        if kind == "F":
            x = inputs[i] if rank == 0 else messages.receive(rank - 1, tag=i)
            y = stage.forward(i, x)
            if rank < last:
                messages.isend(y, rank + 1, tag=i)
            else:
                losses.append(y)
        else:
            gradient = messages.receive(rank + 1, tag=i) if rank < last else None
            gradient = stage.backward(i, gradient)
            if rank > 0:
                messages.isend(gradient, rank - 1, tag=i)
    messages.finish()  # all sends have been taken
    return losses


def bubble_fraction(n_stages, n_microbatches):
    """Idle part of all stages' time, for equal stages (Huang et al. 2019, sec. 2.3)."""
    return (n_stages - 1) / (n_microbatches + n_stages - 1)


def idle_fraction(timeline, stage):
    """The part of the time in which one stage computes nothing, read off its spans."""
    busy = sum(span.end - span.start for span in timeline.ops(stage))
    return 1 - busy / timeline.makespan


def memory(inside, boundary, recompute=False):
    """Peak bytes of activations, from what each microbatch's forward keeps (inside) and
    its input (boundary): O(N); with recompute O(N + L/K N/M) (section 2.3)."""
    if not recompute:
        return sum(inside)
    return max(sum(boundary[:i]) + inside[i] for i in range(len(inside)))


def traffic(boundary):
    """Bytes that each stage sends per step, activations on and gradients back, from
    the bytes of each stage's input (boundary), of the whole batch."""
    inner = [0, *boundary[1:], 0]
    return [back + on for back, on in zip(inner, inner[1:])]


@dataclass(frozen=True)
class Config(training.Config):
    """One run of GPipe."""

    n_stages: Annotated[int, "stages, one per rank; more make a larger bubble"] = 4
    n_microbatches: Annotated[int, "pieces of the batch; more make it smaller"] = 8
    partition: Annotated[str, "even (layers) or cost (their FLOPs)"] = "even"
    recompute: Annotated[bool, "keep inputs only, and run forwards again"] = False
    schedule: Annotated[str, "the order of operations"] = "gpipe"

    def check(self):
        super().check()
        lab.choose("schedule", self.schedule, SCHEDULES)
        lab.choose("partition", self.partition, ("even", "cost"))
        split.even(self.batch, self.n_microbatches, "samples", "microbatches")
        split.check(self.build(), self.sizes(), self.data(0)[0][:2])

    def n_ranks(self):
        return self.n_stages

    def costs(self):
        return {"F": 1.0, "B": 3.0 if self.recompute else 2.0}

    def sizes(self):
        """Layers per stage."""
        if self.partition == "cost":
            return split.by_cost(toy.layer_costs(self.model, 1), self.n_stages)
        return split.even(len(self.build()), self.n_stages)

    def order(self):
        return SCHEDULES[self.schedule](self.n_stages, self.n_microbatches)

    def cut(self, batch):
        return [part.clone() for part in batch.tensor_split(self.n_microbatches)]

    def worker(self, rank):
        layers = split.ranges(self.sizes())[rank]
        return Stage(self.build(layers), recompute=self.recompute)

    def step(self, stage, rank, inputs, targets):
        parts, valid = self.cut(targets), toy.n_valid(targets)
        if rank == self.n_stages - 1:
            stage.loss = lambda y, i: toy.loss_sum(y, parts[i]) / valid
        losses = run(self.order()[rank], stage, self.cut(inputs))
        return float(sum(losses)) if losses else None


def measure(config, clock, progress=False):
    """Train on ranks; return a training.Report with prediction and ledger."""
    report = training.train(config, clock, progress)
    d, m, timeline = config.n_stages, config.n_microbatches, report.timeline
    report.predicted = training.predict(config.order(), timeline)
    inside, boundary = split.weigh(config)
    kept = [memory(*sizes, config.recompute) for sizes in zip(inside, boundary)]
    idle = [idle_fraction(timeline, stage) for stage in range(d)]
    report.rows = [
        ("bubble", bubble_fraction(d, m), timeline.bubble(), "%"),
        ("idle per stage", [bubble_fraction(d, m)] * d, idle, "%"),
        ("microbatches alive", [m] * d, [timeline.peak_live(s) for s in range(d)], ""),
        ("activations", kept, report.peaks, "B"),
        ("sent", traffic([sum(sizes) for sizes in boundary]), report.sent, "B"),
    ]
    return report


if __name__ == "__main__":
    from labs import gpipe  # ranks import it by this name

    lab.main("gpipe", __doc__, gpipe.Config, gpipe.measure)
