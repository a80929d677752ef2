"""Cut a model into stages: contiguous slices of an `nn.Sequential`.

    even(8, 3)              [3, 3, 2]   layers per stage, sizes that differ by at most 1
    by_cost([1, 1, 6], 2)   [2, 1]      the smallest possible largest cost
    check(model, sizes, x)  refuses a cut through a tied weight or a skip connection
"""

import contextlib
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn

from labs.kit import rng, toy
from labs.kit.messages import chunk_sizes
from labs.kit.meter import Meter


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

    Each stage runs by itself, as on its rank: its input and the gradient of its output
    must lead to the output and the gradients that it has in the whole model, on a small
    `sample` of inputs. That finds tied weights and connections that skip a boundary,
    however they are written.
    """
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"cut an nn.Sequential, not a {type(model).__name__}.")
    if sum(sizes) != len(model):
        raise ValueError(f"stages of {sizes} layers do not make {len(model)} layers.")
    stages = [model[span.start : span.stop] for span in ranges(sizes)]
    _refuse_tied(stages)
    with _unchanged(model) as reset:
        runs = _run_whole(stages, sample)
        for number in reversed(range(len(runs))):  # who misses something comes first
            _leave_other_data(model, sample)
            reset()
            trouble = _trouble(number, runs[number])
            if trouble:
                raise ValueError(
                    f"stage {number} by itself {trouble}: cut elsewhere, so that both "
                    "ends of a connection are in one stage, or hand the tensor on from "
                    "layer to layer."
                )
        _leave_other_data(model, sample)  # and no graph


def _refuse_tied(stages):
    users = {}  # who has a piece of memory: (weight, stage)
    for number, stage in enumerate(stages):
        for name, weight in stage.named_parameters():
            memory = weight.untyped_storage().data_ptr()
            first, where = users.setdefault(memory, (name, number))
            if where != number and memory and weight.requires_grad:
                raise ValueError(
                    f"{first} of stage {where} and {name} of stage {number} are one "
                    "tied weight: put both layers into one stage, or untie them."
                )


@contextlib.contextmanager
def _unchanged(model):
    """Runs inside change neither buffers nor gradients nor the random state of the
    process; yields a function that puts a run's traces away."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    gradients = [(weight, weight.grad) for weight in model.parameters()]

    def reset():
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
        for weight, _ in gradients:
            weight.grad = None

    with torch.random.fork_rng(devices=[]):
        try:
            reset()
            yield reset
        finally:
            reset()
            for weight, gradient in gradients:
                weight.grad = gradient


def _leave_other_data(model, sample):
    """Run on other inputs. What layers hand on behind the pipeline's back is then there
    and wrong, as on another rank."""
    other = sample + 1 if sample.is_floating_point() else torch.zeros_like(sample)
    with torch.no_grad():
        model(other)


class _Run(NamedTuple):
    """What a stage did within the whole model; x and y have their gradients."""

    stage: nn.Sequential
    random: tuple
    x: torch.Tensor
    y: torch.Tensor
    gradients: dict


def _run_whole(stages, x):
    """Run stages as one model, forward and backward; return a _Run of each."""
    flow, x = [], _leaf(x)
    for stage in stages:
        random, y = rng.state(x.device), stage(x)
        if not isinstance(y, torch.Tensor):
            raise ValueError(
                f"stage {len(flow)} ends in a {type(y).__name__}: cut the model where "
                "one tensor passes."
            )
        if y.requires_grad:
            y.retain_grad()
        flow.append((stage, random, x, y))
        x = y
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return [_Run(*one, _gradients(one[0])) for one in flow]


def _leaf(x):
    return x.detach().clone().requires_grad_(x.is_floating_point())


def _gradients(stage):
    return {f"gradient of {name}": p.grad for name, p in stage.named_parameters()}


def _trouble(number, run):
    """Say what a stage alone does otherwise than in a `run` of the whole model."""
    x = _leaf(run.x)
    try:
        with rng.again(run.random):
            y = run.stage(x)
    except Exception as error:  # whatever its layers raise
        return f"cannot run ({type(error).__name__}: {error})"
    if y.requires_grad and run.y.grad is not None:
        y.backward(run.y.grad)
    if number and x.grad is None:
        return f"has no gradient for stage {number - 1}"
    its = {"output": run.y, "gradient of its input": run.x.grad, **run.gradients}
    mine = {"output": y, "gradient of its input": x.grad, **_gradients(run.stage)}
    if not run.x.requires_grad:  # the stages before have nothing to train
        mine["gradient of its input"] = None
    wrong = [what for what in its if not _same(mine[what], its[what])]
    return f"has another {wrong[0]} than in the whole model" if wrong else None


def _same(a, b):
    if a is None or b is None:
        return a is b
    a, b = a.detach().double(), b.detach().double()
    return torch.allclose(a, b, 1e-4, 1e-6 * float(a.norm()), equal_nan=True)


def remarks(model):
    """Return sentences: why microbatches of this model need not equal the batch."""
    dropout, batch_norm = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm
    said = []
    if any(isinstance(layer, batch_norm) for layer in model.modules()):
        said.append(
            "BatchNorm normalises each microbatch by itself, and updates its running "
            "statistics once per microbatch (twice with recompute): the weights need "
            "not equal those of one process."
        )
    if any(isinstance(layer, dropout) and layer.p for layer in model.modules()):
        said.append(
            "Dropout draws a mask per microbatch, on each rank: the weights need not "
            "equal those of one process."
        )
    return said


def weigh(config):
    """Return (inside, boundary): bytes per stage and microbatch, in one process.

    inside: all that a forward keeps for its backward; boundary: its input alone. The
    output is kept until then too, except with recompute.
    config: a lab's Config, with worker(rank) and cut(batch).
    """
    inputs, targets = config.data(0)
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
