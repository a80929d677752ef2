"""The checks of the notebook on parameter servers: other right answers, and threads."""

import sys
from random import Random

import cloudpickle
import numpy as np
import pytest
import torch
from answers import answers, unanswered, worth
from answers import verdict as verdict_of
from wrong import parameter_server as wrong
from wrong.notes import notes

from labs import parameter_server as lab
from labs.checks import Trouble
from labs.checks.parameter_server import (
    EXERCISES,
    Store,
    Threads,
    check,
    interleaved,
    rates_of,
    times_of,
    trained,
)
from labs.kit import messages

# Answers of this file go to ranks as those of a notebook do; ranks need not import it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(wrong)

ANSWERS = answers("parameter_server")


def verdict(name, answer, seed=0):
    return verdict_of("parameter_server", name, answer, seed)


def test_a_verdict_is_printed(capsys):
    assert check("traffic", unanswered) is None
    assert capsys.readouterr() == ("traffic: your turn (practice).\n", "")


# ---- other right answers -------------------------------------------------------------

RIGHT, right = notes()


@right("ranges")
def by_largest_remainder(n_weights, bandwidths):
    """Round down; then whoever has the next weight first gets one of the rest."""
    total = sum(bandwidths)
    sizes = torch.tensor([n_weights * speed // total for speed in bandwidths])
    speeds = torch.tensor(bandwidths, dtype=torch.float64)
    for _ in range(n_weights - int(sizes.sum())):
        sizes[((sizes + 1) / speeds).argmin()] += 1
    return sizes


@right("ranges")
def by_time(n_weights, bandwidths):
    """Wait until all servers together could have taken enough, then give some back."""
    times = sorted({k / b for b in bandwidths for k in range(n_weights + 1)})
    fits = lambda time: [int(time * b + 1e-9) for b in bandwidths]
    sizes = next(fits(time) for time in times if sum(fits(time)) >= n_weights)
    while sum(sizes) > n_weights:
        sizes[sizes.index(max(sizes))] -= 1
    return tuple(np.int64(size) for size in sizes)


@right("backup_server")
def as_a_class(*arguments):
    print("a print does no harm")
    return wrong.Backup(*arguments).run()


@right("backup_server")
def with_blocking_messages(weights, n_needed, n_updates, lr):
    """Handle one message after the other; whoever may go on gets an answer."""
    inbox, version, came = messages.Inbox(), 0, []
    has = dict.fromkeys(range(1, messages.n_ranks()), -1)
    working = set()
    while has:
        for worker in sorted(set(has) - working):
            if version == n_updates:
                messages.send(torch.empty(0), worker)
                del has[worker]
            elif has[worker] < version:
                message = torch.tensor([*weights.tolist(), version])
                messages.send(message, worker)
                has[worker] = version
                working.add(worker)
        if not working:
            continue
        worker, (*gradient, of) = inbox.take(sorted(working))
        working.remove(worker)
        if of == version:
            came.append(torch.stack(gradient))
        if len(came) == n_needed:
            weights = weights - lr * sum(came) / n_needed
            version, came = version + 1, []
    return weights.tolist()


@right("staleness_of")
def by_looking_back(events, limit):
    found, used = [], []
    for now, event in enumerate(events):
        if event[0] == "push":
            pulled = max(t for t in range(now) if events[t] == ("pull", event[1]))
            found.append(torch.tensor(sum(t > pulled for t in used)))
            used += [now] * bool(found[-1] <= limit)
    return iter(found)


@right("largest_rate")
def by_roots(delay):
    """The roots of z^(delay + 1) - z^delay + lr must be inside the circle."""
    inside = lambda lr: max(abs(np.roots([1, -1, *[0] * (delay - 1), lr]))) < 1
    if not delay:
        return 2
    rates = np.linspace(0.01, 1.5, 1000)
    return max(lr for lr in rates if inside(lr)) + 0.0007


@right("shared_step")
def by_acquire_and_release(store, gradient):
    store.lock.acquire()
    try:
        pulled = tuple(map(store.read, range(len(store))))
    finally:
        store.lock.release()
    change = gradient(pulled)
    store.lock.acquire()
    now = [store.read(i) for i in range(len(store))]
    for i in reversed(range(len(store))):
        store.write(i, torch.tensor(now[i] - change[i]))
    store.lock.release()


@right("shared_step")
def weight_by_weight_in_one_block(store, gradient):
    with store.lock:
        pulled = wrong.pull(store)
    change = gradient(pulled)
    with store.lock:
        while change:
            i = len(change) - 1
            store.write(i, store.read(i) - change.pop())


@pytest.mark.parametrize(
    "name, answer", RIGHT, ids=[answer.__name__ for _, answer in RIGHT]
)
def test_another_right_answer_is_right(name, answer, capfd):
    said = verdict(name, answer, seed=1)
    assert said == f"{name}: right {worth('parameter_server', name)}."
    assert capfd.readouterr() == ("", "")


# ---- what the oracles rest on --------------------------------------------------------


@pytest.mark.parametrize("name", ["ranges", "backup_server", "staleness_of"])
def test_cases_in_which_every_mistake_shows_are_found(name):
    exercise = EXERCISES[name]
    for seed in range(20):
        cases = exercise.cases(Random(seed))
        assert [exercise.expected(*case) for case in cases] == exercise.oracle(seed)


def test_four_workers_in_turn_are_three_updates_behind():
    """All pull at version 0 and then push in turn: 0, 1, 2, 3, and always 3."""
    events, limit = EXERCISES["staleness_of"].cases(Random(0))[0]
    assert ANSWERS["staleness_of"](events, limit) == [0, 1, 2, 3, 3, 3, 3]


def test_the_worst_case_is_one_that_turns_allow():
    worst = EXERCISES["most_stale"].expected
    for n_workers in range(1, 6):
        for bound in range(4):
            expected = {"staleness": lab.most_stale(n_workers, bound)}
            assert worst(n_workers, bound) == expected


@pytest.mark.parametrize("delay, limit", [(0, 2), (1, 1), (2, (5**0.5 - 1) / 2)])
def test_the_largest_rate_is_known_for_short_delays(delay, limit):
    assert EXERCISES["largest_rate"].limit(delay) == pytest.approx(limit)


def test_a_server_that_needs_all_gradients_is_synchronous():
    assert trained(ANSWERS["backup_server"], n_needed=3, n_updates=2) == 8.75


def test_a_server_that_has_no_update_to_make_ends_its_workers():
    assert trained(ANSWERS["backup_server"], n_needed=2, n_updates=0) == 0


# ---- threads that take turns ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_no_update_is_lost_in_any_order(seed):
    """4 threads push the gradient -1 500 times each: 2000 exactly, 20 times."""
    exercise = EXERCISES["shared_step"]
    found = exercise.facts(ANSWERS["shared_step"], 4, 500, 1, -1, seed)
    assert found["weights"] == [2000.0]


def test_a_run_of_threads_is_the_same_every_time():
    first, again = interleaved(wrong.as_given), interleaved(wrong.as_given)
    assert first == again
    assert first["weights"][0] < 2000 and first["gradients computed"] == 2000


def test_a_thread_that_fails_ends_the_others():
    seen = []

    def fails(store):
        store.read(0)
        raise ValueError("on purpose")

    def waits(store):
        try:
            while True:
                store.read(0)
        finally:
            seen.append("ended")

    store = Store(1, [waits, fails, waits], Random(0))
    with pytest.raises(ValueError, match="on purpose"):
        store.threads.run()
    assert seen == ["ended", "ended"]


def test_threads_that_wait_for_each_other_are_told_so():
    def both_wait(store):
        store.lock.acquire()
        store.lock.acquire()

    store = Store(1, [both_wait, both_wait], Random(0))
    with pytest.raises(Trouble, match="it deadlocks"):
        store.threads.run()


def test_one_thread_runs_at_a_time():
    inside, most = 0, 0

    def work():
        nonlocal inside, most
        for _ in range(50):
            inside += 1
            most = max(most, inside)
            inside -= 1
            threads.pause()

    threads = Threads([work] * 4, Random(0))
    threads.run()
    assert (inside, most) == (0, 1)


# ---- what the notebook uses ----------------------------------------------------------


def test_rates_for_a_figure(capsys):
    assert rates_of(lambda delay: 2.0 - delay, [0]) == [2.0]
    assert rates_of(unanswered, [0, 1]) is None
    assert capsys.readouterr().out == "No figure yet: your turn.\n"


def test_times_for_a_figure(capsys):
    few, all_of_them = times_of(ANSWERS["backup_server"], 3, [1, 3])
    assert 1 < few < all_of_them
    assert times_of(wrong.broken, 3, [1, 3]) is None
    assert capsys.readouterr().out == "No figure yet: the check says why.\n"
