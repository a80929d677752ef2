# %% [markdown]
# # Data parallelism: exercises
#
# The chapter *Data parallelism* gives every rank the whole model and a part of the
# batch, and averages their gradients. Here you write parts of it yourself and then go
# further than the chapter: three exercises for practice, five for points (12 in all).
#
# A cell that is yours ends in `raise NotImplementedError("your turn")`: replace that
# line. The check below it gives a verdict and, if you are not right yet, a reason. The
# text stored under a check is what a right answer gets.
#
# A check calls your function in processes of its own, often on several ranks at once,
# and with other numbers than the examples. What your function prints is not shown
# there: to look at something, call the function in a new cell.

# %% [markdown]
# ## Set-up
#
# On Colab, or anywhere outside the course's folder, install the course first: in a cell
# above this one, run `%pip install` with its folder or repository.

# %% id="setup"
try:
    from labs import data_parallel as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

from itertools import cycle, islice  # noqa: F401 (for your answers)

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters  # noqa: F401

from labs.checks.data_parallel import check, times_of
from labs.kit import messages
from labs.kit.clock import Unit, Virtual, ring_seconds
from labs.kit.draw import curve, draw
from labs.kit.page import ledger
from labs.kit.timeline import Link
from labs.kit.world import launch

# %% [markdown]
# ## The lab, once
#
# Four processes train the same small network on images of digits, each on a quarter of
# the batch. Their messages are real. Time is a model: a forward of a rank's whole part
# counts as one unit and its backward as two, and a message takes what a ring of slow
# links would. So you see what four devices would do, on whatever you have.

# %% id="run"
config = lab.Config(model="digits", n_workers=4, bucket=20_000, steps=2)
report = lab.measure(config, Virtual(Unit(within=True), Link(0.01, 200_000)))
ledger(report.rows + report.invariant()[1:])

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. The same
# as a picture: a row is a rank; time runs to the right. The gradients leave in buckets,
# while the backward is still at work on the layers before.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown]
# ## Ranks and messages
#
# `launch(f, 2)` runs `f(rank, n_ranks)` on two ranks and returns what each of them
# returned. Use it whenever you want to see what your own function does.


# %% id="all-reduce"
def example(rank, n_ranks):
    """Add up a tensor of each rank."""
    mine = torch.tensor([1.0 + rank, 10.0])
    messages.all_reduce(mine)
    return mine.tolist()


launch(example, 2)

# %% [markdown]
# `messages.all_reduce` puts the sum over all ranks into the tensor that it is given;
# with `"avg"` as second argument it is the average. `messages.broadcast(tensor, 1)`
# gives all ranks what rank 1 has in it. Every rank has to make such a call, all of them
# in the same order, with tensors of the same shape. Inside a function that runs on
# ranks, `messages.rank()` and `messages.n_ranks()` say where you are.

# %% [markdown] exercise="indices"
# ## Practice: who gets which samples
#
# Without a message, all ranks have to agree on who takes which sample. They draw the
# same random order, because they use the same seed, and take turns: with two ranks,
# rank 0 takes the first sample of that order, the third, the fifth.
#
# There may be a remainder. All ranks need equally many samples, or one would wait for
# messages that no other sends. So the order begins again at its end, as often as
# needed: 10 samples are dealt to 4 ranks as 12, and the first two come twice. How you
# draw the order does not matter, if seed and epoch alone decide it.

# %% tags=["exercise"] exercise="indices" practice=true
from labs.data_parallel import indices

# %% tags=["check"] exercise="indices"
check("indices", indices)

# %% [markdown] exercise="average"
# ## Practice: an average in one message
#
# A message has a price, however small it is. So do not send one for each gradient: make
# one long vector of all of them, average it, and cut it up again. PyTorch's
# `parameters_to_vector` and `vector_to_parameters` do the first and the last; they take
# any list of tensors.
#
# The tensors themselves change: if rank 0 comes with `[1.0]` and `[5.0]`, rank 1 with
# `[3.0]` and `[7.0]`, then both end with `[2.0]` and `[6.0]`. One message has to do.

# %% tags=["exercise"] exercise="average" practice=true
from labs.data_parallel import average

# %% tags=["check"] exercise="average"
check("average", average)

# %% [markdown] exercise="buckets"
# ## Practice: buckets
#
# One message for all has to wait for the end of the backward. Cut in buckets, the
# gradients of the last layers, which the backward reaches first, can leave earlier.
# Go from the last parameter to the first, and put each into the bucket at hand, unless
# that would become larger than `nbytes`: then begin another one. With 12 bytes to a
# bucket, parameters of 8, 4 and 8 bytes make two: the last and the middle one, then the
# first. `messages.nbytes(parameter)` is the size of one.

# %% tags=["exercise"] exercise="buckets" practice=true
from labs.data_parallel import buckets

# %% tags=["check"] exercise="buckets"
check("buckets", buckets)

