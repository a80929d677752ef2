# %% [markdown]
# # Parameter server: exercises
#
# In the chapter *Parameter server* some ranks keep the weights, and the others compute
# gradients. Here you write parts of it yourself and then go further than the chapter:
# three exercises for practice, five for points (12 in all).
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
    from labs import parameter_server as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

import torch

from labs.checks.parameter_server import (
    check,
    interleaved,
    rates_of,
    times_of,
    trained,
)
from labs.kit import messages
from labs.kit.clock import Unit, Virtual
from labs.kit.draw import curve, draw
from labs.kit.page import ledger
from labs.kit.timeline import Link
from labs.kit.toy import delayed_descent

# %% [markdown]
# ## The lab, once
#
# One server and three workers train a small network on images of digits. Weights and
# gradients travel as real messages. Only time is a model: a forward takes one unit, a
# backward two, an update a quarter, and a message 0.1 units and then one more for every
# 200 kB.

# %% id="run"
config = lab.Config(model="digits", n_workers=3, steps=2)
link = Link(latency=0.1, bandwidth=2e5)
report = lab.measure(config, Virtual(Unit(config.costs()), link))
ledger(report.rows)

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. The same
# as a picture: a row is a rank, the first one is the server; time runs to the right.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown] exercise="traffic"
# ## Practice: what a server sends
#
# In every step a worker pulls the weights of all servers and pushes a gradient to each.
# At the end it pulls once more. How many bytes does each rank send?

# %% tags=["exercise"] exercise="traffic" practice=true
from labs.parameter_server import traffic

# %% tags=["check"] exercise="traffic"
check("traffic", traffic)

# %% [markdown] exercise="step_seconds"
# ## Practice: a step of all together
#
# All weights leave one server's port, one message after the other, so the workers start
# one after the other. All gradients come in through it, but most of them while the last
# worker is not done yet: look at the picture above. Count the messages that must follow
# each other from one update to the next, and what else takes time.

# %% tags=["exercise"] exercise="step_seconds" practice=true
from labs.parameter_server import step_seconds

# %% tags=["check"] exercise="step_seconds"
check("step_seconds", step_seconds)

# %% [markdown] exercise="ranges"
# ## Servers with unequal ports (2 points)
#
# Cut into equal ranges, the weights are done when the slowest port is. If one server
# reaches its workers four times as fast as another, it should keep about four times as
# much. "About", because a weight cannot be cut in two.

# %% tags=["exercise"] exercise="ranges" points=2
def ranges(n_weights, bandwidths):
    """Return how many weights each server keeps: a list of int, one for each server.

    bandwidths: of each server's port, positive. All weights have to be kept. A server
    takes n / bandwidth for its range of n weights, and all work at once: make the time
    of the slowest one as short as it can be. A range may be empty. Where several lists
    are as good as each other, any of them will do.

    >>> ranges(12, [1, 1, 4])
    [2, 2, 8]
    >>> ranges(2, [5, 1, 5])
    [1, 0, 1]
    """
    sizes = [0] * len(bandwidths)
    for _ in range(n_weights):
        done = [(n + 1) / speed for n, speed in zip(sizes, bandwidths)]
        sizes[done.index(min(done))] += 1
    return sizes


# %% tags=["check"] exercise="ranges"
check("ranges", ranges)

# %% [markdown] exercise="backup_server"
# ## Do not wait for the last (3 points)
#
# A synchronous step lasts as long as its slowest worker, and with many workers there is
# always one that is slow. Chen et al. (2016) start a few more workers than needed and
# update as soon as enough gradients have come. What comes too late is dropped: it
# belongs to weights that are no longer there.
#
# Write this server. The check runs it on rank 0, with real workers on the other ranks.
# These do nothing but this, and some of them are slow:
#
#     repeat
#         receive a message from rank 0; end if it is empty
#         compute a gradient of the weights in it
#         send the gradient, and the version that came with the weights
#
# Messages are flat tensors: the weights and then the version as one more element, or
# the gradient and then the version. Here is a server that waits for all workers.

# %% id="patient"
def patient(weights, n_needed, n_updates, lr):
    workers = range(1, messages.n_ranks())
    for version in range(n_updates):
        for worker in workers:
            messages.isend(torch.tensor([*weights, version]), worker)
        pushed = torch.stack([messages.receive(worker) for worker in workers])
        weights = weights - lr * pushed[:, :-1].mean(0)
    for worker in workers:
        messages.isend(torch.empty(0), worker)
    return weights


