# %% [markdown]
# # Ring all-reduce: exercises
#
# The chapter *Ring all-reduce* sums a tensor over all ranks, first through one rank,
# then around a ring. Here you write parts of it yourself and then go further than the
# chapter: three exercises for practice, five for points (12 in all).
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
    from labs import ring_allreduce as lab
except ImportError:
    raise ImportError(
        "the course is not installed here: %pip install its folder, then try again."
    ) from None

import torch

from labs.checks.ring_allreduce import check, chunks_after, times_of
from labs.kit import messages
from labs.kit.clock import Unit, Virtual
from labs.kit.draw import curve, draw
from labs.kit.page import ledger, refused
from labs.kit.timeline import Link
from labs.kit.world import launch

shift = lab.shift  # to the right neighbour, from the left one

# %% [markdown]
# ## The lab, once
#
# Four processes train copies of a small network, each on its shard of the images. After
# the backward they add up their gradients around a ring, with real messages. Only time
# is a model: a forward counts as one unit, a backward as two, and a message takes 0.1
# units and then one more for every 100 kB.

# %% id="run"
config = lab.Config(model="digits", n_workers=4, algorithm="ring", steps=2)
report = lab.measure(config, Virtual(Unit(), Link(latency=0.1, bandwidth=1e5)))
ledger(report.rows + report.invariant()[1:])

# %% [markdown]
# On the left what the formulas say, on the right what was counted in the run. The same
# as a picture: a row is a rank; time runs to the right.

# %% id="picture" tags=["expected"]
report.timeline.hardware = ""  # these times depend on none
draw(*report.timelines(), titles=["predicted", "run"])

# %% [markdown]
# ## Messages between ranks
#
# `launch(function, n_ranks)` starts the ranks and returns what the function returned on
# each. `shift(tensor, into=None)` is a turn of a ring: it sends a tensor to the right
# neighbour and returns what comes from the left one, in `into` if that is given.

# %% id="shift"
def turn(rank, n_ranks):
    came = shift(torch.tensor([100 + rank]))
    return f"rank {rank} has sent {100 + rank} to the right and received {came.item()}"


print(*launch(turn, 3), sep="\n")

# %% [markdown]
# On a rank, `messages.rank()` is its number and `messages.n_ranks()` says how many
# there are. To talk to ranks that are no neighbours, there are also
#
# - `messages.exchange(tensor, to, source, into=None)`, which does with any two ranks
#   what `shift` does with the neighbours;
# - `messages.isend(tensor, to)`, which does not wait, and `messages.send`, which does;
# - `messages.receive(source, into=None)`, which returns what comes.

# %% [markdown] exercise="reduce_scatter"
# ## Practice: the first half of the ring
#
# A ring all-reduce cuts the tensor into one chunk per rank. In its first half, chunks
# go to the right and are added up on their way. To try that out, `chunks_after` lets
# rank 0 begin with 1 in each chunk, rank 1 with 10 and rank 2 with 100: then 110 is the
# sum of ranks 1 and 2, and 111 is that of all three.

# %% id="try-on"
buffer = torch.empty(1)
for rank, chunks in enumerate(chunks_after(lab.reduce_scatter, 3, buffer)):
    print(f"rank {rank}: {chunks}")

# %% [markdown]
# Each rank has one chunk that is whole. Follow chunk 0 through the ranks, then write
# the function. `chunks` is a list of views of one tensor, one for each rank, and some
# may be smaller than others: change the numbers in them, with `add_` or `copy_`,
# instead of making new ones. `buffer` is room for the largest chunk, to receive into;
# you need not use it. To see what your function does, put it into the cell above in
# place of `lab.reduce_scatter`.

# %% tags=["exercise"] exercise="reduce_scatter" practice=true
from labs.ring_allreduce import reduce_scatter

# %% tags=["check"] exercise="reduce_scatter"
check("reduce_scatter", reduce_scatter)

