"""Wrong answers to the all-reduce exercises, as students give them, and what each
hears."""

import math
import os

import torch
import torch.distributed as dist
from wrong.notes import notes

from labs import ring_allreduce as lab
from labs.kit import messages

WRONG, told = notes()


def here():
    return messages.rank(), messages.n_ranks()


# ---- any exercise ----------------------------------------------------------------


@told("reduce_scatter", "No message went from rank to rank")
@told("all_gather", "No message went from rank to rank")
@told("mended", "No message went from rank to rank")
@told("pipelined_broadcast", "No message went from rank to rank")
@told("two_level", "No message went from rank to rank")
@told("ring_sum", "returned None, not a tensor")
@told("busbw", "returned None, not a number")
@told("bucket_bytes", "returned None, not a number")
def nothing(*arguments):
    pass


@told("mended", "it raised ZeroDivisionError: division by zero (")
@told("two_level", "it raised ZeroDivisionError: division by zero (")
def broken(*arguments):
    return 1 / 0


@told("all_gather", "on rank 1, it raised IndexError")
def broken_on_one_rank(chunks):
    rank, n_ranks = here()
    if rank == 1:
        raise IndexError("list index out of range")
    messages.receive((rank - 1) % n_ranks)


@told("two_level", "Does a loop never end?")
def endless_on_one_rank(tensor, per_node):
    rank, n_ranks = here()
    while rank == 2:
        pass
    messages.receive((rank - 1) % n_ranks)


@told("pipelined_broadcast", "os._exit(0)")
def gone(*arguments):
    os._exit(0)


@told("mended", "raised TypeError")
def too_few_parameters():
    pass


# ---- reduce_scatter --------------------------------------------------------------


def half_ring(chunks, first, put, n_steps=None):
    """As the lab's, with another beginning or another way to put what comes."""
    rank, n = here()
    for step in range(n - 1 if n_steps is None else n_steps):
        theirs = chunks[(rank + first - step - 1) % n]
        put(theirs, lab.shift(chunks[(rank + first - step) % n]))


@told("reduce_scatter", "does not replace them")
def replaces(chunks, buffer):
    half_ring(chunks, 0, lambda theirs, came: theirs.copy_(came))


@told("reduce_scatter", "That is too little")
def stops_early(chunks, buffer):
    half_ring(chunks, 0, torch.Tensor.add_, len(chunks) - 2)


@told("reduce_scatter", "sends one chunk to the right")
def goes_on(chunks, buffer):
    half_ring(chunks, 0, torch.Tensor.add_, len(chunks))


@told("reduce_scatter", "Rank r ends with chunk r + 0")
def begins_one_before(chunks, buffer):
    half_ring(chunks, -1, torch.Tensor.add_)


@told("reduce_scatter", "Nothing has changed here")
def adds_to_copies(chunks, buffer):
    half_ring(chunks, 0, torch.add)


@told("reduce_scatter", "puts other tensors into the list")
def rebinds(chunks, buffer):
    rank, n = here()
    for step in range(n - 1):
        theirs = (rank - step - 1) % n
        chunks[theirs] = chunks[theirs] + lab.shift(chunks[(rank - step) % n])


@told("reduce_scatter", "A sum is asked for, no mean")
def divides(chunks, buffer):
    lab.reduce_scatter(chunks, buffer)
    for chunk in chunks:
        chunk /= len(chunks)


@told("reduce_scatter", "That is an all-reduce")
def all_of_it(chunks, buffer):
    lab.reduce_scatter(chunks, buffer)
    lab.all_gather(chunks)


@told("reduce_scatter", "No message went from rank to rank")
def with_a_collective(chunks, buffer):
    for chunk in chunks:
        messages.all_reduce(chunk)


@told("reduce_scatter", "belongs to the chunk of the same number")
def to_the_left(chunks, buffer):
    rank, n = here()
    for step in range(n - 1):
        came = messages.exchange(chunks[rank - step], (rank - 1) % n, (rank + 1) % n)
        chunks[rank - step - 1] += came


@told("reduce_scatter", "All can send at once")
def one_after_the_other(chunks, buffer):
    rank, n = here()
    for step in range(n - 1):
        if rank == 0:
            messages.isend(chunks[rank - step], 1)
        came = messages.receive((rank - 1) % n)
        if rank > 0:
            messages.isend(chunks[rank - step], (rank + 1) % n)
        chunks[rank - step - 1] += came


