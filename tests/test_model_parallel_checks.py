"""The checks of the model-parallel notebook: right answers pass, however written."""

import sys
from collections import OrderedDict

import cloudpickle
import numpy as np
import pytest
import torch
from answers import unanswered, worth, wrong
from answers import verdict as verdict_of
from wrong.model_parallel import skip
from wrong.notes import notes

from labs.checks.model_parallel import EXERCISES, check, gradients_of, traffic_of
from labs.kit import messages, split
from labs.kit.timeline import Link

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KEY = "model_parallel"
WRONG = {answer.__name__: answer for _, answer, _ in wrong(KEY)}


def verdict(name, answer, seed=0):
    return verdict_of(KEY, name, answer, seed)


def test_a_verdict_is_printed(capsys):
    assert check("in_turn", unanswered) is None
    assert capsys.readouterr() == ("in_turn: your turn (practice).\n", "")


# ---- other right answers -------------------------------------------------------------

RIGHT, right = notes()


@right("idle_fraction")
def by_counting_ranks(n_stages, computing=1.0):
    idle = (n_stages - 1) * computing + n_stages * (1 - computing)
    return torch.tensor(idle) / n_stages


@right("in_turn")
def with_bare_messages(stage, inputs):
    """One tensor needs no tuple on its way; all ranks return something."""
    print("a print does no harm")
    rank, last = messages.rank(), messages.n_ranks() - 1
    x = messages.receive(rank - 1) if rank else inputs
    [y] = stage.forward(7, (x,))
    gradient = torch.tensor(1.0)
    if rank != last:
        messages.isend(y, rank + 1)
        gradient = messages.receive(rank + 1)
    [gradient] = stage.backward(7, (gradient,))
    if rank:
        messages.isend(gradient, rank - 1)
    return y if y.numel() == 1 else gradient


@right("step_time")
def message_by_message(computing, boundary, link):
    time = float(computing)
    for nbytes in boundary[1:]:
        for _ in ("on", "back"):
            time += link.latency + nbytes / link.bandwidth
    return np.float32(time)


@right("fewest_stages")
def from_the_end(weights, activations, budget):
    """Filled from the last layer on: another cut, with as few stages."""
    needs = [4 * w + a for w, a in zip(weights, activations)]
    if any(nbytes > budget for nbytes in needs):
        raise ValueError("no")
    stages = [[]]
    for nbytes in reversed(needs):
        if sum(stages[-1]) + nbytes > budget:
            stages.append([])
        stages[-1].append(nbytes)
    return (np.int64(len(stage)) for stage in reversed(stages))


@right("fewest_stages")
def with_the_least_largest_stage(weights, activations, budget):
    needs = [4 * w + a for w, a in zip(weights, activations)]
    for n_stages in range(1, len(needs) + 1):
        sizes = split.by_cost(needs, n_stages)
        held = [sum(needs[i] for i in layers) for layers in split.ranges(sizes)]
        if max(held) <= budget:
            return torch.tensor(sizes)
    raise ValueError("a layer does not fit")


@right("skip_step")
def backward_twice(module, x):
    last = messages.n_ranks() - 1
    if messages.rank() > 0:
        return skip(module, x)
    y = module(x)
    messages.isend(y, last)
    messages.isend(y, 1)
    y.backward(messages.receive(last), retain_graph=True)
    y.backward(messages.receive(1))
    return None


@right("step_with_recompute")
def moment_by_moment(forwards, backwards, boundary, link):
    now = 0.0
    for stage, forward in enumerate(forwards):
        now += forward + (link.seconds(boundary[stage]) if stage else 0)
    for stage in reversed(range(len(forwards))):
        begun, done = now, now + backwards[stage]
        if stage:
            arrival = done + link.seconds(boundary[stage])
            now = max(arrival, begun + forwards[stage - 1])
    return torch.tensor(done)


