"""The checks of the data-parallel notebook: other right answers, and several ranks."""

import sys
from fractions import Fraction

import cloudpickle
import numpy as np
import pytest
import torch
from wrong.notes import notes

from labs import data_parallel as lab
from labs.checks import judge
from labs.checks.data_parallel import EXERCISES, times_of
from labs.kit import messages
from labs.kit.timeline import Link

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

RIGHT, right = notes()


def verdict(name, answer, seed=1):
    return judge(EXERCISES[name], answer, seed)


# ---- other right answers -------------------------------------------------------------


@right("indices")
def with_numpy(n_samples, n_ranks, rank, epoch=0, seed=0):
    order = np.random.default_rng([seed, epoch]).permutation(n_samples)
    places = np.arange(rank, -(-n_samples // n_ranks) * n_ranks, n_ranks)
    return order[places % n_samples]


@right("indices")
def with_torchs_sampler(n_samples, n_ranks, rank, epoch=0, seed=0):
    sampler = torch.utils.data.DistributedSampler(
        range(n_samples), n_ranks, rank, seed=seed
    )
    sampler.set_epoch(epoch)
    return iter(sampler)


@right("average")
def by_cutting(tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors]) / messages.n_ranks()
    messages.iall_reduce(flat).wait()
    for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
        tensor.copy_(part.view_as(tensor))


@right("buckets")
def as_tuples(parameters, nbytes):
    bucket = ()
    for parameter in parameters[::-1]:
        larger = (*bucket, parameter)
        if bucket and sum(4 * p.numel() for p in larger) > nbytes:
            yield bucket
            larger = (parameter,)
        bucket = larger
    yield bucket


@right("accuracy")
def by_gathering(correct, n_samples):
    dealt = torch.stack(messages.all_gather(torch.tensor(correct)), dim=1)
    return dealt.flatten()[:n_samples].double().mean()


@right("accuracy")
def by_sending_to_rank_0(correct, n_samples):
    rank, n_ranks = messages.rank(), messages.n_ranks()
    mine = sum(correct[: len(range(rank, n_samples, n_ranks))])
    hits = torch.tensor([mine])
    if rank:
        messages.send(hits, 0)
    else:
        for peer in range(1, n_ranks):
            hits += messages.receive(peer)
    return np.float64(messages.broadcast(hits).item() / n_samples)


@right("average_unequal")
def one_message(parameters, n_samples):
    """The number of samples travels behind the gradients."""
    grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
    parts = [n_samples * grad.flatten() for grad in grads]
    flat = torch.cat([*parts, torch.tensor([float(n_samples)])])
    messages.all_reduce(flat)
    shares = (flat[:-1] / flat[-1]).split([len(part) for part in parts])
    for parameter, share in zip(parameters, shares):
        parameter.grad = share.view_as(parameter)


@right("average_unequal")
def everybody_adds_up(parameters, n_samples):
    sizes = messages.all_gather(torch.tensor(float(n_samples)))
    for i, parameter in enumerate(parameters):
        grads = messages.all_gather(lab.gradient(parameter), f"gradient {i}")
        weighted = [size * grad for size, grad in zip(sizes, grads)]
        parameter.grad = torch.stack(weighted).sum(0) / sum(sizes)


@right("sync_batch_norm")
def in_double(x, eps=1e-5):
    sums = torch.zeros(2 * x.shape[1] + 1, dtype=torch.float64)
    sums[0] = len(x)
    sums[1:] = torch.cat([x, x**2], dim=1).sum(0)
    messages.all_reduce(sums, name="sums")
    mean, squares = (sums[1:] / sums[0]).chunk(2)
    return (x - mean) * torch.rsqrt(squares - mean**2 + eps)


@right("sharded_step")
@torch.no_grad()
def all_in_one_message(parameters, state, lr, momentum):
    """Each rank adds its own updates to zeros; the sum holds all of them."""
    changes = [torch.zeros_like(parameter) for parameter in parameters]
    for i in range(messages.rank(), len(parameters), messages.n_ranks()):
        old = state.setdefault(i, torch.zeros_like(parameters[i]))
        changes[i] = state[i] = momentum * old + parameters[i].grad
    flat = messages.all_reduce(torch.cat([change.flatten() for change in changes]))
    for parameter, change in zip(parameters, flat.split([len(p) for p in parameters])):
        parameter -= lr * change


@right("step_time")
def exactly(backward, nbytes, bucket, n_ranks, link):
    """Walk backward through the layers, and send what cannot take the next one."""
    layers = [*zip(backward, nbytes)][::-1]
    now = ready = free = Fraction(0)
    full = 0

    def leave():
        passes = 2 * (n_ranks - 1)
        part = Fraction(full, n_ranks) / Fraction(link.bandwidth)
        return max(ready, free) + passes * (Fraction(link.latency) + part)

    for time, size in layers:
        now += time
        if size and full and full + size > bucket:
            free, full = leave(), 0
        if size:
            full, ready = full + size, now
    return max(now, leave())


@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, capfd):
    assert verdict(name, answer).startswith(f"{name}: right ")
    assert capfd.readouterr() == ("", "")