# %% [markdown] exercise="all_gather"
# ## Practice: the second half
#
# Now rank r has chunk r + 1 whole (the last rank has chunk 0); what is in its others is
# worth nothing. Let the whole chunks go round until every rank has all of them.

# %% tags=["exercise"] exercise="all_gather" practice=true
from labs.ring_allreduce import all_gather

# %% tags=["check"] exercise="all_gather"
check("all_gather", all_gather)

# %% [markdown] exercise="mended"
# ## Mend a reduce-scatter (2 points)
#
# Libraries also offer the first half alone, and there rank r ends with chunk r. Here is
# an attempt. It has two mistakes. The first one stops it:

# %% id="broken"
def broken(chunks):
    rank, n_ranks = messages.rank(), messages.n_ranks()
    for step in range(n_ranks - 1):
        mine, theirs = (rank - step) % n_ranks, (rank - step - 1) % n_ranks
        messages.send(chunks[mine], (rank + 1) % n_ranks)
        chunks[theirs] += messages.receive((rank - 1) % n_ranks)


print(refused(chunks_after, broken, 3).splitlines()[-1])  # the rest says where

# %% [markdown]
# When that is mended you will see the second one: look at `chunks_after(mended, 3)`.

# %% tags=["exercise"] exercise="mended" points=2
def mended(chunks):
    """Sum chunks over all ranks so that rank r ends with the whole of chunk r.

    chunks: a list of n_ranks tensors, views of one tensor; sizes may differ, and some
    may be empty. Sum in place; the other chunks may hold anything at the end. In each
    of n_ranks - 1 steps every rank sends a chunk to the right, all at the same time.

    >>> [chunks[rank] for rank, chunks in enumerate(chunks_after(mended, 3))]
    [111, 111, 111]
    """
    here = messages.rank()
    for step in range(len(chunks) - 1):
        going, coming = chunks[here - step - 1], chunks[here - step - 2]
        coming += shift(going)


# %% tags=["check"] exercise="mended"
check("mended", mended)

# %% [markdown] exercise="pipelined_broadcast"
# ## A broadcast in chunks (3 points)
#
# One rank, the source, has new weights for all. It may send them to each of the others,
# but all that goes through its one port. Or it hands them to its right neighbour, who
# hands them on, and so forth: now each port carries them once. If they travel as one
# message, each rank waits until the one before has all of them. In chunks, the ranks
# work at the same time, like the stages of a pipeline.

# %% tags=["exercise"] exercise="pipelined_broadcast" points=3
def pipelined_broadcast(chunks, source):
    """Give every rank, in place, the chunks of rank `source`.

    chunks: a list of tensors of any sizes; on each rank as many and as large. They go
    to the right around the ring, each as a message of its own, in the order of the
    list. A rank hands on a chunk as soon as it has it. The last rank, which is left of
    the source, hands on nothing. There may be one rank alone.

    With k chunks that take t each to send, and latency a, the last rank has all after
    (n_ranks - 1) (a + t) + (k - 1) t.

    >>> chunks_after(pipelined_broadcast, 3, 1)
    [[10, 10, 10], [10, 10, 10], [10, 10, 10]]
    """
    here, n_ranks = messages.rank(), messages.n_ranks()
    left, right = (here - 1) % n_ranks, (here + 1) % n_ranks
    for chunk in chunks:
        if here != source:
            messages.receive(left, into=chunk)
        if right != source:
            messages.isend(chunk, right)
    messages.finish()  # from here on, chunks may be changed


# %% tags=["check"] exercise="pipelined_broadcast"
check("pipelined_broadcast", pipelined_broadcast)

# %% [markdown]
# Four ranks, a tensor of 48 elements; a message takes one unit of time, and one more
# for every two elements. In one chunk, the ring is no better than sending to all.

