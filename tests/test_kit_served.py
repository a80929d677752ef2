"""Turns at a server, and timelines of workers and servers without ranks.

That these are the timelines of runs is shown by test_parameter_server.
"""

from math import inf

import pytest

from labs.kit import served
from labs.kit.served import Turns, order, rotated, serve
from labs.kit.timeline import Link

FREE = Link()
UNIT = {"F": 1.0, "B": 2.0, "U": 0.25}


def cost(rank, op):
    return UNIT[op.kind]


# ---- whose turn it is ----------------------------------------------------------------


def test_together_an_update_waits_for_all_and_so_does_a_pull():
    turns = Turns([1, 2, 3])
    assert turns.expected() == [] and turns.answer() == [1, 2, 3]
    for worker in (3, 1):
        turns.push(worker)
        assert turns.update() == [] and turns.answer() == []
    assert turns.expected() == [2]
    turns.push(2)
    assert turns.update() == [1, 2, 3] and sorted(turns.answer()) == [1, 2, 3]


def test_alone_each_gradient_is_an_update():
    turns = Turns([1, 2], together=False, bound=inf)
    turns.answer()
    for worker in (2, 2, 1, 2):
        turns.push(worker)
        assert turns.update() == turns.answer() == [worker]
        assert turns.update() == []


def test_who_is_more_than_the_bound_ahead_waits():
    turns = Turns([1, 2], together=False, bound=1)
    turns.answer()
    for answered in ([2], []):
        turns.push(2)
        assert turns.update() == [2] and turns.answer() == answered
    assert turns.expected() == [1]
    turns.push(1)
    assert turns.update() == [1] and turns.answer() == [2, 1]


def test_nobody_waits_for_a_worker_that_has_left():
    turns = Turns([1, 2, 3])
    turns.answer()
    turns.push(1)
    turns.leave(2)
    assert turns.update() == [] and turns.expected() == [3]
    turns.leave(3)
    assert turns.update() == [1] and turns.answer() == [1]
    turns.leave(1)
    assert not turns.pushes and turns.update() == turns.answer() == []


def test_servers_begin_with_different_workers_and_workers_with_different_servers():
    assert rotated(range(3), 1) == [1, 2, 0] and rotated([], 5) == []
    assert [order(3, worker, together=True) for worker in (3, 4, 5, 6)] == [
        [0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]
    ]  # fmt: skip
    assert order(3, 5, together=False) == [0, 1, 2]
    config = served.Config(n_workers=4, n_servers=2)
    assert [config.workers(server) for server in (0, 1)] == [[2, 3, 4, 5], [4, 5, 2, 3]]


# ---- timelines -----------------------------------------------------------------------


def picture(timeline, per_unit=1):
    """A row per rank: its operations, one letter for each unit of time."""
    rows = []
    for rank in range(timeline.n_ranks):
        row = [" "] * round(per_unit * timeline.makespan)
        for span in timeline.ops(rank):
            at = range(round(per_unit * span.start), round(per_unit * span.end))
            for i in at:
                row[i] = span.name
        rows.append("".join(row).rstrip())
    return "\n" + "\n".join(rows)


def one_server(mode, slowest, n_steps=3, n_workers=2, link=FREE, nbytes=100):
    bound = {"sync": 0, "stale": 1, "async": inf}[mode]
    turns = Turns(range(1, n_workers + 1), mode == "sync", bound)
    costs = {"F": 1.0, "B": 1.0, "U": 0.0}

    def seconds(rank, op):
        return costs[op.kind] * (slowest if rank == n_workers else 1)

    return serve([turns], n_workers, seconds, [nbytes], n_steps, link)


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("sync", "FB    FB    FB"),
        ("stale", "FBFB  FB"),
        ("async", "FBFBFB"),
    ],
)
def test_a_fast_worker_waits_for_a_slow_one_as_its_mode_says(mode, expected):
    slow = "FFFBBB" * 3
    assert picture(one_server(mode, 3)) == f"\n\n{expected}\n{slow}"


def test_the_first_workers_compute_while_the_last_ones_pull():
    """A message takes one unit: the last of three has its weights after three."""
    run = one_server("sync", 1, n_steps=1, n_workers=3, link=Link(bandwidth=100.0))
    assert picture(run).splitlines()[2:] == [" FB", "  FB", "   FB"]
    pushed = [s.end for s in run.lane(0, "transfer") if s.name == "receive"]
    assert pushed == [4, 5, 6]


def test_latency_is_paid_once_a_pull_and_once_a_push():
    link = Link(latency=0.5, bandwidth=100.0)
    for n_workers in (1, 3):
        run = one_server("sync", 1, n_steps=4, n_workers=n_workers, link=link)
        assert served.interval(run) == pytest.approx(2 + 2 * 0.5 + n_workers + 1)


def test_the_same_arguments_give_the_same_timeline_and_leave_the_turns_alone():
    turns = [Turns([2, 3, 4], False, 2), Turns([3, 4, 2], False, 2)]
    runs = [serve(turns, 3, cost, [50, 40], 5, Link(0.1, 20.0)) for _ in range(2)]
    assert runs[0].spans == runs[1].spans
    assert turns[0].pushes == {2: 0, 3: 0, 4: 0} and turns[0].held == [2, 3, 4]
    assert [len(runs[0].ops(rank)) for rank in range(5)] == [15, 15, 10, 10, 10]


def test_bytes_that_a_timeline_moves():
    run = one_server("async", 1, n_steps=3, link=Link(bandwidth=50.0), nbytes=100)
    sent = [sum(s.nbytes for s in run.lane(rank, "transfer") if s.name == "send")
            for rank in range(3)]  # fmt: skip
    assert sent == [2 * 4 * 100, 300, 300]


def test_an_interval_is_the_time_between_updates():
    run = one_server("sync", 1, n_steps=5)
    assert served.interval(run) == 2.0
    assert served.interval(one_server("sync", 1, n_steps=1, n_workers=1)) is None
