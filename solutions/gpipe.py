# %% [markdown]
# # GPipe: exercises
#
# The chapter *GPipe* cuts a model into stages and a batch into microbatches, and shows
# what that costs. Here you write parts of it yourself and then go further than the
# chapter: three exercises for practice, five for points (12 in all).
#
# A cell that is yours ends in `raise NotImplementedError("your turn")`: replace that
# line. The check below it gives a verdict and, if you are not right yet, a reason. The
# text stored under a check is what a right answer gets.
#
# A check calls your function in processes of its own, and with other sizes than the
# examples. What your function prints is not shown there: to look at something, call the
# function in a new cell.

# %% [markdown]
# ## Set-up
#
# On Colab, or anywhere outside the course's folder, install the course first: in a cell
# above this one, run `%pip install` with its folder or repository.

# %% id="setup"
try:
    from labs import gpipe as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

import torch

from labs.checks.gpipe import check, timeline_of
from labs.kit.clock import Unit, Virtual
from labs.kit.draw import draw
from labs.kit.page import ledger
from labs.kit.simulate import simulate
from labs.kit.timeline import Op

COST = {"F": 1, "B": 2}  # a forward is the unit of time, a backward takes two

# %% [markdown]
# ## The lab, once
#
# Four processes train a small network on images of digits, in eight microbatches. They
# send each other real messages. Only time is a model: every forward counts as one unit,
# every backward as two. So you see what four devices would do, on whatever you have.

# %% id="run"
config = lab.Config(model="digits", n_stages=4, n_microbatches=8, steps=2)
report = lab.measure(config, Virtual(Unit()))
ledger(report.rows + report.invariant()[1:])

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. The same
# as a picture: a row is a rank, which is one stage; time runs to the right.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown] exercise="idle_fraction"
# ## Practice: read a timeline
#
# A timeline holds spans: one for each thing that a rank did. Stage 1 of this pipeline
# is slower than its neighbours.

# %% id="slow-middle" tags=["expected"]
slow_middle = simulate(
    lab.gpipe(3, 3), lambda stage, op: COST[op.kind] * (2 if stage == 1 else 1)
)
draw(slow_middle, titles=["three stages, three microbatches"])

# %% id="spans"
for span in slow_middle.ops(1):
    print(span.op, "from", span.start, "to", span.end)
print("makespan", slow_middle.makespan)

# %% [markdown]
# How large is the idle part of one stage's time? Read it off the spans.

# %% tags=["exercise"] exercise="idle_fraction" practice=true
from labs.gpipe import idle_fraction

# %% tags=["check"] exercise="idle_fraction"
check("idle_fraction", idle_fraction)

# %% [markdown] exercise="gpipe"
# ## Practice: the GPipe order
#
# A schedule is a list of operations for each stage. `Op("F", 2)` is the forward of
# microbatch 2 and `Op("B", 2)` its backward. The check reads your orders, simulates
# them, and trains with the four-stage one on four ranks.

# %% tags=["exercise"] exercise="gpipe" practice=true
from labs.gpipe import gpipe

# %% tags=["check"] exercise="gpipe"
check("gpipe", gpipe)

# %% [markdown] exercise="backward"
# ## Practice: one stage goes backward
#
# A message carries numbers and no graph. Each stage therefore begins a graph of its own
# at its input, and the gradient has to be handed on from stage to stage.

# %% id="two-stages"
first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
y = first(torch.ones(1, 2))  # on rank 0
received = y.detach().requires_grad_()  # on rank 1: the same numbers
second(received).sum().backward()
print("rank 1 has a gradient to send back:", received.grad is not None)
print("rank 0 has gradients already:", first.weight.grad is not None)

# %% [markdown]
# Write what a stage does when the gradient of its output arrives.

# %% tags=["exercise"] exercise="backward" practice=true
from labs.gpipe import backward

# %% tags=["check"] exercise="backward"
check("backward", backward)