# %% [markdown] exercise="accuracy"
# ## Accuracy without counting twice (2 points)
#
# In training, a sample that comes twice does little harm. In a test it does: suppose
# that of 10 samples on 4 ranks the model is right on two, and that just these two come
# twice. Counting what was dealt gives 4 of 12. The truth is 2 of 10.


# %% tags=["exercise"] exercise="accuracy" points=2
def accuracy(correct, n_samples):
    """Return, on every rank, the part of n_samples on which the model is right, 0 to 1.

    correct: a list of True and False for the samples that this rank holds, in the order
    of indices(n_samples, n_ranks, rank): some are repeats, which count once. There may
    be fewer samples than ranks.

    >>> launch(lambda rank, n: accuracy([[True, False], [True, True]][rank], 3), 2)
    [0.6666666666666666, 0.6666666666666666]
    """
    n_ranks, rank = messages.n_ranks(), messages.rank()
    first = [flag for i, flag in enumerate(correct) if i * n_ranks + rank < n_samples]
    hits = messages.all_reduce(torch.tensor(sum(first)))
    return hits.item() / n_samples


# %% tags=["check"] exercise="accuracy"
check("accuracy", accuracy)

# %% [markdown] exercise="average_unequal"
# ## Ranks with different numbers of samples (2 points)
#
# Two ranks learn to map x to itself: $y = wx$ with $w = 0$ at the start. Rank 0 has the
# samples 1 and 2, rank 1 has 3. Each takes the mean of the squared error over its own.


# %% id="unequal"
def mean_of_means(rank, n_ranks):
    """The gradient of w after plain averaging."""
    x = torch.tensor([[1.0, 2.0], [3.0]][rank])
    w = torch.zeros(1, requires_grad=True)
    (w * x - x).square().mean().backward()
    lab.average_flat([w])
    return w.grad.item()


launch(mean_of_means, 2)

# %% [markdown]
# One process with all three samples finds $-2 (1 + 4 + 9) / 3 = -9.33$ instead. To be
# what a single process finds, an average over ranks needs weights.


# %% tags=["exercise"] exercise="average_unequal" points=2
def average_unequal(parameters, n_samples):
    """Leave in `.grad` the gradient of the mean loss over all samples of all ranks.

    parameters: a list, equal on all ranks but for `.grad`, which holds the gradient of
    the mean loss over this rank's samples, or None where there is none. n_samples: how
    many samples this rank has, on some ranks 0; at least one rank has some.

    >>> def example(rank, n_ranks):
    ...     w = torch.zeros(1, requires_grad=True)
    ...     w.grad = torch.tensor([[-5.0], [-18.0]][rank])
    ...     average_unequal([w], [2, 1][rank])
    ...     return round(w.grad.item(), 4)
    >>> launch(example, 2)
    [-9.3333, -9.3333]
    """
    total = messages.all_reduce(torch.tensor(float(n_samples))).item()
    for weight in parameters:
        if weight.grad is not None:
            weight.grad *= n_samples * messages.n_ranks() / total
    lab.average_flat(parameters)


# %% tags=["check"] exercise="average_unequal"
check("average_unequal", average_unequal)

# %% [markdown] exercise="sync_batch_norm"
# ## Batch norm over all ranks (3 points)
#
# Batch norm subtracts the mean of the batch and divides by its standard deviation. With
# a part of the batch on each rank there are many means, and the model is no longer that
# of a single process. Averaging gradients cannot mend this: the forward itself has to
# know all samples. It should do so with one small message, however large the batch.


# %% tags=["exercise"] exercise="sync_batch_norm" points=3
def sync_batch_norm(x, eps=1e-5):
    """Return x normalised with mean and variance of all ranks' samples.

    x: this rank's samples, shape (n_samples, n_features); ranks may have different
    numbers of them, also none. Each feature has a mean and a variance of its own. The
    result is (x - mean) / sqrt(variance + eps), where the variance is the mean squared
    distance from the mean (divided by the number of all samples, not by one less).
    Exactly one all_reduce, and no other message.

    >>> x = torch.tensor([[0.0], [0.0], [4.0], [4.0]]).split([3, 1])
    >>> launch(lambda rank, n: sync_batch_norm(x[rank], eps=0).tolist(), 2)
    [[[-1.0], [-1.0], [1.0]], [[1.0]]]
    """
    n = torch.full((x.shape[1],), float(len(x)))
    sums = torch.stack([n, x.sum(0), x.square().sum(0)])
    n, total, squares = messages.all_reduce(sums)
    mean = total / n
    variance = squares / n - mean.square()
    return (x - mean) / (variance + eps).sqrt()


# %% tags=["check"] exercise="sync_batch_norm"
check("sync_batch_norm", sync_batch_norm)

# %% [markdown] exercise="sharded_step"
# ## An optimizer in parts (3 points)
#
# So far every rank holds everything: weights, gradients and the optimizer's state. The
# state is as large as the weights or, with Adam, twice that, and all ranks keep the
# same numbers. Instead, let each rank keep the state of some parameters, update these
# alone, and give the new weights to the others. (Autograd watches parameters: change
# their `.data`.)


