"""The checks of the all-reduce notebook: right answers, and deadlocks in words."""

import sys

import cloudpickle
import pytest
import torch
from wrong import ring_allreduce as wrong
from wrong.notes import notes

from labs import ring_allreduce as lab
from labs.checks import judge
from labs.checks.ring_allreduce import EXERCISES, check, chunks_after, times_of
from labs.kit import messages
from labs.kit.timeline import Link

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(wrong)


def verdict(name, answer, seed=0):
    return judge(EXERCISES[name], answer, seed)


# ---- other right answers -------------------------------------------------------------

RIGHT, right = notes()


@right("reduce_scatter")
def without_the_buffer(chunks, buffer):
    """Sends do not block, so that all may begin with one."""
    rank, n = messages.rank(), messages.n_ranks()
    print("a print does no harm")
    for step in range(n - 1):
        messages.isend(chunks[rank - step].clone(), (rank + 1) % n)
        chunks[rank - step - 1] += messages.receive((rank - 1) % n)


@right("all_gather")
def in_two_turns(chunks):
    """Receive before sending, on all ranks but one."""
    rank, n = messages.rank(), messages.n_ranks()
    for step in range(n - 1):
        going = messages.isend(chunks[(rank + 1 - step) % n], (rank + 1) % n)
        messages.receive((rank - 1) % n, into=chunks[(rank - step) % n])
        going.wait()


@right("mended")
def renumbered(chunks):
    """The lab's, in which chunk r is called r + 1."""
    lab.reduce_scatter([chunks[-1], *chunks[:-1]], torch.empty_like(chunks[0]))


@right("mended")
def with_a_travelling_sum(chunks):
    rank, n = messages.rank(), messages.n_ranks()
    total = chunks[rank - 1]
    for step in range(2, n + 1):
        total = chunks[rank - step] + lab.shift(total)
    if n > 1:
        chunks[rank].copy_(total)


@right("pipelined_broadcast")
def with_blocking_sends(chunks, source):
    rank, n = messages.rank(), messages.n_ranks()
    place = (rank - source) % n
    for number, chunk in enumerate(chunks):
        if place > 0:
            chunk.copy_(messages.receive((rank - 1) % n, tag=number))
        if place < n - 1:
            messages.send(chunk, (rank + 1) % n, tag=number)


@right("two_level")
def to_each_directly(tensor, per_node):
    """Every rank sends each chunk to the one who sums it, and gets the sums back."""
    node, place = divmod(messages.rank(), per_node)
    inside = [node * per_node + i for i in range(per_node)]
    across = list(range(place, messages.n_ranks(), per_node))
    chunks = tensor.tensor_split(per_node)
    parts = chunks[place].tensor_split(len(across))
    scatter(chunks, inside)
    scatter(parts, across)
    gather(parts, across)
    gather(chunks, inside)


def scatter(chunks, ranks):
    for rank, chunk in zip(ranks, chunks):
        if rank != messages.rank():
            messages.isend(chunk, rank)
    for rank in ranks:
        if rank != messages.rank():
            chunks[ranks.index(messages.rank())].add_(messages.receive(rank))


def gather(chunks, ranks):
    for rank in ranks:
        if rank != messages.rank():
            messages.isend(chunks[ranks.index(messages.rank())], rank)
    for rank, chunk in zip(ranks, chunks):
        if rank != messages.rank():
            messages.receive(rank, into=chunk)


@right("ring_sum")
def element_by_element(tensors):
    n, sums = len(tensors), []
    for c, chunk in enumerate(torch.arange(len(tensors[0])).tensor_split(n)):
        for i in chunk.tolist():
            total = torch.tensor(0.0)
            for k in range(n):
                total += tensors[(c + k) % n][i]
            sums.append(float(total))
    return sums


@right("bucket_bytes")
def by_bisection(n_ranks, latency, bandwidth, share):
    low, high, link = 1.0, 1e18, Link(latency, bandwidth)
    while high > low * (1 + 1e-9):
        size = (low * high) ** 0.5
        reached = lab.busbw(size, lab.seconds("ring", n_ranks, size, link), n_ranks)
        low, high = (low, size) if reached > share * bandwidth else (size, high)
    return torch.tensor(high)


@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, capfd):
    points = EXERCISES[name].points
    worth = f"{points} points" if points else "practice"
    assert verdict(name, answer, seed=1) == f"{name}: right ({worth})."
    assert capfd.readouterr() == ("", "")


# ---- what ends a run -----------------------------------------------------------------


def test_a_deadlock_is_a_verdict_on_the_case_in_which_it_comes():
    def deadlocks_on_five(chunks):
        if messages.n_ranks() == 5:
            messages.receive((messages.rank() - 1) % 5)
        lab.reduce_scatter([chunks[-1], *chunks[:-1]], torch.empty_like(chunks[0]))

    said = verdict("mended", deadlocks_on_five)
    assert "on 5 ranks): it deadlocks: rank 0 is stuck in receive from rank 4" in said
    assert "everyone receives and nobody sends" in said
    assert "Cell" not in said and ".py" not in said  # a sentence, not a table


def test_a_rank_that_returns_early_is_named():
    def rank_2_is_tired(chunks):
        if messages.rank() != 2:
            lab.reduce_scatter(chunks, torch.empty_like(chunks[0]))

    said = verdict("mended", rank_2_is_tired)
    assert "it deadlocks: rank 2 has returned, but rank 0 is in exchange with" in said


def test_an_answer_begun_on_some_ranks_is_your_turn(capsys):
    def begun(chunks, source):
        if messages.rank() == source:
            messages.isend(chunks[0], source + 1)
        else:
            raise NotImplementedError("your turn")

    check("pipelined_broadcast", begun)
    assert capsys.readouterr().out == "pipelined_broadcast: your turn (3 points).\n"


@pytest.mark.parametrize(
    "trouble, advice",
    [
        ("rank 0 is stuck in receive from rank 3", "Rank 0 is the source: it has noth"),
        ("rank 2 has returned, but rank 0 is in receive from rank 3", "Rank 0 is the"),
        ("rank 3 is in send to rank 0", "Rank 3 is the last"),
        ("rank 1 is in receive from rank 0", ""),
    ],
)
def test_a_deadlocked_broadcast_gets_advice(trouble, advice):
    found = EXERCISES["pipelined_broadcast"].advice(trouble, 4, [2, 2], 0, 7)
    assert found.startswith(advice) and bool(found) == bool(advice)


# ---- what the notebook uses ----------------------------------------------------------


def test_chunks_after_shows_who_is_in_a_sum():
    assert chunks_after(lab.reduce_scatter, 3, torch.empty(1)) == [
        [1, 111, 101],
        [11, 10, 111],
        [111, 110, 100],
    ]


def test_times_of_a_broadcast(capsys):
    assert times_of(wrong.passed_on, 3, 8, [1, 4]) == [2 * (1 + 4), 2 * (1 + 1) + 3]
    assert times_of(wrong.broken, 3, 8, [1, 4]) is None
    assert capsys.readouterr().out == "No figure yet: the check says why.\n"
