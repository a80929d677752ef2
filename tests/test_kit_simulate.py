"""Simulate: pictures, published numbers, ports by hand, deadlocks in words; explain."""

import random
import sys

import pytest

from labs.kit.simulate import (
    Explanation,
    ScheduleDeadlock,
    explain,
    pipeline_needs,
    simulate,
)
from labs.kit.timeline import Link, Op, Span, Timeline

EQUAL = {"F": 1, "B": 1}
TWICE = {"F": 1, "B": 2}


def gpipe(n_stages, n_microbatches):
    """All forwards, then all backwards in reverse."""
    forward = [Op("F", i) for i in range(n_microbatches)]
    return [forward + [Op("B", op.microbatch) for op in reversed(forward)]] * n_stages


def one_f_one_b(n_stages, n_microbatches):
    """Forwards until the pipeline is full, then one backward for each forward."""
    schedule = []
    for stage in range(n_stages):
        ahead = min(n_stages - 1 - stage, n_microbatches)
        order = [Op("F", i) for i in range(ahead)]
        for i in range(n_microbatches):
            if ahead + i < n_microbatches:
                order.append(Op("F", ahead + i))
            order.append(Op("B", i))
        schedule.append(order)
    return schedule


def ops(text):
    return [Op(word[0], int(word[1:])) for word in text.split()]


def picture(timeline):
    """A row per rank, a cell per unit of time; "--" goes on with what was before."""
    rows = []
    for rank in range(timeline.n_ranks):
        cells = ["."] * int(timeline.makespan)
        for span in timeline.ops(rank):
            start, end = int(span.start), int(span.end)
            cells[start:end] = [str(span.op)] + ["--"] * (end - start - 1)
        rows.append(cells)
    return rows


def shape(text):
    return [line.split() for line in text.strip().splitlines()]


def spans(timeline, name):
    """(rank, peer, start, end) of the spans of that name."""
    found = [span for span in timeline.spans if span.name == name]
    return sorted((s.rank, s.peer, s.start, s.end) for s in found)


# Pictures


def test_gpipe_picture():
    assert picture(simulate(gpipe(3, 4), TWICE)) == shape("""
        F0 F1 F2 F3 .  .  .  .  .  .  B3 -- B2 -- B1 -- B0 --
        .  F0 F1 F2 F3 .  .  .  B3 -- B2 -- B1 -- B0 -- .  .
        .  .  F0 F1 F2 F3 B3 -- B2 -- B1 -- B0 -- .  .  .  .
    """)


def test_one_f_one_b_picture():
    assert picture(simulate(one_f_one_b(3, 4), TWICE)) == shape("""
        F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- .  B2 -- .  B3 --
        .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- .  B3 -- .  .
        .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- .  .  .  .
    """)


def test_plain_model_parallelism_picture():
    assert picture(simulate(gpipe(3, 1), TWICE)) == shape("""
        F0 .  .  .  .  .  .  B0 --
        .  F0 .  .  .  B0 -- .  .
        .  .  F0 B0 -- .  .  .  .
    """)


def test_a_slow_stage_picture():
    def cost(stage, op):
        return 2 if stage == 1 else 1

    assert picture(simulate(gpipe(3, 2), cost)) == shape("""
        F0 F1 .  .  .  .  .  .  .  B1 .  B0
        .  F0 -- F1 -- .  .  B1 -- B0 -- .
        .  .  .  F0 .  F1 B1 B0 .  .  .  .
    """)


def test_a_latency_of_one_picture():
    assert picture(simulate(gpipe(2, 2), EQUAL, Link(latency=1))) == shape("""
        F0 F1 .  .  .  .  B1 B0
        .  .  F0 F1 B1 B0 .  .
    """)


@pytest.mark.parametrize("schedule", [[], [[]], [[], []]])
def test_empty_schedules(schedule):
    timeline = simulate(schedule, TWICE)
    assert timeline.n_ranks == len(schedule)
    assert timeline.makespan == timeline.bubble() == 0


def test_other_kinds_need_only_their_place():
    schedule = [[*ops("F0 B0"), Op("U")], [*ops("F0 B0 W0"), Op("U")]]
    timeline = simulate(schedule, {"F": 1, "B": 1, "W": 2, "U": 1})
    assert " ".join(map(str, timeline.order(1))) == "F0 B0 W0 U"
    assert [(span.start, span.end) for span in timeline.ops(1)] == [
        (1, 2), (2, 3), (3, 5), (5, 6)
    ]  # fmt: skip


# Bubbles and live microbatches


