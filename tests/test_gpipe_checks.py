"""The checks of the GPipe notebook: right answers pass, wrong ones hear why not."""

import statistics
import sys
import threading
from fractions import Fraction
from random import Random

import cloudpickle
import numpy as np
import pytest
import torch
from answers import answers, unanswered, worth
from answers import verdict as verdict_of
from wrong.notes import notes

from labs import gpipe as lab
from labs.checks.gpipe import EXERCISES, check, timeline_of
from labs.kit import messages
from labs.kit.simulate import simulate
from labs.kit.timeline import Op

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

ANSWERS = answers("gpipe")


def verdict(name, answer, seed=0):
    return verdict_of("gpipe", name, answer, seed)


def test_a_verdict_is_printed(capsys):
    assert check("gpipe", unanswered) is None
    assert capsys.readouterr() == ("gpipe: your turn (practice).\n", "")


# ---- other right answers -------------------------------------------------------------

RIGHT, right = notes()


@right("one_f_one_b")
def by_priority(n_stages, n_microbatches):
    """Each stage goes back whenever it has as many alive as it may."""
    for stage in range(n_stages):
        order, forwards, backwards = [], 0, 0
        while backwards < n_microbatches:
            full = forwards - backwards == n_stages - stage
            if forwards == n_microbatches or full:
                order.append(("B", backwards))
                backwards += 1
            else:
                order.append(("F", forwards))
                forwards += 1
        yield tuple(order)


@right("one_f_one_b")
def by_zipping(n_stages, n_microbatches):
    """Backwards start n_stages - 1 - stage places later; gaps are left out."""
    schedule = []
    for stage in range(n_stages):
        late = n_stages - 1 - stage
        order = []
        for i in range(n_microbatches + late):
            order += [Op("F", np.int64(i))] * (i < n_microbatches)
            order += [Op("B", np.int64(i - late))] * (i >= late)
        schedule.append(iter(order))
    return schedule


@right("flushes")
def with_the_labs_gpipe(n_stages, n_microbatches, k):
    def shifted(first):
        size = min(k, n_microbatches - first)
        [order] = lab.gpipe(1, size)
        return [Op(kind, first + i) for kind, i in order]

    firsts = range(0, n_microbatches, k)
    return [[op for first in firsts for op in shifted(first)] for _ in range(n_stages)]


@right("flushes")
def oldest_back_first(n_stages, n_microbatches, k):
    """The order of backwards within a flush changes neither time nor memory."""
    order, numbers = [], list(range(n_microbatches))
    while numbers:
        group, numbers = numbers[:k], numbers[k:]
        order += [("F", i) for i in group]
        order += [("B", i) for i in group]
    return (order,) * n_stages


@right("slow_stage")
def by_the_first_forward(timeline):
    """All operations of a stage are slow alike, so one of them will do."""
    first = [timeline.ops(rank)[0] for rank in range(timeline.n_ranks)]
    times = np.array([span.end - span.start for span in first], dtype=np.float32)
    slow = times.argmax()
    return [slow, times[slow] / np.median(np.delete(times, slow))]


@right("slow_stage")
def from_the_table(timeline):
    times = torch.tensor([row["compute"] for row in timeline.table()])
    slow = times.argmax()
    others = sorted(float(t) for i, t in enumerate(times) if i != slow)
    return slow, times[slow] / statistics.median(others)


@right("bubble_of")
def by_simulation(forward, backward, n_microbatches):
    cost = lambda stage, op: (forward if op.kind == "F" else backward)[stage]
    return simulate(lab.gpipe(len(forward), n_microbatches), cost).bubble()


@right("bubble_of")
def by_a_recurrence(forward, backward, n_microbatches):
    """Exact: each operation ends after the later of its two predecessors."""

    def last_end(times):
        ends = [Fraction(0)] * len(times)
        for _ in range(n_microbatches):
            before = Fraction(0)
            for stage, time in enumerate(times):
                ends[stage] = before = max(ends[stage], before) + Fraction(time)
        return ends[-1]

    # Forwards end on the last stage, where backwards begin.
    makespan = last_end(forward) + last_end(backward[::-1])
    busy = n_microbatches * Fraction(sum(forward) + sum(backward))
    return 1 - busy / len(forward) / makespan