# %% tags=["exercise"] exercise="sharded_step" points=3
def sharded_step(parameters, state, lr, momentum):
    """Update all weights as SGD with momentum does, its state dealt out over the ranks.

    parameters: a list, equal on all ranks; their `.grad` have been averaged. state: a
    dict of this rank, empty before the first step, in which parameter number i has its
    velocity. Rank i % n_ranks keeps that of parameter i, no other rank does. A step is

        velocity = momentum * velocity + gradient     (at first 0)
        weight = weight - lr * velocity

    and after it, all ranks have the same weights.
    Rajbhandari et al. 2020, arXiv 1910.02054, section 5.1.

    >>> def two_steps(rank, n_ranks):
    ...     weights, state = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)], {}
    ...     for _ in range(2):
    ...         for weight in weights:
    ...             weight.grad = torch.ones(1)
    ...         sharded_step(weights, state, lr=0.25, momentum=0.5)
    ...     return [weight.item() for weight in weights], sorted(state)
    >>> launch(two_steps, 2)
    [([0.375, 0.375, 0.375], [0, 2]), ([0.375, 0.375, 0.375], [1])]
    """
    for i, weight in enumerate(parameters):
        owner = i % messages.n_ranks()
        if messages.rank() == owner:
            state[i] = momentum * state.get(i, 0) + weight.grad
            weight.data -= lr * state[i]
        messages.broadcast(weight.data, owner)


# %% tags=["check"] exercise="sharded_step"
check("sharded_step", sharded_step)

# %% [markdown] exercise="step_time"
# ## How large a bucket? (2 points)
#
# Small buckets leave early, and each pays the latency of the links. Large ones pay
# seldom, and leave late. What is best depends on the model and on the links, so write
# down when a step is over. `ring_seconds(link, "all_reduce", n_ranks, n)` is what an
# all-reduce of n bytes takes: $2 (N-1)$ passes around a ring, each with one N-th of the
# bytes, $2 (N-1) (\text{latency} + n / N / \text{bandwidth})$ in all.
#
# In the example below, the last two layers share a bucket. It is ready at 2, on its way
# for 5, and over at 7. The bucket of the first layer is ready at 3, waits for the link
# until 7, takes 3, and is over at 10.


# %% tags=["exercise"] exercise="step_time" points=2
def step_time(backward, nbytes, bucket, n_ranks, link):
    """Return how long backward and messages take together, with gradients in buckets.

    backward, nbytes: of each layer, from the first to the last, the time of its
    backward and the bytes of its gradients. The backward goes from the last layer to
    the first; a layer's gradients are there when its backward ends. Buckets are filled
    in that order, each with as many whole layers as `bucket` bytes hold, at least one;
    a layer without weights (0 bytes) is in none. A bucket can leave as soon as its last
    gradient is there. Messages take their time beside the backward, one at a time, in
    order. The result is when backward and messages are over.
    Li et al. 2020, arXiv 2006.15704, section 3.2.3.

    >>> step_time([1, 1, 1], [16, 16, 16], 32, 2, Link(latency=0.5, bandwidth=8))
    10.0
    """
    now, ready, sizes = 0.0, [], []
    for time, size in zip(reversed(backward), reversed(nbytes)):
        now += time
        if size and sizes and sizes[-1] + size <= bucket:
            ready[-1], sizes[-1] = now, sizes[-1] + size
        elif size:
            ready.append(now)
            sizes.append(size)
    free = 0.0
    for begin, size in zip(ready, sizes):
        free = max(free, begin) + ring_seconds(link, "all_reduce", n_ranks, size)
    return max(now, free)


# %% tags=["check"] exercise="step_time"
check("step_time", step_time)

# %% [markdown]
# A model of 24 equal layers, on 8 ranks: your answer for buckets of 1 to 24 layers. The
# backward alone takes 24 ms.

# %% id="step_time-figure" tags=["expected"]
layers, link = range(1, 25), Link(latency=50e-6, bandwidth=10e9)
plans = [([1e-3] * 24, [4_000_000] * 24, n * 4_000_000, 8, link) for n in layers]
times = times_of(step_time, plans)
if times:
    step = [1e3 * time for time in times]
    picture = curve(
        [
            {"label": "step", "x": list(layers), "y": step},
            {"label": "backward", "x": list(layers), "y": [24.0] * len(step)},
        ],
        xlabel="layers in a bucket",
        ylabel="time (ms)",
        title="Neither the smallest bucket nor the largest",
        alt="The time of a step falls from one layer in a bucket on, then rises again; "
        "it stays above that of the backward.",
    )
picture if times else None

# %% [markdown]
# ## What you have found
#
# - The average of gradients is the gradient of the batch only if all ranks hold equally
#   many samples; otherwise it needs weights, and so does every other mean.
# - Whatever looks at the batch as a whole, such as batch norm or an accuracy, needs a
#   message of its own. Sums and counts add up; means do not.
# - All ranks make the same calls in the same order, also one that has nothing to add.
# - What all ranks hold alike can be dealt out, for the price of messages.