@told("reduce_scatter", "sends one chunk to the right")
def whole_tensors(chunks, buffer):
    rank, n = here()
    mine = [chunk.clone() for chunk in chunks]
    for peer in range(n):
        for chunk in mine if peer != rank else []:
            messages.isend(chunk, peer)
    for peer in range(n):
        for k, chunk in enumerate(chunks if peer != rank else []):
            came = messages.receive(peer)
            if k == (rank + 1) % n:
                chunk += came


# ---- all_gather ------------------------------------------------------------------


@told("all_gather", "that is what it sends first")
def begins_with_its_own(chunks):
    half_ring(chunks, 0, lambda theirs, came: theirs.copy_(came))


@told("all_gather", "is not added")
def adds(chunks):
    half_ring(chunks, 1, torch.Tensor.add_)


@told("all_gather", "That is too little")
def lacks_one(chunks):
    half_ring(chunks, 1, lambda theirs, came: theirs.copy_(came), len(chunks) - 2)


@told("all_gather", "Nothing has changed here")
def gathers_and_forgets(chunks):
    half_ring(chunks, 1, lambda theirs, came: came.clone())


@told("all_gather", "belongs to the chunk of the same number")
def receives_into_another(chunks):
    rank, n = here()
    for step in range(n - 1):
        lab.shift(chunks[(rank + 1 - step) % n], into=chunks[(rank - step - 1) % n])


# ---- mended ----------------------------------------------------------------------


@told("mended", "it deadlocks: rank 0 is stuck in send to rank 1")
def as_given(chunks):
    rank, n = here()
    for step in range(n - 1):
        messages.send(chunks[rank - step], (rank + 1) % n)
        chunks[rank - step - 1] += messages.receive((rank - 1) % n)


@told("mended", "let every rank begin one chunk earlier")
def half_mended(chunks):
    half_ring(chunks, 0, torch.Tensor.add_)


@told("mended", "Rank r ends with chunk r + 2")
def wrong_way(chunks):
    half_ring(chunks, 1, torch.Tensor.add_)


@told("mended", "A rank sends to its right neighbour alone")
def directly(chunks):
    rank, n = here()
    for k in range(1, n):
        messages.isend(chunks[(rank + k) % n], (rank + k) % n)
    for k in range(1, n):
        chunks[rank] += messages.receive((rank - k) % n)


@told("mended", "sends one chunk to the right")
def with_one_more_turn(chunks):
    half_ring(chunks, -1, torch.Tensor.add_, len(chunks))


# ---- pipelined_broadcast ---------------------------------------------------------


def passed_on(chunks, source, left=-1):
    """Receive and hand on, chunk by chunk."""
    rank, n = here()
    for chunk in chunks:
        if rank != source:
            messages.receive((rank + left) % n, into=chunk)
        if (rank - left) % n != source:
            messages.isend(chunk, (rank - left) % n)


@told("pipelined_broadcast", "tells its right neighbour alone")
def source_to_all(chunks, source):
    rank, n = here()
    for chunk in chunks:
        for peer in range(n) if rank == source else []:
            if peer != source:
                messages.isend(chunk, peer)
        if rank != source:
            messages.receive(source, into=chunk)


@told("pipelined_broadcast", "as soon as it has come")
def takes_all_first(chunks, source):
    rank, n = here()
    for chunk in chunks if rank != source else []:
        messages.receive((rank - 1) % n, into=chunk)
    for chunk in chunks if (rank + 1) % n != source else []:
        messages.isend(chunk, (rank + 1) % n)


@told("pipelined_broadcast", "its chunks stay as they are")
def always_from_rank_0(chunks, source):
    passed_on(chunks, 0)


@told("pipelined_broadcast", "Rank 3 is the last")
def all_the_way_round(chunks, source):
    rank, n = here()
    for chunk in chunks:
        if rank == source:
            messages.isend(chunk, (rank + 1) % n)
            messages.receive((rank - 1) % n)
        else:
            messages.receive((rank - 1) % n, into=chunk)
            messages.isend(chunk, (rank + 1) % n)


@told("pipelined_broadcast", "Rank 3 is the last: the source has what")
def last_hands_on(chunks, source):
    rank, n = here()
    for chunk in chunks:
        if rank != source:
            messages.receive((rank - 1) % n, into=chunk)
        messages.send(chunk, (rank + 1) % n)


@told("pipelined_broadcast", "Chunks go to the right")
def mirrored(chunks, source):
    passed_on(chunks, source, left=1)