# ---- the cases of the papers and of the field ----------------------------------------


def test_the_gradients_of_two_ranks_are_averaged_once():
    """w = 0, x = t: rank 0 has 1, rank 1 has 2. Sum -10, divided twice -2.5."""
    facts = EXERCISES["average"].expected([[1], [2]], "w")
    assert facts["gradient on each rank"] == [[-5.0], [-5.0]]


def test_unequal_ranks_are_weighted():
    """The mean of means would be -11.5."""
    [gradient, other] = EXERCISES["average_unequal"].expected([[1, 2], [3]], "w")[
        "gradient on each rank"
    ]
    assert gradient == other == pytest.approx([-28 / 3])


def test_repeats_do_not_count():
    """Of 10 samples on 4 ranks, the model is right on the first two: 4 of 12 dealt."""
    shards, n_samples = EXERCISES["accuracy"].dealt([1, 1] + [0] * 8, 4)
    assert sum(map(sum, shards)) == 4 and sum(map(len, shards)) == 12
    facts = EXERCISES["accuracy"].expected(shards, n_samples)
    assert facts == {"accuracy on each rank": [0.2] * 4}


def test_more_ranks_than_samples():
    dealt = EXERCISES["indices"].expected(3, 7, 0, 0)
    assert dealt["samples per rank"] == [1] * 7
    shards, _ = EXERCISES["accuracy"].dealt([1, 0, 0], 4)
    assert shards == [[1], [0], [0], [1]]


# ---- several ranks -------------------------------------------------------------------


def test_a_verdict_names_call_expected_and_found():
    said = verdict(
        "average_unequal", lambda parameters, n: lab.average_flat(parameters)
    )
    assert said == (
        "average_unequal: not yet. average_unequal([w], samples [[1, 2], [3]]): "
        "gradient on each rank: expected [[-9.33333], [-9.33333]], found [[-11.5], "
        "[-11.5]]. That is the mean of the ranks' means: more samples have to count "
        "more."
    )


def test_every_rank_is_judged():
    """Rank 0 alone would be right."""

    def right_on_rank_0(x, eps=1e-5):
        y = in_double(x, eps)
        return y if messages.rank() == 0 else 2 * y

    assert "output on each rank: expected" in verdict(
        "sync_batch_norm", right_on_rank_0
    )


def test_the_cause_is_told_and_not_what_follows():
    """Ranks 0, 2 and 3 wait for rank 1, which has left for a reason of its own."""

    def divides_by_zero(correct, n_samples):
        if len(correct) == 3 and messages.rank() == 1:
            return 1 / 0
        return by_gathering(correct, n_samples)

    said = verdict("accuracy", divides_by_zero)
    assert "on rank 1, it raised ZeroDivisionError: division by zero" in said


def test_a_rank_may_come_late_to_the_end():
    """Rank 1 meets each of rank 0's messages at its own end; all of them are told."""

    def stubborn(tensors):
        for _ in range(5 if messages.rank() == 0 else 0):
            try:
                messages.all_reduce(torch.zeros(1))
            except TypeError:
                pass

    said = verdict("average", stubborn)
    assert "found [[-2], [-8]]. This is what was there before" in said


def test_a_figure_needs_an_answer(capsys):
    plan = [1, 1, 1], [16, 16, 16], 32, 2, Link(0.5, 8.0)
    assert times_of(exactly, [plan]) == [10.0]
    assert times_of(lambda *arguments: None, [plan]) is None
    assert capsys.readouterr().out == (
        "No figure yet: it returned None, not a number. Is a return missing?.\n"
    )
