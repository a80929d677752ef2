"""All-reduce, five ways: every rank ends with the sum of all ranks' tensors.

    algorithm           what each rank does                         time on N ranks
    reduce_broadcast    sends to rank 0, which adds and sends back  2a + 2(N-1) nb
    pass_around         passes tensors to the right, N-1 times      (N-1)(a + nb)
    ring                the same with chunks, 2(N-1) times          2(N-1)(a + nb/N)
    recursive_doubling  swaps tensors with a partner, lg N times    lg N (a + nb)
    halving_doubling    swaps halves, quarters, ..., and back       2a lg N + 2nb(N-1)/N

a: latency, b: seconds per byte, n: bytes. On top of them: data parallelism.
    python -m labs.ring_allreduce --workers 4 --latency 1e-4 --bandwidth 1e8
    torchrun --nproc-per-node 4 -m labs.ring_allreduce
"""

import functools
from dataclasses import dataclass
from typing import Annotated

import torch

from labs.kit import lab, messages, replica


def in_place(algorithm):
    """Let an algorithm for flat tensors take any, change it in place and return it.
    Half precision travels and is summed in float32, and is rounded once, at the end."""

    @functools.wraps(algorithm)
    def all_reduce(tensor, *buffer):
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        dense = tensor.detach().to(torch.float32 if half else tensor.dtype).contiguous()
        algorithm(dense.view(-1), *buffer)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)
        return tensor

    return all_reduce


def reduce(tensor):
    """Add all ranks' tensors up on rank 0, in rank order."""
    if messages.rank() > 0:
        messages.send(tensor, 0)
    else:
        for source in range(1, messages.n_ranks()):
            tensor.add_(messages.receive(source))


def broadcast(tensor):
    """Give every rank the tensor of rank 0."""
    if messages.rank() > 0:
        messages.receive(0, into=tensor)
    else:
        for peer in range(1, messages.n_ranks()):
            messages.isend(tensor, peer)
        messages.finish()


@in_place
def reduce_broadcast(tensor):
    """All-reduce through one place."""
    reduce(tensor)
    broadcast(tensor)


def shift(tensor, into=None):
    """Send a tensor to the right neighbour; return what comes from the left one."""
    rank, n = messages.rank(), messages.n_ranks()
    return messages.exchange(tensor, (rank + 1) % n, (rank - 1) % n, into=into)


@in_place
def pass_around(tensor):
    """All-reduce around a ring: pass on what came last, and add it to your own."""
    passing = tensor.clone()
    for _ in range(messages.n_ranks() - 1):
        passing = shift(passing)
        tensor.add_(passing)


@in_place
def ring(tensor, buffer=None):
    """All-reduce around a ring in chunks (Patarasuk & Yuan 2009, Gibiansky 2017).
    buffer: room for the largest chunk, kept from a call with equal tensors: faster."""
    kept, chunks = buffer is not None, tensor.tensor_split(messages.n_ranks())
    with messages.trusted(kept):  # equal tensors have gone round before
        reduce_scatter(chunks, buffer if kept else torch.empty_like(chunks[0]))
        all_gather(chunks)


def reduce_scatter(chunks, buffer):
    """Pass sums on, which grow on the way: rank r ends with chunk r + 1."""
    rank, n = messages.rank(), len(chunks)
    for step in range(n - 1):
        growing = chunks[(rank - step - 1) % n]
        growing.add_(shift(chunks[(rank - step) % n], into=buffer[: len(growing)]))


def all_gather(chunks):
    """Pass whole sums on: rank r begins with chunk r + 1, and ends with all."""
    rank, n = messages.rank(), len(chunks)
    for step in range(n - 1):
        shift(chunks[(rank + 1 - step) % n], into=chunks[(rank - step) % n])


def rounds(n_ranks):
    """Return lg N; ValueError unless all ranks can be paired in every round."""
    if n_ranks & (n_ranks - 1):
        raise ValueError(f"doubling needs 2, 4, 8, ... ranks, not {n_ranks}: use ring.")
    return n_ranks.bit_length() - 1


@in_place
def recursive_doubling(tensor):
    """All-reduce in lg N swaps of whole tensors, with ranks 1, 2, 4, ... away."""
    for k in range(rounds(messages.n_ranks())):
        tensor.add_(messages.exchange(tensor, messages.rank() ^ 1 << k))


@in_place
def halving_doubling(tensor):
    """All-reduce in halves, quarters, ..., and back (Thakur et al. 2005)."""
    rank, kept, swaps = messages.rank(), tensor, []
    for k in reversed(range(rounds(messages.n_ranks()))):
        halves, upper = kept.tensor_split(2), rank >> k & 1
        kept, given = halves[upper], halves[1 - upper]
        kept.add_(messages.exchange(given, rank ^ 1 << k))
        swaps.append((rank ^ 1 << k, kept, given))
    for partner, kept, given in reversed(swaps):
        messages.exchange(kept, partner, into=given)


EVERY = reduce_broadcast, pass_around, ring, recursive_doubling, halving_doubling
ALGORITHMS = {algorithm.__name__: algorithm for algorithm in EVERY}


def cost(algorithm, n_ranks):
    """Return (latencies, times of a tensor on a port) that it waits for in turn."""
    n, lg = n_ranks, rounds(n_ranks) if "doubling" in algorithm else 0
    return {
        "reduce_broadcast": (2 * (n > 1), 2 * (n - 1)),
        "pass_around": (n - 1, n - 1),
        "ring": (2 * (n - 1), 2 * (n - 1) / n),
        "recursive_doubling": (lg, lg),
        "halving_doubling": (2 * lg, 2 * (n - 1) / n),
    }[algorithm]


def seconds(algorithm, n_ranks, nbytes, link):
    """The alpha-beta model: full-duplex ports that carry one message at a time."""
    latencies, tensors = cost(algorithm, n_ranks)
    return latencies * link.latency + tensors * nbytes / link.bandwidth


def crossover(algorithm, other, n_ranks, link):
    """Return the bytes at which both take as long; None where one always wins."""
    (a, b), (c, d) = cost(algorithm, n_ranks), cost(other, n_ranks)
    if (a - c) * (d - b) <= 0:
        return None
    return (a - c) / (d - b) * link.latency * link.bandwidth


def traffic(algorithm, n_ranks, nbytes):
    """Bytes that each rank sends, for chunks of equal size."""
    if algorithm == "reduce_broadcast":
        return [(n_ranks - 1) * nbytes, *[nbytes] * (n_ranks - 1)]
    return [cost(algorithm, n_ranks)[1] * nbytes] * n_ranks


def busbw(nbytes, time, n_ranks):
    """Bytes per second of each port on a ring, 2(N-1)/N n / t, as in nccl-tests."""
    return 2 * (n_ranks - 1) / n_ranks * nbytes / time


@dataclass(frozen=True)
class Config(replica.Config):
    """One run of data parallelism on one of these algorithms."""

    algorithm: Annotated[str, "of the all-reduce, such as pass_around"] = "ring"

    def check(self):
        super().check()
        lab.choose("algorithm", self.algorithm, ALGORITHMS)
        cost(self.algorithm, self.n_workers)  # or it says why not

    def all_reduce(self, tensor):
        return ALGORITHMS[self.algorithm](tensor)

    def expected(self, nbytes, link):
        run = self.algorithm, self.n_workers, nbytes
        return seconds(*run, link), traffic(*run)


measure = replica.measure


if __name__ == "__main__":
    from labs import ring_allreduce as own  # ranks import it by this name

    lab.main("ring_allreduce", __doc__, own.Config, own.measure)
