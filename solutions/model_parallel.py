# %% [markdown]
# # Model parallelism: exercises
#
# The chapter *Model parallelism* cuts a model that is too large for one device into
# stages, and lets them work one after the other. Here you write parts of it yourself
# and then go further than the chapter: three exercises for practice, five for points
# (12 in all).
#
# A cell that is yours ends in `raise NotImplementedError("your turn")`: replace that
# line. The check below it gives a verdict and, if you are not right yet, a reason. The
# text stored under a check is what a right answer gets.
#
# A check calls your function in processes of its own, several of them where it sends
# messages, and with other sizes than the examples. What your function prints is not
# shown there: to look at something, call the function in a new cell.

# %% [markdown]
# ## Set-up
#
# On Colab, or anywhere outside the course's folder, install the course first: in a cell
# above this one, run `%pip install` with its folder or repository.

# %% id="setup"
try:
    from labs import model_parallel as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

import torch

from labs.checks.model_parallel import check, gradients_of, traffic_of
from labs.kit import messages
from labs.kit.clock import Unit, Virtual
from labs.kit.draw import curve, draw
from labs.kit.page import ledger
from labs.kit.simulate import simulate
from labs.kit.timeline import Link
from labs.kit.world import launch

COST = {"F": 1, "B": 2}  # a forward is the unit of time, a backward takes two
send, receive = lab.send, lab.receive  # tuples, between neighbours

# %% [markdown]
# ## The lab, once
#
# Four processes hold the layers of one small network, which learns to read digits. They
# send each other real messages. Only time is a model: a forward of a stage counts as
# one unit, a backward as two, and a message takes 0.1 units and then one more for every
# megabyte.

# %% id="run"
config = lab.Config(model="digits", n_stages=4, steps=2)
report = lab.measure(config, Virtual(Unit(), Link(latency=0.1, bandwidth=1e6)))
ledger(report.rows + report.invariant()[1:])

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. The same
# as a picture: a row is a rank, which is one stage; time runs to the right.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown]
# ## Messages between ranks
#
# `launch(function, n_ranks)` starts the ranks and returns what the function returned on
# each. On a rank, `messages.rank()` is its number and `messages.n_ranks()` says how
# many there are. `messages.send(tensor, to)` waits until the tensor has been received,
# `messages.isend(tensor, to)` does not; `messages.receive(source)` returns what comes.
# What comes are numbers alone, without a graph: no autograd leads back to the sender.

# %% id="numbers-alone"
def hand_over(rank, n_ranks):
    if rank == 0:
        return messages.send(2 * torch.ones(1, requires_grad=True), 1)
    came = messages.receive(0)
    return f"rank 1 has {came.item()}, and requires_grad is {came.requires_grad}"


print(launch(hand_over, 2)[1])

# %% [markdown] exercise="idle_fraction"
# ## Practice: the idle part
#
# Stage 1 of this model has more to do than its neighbours, and every message takes half
# a unit of time. While a message is on its way, no stage computes.

# %% id="unequal" tags=["expected"]
times = [1, 1.5, 1]
step = simulate(lab.order(3), lambda s, op: COST[op.kind] * times[s], Link(latency=0.5))
draw(step)

# %% [markdown]
# How large is the idle part of all stages' time, together? All you need to know is in
# which part of the time one of them computes. Which one it is does not matter.

# %% tags=["exercise"] exercise="idle_fraction" practice=true
from labs.model_parallel import idle_fraction

# %% tags=["check"] exercise="idle_fraction"
check("idle_fraction", idle_fraction)

# %% [markdown] exercise="in_turn"
# ## Practice: one batch, through all stages and back
#
# Every rank runs the same function and has its own stage. A stage takes and returns
# tuples, because more than one tensor may pass from layer to layer. It wants to know
# which batch it works on: here there is one alone, number 0.

# %% id="stage"
stage = lab.Stage(torch.nn.Linear(2, 1))
[y] = stage.forward(0, (torch.ones(3, 2),))
[gradient] = stage.backward(0, (torch.ones_like(y),))
print("output", list(y.shape), "and the input's gradient", list(gradient.shape))