print("after 1 update:", trained(patient, n_needed=2, n_updates=1))
print("after 2 updates:", trained(patient, n_needed=2, n_updates=2))

# %% [markdown]
# `trained` runs a server with three workers on one weight, 0 at first. Worker r wants
# it to be 10 r (its gradient is the weight less 10 r) and takes r units of time. The
# learning rate is 0.25. Follow the first update by hand, then find out what it will be
# when two gradients are enough.
#
# To take what comes first, make an inbox: after `inbox = messages.Inbox()`, the call
# `inbox.take(among)` returns `(worker, tensor)`, the message that was sent first by one
# of the ranks in the list `among`. Name those that have weights to work on, and no
# others: an idle worker sends nothing.

# %% tags=["exercise"] exercise="backup_server" points=3
def backup_server(weights, n_needed, n_updates, lr):
    """Train on the ranks 1, 2, ... as workers; return the weights after all updates.

    weights: a flat float32 tensor, version 0; send it to all workers first. An update
    subtracts lr times the mean of the first n_needed gradients of the newest version,
    and makes the next one. Drop gradients of older versions.

    A worker has at most one message to work on. One whose gradient was of the newest
    version waits for the next; one that comes late gets the newest weights at once.
    After n_updates send each worker, when its turn has come, an empty tensor instead.
    Take all gradients that are under way, so that every worker can end.

    Chen et al. 2016, arXiv 1604.00981, section 3.

    >>> trained(backup_server, n_needed=2, n_updates=1)
    3.75
    >>> trained(backup_server, n_needed=2, n_updates=2)
    6.5625
    """
    inbox, busy = messages.Inbox(), []
    waiting = list(range(1, messages.n_ranks()))

    def hand_out(worker, version):
        stamp = weights.new_full((1,), version)
        messages.isend(torch.cat([weights, stamp]), worker)

    for version in range(n_updates):
        for worker in waiting:
            hand_out(worker, version)
        busy, waiting, gradients = busy + waiting, [], []
        while len(gradients) < n_needed:
            worker, pushed = inbox.take(busy)
            if pushed[-1] < version:
                hand_out(worker, version)
                continue
            busy.remove(worker)
            waiting.append(worker)
            gradients.append(pushed[:-1])
        weights = weights - lr * torch.stack(gradients).mean(0)
    while busy:
        worker, _ = inbox.take(busy)
        busy.remove(worker)
        waiting.append(worker)
    for worker in waiting:
        messages.isend(weights.new_empty(0), worker)
    return weights


# %% tags=["check"] exercise="backup_server"
check("backup_server", backup_server)

# %% [markdown]
# Six workers, each of which takes one unit of time and, now and then, much more. The
# last gradient is the dearest. But an update of fewer gradients is worth less, so one
# drops only a few.

# %% id="backup_server-figure" tags=["expected"]
needed = [1, 2, 3, 4, 5, 6]
times = times_of(backup_server, 6, needed)
curve(
    [{"label": "six workers", "x": needed, "y": times, "style": "points"}],
    xlabel="gradients that make an update",
    ylabel="time from update to update",
    title="The last gradient of six takes longest",
    alt="The time rises with each gradient that is waited for, most with the last.",
) if times else None

# %% [markdown] exercise="staleness_of"
# ## How old is a gradient? (2 points)
#
# If a server updates with every gradient at once, the weights move on while a worker
# computes. The staleness of its gradient is the number of updates in between. A server
# may set a limit and drop what is staler.

# %% tags=["exercise"] exercise="staleness_of" points=2
def staleness_of(events, limit):
    """Return the staleness of every push, in order: a list of int.

    events: what the server sees, a list of ("pull", worker) and ("push", worker); a
    worker has pulled before its first push. It may push several gradients of the same
    weights. A push that is staler than the limit is dropped: it has a staleness, but
    makes no update. Every other push makes one at once.

    >>> events = [("pull", 0), ("pull", 1), ("push", 0), ("pull", 0), ("push", 1)]
    >>> staleness_of(events + [("push", 0), ("push", 0)], limit=9)
    [0, 1, 1, 2]
    """
    version, pulled, found = 0, {}, []
    for what, worker in events:
        if what == "pull":
            pulled[worker] = version
        else:
            found.append(version - pulled[worker])
            version += found[-1] <= limit
    return found


# %% tags=["check"] exercise="staleness_of"
check("staleness_of", staleness_of)

# %% [markdown] exercise="most_stale"
# ## Practice: how stale can it get?
#
# In mode `stale` a worker waits when it is `bound` pushes ahead of the slowest one.
# That limits the staleness without a gradient being dropped. Play the worst case: one
# worker gets its weights and then takes very long. How many updates can the others make
# before its gradient comes? Mind that it may have been the first one before.