# %% id="pipelined_broadcast-figure" tags=["expected"]
counts = [1, 2, 4, 8, 16]
times = times_of(pipelined_broadcast, 4, 48, counts)
curve(
    [
        {"label": "around the ring", "x": counts, "y": times, "style": "points"},
        {"label": "source to all", "x": counts, "y": [1 + 3 * 24] * len(counts)},
    ],
    xlabel="chunks",
    ylabel="time",
    title="A broadcast to four ranks: with more chunks, they work at the same time",
    alt="With one chunk the ring takes 75 units, with 16 only 30; source to all: 73.",
) if times else None

# %% [markdown] exercise="two_level"
# ## All-reduce over two levels (3 points)
#
# Ranks of one node reach each other quickly; from node to node it is slow. So send as
# little as possible to other nodes: sum within the node first. If one rank of each node
# then spoke for all, its port would have to carry the whole sum. Better that each rank
# of a node takes one chunk of it across.
#
#     node 0: ranks 0 1 2     1. within a node: each rank sums one chunk
#     node 1: ranks 3 4 5     2. across: ranks 0 and 3 sum their chunk, 1 and 4, 2 and 5
#                             3. within a node: gather the chunks
#
# All three go around rings of *some* ranks: write yourself a helper that takes a list
# of ranks, and put it into the same cell.

# %% tags=["exercise"] exercise="two_level" points=3
def two_level(tensor, per_node):
    """Sum `tensor` over all ranks, in place, with few bytes between nodes.

    tensor: flat, with any number of elements. per_node: ranks on each node; those of
    node k are k * per_node and the following ones. n_ranks is a multiple of it.

    With n bytes on N nodes and equal chunks, a rank sends 2 (N - 1)/N n / per_node
    bytes to other nodes, and 2 (per_node - 1)/per_node n bytes within its own. Send
    messages from rank to rank: the library's collectives do not count.

    >>> def summed(rank, n_ranks):
    ...     tensor = torch.arange(4.0) + 10 * rank
    ...     two_level(tensor, per_node=2)
    ...     return tensor.tolist()
    >>> launch(summed, 4)[3]
    [60.0, 64.0, 68.0, 72.0]
    """
    node, place = divmod(messages.rank(), per_node)
    inside = range(node * per_node, (node + 1) * per_node)
    across = range(place, messages.n_ranks(), per_node)
    chunks = tensor.tensor_split(per_node)
    parts = chunks[place].tensor_split(len(across))
    turns(chunks, inside, place - 1, add=True)
    turns(parts, across, node - 1, add=True)
    turns(parts, across, node, add=False)
    turns(chunks, inside, place, add=False)


def turns(chunks, ranks, first, add):
    """Go round the ring of some ranks; this one sends chunk `first` at first."""
    n, here = len(ranks), ranks.index(messages.rank())
    right, left = ranks[(here + 1) % n], ranks[here - 1]
    for k in range(first, first - n + 1, -1):
        came = messages.exchange(chunks[k % n], right, left)
        coming = chunks[(k - 1) % n]
        coming.copy_(coming + came if add else came)


# %% tags=["check"] exercise="two_level"
check("two_level", two_level)

# %% [markdown] exercise="ring_sum"
# ## The sum, to the last bit (2 points)
#
# Float32 keeps about seven digits and rounds after each addition. So a sum depends on
# its order, and here one can see it with the naked eye: three ranks hold tensors of
# equal elements, and the elements of their sum are not equal.

# %% id="rounding"
def added_up(rank, n_ranks):
    return lab.ring(torch.full((3,), [1e8, 1.0, -1e8][rank]))


for rank, total in enumerate(launch(added_up, 3)):
    print(f"rank {rank}: {total}")

# %% [markdown]
# All ranks have the same bits, which matters: copies of a model must not drift apart.
# Which bits these are depends on where a chunk begins its way.

