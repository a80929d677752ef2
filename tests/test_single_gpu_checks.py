"""The checks of the notebook on a single GPU: other right answers, figures, limits."""

import sys
from fractions import Fraction
from random import Random

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from answers import answers
from wrong.notes import notes

from labs import single_gpu as lab
from labs.checks import judge
from labs.checks.single_gpu import EXERCISES, values_of

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def verdict(name, answer, seed=0):
    return judge(EXERCISES[name], answer, seed)


# ---- other right answers -------------------------------------------------------------

RIGHT, right = notes()


@right("throughput")
def by_times(load, train, prefetch=False):
    print("a print does no harm")
    times = 1 / load, 1 / train
    return torch.tensor(1 / (max(times) if prefetch else sum(times)))


@right("update")
def by_data(parameters, momenta, lr, momentum):
    """The moments and weights move at the back of autograd."""
    for w, v in zip(parameters, momenta):
        v *= momentum
        v += w.grad
        w.data -= lr * v


@right("accumulate")
def by_slices(trainer, inputs, targets, n_microbatches):
    """Another cut: all but the last have one size."""
    valid, loss = (targets >= 0).sum(), 0
    size = -(-len(inputs) // n_microbatches)
    for i in range(n_microbatches):
        part = slice(i * size, (i + 1) * size)
        loss += trainer.forward(i, inputs[part], targets[part], valid)
        trainer.backward(i)
    return loss


@right("adamw")
def by_torch(parameters, first, second, step, lr, betas, eps, weight_decay):
    """torch's own, which keeps its moments where the exercise does."""
    adamw = torch.optim.AdamW(parameters, lr, betas, eps, weight_decay)
    for w, mean, square in zip(parameters, first, second):
        state = {"step": torch.tensor(step - 1.0), "exp_avg": mean}
        adamw.state[w] = {**state, "exp_avg_sq": square}
    adamw.step()


@right("adamw")
def corrected_rate(parameters, first, second, step, lr, betas, eps, weight_decay):
    """With both corrections in the rate, and eps to go with them."""
    b1, b2 = (1 - beta**step for beta in betas)
    for w, mean, square in zip(parameters, first, second):
        if w.grad is not None:
            mean.lerp_(w.grad, 1 - betas[0])
            square.mul_(betas[1]).addcmul_(w.grad, w.grad, value=1 - betas[1])
            move = lr * b2**0.5 / b1 * mean / (square.sqrt() + eps * b2**0.5)
            w.data = (1 - lr * weight_decay) * w.data - move


@right("accumulate_stream")
def running_mean(model, microbatches):
    """After each microbatch, .grad and loss are the mean over the targets so far."""
    loss = n = 0
    for inputs, targets in microbatches:
        here = int((targets != -100).sum())
        if not here:
            continue
        for weights in model.parameters():
            if weights.grad is not None:
                weights.grad *= n / (n + here)
        part = F.cross_entropy(model(inputs), targets) * here / (n + here)
        part.backward()
        loss = loss * n / (n + here) + part.detach()
        n += here
    return loss


@right("accumulate_stream")
def with_next(model, microbatches):
    total = n = torch.zeros(())
    while True:
        try:
            inputs, targets = next(microbatches)
        except StopIteration:
            break
        loss = F.cross_entropy(model(inputs), targets, reduction="sum")
        loss.backward()
        total, n = total + loss.detach(), n + (targets >= 0).sum()
    for weights in model.parameters():
        weights.grad = weights.grad / n
    return total / n


@right("microbatch_sizes")
def by_division(batch, budget, n_parameters, rule, per_sample):
    largest = (budget - sum(lab.memory(n_parameters, rule))) // per_sample
    if largest < 1:
        return None
    n = -(-batch // largest)
    return tuple(np.int64(len(part)) for part in np.array_split(range(batch), n))


@right("epoch_time")
def by_events(loads, train, n_loaders, ahead):
    """Walk from event to event, as a simulation would."""
    now, n = Fraction(), len(loads)
    ends, loaded, begun, taken, free_at = {}, set(), 0, 0, now
    while True:
        loaded |= {i for i, end in ends.items() if end <= now}
        ends = {i: end for i, end in ends.items() if end > now}
        if taken in loaded and free_at <= now:
            loaded.remove(taken)
            taken, free_at = taken + 1, now + train
        while begun < n and len(ends) < n_loaders and len(ends) + len(loaded) < ahead:
            ends[begun] = now + loads[begun]
            begun += 1
        if taken == n:
            return free_at
        now = min([*ends.values(), *[free_at] * (free_at > now)])


@right("tokens_to_fill")
def by_trying(n_in, n_out, peak, bandwidth, nbytes=2):
    for n in range(1, 100_000):
        traffic = nbytes * (n * n_in + n_in * n_out + n * n_out)
        if 2 * n * n_in * n_out / peak >= traffic / bandwidth:
            return np.int64(n)


@pytest.mark.parametrize("seed", [1, "another"])
@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, seed, capfd):
    assert verdict(name, answer, seed).startswith(f"{name}: right (")
    assert capfd.readouterr() == ("", "")


# ---- cases ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXERCISES)
def test_cases_are_found_for_every_seed(name):
    """Some are drawn until every usual mistake shows; that must not take long."""
    for seed in range(20):
        assert EXERCISES[name].cases(Random(seed))


def test_a_case_that_rounding_would_decide_is_not_asked():
    """Where arithmetic and memory take just as long, floats may say either."""
    for seed in range(50):
        for n_in, n_out, peak, bandwidth, nbytes in EXERCISES["tokens_to_fill"].cases(
            Random(seed)
        ):
            gain = 2 * n_in * n_out * bandwidth - nbytes * (n_in + n_out) * peak
            if gain > 0:
                tokens = Fraction(nbytes * n_in * n_out * peak, gain)
                assert abs(tokens - round(tokens)) > Fraction(1, 10**5)


def test_a_verdict_names_call_expected_and_found():
    in_turn = lambda loads, train, n_loaders, ahead: sum(loads) + len(loads) * train
    [(loads, train, *more), *_] = EXERCISES["epoch_time"].cases(Random(0))
    right, wrong = answers("single_gpu")["epoch_time"], in_turn(loads, train, *more)
    assert verdict("epoch_time", in_turn) == (
        f"epoch_time: not yet. epoch_time({loads}, {train}, 1, 2): time: expected "
        f"{right(loads, train, *more)}, found {wrong}. Loading and training go on side "
        "by side."
    )


# ---- figures -------------------------------------------------------------------------


def test_a_figure_needs_values(capsys):
    def unanswered(*arguments):
        raise NotImplementedError("your turn")

    assert values_of(unanswered, (1, 2)) is None
    assert capsys.readouterr().out == "No figure yet: your turn.\n"
    assert values_of(lambda a: a and 2 * a, (3,), (None,)) == [6.0, None]
