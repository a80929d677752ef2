# %% [markdown]
# # A single GPU: exercises
#
# The chapter *A single GPU* follows one training step: where its time goes, and its
# memory. Here you write parts of it yourself and then go further than the chapter:
# three exercises for practice, five for points (12 in all).
#
# A cell that is yours ends in `raise NotImplementedError("your turn")`: replace that
# line. The check below it gives a verdict and, if you are not right yet, a reason. The
# text stored under a check is what a right answer gets.
#
# A check calls your function in a process of its own, and with other sizes than the
# examples. What your function prints is not shown there: to look at something, call the
# function in a new cell.

# %% [markdown]
# ## Set-up
#
# On Colab, or anywhere outside the course's folder, install the course first: in a cell
# above this one, run `%pip install` with its folder or repository.

# %% id="setup"
try:
    from labs import single_gpu as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

import torch

from labs.checks.single_gpu import check, values_of
from labs.kit import toy
from labs.kit.clock import Unit, Virtual
from labs.kit.draw import curve, draw
from labs.kit.page import Table, ledger

# %% [markdown]
# ## The lab, once
#
# One process trains a small network on images of digits. It cuts each batch of 32 into
# four microbatches and adds up their gradients. Only time is a model: every forward
# counts as one unit, every backward as two, loading a batch and updating the weights as
# a half each. So the picture is the same on whatever you have.