# %% tags=["exercise"] exercise="most_stale" practice=true
from labs.parameter_server import most_stale

# %% tags=["check"] exercise="most_stale"
check("most_stale", most_stale)

# %% [markdown] exercise="largest_rate"
# ## What staleness costs (2 points)
#
# How large may the learning rate be? Take the simplest function, f(w) = w²/2: its
# gradient is w. If every gradient is `delay` updates old, then the next w is
# w - lr * (what w was `delay` updates ago). `delayed_descent` does that, from w = 1.

# %% id="delayed"
for delay in (0, 1, 2):
    for lr in (0.5, 0.9, 1.2):
        w = abs(delayed_descent(lr, 300, delay)[-1])
        print(f"delay {delay}, lr {lr}:", "w goes to 0" if w < 1 else "w grows")

# %% [markdown]
# Without delay, any learning rate below 2 will do. Where is the limit with a delay?

# %% tags=["exercise"] exercise="largest_rate" points=2
def largest_rate(delay):
    """Return the largest learning rate with which w goes to 0, to within one percent.

    f(w) = w*w/2 is minimised from w = 1 with gradients that are `delay` updates old, as
    by `delayed_descent(lr, steps, delay)`. w may swing, if only it gets smaller in the
    end; just below the limit that takes long.

    >>> round(largest_rate(0), 1)
    2.0
    """
    low, high = 0.0, 2.0
    for _ in range(12):
        lr = (low + high) / 2
        path = [abs(w) for w in delayed_descent(lr, 4000, delay)]
        shrinks = max(path[3900:]) < max(path[:100])
        low, high = (lr, high) if shrinks else (low, lr)
    return low


# %% tags=["check"] exercise="largest_rate"
check("largest_rate", largest_rate)

# %% id="largest_rate-figure" tags=["expected"]
delays = list(range(11))
rates = rates_of(largest_rate, delays)
curve(
    [{"label": "largest rate", "x": delays, "y": rates, "style": "points"}],
    xlabel="delay [updates]",
    ylabel="learning rate",
    title="The staler the gradients, the smaller the steps must be",
    alt="It falls from 2 without delay to 1 with a delay of 1, and to 0.15 with 10.",
) if rates else None

# %% [markdown] exercise="shared_step"
# ## No update is lost (3 points)
#
# The server of the lab handles one message after the other. Others work with threads:
# several of them read and write the same weights, and any of them may be stopped
# between two lines while another one goes on. Here are four threads, each of which
# pushes the gradient -1 to two weights, 500 times. So both weights should become 2000.

# %% id="broken"
def broken(store, gradient):
    old = [store.read(i) for i in range(len(store))]
    for i, g in enumerate(gradient(old)):
        store.write(i, old[i] - g)


for fact, value in interleaved(broken).items():
    print(f"{fact}: {value}")

# %% [markdown]
# Follow two threads through `broken` to see how an update is lost, and how weights are
# read that belong to no version. Then mend it with `store.lock`. In the block `with
# store.lock:` a thread is alone: another one that comes to such a block waits. But
# then nobody may compute a gradient in it, or the threads take turns at that, too.

# %% tags=["exercise"] exercise="shared_step" points=3
def shared_step(store, gradient):
    """Do one step of a worker, while others do theirs: pull, compute, push.

    store.read(i) returns weight i and store.write(i, value) sets it, for i from 0 to
    len(store) - 1. gradient(weights) takes a list of all weights, a snapshot, and
    returns a list with the gradient of each; call it once, and without the lock. The
    learning rate is 1. No update may be lost.

    >>> interleaved(shared_step)["weights"]
    [2000.0, 2000.0]
    """
    with store.lock:
        snapshot = [store.read(i) for i in range(len(store))]
    change = gradient(snapshot)
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) - g)


# %% tags=["check"] exercise="shared_step"
check("shared_step", shared_step)

# %% [markdown]
# ## What you have found
#
# - A server's port carries everything N times, so cut the weights over several servers,
#   each range as large as its port is fast.
# - Waiting for all costs most for the last one. One way out is to need fewer gradients,
#   another is to wait for none and to take gradients that are stale.
# - Staleness is counted in updates. A limit on it drops work, a bound makes the quick
#   workers wait; without either, learning rates must be small.
# - An update is a read, a sum and a write. Whoever shares weights must keep others out
#   from the first to the last of these, and out of a pull, but not longer.