# %% [markdown]
# `send(values, to)` sends a tuple to another rank, and `receive(source)` returns the
# tuple that comes. The output of the last stage is the loss, and the gradient that it
# begins with is that of the loss with respect to itself. The check runs your function
# on up to four ranks and compares gradients with those of one process.

# %% tags=["exercise"] exercise="in_turn" practice=true
from labs.model_parallel import in_turn

# %% tags=["check"] exercise="in_turn"
check("in_turn", in_turn)

# %% [markdown] exercise="step_time"
# ## Practice: how long a step takes
#
# The stages take turns, so their times add up, to the same sum wherever the model is
# cut. Messages come on top. `Link(latency, bandwidth).seconds(nbytes)` is what one
# takes. Stage 0 reads its input from the data set: nobody sends it.

# %% tags=["exercise"] exercise="step_time" practice=true
from labs.model_parallel import step_time

# %% tags=["check"] exercise="step_time"
check("step_time", step_time)

# %% [markdown] exercise="fewest_stages"
# ## As few devices as will do (2 points)
#
# More stages do not make a step faster. So take only as many as the memory needs. What
# counts are the bytes that a stage holds, not its share of the layers or of the work: a
# layer with few weights can have large activations, and another one none at all.

# %% tags=["exercise"] exercise="fewest_stages" points=2
def fewest_stages(weights, activations, budget):
    """Return layers per stage, for the fewest stages that fit.

    weights, activations: lists with the bytes of each layer; some may be 0. A stage is
    one layer or several that follow each other. For each of its weights it also holds a
    gradient and the two numbers of Adam, of the same size, and all of its layers'
    activations. A stage fits if that is at most `budget` bytes. If several cuts have as
    few stages, any of them will do. Raise ValueError if a layer alone does not fit.

    >>> fewest_stages([10, 20, 20], [30, 0, 5], budget=160)
    [2, 1]
    """
    sizes, room = [], 0
    for nbytes in [4 * w + a for w, a in zip(weights, activations)]:
        if nbytes > budget:
            raise ValueError(f"a layer needs {nbytes} B, a device holds {budget} B.")
        if not sizes or nbytes > room:
            sizes.append(0)
            room = budget
        sizes[-1] += 1
        room -= nbytes
    return sizes


# %% tags=["check"] exercise="fewest_stages"
check("fewest_stages", fewest_stages)

# %% [markdown] exercise="skip_step"
# ## A connection that skips a stage (3 points)
#
# In many networks a later layer uses an earlier output once more, past the layers in
# between. Cut such a model, and the tensor has to travel too. The chapter hands it on
# from stage to stage, and a stage's graph takes care of the way back. Now let it take
# the straight way, to the one rank that needs it, and write the messages yourself:
#
#     rank 0: y = module(x)  -->  rank 1: z = module(y)  -->  rank 2: module(z, y)
#                        \____________________ y ____________________/
#
# If the last rank took y for a constant, the run would end well, the loss would be
# right, and the model would train badly. Think of the way back before you write: which
# gradients come to rank 0, and from whom?

# %% tags=["exercise"] exercise="skip_step" points=3
def skip_step(module, x):
    """Run a model with a skip connection, forward and backward; one stage per rank.

    module: this rank's stage. Rank 0 computes y = module(x); each rank in between
    computes module of what the rank before it has computed; the last rank, of that and
    of y, loss = module(z, y), a scalar. There are three ranks or more.
    x: the inputs on rank 0, which need no gradient; None on the others.

    Leave the weights' gradients in `.grad`, as in one process. The last rank returns
    the loss; what the others return does not matter. y goes straight to the last rank.
    So every rank sends two tensors in all.

    This runs y = 1 x, z = 3 y and loss = 5 z + y on three ranks, with x = 2, and
    returns the loss and the gradient of each rank's weight:

    >>> gradients_of(skip_step, weights=[1, 3, 5], x=2)
    (32.0, [32.0, 10.0, 6.0])
    """
    here, last = messages.rank(), messages.n_ranks() - 1
    if here == 0:
        y = module(x)
        messages.isend(y, 1)
        messages.isend(y, last)
        y.backward(messages.receive(1) + messages.receive(last))
        return None
    came = messages.receive(here - 1).requires_grad_()
    if here < last:
        z = module(came)
        messages.send(z, here + 1)
        z.backward(messages.receive(here + 1))
        messages.send(came.grad, here - 1)
        return None
    skipped = messages.receive(0).requires_grad_()
    loss = module(came, skipped)
    loss.backward()
    messages.send(came.grad, here - 1)
    messages.send(skipped.grad, 0)
    return loss