@pytest.mark.parametrize("cost", [TWICE, EQUAL])
@pytest.mark.parametrize("d", range(1, 9))
def test_gpipe_bubble_is_the_formula(d, cost):
    for m in range(1, 33):
        bubble = simulate(gpipe(d, m), cost).bubble()
        assert bubble == pytest.approx((d - 1) / (m + d - 1), rel=0, abs=1e-12)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize("cost, makespan", [(EQUAL, 78), (TWICE, 117)])
def test_gpipe_and_one_f_one_b_have_the_same_bubble(order, cost, makespan):
    """The bubble is a fraction of the makespan, 14/78, not of the ideal time, 7/32."""
    timeline = simulate(order(8, 32), cost)
    ideal = timeline.compute() / 8
    assert timeline.makespan == makespan
    assert timeline.bubble() == pytest.approx(14 / 78, rel=0, abs=1e-12)
    assert timeline.makespan / ideal - 1 == pytest.approx(7 / 32, rel=0, abs=1e-12)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    "d, m, bubble",
    [
        (4, 1, 0.75),
        (4, 2, 0.60),
        (4, 3, 0.50),
        (4, 4, 0.4286),
        (4, 8, 0.2727),
        (1, 4, 0.0),
    ],
)
def test_few_microbatches(order, d, m, bubble):
    assert round(simulate(order(d, m), TWICE).bubble(), 4) == bubble


def test_live_microbatches():
    def peaks(schedule):
        return [simulate(schedule, TWICE).peak_live(stage) for stage in range(4)]

    assert peaks(gpipe(4, 8)) == [8, 8, 8, 8]
    assert peaks(one_f_one_b(4, 8)) == [4, 3, 2, 1]


# Qi et al. 2024, Zero Bubble Pipeline Parallelism (arXiv 2401.10241), Table 5: bubble
# rates of 1F1B, computed by the authors from times that they profiled on up to 32 GPUs.
@pytest.mark.parametrize(
    "p, m, forward, backward, weight, latency, rate",
    [
        (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240),
        (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1898),
        (8, 64, 29.935, 29.621, 19.388, 0.535, 0.1091),
        (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552),
        (16, 128, 11.325, 11.308, 8.109, 0.378, 0.1251),
        (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646),
        (32, 128, 10.408, 10.204, 7.703, 0.408, 0.2168),
        (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352),
    ],
)
def test_published_bubble_rates(p, m, forward, backward, weight, latency, rate):
    cost = {"F": forward, "B": backward + weight}
    timeline = simulate(one_f_one_b(p, m), cost, Link(latency))
    rows = [timeline.ops(stage) for stage in range(p)]
    longest = max(row[-1].end - row[0].start for row in rows)
    found = (longest - m * (cost["F"] + cost["B"])) / longest
    assert found == pytest.approx(rate, rel=0, abs=5e-5)


# An independent model: raise start times until nothing changes


def starts_by_relaxation(schedule, cost, latency):
    start = {(s, op): 0.0 for s, order in enumerate(schedule) for op in order}
    for _ in range(len(start) + 1):
        before = dict(start)
        for stage, order in enumerate(schedule):
            for i, op in enumerate(order):
                needs = pipeline_needs(len(schedule), stage, op)
                ready = [(need, latency * (need[0] != stage)) for need in needs]
                ready += [((stage, order[i - 1]), 0.0)] if i else []
                for need, delay in ready:
                    end = start[need] + cost(*need)
                    start[stage, op] = max(start[stage, op], end + delay)
        if start == before:
            return start
    return None  # still growing: a circle


def test_random_schedules_agree_with_relaxation():
    outcomes = set()
    for seed in range(60):
        rng = random.Random(seed)
        d, m, latency = rng.randint(1, 4), rng.randint(1, 4), rng.random()
        times = {(s, kind): rng.random() for s in range(d) for kind in "FB"}
        schedule = [list(order) for order in one_f_one_b(d, m)]
        for _ in range(rng.randint(0, 3)):
            order = rng.choice(schedule)
            i = rng.randrange(1, len(order))
            order[i - 1 : i + 1] = order[i], order[i - 1]

        def cost(stage, op, times=times):
            return times[stage, op.kind]

        expected = starts_by_relaxation(schedule, cost, latency)
        try:
            timeline = simulate(schedule, cost, Link(latency))
        except ScheduleDeadlock:
            assert expected is None
        else:
            rows = [span for stage in range(d) for span in timeline.ops(stage)]
            assert {(s.rank, s.op): s.start for s in rows} == pytest.approx(expected)
        outcomes.add(expected is None)
    assert outcomes == {True, False}