@told("pipelined_broadcast", "written into the chunks")
def forgets_what_came(chunks, source):
    rank, n = here()
    for chunk in chunks:
        came = messages.receive((rank - 1) % n) if rank != source else chunk
        if (rank + 1) % n != source:
            messages.isend(came, (rank + 1) % n)


@told("pipelined_broadcast", "before you receive chunk i + 1")
def one_behind(chunks, source):
    """Hands on a chunk only when the next one has come."""
    rank, n = here()
    for i, chunk in enumerate(chunks):
        if rank != source:
            messages.receive((rank - 1) % n, into=chunk)
        if i and (rank + 1) % n != source:
            messages.isend(chunks[i - 1], (rank + 1) % n)
    if (rank + 1) % n != source:
        messages.isend(chunks[-1], (rank + 1) % n)


@told("pipelined_broadcast", "No message went from rank to rank")
def the_kits(chunks, source):
    for chunk in chunks:
        messages.broadcast(chunk, source)


@told("pipelined_broadcast", "A rank alone is the source and the last")
def never_alone(chunks, source):
    rank, n = here()
    if rank == source:
        for chunk in chunks:
            messages.isend(chunk, (rank + 1) % n)
    else:
        passed_on(chunks, source)


# ---- two_level -------------------------------------------------------------------


def around(tensor, ranks):
    """All-reduce a tensor around a ring of some ranks."""
    n, place = len(ranks), ranks.index(messages.rank())
    chunks = tensor.tensor_split(n)
    turns(chunks, ranks, place)
    turns(chunks, ranks, place + 1, add=False)


def turns(chunks, ranks, first, add=True):
    n, place = len(ranks), ranks.index(messages.rank())
    for step in range(n - 1):
        theirs = chunks[(first - step - 1) % n]
        going = chunks[(first - step) % n]
        came = messages.exchange(going, ranks[(place + 1) % n], ranks[place - 1])
        theirs.copy_(theirs + came if add else came)


def split(per_node):
    rank, n = here()
    node, place = divmod(rank, per_node)
    inside = list(range(node * per_node, (node + 1) * per_node))
    return node, place, inside, list(range(place, n, per_node))


@told("two_level", "One rank carries all that leaves a node")
def one_ring(tensor, per_node):
    lab.ring(tensor)


@told("two_level", "One rank carries all that leaves a node")
def leaders(tensor, per_node):
    node, place, inside, across = split(per_node)
    if place:
        messages.send(tensor, inside[0])
        messages.receive(inside[0], into=tensor)
        return
    for source in inside[1:]:
        tensor += messages.receive(source)
    around(tensor, across)
    for peer in inside[1:]:
        messages.send(tensor, peer)


@told("two_level", "not the whole tensor")
def whole_across(tensor, per_node):
    _, _, inside, across = split(per_node)
    around(tensor, inside)
    around(tensor, across)


@told("two_level", "Other nodes have numbers too")
def node_alone(tensor, per_node):
    around(tensor, split(per_node)[2])


@told("two_level", "a node's ranks gather them at the end")
def no_gather(tensor, per_node):
    _, place, inside, across = split(per_node)
    chunks = tensor.tensor_split(per_node)
    turns(chunks, inside, place - 1)
    around(chunks[place], across)


def right(tensor, per_node):
    _, place, inside, across = split(per_node)
    chunks = tensor.tensor_split(per_node)
    turns(chunks, inside, place - 1)
    around(chunks[place], across)
    turns(chunks, inside, place, add=False)


@told("two_level", "A sum is asked for, no mean")
def mean_of_all(tensor, per_node):
    right(tensor, per_node)
    tensor /= messages.n_ranks()


@told("two_level", "Nothing has changed here")
def of_a_copy(tensor, per_node):
    right(tensor.clone(), per_node)


@told("two_level", "Within a node: a reduce-scatter before")
def whole_within(tensor, per_node):
    _, place, inside, across = split(per_node)
    start = tensor.clone()
    for peer in inside:
        if peer != messages.rank():
            tensor += messages.exchange(start, peer)
    chunks = tensor.tensor_split(per_node)
    around(chunks[place], across)
    turns(chunks, inside, place, add=False)


@told("two_level", "Sum within a node, then over the nodes")
def gathers_another_chunk(tensor, per_node):
    _, place, inside, across = split(per_node)
    chunks = tensor.tensor_split(per_node)
    turns(chunks, inside, place - 1)
    around(chunks[place], across)
    turns(chunks, inside, place + 1, add=False)


