"""Clocks: virtual time is exact, deterministic, and that of simulate; wall time waits.

Programs for ranks are functions (rank, n_ranks); several run in one launch.
"""

import os
import random
import sys
import time
from itertools import pairwise

import cloudpickle
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from labs.kit import clock, messages, toy
from labs.kit.clock import Flops, Timed, Unit, Virtual, Wall, recording, watch
from labs.kit.messages import exchange, isend, receive, send
from labs.kit.simulate import pipeline_needs, simulate
from labs.kit.timeline import Link, Op, Span, Timeline
from labs.kit.watchdog import RankFailed
from labs.kit.world import launch

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest

LINK = Link(latency=1e-5, bandwidth=1e9)
FREE = Link()


def together(rank, n_ranks, functions):
    """Run several programs in one launch, apart from each other."""
    results = []
    for function in functions:
        messages.barrier()
        results.append(function(rank, n_ranks))
        messages.finish()
    return results


def run(n_ranks, *functions):
    """Return per program the list of what its ranks returned."""
    return list(zip(*launch(together, n_ranks, functions, limit=60)))


def recorded(clk, program):
    """Make a program that runs another one under a clock, and returns its spans."""

    def record(rank, n_ranks):
        with recording(clk, rank):
            program(rank, n_ranks)
        return clk.spans

    return record


class Worker:
    """Something to watch: forward and backward do nothing, or what they are given."""

    def __init__(self, work=lambda i: i):
        self.work = work

    def forward(self, i):
        return self.work(i)

    def backward(self, i, scale=1):
        return scale * self.work(i)


def watched(work=lambda i: i):
    return watch(Worker(work), forward="F", backward="B")


# ---- virtual time, by formula --------------------------------------------------------

MEGABYTE = torch.zeros(1 << 20, dtype=torch.uint8)