# Links and ports, by hand


def server_needs(n_ranks, rank, op):
    """Rank 0 is a server that needs what all others push."""
    if op.kind == "U":
        return [(worker, Op("P", op.microbatch)) for worker in range(1, n_ranks)]
    return []


def test_fan_in_shares_the_servers_port():
    timeline = simulate(
        [ops("U0"), ops("P0"), ops("P0"), ops("P0")],
        {"P": 1, "U": 1}, Link(latency=0.5, bandwidth=4), nbytes=8, needs=server_needs,
    )  # fmt: skip
    assert spans(timeline, "send") == [(1, 0, 1, 3), (2, 0, 1, 3), (3, 0, 1, 3)]
    assert spans(timeline, "receive") == [
        (0, 1, 1, 3.5), (0, 2, 1, 5.5), (0, 3, 1, 7.5)
    ]  # fmt: skip
    assert spans(timeline, "wait") == [(0, 1, 0, 1)]
    assert timeline.ops(0)[0].start == 1 + 0.5 + 3 * 8 / 4


def test_fan_out_shares_the_senders_port_and_computing_goes_on():
    def needs(n_ranks, rank, op):
        return [(0, Op("P", 0))] if op.kind == "U" else []

    timeline = simulate(
        [ops("P0 P1"), ops("U0"), ops("U0"), ops("U0")],
        {"P": 1, "U": 1}, Link(latency=0.5, bandwidth=4), nbytes=8, needs=needs,
    )  # fmt: skip
    assert spans(timeline, "send") == [(0, 1, 1, 3), (0, 2, 3, 5), (0, 3, 5, 7)]
    assert [timeline.ops(rank)[0].start for rank in (1, 2, 3)] == [3.5, 5.5, 7.5]
    assert [(span.start, span.end) for span in timeline.ops(0)] == [(0, 1), (1, 2)]


def test_a_chain_adds_up():
    forward = [ops("F0"), ops("F0"), ops("F0")]
    timeline = simulate(forward, {"F": 1}, Link(latency=0.5, bandwidth=4), nbytes=8)
    assert spans(timeline, "receive") == [(1, 0, 1, 3.5), (2, 1, 4.5, 7)]
    assert spans(timeline, "wait") == [(1, 0, 0, 1), (2, 1, 0, 4.5)]
    assert timeline.makespan == 3 * 1 + 2 * (0.5 + 8 / 4)


def test_a_slow_link_serves_one_message_after_the_other():
    forward = [ops("F0 F1 F2"), ops("F0 F1 F2")]
    timeline = simulate(forward, {"F": 1}, Link(bandwidth=1), nbytes=3)
    assert spans(timeline, "send") == [(0, 1, 1, 4), (0, 1, 4, 7), (0, 1, 7, 10)]
    assert [span.start for span in timeline.ops(1)] == [4, 7, 10]
    assert timeline.gaps(1) == [(0, 4), (5, 7), (8, 10)]


def test_bytes_can_depend_on_the_sending_operation():
    def nbytes(stage, op):
        return {"F": 2, "B": 6}[op.kind]

    timeline = simulate(gpipe(2, 1), EQUAL, Link(bandwidth=2), nbytes)
    assert spans(timeline, "receive") == [(0, 1, 4, 7), (1, 0, 1, 2)]
    assert {s.nbytes for s in timeline.spans if s.lane == "transfer"} == {2, 6}


def test_a_send_and_its_receive_share_a_flow():
    timeline = simulate(gpipe(3, 2), EQUAL, Link(latency=1))
    flows = {
        name: sorted(span.flow for span in timeline.spans if span.name == name)
        for name in ("send", "receive")
    }
    assert flows["send"] == flows["receive"]
    assert flows["send"] == [f"{way}#{i}" for way in ("0>1", "1>0", "1>2", "2>1")
                             for i in range(2)]  # fmt: skip


@pytest.mark.parametrize("schedule", [gpipe(4, 8), one_f_one_b(4, 8)])
@pytest.mark.parametrize("link", [Link(0.3), Link(0.1, 2), Link(0, 0.5)])
def test_no_receive_ends_before_its_send_began(schedule, link):
    timeline = simulate(schedule, TWICE, link, nbytes=2)
    sends = {s.flow: s for s in timeline.spans if s.name == "send"}
    receives = [s for s in timeline.spans if s.name == "receive"]
    assert len(sends) == len(receives) == 2 * 3 * 8
    for receive in receives:
        assert receive.start == sends[receive.flow].start
        assert receive.end >= sends[receive.flow].end
        assert receive.microbatch == sends[receive.flow].microbatch