@told("two_level", "No message went from rank to rank")
def the_librarys(tensor, per_node):
    dist.all_reduce(tensor)


@told("two_level", "node 0 has rank 0, rank 1")
def transposed(tensor, per_node):
    """Takes rank k, k + n_nodes, ... for a node."""
    rank, n = here()
    n_nodes = n // per_node
    place, node = divmod(rank, n_nodes)
    chunks = tensor.tensor_split(per_node)
    turns(chunks, list(range(node, n, n_nodes)), place - 1)
    around(chunks[place], list(range(place * n_nodes, (place + 1) * n_nodes)))
    turns(chunks, list(range(node, n, n_nodes)), place, add=False)


# ---- ring_sum --------------------------------------------------------------------


def chunk_by_chunk(tensors, order, cut=torch.tensor_split):
    """Add up chunk c in the order of ranks order(c, n)."""
    n = len(tensors)
    parts = [cut(tensor, n) for tensor in tensors]
    return torch.cat([
        sum(parts[rank][c] for rank in order(c, n)) for c in range(len(parts[0]))
    ])  # fmt: skip


@told("ring_sum", "order of ranks for every chunk")
def in_rank_order(tensors):
    return sum(tensors)


@told("ring_sum", "exact sum")
def exactly(tensors):
    columns = torch.stack(tensors).T.tolist()
    return torch.tensor([math.fsum(column) for column in columns])


@told("ring_sum", "not on the one after")
def where_it_ends(tensors):
    return chunk_by_chunk(tensors, lambda c, n: [(c + 1 + k) % n for k in range(n)])


@told("ring_sum", "Chunks go to the right")
def leftwards(tensors):
    return chunk_by_chunk(tensors, lambda c, n: [(c - k) % n for k in range(n)])


@told("ring_sum", "tensor_split")
def with_torch_chunk(tensors):
    order = lambda c, n: [(c + k) % n for k in range(n)]
    return chunk_by_chunk(tensors, order, torch.chunk)


@told("ring_sum", "returned list, not a tensor")
def for_each_rank(tensors):
    return [sum(tensors)] * len(tensors)


@told("ring_sum", "it returned 9 elements, not 3")
def end_to_end(tensors):
    return torch.cat(tensors)


@told("ring_sum", "Follow one chunk")
def average(tensors):
    return sum(tensors) / len(tensors) + 2


# ---- busbw -----------------------------------------------------------------------


@told("busbw", "That is n / t")
def algorithm_bandwidth(nbytes, time, n_ranks):
    return nbytes / time


@told("busbw", "half of an all-reduce")
def of_reduce_scatter(nbytes, time, n_ranks):
    return (n_ranks - 1) / n_ranks * nbytes / time


@told("busbw", "divide by the time")
def bytes_alone(nbytes, time, n_ranks):
    return 2 * (n_ranks - 1) / n_ranks * nbytes


@told("busbw", "A chunk is 1/n_ranks")
def whole_tensor_each_step(nbytes, time, n_ranks):
    return 2 * (n_ranks - 1) * nbytes / time


@told("busbw", "Count the bytes")
def twice(nbytes, time, n_ranks):
    return 2 * nbytes / time


# ---- bucket_bytes ----------------------------------------------------------------


@told("bucket_bytes", "That is one chunk")
def one_chunk(n_ranks, latency, bandwidth, share):
    return latency * bandwidth * share / (1 - share)


@told("bucket_bytes", "half of the bandwidth, whatever the share")
def for_half(n_ranks, latency, bandwidth, share):
    return n_ranks * latency * bandwidth


@told("bucket_bytes", "That is the size for 1 - share")
def upside_down(n_ranks, latency, bandwidth, share):
    return n_ranks * latency * bandwidth * (1 - share) / share


@told("bucket_bytes", "busbw counts what goes through a port")
def by_the_tensor(n_ranks, latency, bandwidth, share):
    part = share * 2 * (n_ranks - 1) / n_ranks
    return part * n_ranks * latency * bandwidth / (1 - part)


@told("bucket_bytes", "That is the time, in seconds")
def a_time(n_ranks, latency, bandwidth, share):
    return n_ranks * latency * share / (1 - share)


@told("bucket_bytes", "the transfer must take `share`")
def without_the_rest(n_ranks, latency, bandwidth, share):
    return n_ranks * latency * bandwidth * share