# %% tags=["check"] exercise="skip_step"
check("skip_step", skip_step)

# %% [markdown]
# The same on four ranks: y = 2 x, then 3 y, then 5 times that, and loss = 7 z + y.

# %% id="skip_step-example" tags=["expected"]
gradients_of(skip_step, weights=[2, 3, 5, 7], x=1)

# %% [markdown] exercise="step_with_recompute"
# ## Recompute while you wait (2 points)
#
# To save memory, a stage can keep its input alone and run its forward again before its
# backward: recompute. If it begins when the gradient has come, the step is longer by
# that forward. But it has nothing else to do while the next stage is at its backward:
#
#     R when the gradient is there         R during the next stage's backward
#     stage 0  F . . . . . . . R B B       stage 0  F . . . . R . B B
#     stage 1  . F . . . R B B . . .       stage 1  . F . R . B B . .
#     stage 2  . . F B B . . . . . .       stage 2  . . F B B . . . .
#
# The last stage goes backward at once, so it forgets nothing and computes nothing
# again. What does a step take on the right, if stages and messages are not equal?

# %% tags=["exercise"] exercise="step_with_recompute" points=2
def step_with_recompute(forwards, backwards, boundary, link):
    """Return the seconds of a step whose stages recompute while they wait.

    forwards, backwards: lists with the seconds of each stage. Every stage but the last
    runs its forward again. It begins when the next stage begins its backward (it is
    told so in no time), and goes backward as soon as that is done and the gradient has
    come. boundary: bytes of each stage's input, as many there as back; link: a Link,
    with link.seconds(nbytes). Stage 0 reads its input, nobody sends it.

    >>> step_with_recompute([1, 1, 1], [2, 2, 2], [0, 0, 0], Link())
    9.0
    >>> step_with_recompute([5, 1], [8, 2], [64, 16], Link(latency=0.5, bandwidth=32))
    20.0
    """
    trips = [link.seconds(nbytes) for nbytes in boundary[1:]]
    time = sum(forwards) + sum(trips)
    for again, back, trip in zip(forwards, backwards[1:], trips):
        time += max(again, back + trip)
    return time + backwards[0]


# %% tags=["check"] exercise="step_with_recompute"
check("step_with_recompute", step_with_recompute)

# %% [markdown] exercise="split_mlp"
# ## Cut inside the layers (3 points)
#
# Tensor parallelism cuts each layer, so that all ranks work at the same time. Of two
# linear layers with a ReLU between them, let each rank have some of the hidden units:
# their rows of the first weight, and the columns of the second that belong to them.
#
#     h = relu(x @ W1.T)       rank r has some rows of W1, so it has its part of h
#     y = h @ W2.T + bias      and these columns of W2: its h makes a part of every y
#
# At the ReLU nobody needs another rank's h, so no message is sent there. How do the
# parts of y become the whole? And x went to all ranks: what does that mean for its
# gradient? `messages.all_reduce(tensor)` sums a tensor over all ranks, in place, and
# returns it. (Shoeybi et al. 2019, arXiv 1909.08053, section 3.)