@right("bubble_of")
def in_float32(forward, backward, n_microbatches):
    f, b = torch.tensor(forward).float(), torch.tensor(backward).float()
    makespan = f.sum() + b.sum() + (n_microbatches - 1) * (f.max() + b.max())
    return 1 - n_microbatches * (f + b).mean() / makespan


@right("fewest_microbatches")
def from_the_bubbles_own_minimum(n_stages, batch, inside, boundary, budget, limit=0.1):
    n = 1
    while n <= batch:
        sizes = [len(part) for part in np.array_split(range(batch), n)]
        peak = max(
            boundary * sum(sizes[:i]) + inside * size for i, size in enumerate(sizes)
        )
        if peak <= budget and n_stages - 1 < limit * (n + n_stages - 1):
            return np.int64(n)
        n += 1


@right("fewest_microbatches")
def with_a_generator(n_stages, batch, inside, boundary, budget, limit=0.1):
    def peak(n):
        small, larger = divmod(batch, n)
        waits, most = 0, 0
        for i in range(n):
            size = small + (i < larger)
            most = max(most, waits + inside * size)
            waits += boundary * size
        return most

    fits = (
        n
        for n in range(1, batch + 1)
        if lab.bubble_fraction(n_stages, n) < limit and peak(n) <= budget
    )
    return next(fits, None)


@right("gpipe")
def lazily(n_stages, n_microbatches):
    for _ in range(n_stages):
        yield (Op(*pair) for pair in pairs(n_microbatches))


def pairs(n):
    return [("F", i) for i in range(n)] + [("B", n - 1 - i) for i in range(n)]


@right("backward")
def by_the_tensor(x, y, gradient=None):
    y.backward(gradient)
    return None if x.grad is None else x.grad.clone()


@right("idle_fraction")
def by_the_gaps(timeline, stage):
    print("a print does no harm")
    gaps = sum(end - start for start, end in timeline.gaps(stage))
    return torch.tensor(gaps / timeline.makespan)


@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, capfd):
    assert verdict(name, answer, seed=1) == f"{name}: right {worth('gpipe', name)}."
    assert capfd.readouterr() == ("", "")


# ---- verdicts ------------------------------------------------------------------------


def test_what_is_no_function_or_cannot_travel_is_told():
    assert verdict("gpipe", lab.gpipe(4, 8)) == (
        "gpipe: not yet. Hand over the function, not what it returns."
    )
    lock = threading.Lock()
    said = verdict("bubble_of", lambda *arguments: lock)
    assert "cannot be sent to ranks" in said


def test_a_verdict_names_call_expected_and_found():
    [(n_stages, m), *_] = EXERCISES["one_f_one_b"].cases(Random(0))
    assert verdict("one_f_one_b", lab.gpipe) == (
        f"one_f_one_b: not yet. one_f_one_b({n_stages}, {m}): microbatches alive on "
        f"each stage: expected [3, 2, 1], found {[m] * 3}. That is GPipe's memory: go "
        "back sooner, one B for each further F."
    )


# ---- figures -------------------------------------------------------------------------


def test_a_figure_needs_a_schedule(capsys):
    assert timeline_of(unanswered, 4, 8) is None
    assert capsys.readouterr().out == "No figure yet: your turn.\n"
    assert timeline_of(lab.gpipe, 2, 3).order(1) == lab.gpipe(2, 3)[1]


def test_schedules_of_four_stages_run_on_four_ranks():
    """Each rank runs its own stage, so a rank with another order shows in the facts."""

    def rank_0_differs(n_stages, n_microbatches):
        answer = lab.gpipe if messages.rank() == 0 else ANSWERS["one_f_one_b"]
        return answer(n_stages, n_microbatches)

    facts = EXERCISES["one_f_one_b"].probe(rank_0_differs, 0)[-1]
    alive = facts["microbatches alive on each stage"]
    assert alive[0] > 4 and alive[1:] == [3, 2, 1]
    assert facts["gradients off by"] < 1e-12