# %% tags=["exercise"] exercise="ring_sum" points=2
def ring_sum(tensors):
    """Return, without any message, exactly what `lab.ring` gives each rank.

    tensors: what each rank holds, a list of flat float32 tensors of one length. Return
    a tensor. Chunks are those of `tensor_split`; elements may be fewer than ranks.

    >>> ring_sum([torch.full((3,), x) for x in (1e8, 1.0, -1e8)])
    tensor([0., 0., 1.])
    """
    n_ranks = len(tensors)
    chunks = [tensor.tensor_split(n_ranks) for tensor in tensors]
    sums = []
    for c in range(n_ranks):
        total = chunks[c][c]
        for step in range(1, n_ranks):
            total = total + chunks[(c + step) % n_ranks][c]
        sums.append(total)
    return torch.cat(sums)


# %% tags=["check"] exercise="ring_sum"
check("ring_sum", ring_sum)

# %% [markdown] exercise="busbw"
# ## Practice: bus bandwidth
#
# How well does an all-reduce use the links? Bytes of the tensor over time is no good
# measure: it falls with the number of ranks, though each link is as busy as before. So
# one divides the bytes that have to pass a rank's port, in the best algorithm.

# %% tags=["exercise"] exercise="busbw" practice=true
from labs.ring_allreduce import busbw

# %% tags=["check"] exercise="busbw"
check("busbw", busbw)

# %% [markdown] exercise="bucket_bytes"
# ## How large must a bucket be? (2 points)
#
# Data parallelism does not reduce one gradient at a time: it collects them in buckets.
# The figure shows why. On a link of 10 GB/s with a latency of 10 µs, small tensors get
# next to nothing of the bandwidth, and the more ranks there are, the larger "small" is.

# %% id="bandwidths"
link = Link(latency=1e-5, bandwidth=1e10)
sizes = [4**k * 1000 for k in range(11)]
curve(
    [
        {
            "label": f"{n} ranks",
            "x": [size / 1e6 for size in sizes],
            "y": [
                lab.busbw(size, lab.seconds("ring", n, size, link), n) / link.bandwidth
                for size in sizes
            ],
        }
        for n in (4, 16, 64, 256)
    ],
    xlabel="bucket [MB]",
    ylabel="bus bandwidth / bandwidth",
    title="A ring needs large buckets, and more so with more ranks",
    alt="Four curves rise from near 0 to near 1; with more ranks they rise later.",
    log="x",
)

# %% [markdown]
# How large must a bucket be for the ring to reach a given share of the bandwidth? The
# model is that of `lab.seconds`: each of 2 (n_ranks - 1) steps takes the latency and
# the time of a chunk.

# %% tags=["exercise"] exercise="bucket_bytes" points=2
def bucket_bytes(n_ranks, latency, bandwidth, share):
    """Return the bytes of a bucket with which the ring's bus bandwidth reaches a share.

    latency: seconds of a message; bandwidth: bytes a second of each link; share: of
    this bandwidth, between 0 and 1. There are at least two ranks. Any number will do,
    whole or not.

    >>> round(bucket_bytes(4, latency=1e-5, bandwidth=1e9, share=0.5))
    40000
    >>> round(bucket_bytes(64, latency=1e-5, bandwidth=1e10, share=0.8))
    25600000
    """
    chunk = latency * bandwidth * share / (1 - share)
    return n_ranks * chunk


# %% tags=["check"] exercise="bucket_bytes"
check("bucket_bytes", bucket_bytes)

# %% [markdown]
# ## What you have found
#
# - Half a ring is useful by itself: reduce-scatter, all-gather and a broadcast are the
#   same turns with another beginning.
# - In chunks, a message does not have to arrive before the next rank goes on; and with
#   two levels, it need not travel where links are slow.
# - The order of the ring fixes the bits of the sum. All ranks get the same ones, but
#   another number of ranks gives others.
# - Latency counts once per step, so a ring needs large tensors: the more ranks, the
#   larger.