# %% [markdown] exercise="one_f_one_b"
# ## 1F1B: the same time, less memory (3 points)
#
# GPipe keeps all microbatches alive until the last forward is done. That is more than
# needed: as soon as a microbatch has been to the last stage, it can turn round. In 1F1B
# a stage runs a few forwards ahead and then does one backward for each forward. The
# bubble stays; the memory no longer grows with the number of microbatches.

# %% tags=["exercise"] exercise="one_f_one_b" points=3
def one_f_one_b(n_stages, n_microbatches):
    """Return the 1F1B order: a list of Op per stage, as `gpipe` does.

    Stage s keeps at most n_stages - s microbatches alive, the one under way included.
    The makespan is GPipe's, with F = 1, B = 2 and free links. Forwards run in the order
    0, 1, 2, ... and so do backwards. There may be fewer microbatches than stages.
    Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1.

    >>> [" ".join(map(str, order)) for order in one_f_one_b(2, 3)]
    ['F0 F1 B0 F2 B1 B2', 'F0 B0 F1 B1 F2 B2']
    """
    schedule = []
    for stage in range(n_stages):
        ahead = min(n_stages - stage - 1, n_microbatches)
        order = [Op("F", i) for i in range(ahead)]
        for i in range(ahead, n_microbatches):
            order += [Op("F", i), Op("B", i - ahead)]
        order += [Op("B", i) for i in range(n_microbatches - ahead, n_microbatches)]
        schedule.append(order)
    return schedule


# %% tags=["check"] exercise="one_f_one_b"
check("one_f_one_b", one_f_one_b)

# %% [markdown]
# GPipe, and your order below it. Compare the two ends: they are the same. Compare how
# many microbatches stage 0 has begun before its first backward.

# %% id="one_f_one_b-figure" tags=["expected"]
theirs, yours = timeline_of(lab.gpipe, 4, 8), timeline_of(one_f_one_b, 4, 8)
draw(theirs, yours, titles=["GPipe", "1F1B"]) if yours else None

# %% [markdown] exercise="flushes"
# ## A limit on memory: several flushes (3 points)
#
# There is a simpler way to keep few microbatches alive: run GPipe on the first k of
# them, then on the next k, and update the weights after the last. Many systems do this
# under the name of gradient accumulation. Each flush has a bubble of its own.

# %% tags=["exercise"] exercise="flushes" points=3
def flushes(n_stages, n_microbatches, k):
    """Return a schedule in flushes: a list of Op per stage, at most k alive on each.

    Take the microbatches in order, k at a time; the last flush holds what is left. Each
    flush is a GPipe of its own: its forwards, then its backwards, the newest first. On
    every stage the next flush begins after that.

    >>> [" ".join(map(str, order)) for order in flushes(1, 3, 2)]
    ['F0 F1 B1 B0 F2 B2']
    """
    order = []
    for first in range(0, n_microbatches, k):
        group = range(first, min(first + k, n_microbatches))
        order += [Op("F", i) for i in group] + [Op("B", i) for i in reversed(group)]
    return [order] * n_stages


# %% tags=["check"] exercise="flushes"
check("flushes", flushes)

# %% id="flushes-figure" tags=["expected"]
yours = timeline_of(flushes, 4, 8, 4)
draw(yours, titles=["8 microbatches in flushes of 4"]) if yours else None

# %% [markdown] exercise="slow_stage"
# ## Find the slow stage (2 points)
#
# One stage sets the pace of all. In a run you see the others wait, and it is easy to
# blame one that waits. Look at the spans instead.

# %% id="slow-example" tags=["expected"]
slow = [1, 1, 1.5, 1]
draw(simulate(lab.gpipe(4, 4), lambda stage, op: COST[op.kind] * slow[stage]))