def ring(rank, n_ranks):
    """2 (n - 1) exchanges of 1/n of a megabyte."""
    chunk = MEGABYTE[: len(MEGABYTE) // n_ranks]
    for _ in range(2 * (n_ranks - 1)):
        exchange(chunk, (rank + 1) % n_ranks, (rank - 1) % n_ranks)


def fan_in(rank, n_ranks):
    """All send a megabyte to rank 0, which has one port."""
    if rank > 0:
        send(MEGABYTE, 0)
    for worker in range(1, n_ranks if rank == 0 else 0):
        receive(worker)


def fan_out(rank, n_ranks):
    """Rank 0 sends a megabyte to each; the port is busy with one after the other."""
    if rank > 0:
        return receive(0)
    return [isend(MEGABYTE, worker) for worker in range(1, n_ranks)]


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_ring_and_fans_take_what_the_formulas_say(n_ranks):
    alpha, beta = LINK.latency, len(MEGABYTE) / LINK.bandwidth
    expected = [
        2 * (n_ranks - 1) * (alpha + beta / n_ranks),
        alpha + (n_ranks - 1) * beta,
        alpha + (n_ranks - 1) * beta,
    ]
    clk = Virtual(Unit(), LINK)
    programs = [recorded(clk, program) for program in (ring, fan_in, fan_out)]
    found = [Timeline.merge(spans).makespan for spans in run(n_ranks, *programs)]
    assert found == pytest.approx(expected, rel=1e-12)


def collectives(rank, n_ranks):
    """Rank r comes after r forwards; each collective is charged as a ring."""
    worker = watched()
    for i in range(rank):
        worker.forward(i)
    messages.all_reduce(torch.ones(3000))
    messages.all_gather(torch.ones(1000))
    messages.broadcast(torch.ones(1500), 1)
    messages.barrier()


def test_collectives_are_charged_as_rings_and_wait_for_the_last():
    link = Link(latency=0.5, bandwidth=1000)
    (spans,) = run(3, recorded(Virtual(Unit({"F": 2.0}), link), collectives))
    expected = [
        ("all_reduce", 4.0, 4.0 + 4 * (0.5 + 4.0), 12_000),
        ("all_gather", 22.0, 22.0 + 2 * (0.5 + 4.0), 4_000),
        ("broadcast", 31.0, 31.0 + 4 * (0.5 + 2.0), 6_000),
        ("barrier", 41.0, 41.0 + 4 * 0.5, 0),
    ]
    waits = [[(0.0, 4.0)], [(2.0, 4.0)], []]
    for mine, waited in zip(spans, waits):
        transfers = [s for s in mine if s.lane == "transfer"]
        assert [(s.name, s.start, s.end, s.nbytes) for s in transfers] == expected
        assert [(s.start, s.end) for s in mine if s.lane == "wait"] == waited


def a_port_still_busy(rank, n_ranks):
    """The collective begins when rank 0's message has left its port; the message has
    then arrived, though rank 1 takes it later."""
    if rank == 0:
        isend(torch.zeros(10, dtype=torch.uint8), 1)
    messages.all_reduce(torch.zeros(2, dtype=torch.uint8))
    if rank == 1:
        receive(0)


def test_a_collective_waits_for_the_port():
    (spans,) = run(2, recorded(Virtual(Unit(), Link(0, 1.0)), a_port_still_busy))
    begun = [[s.start for s in mine if s.name == "all_reduce"] for mine in spans]
    assert begun == [[10.0], [10.0]]
    assert [s.end for s in spans[1] if s.name == "receive"] == [10.0]


# ---- virtual time is that of simulate ------------------------------------------------


def random_schedule(random, n_stages, n_microbatches):
    """Any order that can be executed: always one of the operations that are ready."""
    ops = [Op(kind, i) for kind in "FB" for i in range(n_microbatches)]
    left = [(stage, op) for stage in range(n_stages) for op in ops]
    order = [[] for _ in range(n_stages)]
    while left:
        ready = [
            (stage, op)
            for stage, op in left
            if not any(need in left for need in pipeline_needs(n_stages, stage, op))
        ]
        stage, op = random.choice(ready)
        left.remove((stage, op))
        order[stage].append(op)
    return order


def gpipe(n_stages, n_microbatches):
    forwards = [Op("F", i) for i in range(n_microbatches)]
    return [forwards + [Op("B", op.microbatch) for op in forwards[::-1]]] * n_stages


def one_f_one_b(n_stages, n_microbatches):
    schedule = []
    for stage in range(n_stages):
        ahead = min(n_stages - 1 - stage, n_microbatches)
        order = [Op("F", i) for i in range(ahead)]
        for i in range(n_microbatches):
            order += [Op("F", ahead + i)] * (ahead + i < n_microbatches) + [Op("B", i)]
        schedule.append(order)
    return schedule


def cases(n_stages):
    """(schedule, costs, link, bytes per message) of fixed and of random runs."""
    draw = random.Random(n_stages)
    drawn = [random_schedule(draw, n_stages, draw.randint(1, 5)) for _ in range(6)]
    schedules = [gpipe(n_stages, 4), one_f_one_b(n_stages, 6), *drawn]
    links = [FREE, Link(0.25, 8.0), Link(1.0), Link(0.0, 3.0)]
    for i, schedule in enumerate(schedules):
        times = {
            (stage, op): draw.choice([0.0, 1.0, 2.0, draw.random()])
            for stage, order in enumerate(schedule)
            for op in order
        }
        sizes = {place: draw.choice([0, 1, 7, 5000]) for place in times}
        yield schedule, times, links[i % 4], sizes


def execute(order, rank, n_ranks, sizes):
    """Run one stage's operations; each sends a message of its own size on."""
    worker = watched()
    for op in order:
        source, to = (rank - 1, rank + 1) if op.kind == "F" else (rank + 1, rank - 1)
        if 0 <= source < n_ranks:
            receive(source, tag=op.microbatch)
        (worker.forward if op.kind == "F" else worker.backward)(op.microbatch)
        if 0 <= to < n_ranks:
            message = torch.zeros(sizes[rank, op], dtype=torch.uint8)
            isend(message, to, tag=op.microbatch)


def all_cases(rank, n_ranks):
    """Run them all twice; return the spans of each."""
    spans = []
    for schedule, times, link, sizes in list(cases(n_ranks)) * 2:

        def cost(stage, kind, microbatch, times=times):
            return times[stage, Op(kind, microbatch)]

        with recording(Virtual(Unit(cost), link), rank) as clk:
            execute(schedule[rank], rank, n_ranks, sizes)
        messages.finish()
        spans.append(clk.spans)
    return spans


def comparable(timeline, link):
    """What both must agree on: every span but the free messages, which simulate does
    not write down; flows are numbered by senders here and by receivers there."""
    spans = [
        span._replace(flow="")
        for span in timeline.spans
        if span.lane != "transfer" or link.seconds(span.nbytes)
    ]
    return sorted(spans, key=repr)


@pytest.mark.parametrize("n_stages", [2, 3, 4])
def test_a_run_in_virtual_time_equals_simulate_span_by_span(n_stages):
    ranks = launch(all_cases, n_stages, limit=60)
    runs = list(zip(*ranks))
    for i, (schedule, times, link, sizes) in enumerate(cases(n_stages)):
        predicted = simulate(
            schedule,
            lambda stage, op, times=times: times[stage, op],
            link,
            lambda stage, op, sizes=sizes: sizes[stage, op],
        )
        measured = Timeline(
            [span for spans in runs[i] for span in spans], n_ranks=n_stages
        )
        assert comparable(measured, link) == comparable(predicted, link), f"case {i}"
        assert measured.makespan == predicted.makespan
        assert measured.bubble() == predicted.bubble()
        assert flows_match(measured)
        again = runs[i + len(runs) // 2]
        assert again == runs[i]  # the same spans, flows and all


def flows_match(timeline):
    """Is each send paired with one receive, which does not begin before it?"""
    sent = {s.flow: s for s in timeline.spans if s.name == "send"}
    received = {s.flow: s for s in timeline.spans if s.name == "receive"}
    numbers = [s.flow for s in timeline.spans if s.name == "send"]
    assert len(numbers) == len(set(numbers)) and sent.keys() == received.keys()
    return all(
        (one.rank, one.peer, one.nbytes, one.microbatch)
        == (sent[flow].peer, sent[flow].rank, sent[flow].nbytes, sent[flow].microbatch)
        and one.start >= sent[flow].start
        for flow, one in received.items()
    )


# ---- what operations cost ------------------------------------------------------------


def spans_of(cost, *calls, work=lambda i: i):
    """Watch a worker alone; calls: (method, microbatch)."""
    worker = watched(work)
    with recording(Virtual(cost), 0) as clk:
        for method, i in calls:
            getattr(worker, method)(i)
    return [(span.name, span.microbatch, span.start, span.end) for span in clk.spans]


def test_unit_costs():
    calls = ("forward", 0), ("backward", 0), ("forward", 1)
    assert spans_of(Unit(), *calls) == [
        ("F", 0, 0.0, 1.0),
        ("B", 0, 1.0, 3.0),
        ("F", 1, 3.0, 4.0),
    ]


def test_unequal_costs():
    cost = Unit(lambda rank, name, microbatch: 10 * (name == "B") + microbatch)
    calls = ("forward", 3), ("backward", 2)
    assert spans_of(cost, *calls) == [("F", 3, 0.0, 3.0), ("B", 2, 3.0, 15.0)]


def test_an_operation_without_a_cost():
    with pytest.raises(ValueError, match="no unit cost for 'B': add it to {'F': 1}"):
        spans_of(Unit({"F": 1}), ("backward", 0))


@pytest.mark.parametrize("bias", [True, False])
def test_flops_of_a_linear_layer_are_exact(bias):
    """2 b i o forward; backward the same for the weight and again for the input."""
    layer = torch.nn.Linear(30, 20, bias=bias)
    inputs, kept = torch.ones(8, 30, requires_grad=True), []

    def work(i):
        if not kept:
            kept.append(layer(inputs).sum())
            return None
        return kept[0].backward()

    one = 2 * 8 * 30 * 20
    calls = ("forward", 0), ("backward", 0)
    found = spans_of(Flops(rate=1.0), *calls, work=lambda i: work(i) or 0)
    assert found == [("F", 0, 0.0, one), ("B", 0, one, 3.0 * one)]
    assert layer.weight.grad is not None


def timed_operations(rank, n_ranks):
    """Return the spans, and when each operation really ran."""
    ran = []

    def work(i):
        start = time.perf_counter()
        while time.perf_counter() < start + 0.004:
            pass
        ran.append((start, time.perf_counter()))
        return 0

    worker = watched(work)
    with recording(Virtual(Timed()), rank) as clk:
        for i in range(6):
            worker.forward(i)
    return clk.spans, ran


def test_timed_operations_have_the_machine_to_themselves():
    (results,) = run(3, timed_operations)
    real = sorted(interval for _, ran in results for interval in ran)
    assert len(real) == 18
    assert all(end <= start for (_, end), (start, _) in pairwise(real))
    for spans, ran in results:
        assert [span.start for span in spans[1:]] == [span.end for span in spans[:-1]]
        for span, (start, end) in zip(spans, ran):
            assert end - start <= span.end - span.start


def two_at_a_time(rank, n_ranks):
    """Each operation waits until that of the other rank has begun: two slots."""

    def work(i):
        exchange(torch.ones(1), 1 - rank)
        return 0

    outside = Timed(slots=2)
    return outside(rank, "F", 0, lambda: work(0))[1] > 0


def test_timed_operations_with_two_slots():
    assert run(2, two_at_a_time) == [(True, True)]


def test_flops_are_those_that_torch_counts():
    """All of a transformer's operations, forward and backward."""
    model = toy.build("text")
    inputs, targets = toy.batch("text", 2)

    def work(i):
        toy.loss_sum(model(inputs), targets).backward()

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        work(0)
        ((_, _, start, end),) = spans_of(Flops(rate=1.0), ("forward", 0), work=work)
    assert (start, end) == (0.0, counter.get_total_flops() / 2)


def test_flops_of_attention_count_on_the_cpu_too():
    model, (inputs, _) = toy.build("text"), toy.batch("text", 2)
    outputs = []

    def work(i):
        return outputs[0].sum().backward() if outputs else outputs.append(model(inputs))

    calls = ("forward", 0), ("backward", 0)
    found = spans_of(Flops(rate=1.0), *calls, work=lambda i: work(i) or 0)
    forward, backward = (end - start for _, _, start, end in found)
    assert forward == sum(toy.layer_costs("text", 2))
    assert 2 * forward < backward < 2.1 * forward  # attention computes its scores again


def test_a_slow_ranks_operations_take_longer_and_its_messages_do_not():
    def program(rank, n_ranks):
        worker = watched()
        worker.forward(0)
        isend(torch.ones(10), 1 - rank)
        receive(1 - rank)

    clk = Virtual(Unit({"F": 2.0}), Link(bandwidth=40.0), slow={1: 3})
    (spans,) = run(2, recorded(clk, program))
    ends = [[(span.name, span.end) for span in one] for one in spans]
    assert ends[0] == [("F", 2), ("send", 3), ("wait", 6), ("receive", 7)]
    assert ends[1] == [("F", 6), ("send", 7), ("receive", 3)]
    assert clk.phrase.endswith(", rank 1 takes 3 times as long")


def test_phrases_name_clock_costs_and_link():
    unit = "virtual time, unit costs (F = 1, B = 2), free links"
    assert Virtual(Unit()).phrase == unit and Virtual(Unit()).unit == ""
    assert Virtual(Unit({"F": 3}), Link(0.5, 4)).phrase == (
        "virtual time, unit costs (F = 3), link 0.5 + bytes / 4"
    )
    assert Virtual(Flops(2e12), LINK).phrase == (
        "virtual time, counted FLOPs at 2 TFLOP/s, link 1e-05 s + bytes / 1e+09 B/s"
    )
    assert Virtual(Timed(2)).phrase == (
        "virtual time, operations timed in turn (2 at a time), free links"
    )
    assert Wall().phrase == "wall time" and Virtual(Timed()).unit == Wall().unit == "s"


# ---- watching from outside -----------------------------------------------------------


def test_watching_changes_nothing():
    plain, worker = Worker(), watched()
    assert worker.forward(3) == plain.forward(3)
    assert worker.backward(3, scale=5) == plain.backward(3, scale=5) == 15
    assert worker.backward.__name__ == "backward"
    with pytest.raises(ZeroDivisionError):
        watched(lambda i: 1 / i).forward(0)
    with pytest.raises(AttributeError, match="no attribute 'sideways'"):
        watch(Worker(), sideways="S")


def test_a_whole_batch_has_no_microbatch():
    worker = Worker()
    worker.update, worker.load = lambda: 7, lambda tensor: tensor
    watch(worker, update="U", load="L")
    with recording(Virtual(Unit({"U": 1, "L": 1})), 0) as clk:
        assert worker.update() == 7
        worker.load(torch.ones(2))
    assert [span.op for span in clk.spans] == [Op("U", None), Op("L", None)]


@pytest.mark.parametrize("clk", [Wall(), Virtual(Unit()), Virtual(Timed())])
def test_an_operation_within_an_operation_is_a_part_of_it(clk):
    worker = watched()
    worker.work = lambda i: worker.forward(i - 1) if i else 0
    with recording(clk, 0):
        assert worker.backward(1) == 0
        worker.forward(0)
    assert [span.op for span in clk.spans] == [Op("B", 1), Op("F", 0)]


def test_recordings_do_not_leave_their_clock_behind():
    silent = clock.current
    outer, inner = Virtual(Unit()), Virtual(Unit())
    worker = watched(lambda i: 1 / i)
    with recording(outer, 0):
        worker.forward(1)
        with pytest.raises(ZeroDivisionError):
            with recording(inner, 0):
                worker.backward(1)
                worker.backward(0)
        assert clock.current is outer
        worker.forward(2)
    assert clock.current is silent
    assert [span.op for span in outer.spans] == [Op("F", 1), Op("F", 2)]
    assert [span.op for span in inner.spans] == [Op("B", 1)]
    with recording(inner, 0):
        worker.forward(5)
    assert [(span.op, span.start) for span in inner.spans] == [(Op("F", 5), 0.0)]


def sends_within_an_operation(rank, n_ranks):
    worker = watched(lambda i: exchange(torch.ones(1), 1 - rank))
    with recording(Virtual(Timed()), rank):
        worker.forward(0)


# ---- a collective beside the computation ---------------------------------------------


def overlapping(rank, n_ranks):
    """Rank 0 computes as much before it starts a reduction as after it; rank 1 starts
    at once; both compute again before they wait."""
    worker, square = Worker(), torch.ones(8, 8)

    def halves():
        started = [] if rank == 0 else [messages.iall_reduce(torch.ones(100))]
        square @ square
        started = started or [messages.iall_reduce(torch.ones(100))]
        square @ square
        return started[0]

    worker.forward = halves
    worker.backward = lambda: square @ square
    watch(worker, forward="F", backward="B")
    reduction = worker.forward()
    worker.backward()
    assert reduction.wait().sum() == 100 * n_ranks


@pytest.mark.parametrize(
    "cost, forward, backward",
    [(Unit(within=True), 1.0, 2.0), (Flops(1024.0), 2.0, 1.0)],
    ids=["unit", "flops"],
)
@pytest.mark.parametrize("size, ends", [(100.0, "under"), (1e-3, "after")])
def test_a_reduction_runs_beside_the_computation(cost, forward, backward, size, ends):
    """It begins when the last rank is ready, in the middle of rank 0's forward."""
    clk = Virtual(cost, Link(latency=0.05, bandwidth=400 * size))
    [spans] = run(2, recorded(clk, overlapping))
    begun, takes = forward / 2, 2 * (0.05 + 0.5 / size)
    for one, two, transfer, *rest in spans:
        assert [one.name, two.name, transfer.name] == ["F", "B", "all_reduce"]
        assert (one.end, two.end) == (forward, forward + backward)
        assert transfer.start == pytest.approx(begun)
        assert transfer.end == pytest.approx(begun + takes)
        assert rest == [] and transfer.nbytes == 400
    assert (transfer.end < two.end) == (ends == "under")


def test_reductions_queue_for_the_network():
    def three(rank, n_ranks):
        for one in [messages.iall_reduce(torch.ones(100)) for _ in range(3)]:
            one.wait()

    [spans] = run(2, recorded(Virtual(Unit(), Link(bandwidth=400)), three))
    assert [(s.start, s.end) for s in spans[1]] == [(0, 1), (1, 2), (2, 3)]
    [spans] = run(2, recorded(Wall(), three))
    assert all(a.end <= b.start for a, b in pairwise(spans[0]))
    assert [s.name for s in spans[0]] == ["all_reduce"] * 3


def test_unit_costs_do_not_know_how_much_of_an_operation_is_done():
    with pytest.raises(RankFailed, match=r"Unit\(within=True\)"):
        run(2, recorded(Virtual(Unit()), overlapping))


def test_virtual_time_refuses_messages_within_an_operation():
    """Their time would be that of the operation's start, and timed ranks would hang."""
    with pytest.raises(RankFailed, match="F0 communicates, but in virtual time"):
        launch(sends_within_an_operation, 2, limit=30)


# ---- wall time -----------------------------------------------------------------------


def late_ranks(rank, n_ranks):
    """Rank r begins r * 0.05 s late; return when it began, by the same clock."""
    worker = watched()
    with recording(Wall(), rank) as clk:
        messages.barrier()
        time.sleep(0.05 * rank)
        before = clk.now()
        worker.forward(0)
        after = clk.now()
    return clk.spans, before, after


def late_message(rank, n_ranks):
    """Rank 0 sends late; then a blocking send waits for rank 0, which sleeps. Return
    the spans, and moments between them."""
    with recording(Wall(), rank) as clk:
        messages.barrier()
        if rank == 0:
            time.sleep(0.05)
            begun = clk.now()
            send(torch.ones(100_000), 1, tag=3)
            time.sleep(0.05)
            receive(1)
        else:
            begun = clk.now()
            receive(0, tag=3)
            send(torch.ones(1), 0)
        ended = clk.now()
    return clk.spans, begun, ended


def exchanges(rank, n_ranks):
    """Many messages at once, under the wall clock."""
    with recording(Wall(), rank) as clk:
        for i in range(20):
            exchange(torch.ones(10 * i), (rank + 1) % n_ranks, (rank - 1) % n_ranks, i)
        messages.all_reduce(torch.ones(10))
    return clk.spans


def test_g01_a_late_start_is_idle_time():
    (results,) = run(4, late_ranks)
    timeline = Timeline.merge([spans for spans, _, _ in results])
    zero = min(span.start for spans, _, _ in results for span in spans)
    assert timeline.n_ranks == 4
    begins = [timeline.ops(rank)[0].start for rank in range(4)]
    for rank, (_, before, after) in enumerate(results):
        assert before - zero - 1e-9 <= begins[rank] <= after - zero + 1e-9
        assert timeline.gaps(rank)[0] == (0.0, begins[rank])
        assert begins[rank] >= 0.05 * rank


def scripted(*times):
    """A wall clock of rank 1 that shows these times, one after the other."""
    clk = Wall()
    clk.begin(1)
    clk.now = iter(times).__next__
    return clk


def test_wall_time_separates_waiting_from_transfer():
    """The rank calls at 2; the message begins at its stamp, but within the call."""
    pictures = {
        5.0: [("wait", 2.0, 5.0), ("receive", 5.0, 6.0)],  # sent late
        1.0: [("receive", 2.0, 6.0)],  # sent before it was called for
        9.0: [("wait", 2.0, 6.0), ("receive", 6.0, 6.0)],  # by a clock that is wrong
    }
    for sent, picture in pictures.items():
        clk = scripted(6.0)
        clk.received(0, (sent, 0.0, 0), since=2.0, nbytes=40, microbatch=3)
        assert [(s.name, s.start, s.end) for s in clk.spans] == picture
        assert clk.spans[-1] == Span(
            1, "transfer", "receive", 3, picture[-1][1], 6.0, 0, 40, "0>1#0"
        )


def test_wall_time_of_sends_and_collectives():
    clk = scripted(3.5, 4.0, 8.0, 9.0)
    assert clk.sent(0, 40, 7, since=3.0) == (3.0, 0.0, 0)
    assert clk.sent(0, 40, None, since=3.5) == (3.5, 0.0, 1)
    clk.waited(0, since=4.0)
    clk.together("all_reduce", [8.0, 8.5], 12, since=8.0)
    assert clk.spans == [
        Span(1, "transfer", "send", 7, 3.0, 3.5, 0, 40, "1>0#0"),
        Span(1, "transfer", "send", None, 3.5, 4.0, 0, 40, "1>0#1"),
        Span(1, "wait", "wait", None, 4.0, 8.0, 0),
        Span(1, "wait", "wait", None, 8.0, 8.5),
        Span(1, "transfer", "all_reduce", None, 8.5, 9.0, None, 12),
    ]


def test_wall_time_between_ranks():
    (((zero, sent, _), (one, called, ended)),) = run(2, late_message)
    assert flows_match(Timeline.merge([zero, one]))
    (transfer,) = [span for span in one if span.name == "receive"]
    assert max(sent, called) <= transfer.start <= transfer.end <= ended
    assert (transfer.microbatch, transfer.nbytes) == (3, 400_000)
    last = [span for span in one if span.lane == "wait"][-1]
    assert last.peer == 0 and transfer.end <= last.start < last.end <= ended


def test_wall_time_keeps_order_in_many_messages():
    (results,) = run(3, exchanges)
    timeline = Timeline.merge(results)
    assert flows_match(timeline)
    assert all(span.start <= span.end for span in timeline.spans)
    ends = [[s.end for s in spans if s.name == "all_reduce"] for spans in results]
    begun = [[s.start for s in spans if s.name == "all_reduce"] for spans in results]
    assert max(begun) <= min(ends)  # nobody is through before the last has come


def test_wall_time_alone():
    with recording(Wall(), 0) as clk:
        before = clk.now()
        watched(lambda i: time.sleep(0.01) or 4).forward(2)
        after = clk.now()
    (span,) = clk.spans
    assert isinstance(span, Span) and span.op == Op("F", 2)
    assert before <= span.start < span.end <= after
    assert span.end - span.start >= 0.01


class FakeEvent:
    """A GPU's event: its time is known, in milliseconds, when the GPU has passed it."""

    passed = 0.0  # what the GPU's own clock shows

    def record(self):
        self.time = FakeEvent.passed

    def elapsed_time(self, later):
        return later.time - self.time


def test_events_time_the_gpu_and_not_the_host():
    """Work that is only launched takes the host no time, and the GPU 250 ms."""

    def work(i):
        FakeEvent.passed += 250.0
        return i

    worker = watched(work)
    FakeEvent.passed = 1e6
    with recording(Wall(event=FakeEvent), 0) as clk:
        begin = clk.now()
        worker.forward(0)
        FakeEvent.passed += 50.0
        worker.backward(0)
        assert clk.spans == []  # events cannot be read yet
    first, second = clk.spans
    assert (first.op, second.op) == (Op("F", 0), Op("B", 0))
    times = [first.start, first.end, second.start, second.end]
    assert [t - first.start for t in times] == pytest.approx([0.0, 0.25, 0.3, 0.55])
    assert first.start <= begin  # on the host's time base: begun before we looked


# ---- ranks' locks --------------------------------------------------------------------


def lock_files(rank, n_ranks):
    Timed(slots=2)(rank, "F", 0, lambda: None)
    messages.barrier()
    folder = clock.folder_of(os.environ["LABS_RUN"])
    return folder, *sorted(os.listdir(folder))


def test_locks_are_those_of_one_run_and_go_with_it():
    (first,), (second,) = run(2, lock_files), run(2, lock_files)
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert first[0][1:] == ("core-0", "core-1")
    assert not os.path.exists(first[0][0]) and not os.path.exists(second[0][0])


def test_timed_costs_need_file_locks(monkeypatch):
    monkeypatch.setattr(clock, "fcntl", None)
    assert Timed()(0, "F", 0, lambda: 5)[0] == 5  # but not where there is one rank
    monkeypatch.setenv("LABS_RUN", "some")
    with pytest.raises(NotImplementedError, match="use unit or flops costs"):
        Timed()(0, "F", 0, lambda: None)