# %% tags=["exercise"] exercise="split_mlp" points=3
def split_mlp(x, first, second, bias, gradient):
    """Run relu(x @ W1.T) @ W2.T + bias, forward and backward, on all ranks together.

    x: (samples, width), the same on all ranks. It needs no gradient as it comes.
    first: this rank's rows of W1, (hidden, width); second: its columns of W2, (width,
    hidden). bias: (width,), all of it on each rank. All three require gradients.
    gradient: of the output, (samples, width), the same on all ranks.

    Return (y, gradient of x), two whole tensors of (samples, width), on every rank.
    Leave the gradients of first, second and bias in `.grad`: the same numbers as in one
    process. Every rank calls all_reduce twice, once for the forward and once for the
    backward, and sends nothing else.

    >>> def on_rank(rank, n_ranks):
    ...     parts = [[1.0 + rank]], [[3.0 + rank]], [5.0]
    ...     parts = [torch.tensor(part).requires_grad_() for part in parts]
    ...     y, of_x = split_mlp(torch.ones(1, 1), *parts, torch.ones(1, 1))
    ...     return y.item(), of_x.item()
    >>> launch(on_rank, 2)  # 3 * 1 + 4 * 2 + 5, and 3 * 1 + 4 * 2
    [(16.0, 11.0), (16.0, 11.0)]
    """
    x = x.detach().clone().requires_grad_()
    part = torch.relu(x @ first.T) @ second.T
    y = messages.all_reduce(part.detach()) + bias
    torch.autograd.backward([part, y], [gradient, gradient])
    return y.detach(), messages.all_reduce(x.grad)


# %% tags=["check"] exercise="split_mlp"
check("split_mlp", split_mlp)

# %% [markdown] exercise="three_ways"
# ## What three ways send (2 points)
#
# A batch can be spread over ranks in three ways: each rank has its share of the samples
# (data parallel), of every layer (tensor parallel), or of the list of layers (model
# parallel). They send other things, of other sizes. What goes through the busiest port?

# %% tags=["exercise"] exercise="three_ways" points=2
def three_ways(n_ranks, weights, boundary, n_layers):
    """Return a dict: bytes that the rank which sends most sends in a step.

    "data":   gradients of all weights are summed once, in one ring all-reduce
    "tensor": each of n_layers layers sums tensors of `boundary` bytes over all ranks,
              two in its forward and two in its backward, in ring all-reduces
    "model":  the layers are cut into n_ranks stages; boundary bytes pass from stage to
              stage, and as many go back

    weights: bytes of all weights. boundary: bytes of a layer's output, for the whole
    batch; each layer's is as large. In a ring all-reduce of n bytes every rank sends
    2 (n_ranks - 1) times a chunk of n / n_ranks. There may be one rank alone.

    >>> three_ways(4, weights=1000, boundary=100, n_layers=8)
    {'data': 1500.0, 'tensor': 4800.0, 'model': 200}
    """
    ring = 2 * (n_ranks - 1) / n_ranks
    return {
        "data": ring * weights,
        "tensor": n_layers * 4 * ring * boundary,
        "model": min(n_ranks - 1, 2) * boundary,
    }


# %% tags=["check"] exercise="three_ways"
check("three_ways", three_ways)

# %% [markdown]
# Eight ranks and a model of 24 layers, 2.4 GB of weights, in which 4 MB pass from layer
# to layer for each sample. Gradients do not grow with the batch; what passes from layer
# to layer does.

# %% id="three_ways-figure" tags=["expected"]
sizes = [4**k for k in range(7)]
found = traffic_of(three_ways, 8, 2.4e9, 4e6, 24, sizes)
curve(
    [
        {"label": way, "x": sizes, "y": [nbytes / 1e9 for nbytes in sent]}
        for way, sent in found.items()
    ],
    xlabel="samples in a batch",
    ylabel="GB sent by the busiest rank",
    title="Cut between layers, a model sends least, until the batch is large",
    alt="Data parallel stays at 4.2 GB. Model parallel grows from 0.008 GB and passes "
    "that between 256 and 1024 samples, tensor parallel between 4 and 16.",
    log="xy",
) if found else None

# %% [markdown]
# Bytes are not all that counts: tensor and data parallel ranks all work at once, while
# of eight stages seven wait.

# %% [markdown]
# ## What you have found
#
# - The stages of a model take turns. No cut makes the idle part smaller; a cut decides
#   who has to hold how much.
# - Autograd ends where a message begins. Whatever crosses a boundary, once or by a
#   detour, needs its way back, and gradients of one tensor add up.
# - A stage that waits has time to recompute: its forward is hidden behind the next
#   stage's backward.
# - What is copied to all ranks in the forward is summed over them in the backward, and
#   the other way round.
# - Model parallel sends little and idles much. To keep its stages busy, cut the batch
#   as well: that is the chapter *GPipe*.