# %% tags=["exercise"] exercise="slow_stage" points=2
def slow_stage(timeline):
    """Return (stage, factor): the slow stage, and how many times as slow it is.

    factor: the time that all operations of this stage take together, divided by the
    median of that time over the other stages. All do the same number of operations.

    >>> slow_stage(simulate(lab.gpipe(3, 2), lambda stage, op: 6 if stage == 1 else 4))
    (1, 1.5)
    """
    from statistics import median

    times = [timeline.compute(stage) for stage in range(timeline.n_ranks)]
    stage = times.index(max(times))
    return stage, times[stage] / median(times[:stage] + times[stage + 1 :])


# %% tags=["check"] exercise="slow_stage"
check("slow_stage", slow_stage)

# %% [markdown] exercise="bubble_of"
# ## The bubble of unequal stages (2 points)
#
# The formula (d-1)/(m+d-1) needs equal stages. Real ones are not: an embedding is
# quick, an output layer is not. Find the makespan first. The first microbatch has to
# pass every stage; at what pace do the others follow?

# %% tags=["exercise"] exercise="bubble_of" points=2
def bubble_of(forward, backward, n_microbatches):
    """Return the bubble of a GPipe step with unequal stages, a fraction from 0 to 1.

    forward, backward: lists with the time of one microbatch on each stage, in any unit.
    Links are free. The bubble is the part of all stages' time, from 0 to the makespan,
    in which they compute nothing.

    >>> bubble_of([1, 1], [2, 2], 3)
    0.25
    >>> bubble_of([1, 3], [6, 2], 1)
    0.5
    """
    once = sum(forward) + sum(backward)
    pace = max(forward) + max(backward)
    makespan = once + (n_microbatches - 1) * pace
    return 1 - n_microbatches * once / (len(forward) * makespan)


# %% tags=["check"] exercise="bubble_of"
check("bubble_of", bubble_of)

# %% [markdown] exercise="fewest_microbatches"
# ## How many microbatches? (2 points)
#
# More microbatches make the bubble smaller and, with recompute, the memory too. But
# small microbatches use a device badly. So take as few as will do. The functions that
# the chapter uses, `lab.bubble_fraction` and `lab.memory`, may help.

# %% tags=["exercise"] exercise="fewest_microbatches" points=2
def fewest_microbatches(n_stages, batch, inside, boundary, budget, limit=0.1):
    """Return the smallest n_microbatches that keeps two limits; None if none does.

    The bubble of GPipe, with equal stages, is below `limit`: equal is not enough.
    The peak of a stage's activations, with recompute, is at most `budget` bytes: of a
    sample, a forward keeps `inside` bytes until its backward. `boundary` bytes of them
    are its input, which is all that recompute keeps of a microbatch that waits.
    batch: samples in a step. Sizes of microbatches differ by at most one sample, the
    larger ones come first, and none is empty. Huang et al. 2019, section 2.3.

    >>> fewest_microbatches(2, 64, inside=500, boundary=10, budget=10**6)
    10
    >>> fewest_microbatches(2, 9, inside=500, boundary=10, budget=10**6) is None
    True
    """
    for n in range(1, batch + 1):
        sizes = [batch // n + (i < batch % n) for i in range(n)]
        kept = [inside * size for size in sizes], [boundary * size for size in sizes]
        peak = lab.memory(*kept, recompute=True)
        if lab.bubble_fraction(n_stages, n) < limit and peak <= budget:
            return n
    return None


# %% tags=["check"] exercise="fewest_microbatches"
check("fewest_microbatches", fewest_microbatches)

# %% [markdown]
# ## What you have found
#
# - The bubble comes from the stages waiting at both ends of a step; only more
#   microbatches, or fewer flushes, make it smaller.
# - Memory comes from the order: GPipe keeps all microbatches alive, 1F1B at most one
#   for each stage from here to the last, flushes as many as you allow.
# - A pipeline runs at the pace of its slowest stage. That stage computes most and waits
#   least.