def test_free_messages_leave_no_transfer():
    timeline = simulate(gpipe(4, 8), TWICE, nbytes=100)
    assert {span.lane for span in timeline.spans} == {"compute", "wait"}


def test_waiting_fills_the_gaps_before_an_operation():
    timeline = simulate(gpipe(3, 2), TWICE)
    for rank in range(3):
        gaps = timeline.gaps(rank)
        waits = [(s.start, s.end) for s in timeline.lane(rank, "wait")]
        assert waits == [gap for gap in gaps if gap[1] < timeline.makespan]


def test_delay_replaces_the_link():
    def delay(stage, op):
        return 0.5 if op == Op("F", 0) else 0.0

    timeline = simulate(gpipe(2, 2), EQUAL, Link(9, 1), nbytes=9, delay=delay)
    assert spans(timeline, "receive") == [(1, 0, 1, 1.5)]
    assert [span.start for span in timeline.ops(1)] == [1.5, 2.5, 3.5, 4.5]


# Schedules that cannot finish


def refusal(schedule, needs=pipeline_needs):
    with pytest.raises(ScheduleDeadlock) as caught:
        simulate(schedule, dict.fromkeys("FBA", 1), needs=needs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


def test_two_stages_wait_for_each_other():
    assert refusal([ops("F0 B0 F1 B1"), ops("F0 F1 B0 B1")]) == (
        "stage 0 is at B0 and waits for B0 of stage 1; "
        "stage 1 is at F1 and waits for F1 of stage 0"
    )


def test_only_the_stages_of_the_circle_are_named():
    assert refusal([ops("F0 F1 B0 B1"), ops("F0 B0 F1 B1"), ops("F0 F1 B0 B1")]) == (
        "stage 1 is at B0 and waits for B0 of stage 2; "
        "stage 2 is at F1 and waits for F1 of stage 1"
    )


def test_three_stages_wait_in_a_circle():
    def needs(n_stages, stage, op):
        return [((stage + 1) % n_stages, op)] if op.kind == "A" else []

    assert refusal([ops("F0 A0")] * 3, needs) == (
        "stage 0 is at A0 and waits for A0 of stage 1; "
        "stage 1 is at A0 and waits for A0 of stage 2; "
        "stage 2 is at A0 and waits for A0 of stage 0"
    )


def test_an_operation_that_nobody_lists():
    assert refusal([ops("F0 B0"), ops("F0 F1 B0 B1")]) == (
        "stage 1 is at F1 and waits for F1 of stage 0, "
        "which is not in that stage's list"
    )


def test_an_operation_listed_twice():
    assert refusal([ops("F0 F0 B0")]) == "stage 0 lists F0 twice: list it once"


def test_backward_before_its_own_forward():
    assert refusal([ops("F0 B0"), ops("B0 F0")]) == (
        "stage 1 is at B0 and has not yet done its own F0"
    )


def test_bad_input_is_refused_in_words():
    with pytest.raises(TypeError, match="stage 0 lists 'F0': use Op"):
        simulate([["F0"]], lambda stage, op: 1)
    with pytest.raises(ValueError, match="cost has no entry for kind B, W"):
        simulate([ops("F0 B0 W0")], {"F": 1})
    with pytest.raises(ValueError, match="0 <= start <= end"):
        simulate([ops("F0")], {"F": -1})
    with pytest.raises(ValueError, match="latency >= 0 and bandwidth > 0"):
        simulate([ops("F0")], {"F": 1}, Link(bandwidth=0))


# Speed, counted and not timed


def lines_executed(function):
    """How many lines of simulate.py and timeline.py run, loops included."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if "labs/kit" not in frame.f_code.co_filename.replace("\\", "/"):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_work_is_linear_in_the_number_of_operations(order):
    def work(d, m):
        schedule = order(d, m)
        return lines_executed(lambda: simulate(schedule, TWICE, Link(1, 1), nbytes=1))

    assert 1.9 < work(4, 64) / work(4, 32) < 2.1
    assert 1.9 < work(16, 16) / work(8, 16) < 2.3  # the ends of the pipeline do less


def test_every_dependency_is_looked_up_once():
    asked = []

    def needs(n_stages, stage, op):
        asked.append((stage, op))
        return pipeline_needs(n_stages, stage, op)

    schedule = one_f_one_b(4, 8)
    simulate(schedule, TWICE, needs=needs)
    assert asked == [(s, op) for s, order in enumerate(schedule) for op in order]


# Explain


def points(explanation):
    return {name: round(value, 9) for name, value in explanation.rows}


def slow_stage(stage, op):
    return TWICE[op.kind] * (1.5 if stage == 1 else 1)


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_explain_equal_runs(order):
    predicted = simulate(order(4, 8), TWICE)
    assert points(explain(predicted, predicted)) == {
        "formula": round(100 * 3 / 11, 9), "imbalance": 0, "transfer": 0, "jitter": 0
    }  # fmt: skip


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
def test_explain_gives_uneven_stages_to_imbalance(order):
    predicted = simulate(order(4, 8), TWICE)
    measured = simulate(order(4, 8), slow_stage)
    found = points(explain(predicted, measured))
    assert found["imbalance"] == round(100 * (measured.bubble() - 3 / 11), 9) > 1
    assert found["transfer"] == found["jitter"] == 0


@pytest.mark.parametrize("order", [gpipe, one_f_one_b])
@pytest.mark.parametrize(
    "link", [Link(latency=0.5), Link(bandwidth=4), Link(0.1, 4), Link(0.1, 0.5)]
)  # the last: a message takes longer than an operation, so messages queue
def test_explain_gives_links_to_transfer(order, link):
    predicted = simulate(order(4, 8), TWICE)
    measured = simulate(order(4, 8), TWICE, link, nbytes=2)
    found = points(explain(predicted, measured))
    assert found["transfer"] == round(100 * (measured.bubble() - 3 / 11), 9) > 1
    assert found["imbalance"] == found["jitter"] == 0


def test_explain_matches_receives_without_a_microbatch_by_order():
    predicted = simulate(one_f_one_b(4, 8), TWICE)
    measured = simulate(one_f_one_b(4, 8), TWICE, Link(0.1, 4), nbytes=2)
    bare = [
        span._replace(microbatch=None) if span.lane == "transfer" else span
        for span in measured.spans
    ]
    assert explain(predicted, Timeline(bare)) == explain(predicted, measured)


def test_explain_gives_late_starts_to_jitter():
    predicted = simulate(gpipe(2, 4), TWICE)
    late = [s._replace(start=s.start + 3, end=s.end + 3) for s in predicted.spans]
    found = points(explain(predicted, Timeline(late)))
    assert found["imbalance"] == found["transfer"] == 0
    assert found["jitter"] == round(100 * (12 / 18 - 12 / 15), 9) * -1 > 1


def test_explain_adds_up():
    predicted = simulate(one_f_one_b(4, 8), TWICE)
    measured = simulate(one_f_one_b(4, 8), slow_stage, Link(0.2, 1), nbytes=3)
    late = [s._replace(start=s.start + 1, end=s.end + 1) for s in measured.spans]
    explanation = explain(predicted, Timeline(late))
    assert explanation.total == pytest.approx(100 * Timeline(late).bubble(), abs=1e-9)
    assert [name for name, value in explanation.rows if abs(value) > 0.1] == [
        "formula", "imbalance", "transfer", "jitter"
    ]  # fmt: skip


def test_explain_in_words():
    predicted = simulate(gpipe(4, 8), TWICE)
    explanation = explain(predicted, simulate(gpipe(4, 8), slow_stage))
    assert str(explanation) == (
        "formula     27.3  equal operations, free links\n"
        "imbalance   12.7  the operation times of this run\n"
        "transfer     0.0  its messages\n"
        "jitter       0.0  the rest: launch overhead, noise\n"
        "bubble      40.0  in all"
    )
    assert explanation.sentence() == (
        "The bubble of 40.0 % is, in points: "
        "formula 27.3 (equal operations, free links), "
        "imbalance 12.7 (the operation times of this run), "
        "transfer 0.0 (its messages), jitter 0.0 (the rest: launch overhead, noise)."
    )


def test_explain_prints_no_negative_zero():
    assert "jitter       0.0  " in str(Explanation([("jitter", -0.01)]))


def test_explain_needs_the_same_order():
    predicted = simulate(gpipe(2, 2), TWICE)
    with pytest.raises(ValueError, match="rank 0, operation 2: predicted B1, m.* B0"):
        explain(predicted, simulate([ops("F0 F1 B0 B1")] * 2, TWICE))
    longer = Timeline([*predicted.spans, Span(0, "compute", "F", 2, 50, 51)])
    with pytest.raises(ValueError, match="operation 4: predicted none, measured F2"):
        explain(predicted, longer)
    with pytest.raises(ValueError, match="predicted are 2 ranks, measured 3"):
        explain(predicted, simulate(gpipe(3, 2), TWICE))