@right("split_mlp")
def by_hand(x, first, second, bias, gradient):
    with torch.no_grad():
        hidden = (x @ first.T).clamp(min=0)
        of_hidden = torch.where(hidden > 0, gradient @ second, 0)
        first.grad, second.grad = of_hidden.T @ x, gradient.T @ hidden
        bias.grad = gradient.sum(0)
        y = messages.all_reduce(hidden @ second.T) + bias
        return [y, messages.all_reduce(of_hidden @ first)]


class Copied(torch.autograd.Function):
    """The same on all ranks forward, a sum over them backward."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return messages.all_reduce(gradient.clone())


class Summed(torch.autograd.Function):
    """The other way round."""

    @staticmethod
    def forward(context, x):
        return messages.all_reduce(x.clone())

    @staticmethod
    def backward(context, gradient):
        return gradient


@right("split_mlp")
def with_two_functions(x, first, second, bias, gradient):
    x = x.clone().requires_grad_()
    hidden = torch.nn.functional.linear(Copied.apply(x), first).relu()
    y = Summed.apply(torch.nn.functional.linear(hidden, second)) + bias
    y.backward(gradient)
    return y, x.grad


@right("three_ways")
def in_another_order(n_ranks, weights, boundary, n_layers):
    left = sum(1 for rank in range(n_ranks) if rank == 1)
    right = sum(1 for rank in range(n_ranks) if rank == 2)
    chunks = 2 * (n_ranks - 1)
    return OrderedDict(
        model=torch.tensor(boundary * (left + right)),
        tensor=np.float64(4 * n_layers * chunks * boundary / n_ranks),
        data=chunks * weights / n_ranks,
        nothing=None,
    )


@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, capfd):
    assert verdict(name, answer, seed=1) == f"{name}: right {worth(KEY, name)}."
    assert capfd.readouterr() == ("", "")


# ---- verdicts ------------------------------------------------------------------------


def test_a_verdict_names_call_expected_and_found():
    assert verdict("fewest_stages", WRONG["one_layer_each"]) == (
        "fewest_stages: not yet. fewest_stages([10, 20, 20, 10], [30, 0, 5, 0], 275): "
        "stages: expected 1, found 4. Fill a stage with as many layers as fit, then "
        "begin another."
    )


def test_a_deadlock_says_who_waits_for_whom():
    said = verdict("skip_step", WRONG["waits_for_each_other"])
    circle = (
        "it deadlocks: rank 0 is stuck in receive from rank 1; rank 1 is stuck in "
        "receive from rank 2; rank 2 is stuck in send to rank 0: "
    )
    assert circle in said


def test_the_oracle_of_recompute_is_the_picture_of_the_task():
    oracle = EXERCISES["step_with_recompute"].expected
    assert oracle([1, 1, 1], [2, 2, 2], [0, 0, 0], Link()) == {"seconds": 9.0}
    assert oracle([5, 1], [8, 2], [64, 16], Link(0.5, 32.0)) == {"seconds": 20.0}


# ---- what the page shows -------------------------------------------------------------


def test_gradients_over_a_skip_connection_add_up():
    """y = 1 x, z = 3 y, loss = 5 z + y: 30 come through the stages, 2 more from y."""
    assert gradients_of(skip, [1, 3, 5], 2) == (32.0, [32.0, 10.0, 6.0])
    lost = gradients_of(WRONG["skipped_is_a_constant"], [1, 3, 5], 2)
    assert lost == (32.0, [30.0, 10.0, 6.0])


def test_a_page_without_an_answer_says_so(capsys):
    assert gradients_of(unanswered, [1, 3, 5], 2) is None
    assert traffic_of(unanswered, 8, 100, 10, 4, [1, 2]) is None
    assert capsys.readouterr().out == (
        "No result yet: your turn.\nNo figure yet: your turn.\n"
    )


def test_traffic_grows_with_the_batch_where_activations_travel():
    found = traffic_of(in_another_order, 4, 100, 8, 5, [1, 3])
    assert found == {"data": [150, 150], "tensor": [240, 720], "model": [16, 48]}