# %% id="run"
config = lab.Config(model="digits", n_microbatches=4, steps=2)
report = lab.measure(config, Virtual(Unit(config.costs())))
everywhere = [row for row in report.rows if "GPU" not in row[0]]
ledger(everywhere + report.invariant()[1:])

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. (6ND is
# far off: it knows no convolutions, which use each weight at every place of an image.)
# The same as a picture: time runs to the right.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown] exercise="throughput"
# ## Practice: loading and training
#
# A step of the run above loads 32 samples in half a unit of time and trains on them in
# twelve and a half. Rates say the same the other way round: so many samples per unit.
# How many samples per unit pass both, if loading and training take turns? And how many,
# if with prefetch the next batch is loaded while this one trains?

# %% tags=["exercise"] exercise="throughput" practice=true
from labs.single_gpu import throughput

# %% tags=["check"] exercise="throughput"
check("throughput", throughput)

# %% [markdown] exercise="update"
# ## Practice: update the weights by hand
#
# An optimizer is a few lines: it reads each gradient once and changes tensors in place.
# `torch.optim.SGD` does the same, and the check compares with it.

# %% tags=["exercise"] exercise="update" practice=true
from labs.single_gpu import update

# %% tags=["check"] exercise="update"
check("update", update)

# %% [markdown] exercise="accumulate"
# ## Practice: a batch in microbatches
#
# Activations live from a forward to its backward. To keep few of them, run the batch
# in microbatches; gradients add up by themselves. But what has to add up is the batch's
# mean, and a mean of means is another one:

# %% id="means"
few, many = torch.tensor([6.0]), torch.tensor([1.0, 2.0, 3.0])
print("mean of both", torch.cat([few, many]).mean().item())
print("mean of their means", (few.mean().item() + many.mean().item()) / 2)

# %% [markdown]
# The lab's trainer has `forward(microbatch, inputs, targets, valid)`, which divides the
# microbatch's loss by `valid` and returns it, and `backward(microbatch)`. There,
# `microbatch` is a number: 0, 1, 2, ... `toy.n_valid(targets)` counts the targets that
# are not masked, and `tensor_split` cuts a tensor into parts.

# %% tags=["exercise"] exercise="accumulate" practice=true
from labs.single_gpu import accumulate

# %% tags=["check"] exercise="accumulate"
check("accumulate", accumulate)

# %% [markdown] exercise="adamw"
# ## AdamW by hand (3 points)
#
# Large models are hardly ever trained with SGD. Adam keeps two moments of each weight,
# running means of its gradient and of the gradient's square. They need memory:

# %% id="rules"
for rule in ("SGD with momentum", "Adam"):
    size = sum(lab.memory(10**9, rule))
    print(f"{rule}: {size / 1e9:g} GB for a billion parameters, without activations")

# %% [markdown]
# Both means begin at zero, so at first they are too small: after k steps, the shares of
# all gradients in a mean add up to 1 - beta**k only. Adam divides by that. The first
# moment over the root of the second is then about 1 or less, however large the
# gradients are, and `lr` says how far a weight goes in a step. The W in AdamW is for a
# decay of the weights that goes past the moments.

# %% tags=["exercise"] exercise="adamw" points=3
@torch.no_grad()
def adamw(
    parameters, first, second, step, lr,
    betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01,
):  # fmt: skip
    """Update parameters by AdamW, from the gradients in their `.grad`; return nothing.

    first, second: lists with a tensor for each parameter, zero before the first step:
    its two moments. Of a moment, a step keeps the part betas[0] or betas[1], and fills
    up with the gradient or its square. Change moments and parameters in place.
    step: which one this is; the first has the number 1.
    eps: is added to the root, so that nothing is divided by zero.
    Besides, a weight loses the part lr * weight_decay of what it was before this step.
    A parameter whose `.grad` is None stays as it is, and so do its moments.
    Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2, as in torch.optim.AdamW.

    >>> w = torch.tensor([1.0, 1.0], requires_grad=True)
    >>> w.grad = torch.tensor([0.01, -100.0])
    >>> adamw([w], [torch.zeros(2)], [torch.zeros(2)], 1, lr=0.1, weight_decay=0)
    >>> [round(x, 3) for x in w.tolist()]
    [0.9, 1.1]
    """
    for w, mean, square in zip(parameters, first, second):
        if w.grad is None:
            continue
        mean += (1 - betas[0]) * (w.grad - mean)
        square += (1 - betas[1]) * (w.grad**2 - square)
        length = (square / (1 - betas[1] ** step)).sqrt() + eps
        w *= 1 - lr * weight_decay
        w -= lr * mean / (1 - betas[0] ** step) / length


# %% tags=["check"] exercise="adamw"
check("adamw", adamw)

# %% [markdown] exercise="accumulate_stream"
# ## A batch whose size is not known yet (3 points)
#
# `accumulate` counts the valid targets of the whole batch before the first forward.
# Often nobody knows them then: microbatches come from a loader, one by one, and there
# is no room to keep them until the last has come. Their gradients have to be the same
# all the same.

# %% tags=["exercise"] exercise="accumulate_stream" points=3
def accumulate_stream(model, microbatches):
    """Add up the gradient of a batch, each microbatch as it comes; return its loss.

    microbatches: an iterator of (inputs, targets), which can be read once. Of each, run
    the backward before you ask for the next one, so that only one is in memory.
    model(inputs): scores (samples, classes). Targets of -100 are masked; a microbatch
    may have no others, the batch has some. `toy.loss_sum(scores, targets)` is the loss
    summed over the valid targets; the batch's loss is its mean over them.
    Before, no parameter has a gradient. At the end `.grad` holds that of the mean.

    >>> model = torch.nn.Linear(1, 2)
    >>> x, t = torch.ones(3, 1), torch.tensor([0, 1, -100])
    >>> loss = accumulate_stream(model, iter([(x, t), (x[:1], t[:1])]))
    >>> truth = toy.loss_sum(model(torch.ones(3, 1)), torch.tensor([0, 1, 0])) / 3
    >>> abs(loss - truth.item()) < 1e-5
    True
    """
    total = n_valid = 0
    for inputs, targets in microbatches:
        summed = toy.loss_sum(model(inputs), targets)
        summed.backward()
        total += summed.item()
        n_valid += int((targets != toy.IGNORE).sum())
    for weights in model.parameters():
        weights.grad /= n_valid
    return total / n_valid


# %% tags=["check"] exercise="accumulate_stream"
check("accumulate_stream", accumulate_stream)

# %% [markdown] exercise="microbatch_sizes"
# ## How large may a microbatch be? (2 points)
#
# Small microbatches use a device badly, and large ones do not fit. So take as few as
# will do. What a rule of training keeps of the parameters, `lab.memory` says.

# %% tags=["exercise"] exercise="microbatch_sizes" points=2
def microbatch_sizes(batch, budget, n_parameters, rule, per_sample):
    """Return the sizes of the fewest microbatches that fit; None if nothing does.

    batch: samples in all. Sizes differ by at most one sample, the larger come first.
    budget: bytes of memory, all of which may be in use.
    rule: a key of `lab.RULES`: what parameters, gradients and optimizer states need.
    per_sample: bytes of activations; those of one microbatch are there at a time.

    >>> microbatch_sizes(10, 1000, 50, "SGD with momentum", per_sample=100)
    [4, 3, 3]
    >>> microbatch_sizes(10, 1000, 100, "SGD with momentum", per_sample=100) is None
    True
    """
    left = budget - sum(lab.memory(n_parameters, rule))
    for n in range(1, batch + 1):
        sizes = [batch // n + (i < batch % n) for i in range(n)]
        if sizes[0] * per_sample <= left:
            return sizes
    return None


# %% tags=["check"] exercise="microbatch_sizes"
check("microbatch_sizes", microbatch_sizes)

# %% [markdown] exercise="epoch_time"
# ## Loaders that run ahead (2 points)
#
# With loading and training side by side, the slower one sets the pace: that is the
# chapter's formula, and it holds if every batch takes equally long. Real ones do not: a
# large picture, a cold disk. So loaders run ahead and put batches on a shelf, which has
# room for a few only. Find out when the last batch is trained on.

# %% tags=["exercise"] exercise="epoch_time" points=2
def epoch_time(loads, train, n_loaders, ahead):
    """Return when the training on the last batch of an epoch ends; it begins at 0.

    loads: the time that it takes to load each batch. train: to train on any of them.
    Training takes the batches in order: each when it is loaded and the one before it is
    done. A free loader begins the next batch, in order too, as soon as a place on the
    shelf is free. There are `ahead` places. A batch has one from the moment on when its
    loading begins, until training takes it.
    (PyTorch's DataLoader has prefetch_factor * num_workers such places.)

    >>> epoch_time([2, 2, 2], train=3, n_loaders=1, ahead=1)
    11
    >>> epoch_time([4, 4, 4, 4], train=1, n_loaders=2, ahead=2)
    10
    """
    free, taken, end = [0] * n_loaders, [], 0
    for i, load in enumerate(loads):
        place = taken[i - ahead] if i >= ahead else 0
        loaded = max(min(free), place) + load
        free[free.index(min(free))] = loaded
        taken.append(max(loaded, end))
        end = taken[-1] + train
    return end


# %% tags=["check"] exercise="epoch_time"
check("epoch_time", epoch_time)

# %% [markdown]
# An epoch of which every eighth batch takes nine times as long to load. On average the
# two loaders are as fast as the training. With a short shelf it waits for them all the
# same.

# %% id="epoch_time-figure" tags=["expected"]
loads, places = [9, 1, 1, 1, 1, 1, 1, 1] * 8, list(range(1, 13))
yours = values_of(epoch_time, *((loads, 1, 2, ahead) for ahead in places))
series = [{"label": "two loaders", "x": places, "y": yours}]
axes = "places on the shelf", "time of an epoch of 64 batches", "Loaders that run ahead"
alt = "The more places on the shelf, the sooner an epoch ends, down to a limit."
curve(series, *axes, alt=alt) if yours else None

# %% [markdown] exercise="tokens_to_fill"
# ## How many tokens fill a device? (2 points)
#
# A device can be idle inside an operation, where no timeline shows it: its arithmetic
# waits for its memory. A linear layer has to read its weights, however few tokens come;
# the more there are, the more work each weight brings. Here is what an operation takes,
# if arithmetic and memory go on side by side: FLOPs / peak or bytes / bandwidth,
# whichever is longer.

# %% tags=["exercise"] exercise="tokens_to_fill" points=2
def tokens_to_fill(n_in, n_out, peak, bandwidth, nbytes=2):
    """Return the fewest tokens that keep a device's arithmetic busy; None if none do.

    A linear layer turns n_in values of each token into n_out, by a matrix of weights
    (no bias), in a forward. Inputs and weights are read from memory and outputs are
    written to it, each value once, with nbytes bytes. A multiply-add is two FLOPs.
    peak: FLOP/s. bandwidth: bytes/s. The arithmetic is busy if it takes at least as
    long as the memory.
    Williams, Waterman and Patterson 2009, "Roofline", Communications of the ACM 52(4).

    >>> tokens_to_fill(12288, 12288, peak=312e12, bandwidth=2e12)
    161
    >>> tokens_to_fill(64, 64, peak=312e12, bandwidth=2e12) is None
    True
    """
    import math

    saved = 2 * n_in * n_out / peak - nbytes * (n_in + n_out) / bandwidth
    if saved <= 0:
        return None
    return math.ceil(nbytes * n_in * n_out / bandwidth / saved)


# %% tags=["check"] exercise="tokens_to_fill"
check("tokens_to_fill", tokens_to_fill)

# %% [markdown]
# The same for square layers, on a device with 312 TFLOP/s and 2 TB/s, as an A100 has.
# The transformer of this course has a width of 64: no batch, however large, fills it.

# %% id="tokens_to_fill-table" tags=["expected"]
widths = [64, 256, 512, 1024, 4096, 12288]
yours = values_of(tokens_to_fill, *((w, w, 312e12, 2e12) for w in widths))
rows = [{"width": w, "tokens": t or "none"} for w, t in zip(widths, yours or [])]
Table(rows) if yours else None

# %% [markdown]
# ## What you have found
#
# - What an optimizer keeps is a part of the memory bill; microbatches make the
#   activations smaller and nothing else.
# - Accumulated gradients are those of the batch only if every target weighs the same:
#   add up sums, divide once.
# - Loading is free as long as it runs beside the training, is fast enough on average,
#   and may run far enough ahead.
# - A device without a pause in its timeline may still wait: for its memory.
