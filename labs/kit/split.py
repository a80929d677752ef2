"""Cut a model into stages: contiguous slices of an `nn.Sequential`.

    even(8, 3)              [3, 3, 2]   layers per stage, sizes that differ by at most 1
    by_cost([1, 1, 6], 2)   [2, 1]      the smallest possible largest cost
    check(model, sizes, x)  refuses a cut through a tied weight or a skip connection
"""

import copy
from itertools import accumulate

import torch
from torch import nn

from labs.kit import toy
from labs.kit.meter import Meter


def chunk_sizes(n, parts):
    """Return the sizes of `parts` chunks of n things, the larger ones first.

    >>> chunk_sizes(10, 4), chunk_sizes(2, 4)
    ([3, 3, 2, 2], [1, 1, 0, 0])
    """
    return [n // parts + (part < n % parts) for part in range(parts)]


def even(n, parts, things="layers", of="stages"):
    """Return the sizes of `parts` parts of n things; ValueError if some were empty."""
    if not 1 <= parts <= n:
        raise ValueError(f"{n} {things} cannot make {parts} {of}: choose 1 to {n}.")
    return chunk_sizes(n, parts)


def by_cost(costs, n_stages):
    """Return layers per stage for the contiguous split with the smallest largest cost.

    Exact, by dynamic programming over (stages so far, layers so far), as in the
    linear partition problem (Skiena, The Algorithm Design Manual, section 10.7).
    """
    even(len(costs), n_stages)
    total = [0, *accumulate(costs)]
    layers = range(len(total))
    best = {(1, end): (total[end], ()) for end in layers[1:]}
    for stages in range(2, n_stages + 1):
        for end in layers[stages:]:
            best[stages, end] = min(
                (max(best[stages - 1, cut][0], total[end] - total[cut]),
                 (*best[stages - 1, cut][1], cut))
                for cut in layers[stages - 1 : end]
            )  # fmt: skip
    cuts = [0, *best[n_stages, len(costs)][1], len(costs)]
    return [end - start for start, end in zip(cuts, cuts[1:])]


def ranges(sizes):
    """Return the layer indices of each stage, as ranges."""
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends)]


def check(model, sizes, sample):
    """Raise ValueError if stages of `sizes` layers would not train `model` rightly.

    Every stage is copied by itself, as a rank has it, and a small `sample` of inputs
    goes through all of them forward and backward: outputs and gradients must be those
    of the whole model. A tied weight or a skip over a boundary is found here.
    """
    stages = [model[span.start : span.stop] for span in ranges(sizes)]
    _refuse_tied(stages)
    whole = copy.deepcopy(model)
    try:
        with torch.random.fork_rng(devices=[]):
            _gradients([whole], sample)
        with torch.random.fork_rng(devices=[]):
            parts = [copy.deepcopy(stage) for stage in stages]
            _gradients(parts, sample)
    except (RuntimeError, AttributeError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{_CUT} ({type(error).__name__}: {error}).") from None
    found = {name: p for part in parts for name, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        if not _same(parameter.grad, found[name].grad):
            raise ValueError(f"{_CUT} (the gradient of {name} would be wrong).")


_CUT = (
    "this cut goes through a connection that skips a stage: put both its ends into one "
    "stage, or hand the skipped tensor on from layer to layer"
)


def _refuse_tied(stages):
    owner = {}
    for number, stage in enumerate(stages):
        for name, parameter in stage.named_parameters():
            first, where = owner.setdefault(id(parameter), (name, number))
            if where != number:
                raise ValueError(
                    f"{first} of stage {where} and {name} of stage {number} are one "
                    "tied weight: put both layers into one stage, or untie them."
                )


def _gradients(stages, x):
    """Run stages one after the other, each with a graph of its own, then back."""
    kept = []
    for stage in stages:
        x = x.detach().requires_grad_(x.is_floating_point())
        kept.append((x, stage(x)))
        x = kept[-1][1]
    gradient = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)
    for x, y in reversed(kept):
        y.backward(gradient)
        gradient = x.grad


def _same(a, b):
    if a is None or b is None:
        return a is b
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6 * float(a.abs().max()))


def remarks(model):
    """Return sentences on layers for which microbatches are not the whole batch."""
    batch_norm = nn.modules.batchnorm._BatchNorm
    said = []
    if any(isinstance(layer, batch_norm) for layer in model.modules()):
        said.append(
            "BatchNorm normalises each microbatch by itself and updates its running "
            "statistics once per microbatch (twice with recompute): the weights will "
            "not equal those of one process."
        )
    if any(isinstance(m, nn.Dropout) and m.p for m in model.modules()):
        said.append(
            "Dropout draws a mask per microbatch and stage: the weights equal those of "
            "one process only in distribution."
        )
    return said


def weigh(config):
    """Return (inside, boundary): bytes per stage and microbatch, in one process.

    inside: all that a forward keeps for its backward; boundary: its input alone. The
    output is kept until then too, except with recompute.
    config: a lab's Config, with worker(rank), cut(batch) and the model's name.
    """
    inputs, targets = toy.batch(config.model, config.batch)
    parts, wanted = config.cut(inputs), config.cut(targets)
    inside, boundary = [], []
    for rank in range(config.n_ranks()):
        stage = config.worker(rank)
        stage.recompute = False
        if rank == config.n_ranks() - 1:
            stage.loss = lambda y, i: toy.loss_sum(y, wanted[i])
        boundary.append([x.numel() * x.element_size() for x in parts])
        inside.append([])
        for i, x in enumerate(parts):
            meter = Meter(stage.module)
            with meter:
                parts[i] = stage.forward(i, x)
            x, y = stage.live.pop(i)
            meter.hold(i, x, *[] if config.recompute else [y])
            inside[-1].append(meter.bytes)
    return inside, boundary
