"""Timeline: sums, gaps, live microbatches, words, and the trace file."""

import json
from itertools import pairwise
from math import inf, nan

import pytest

from labs.kit.simulate import simulate
from labs.kit.timeline import Link, Op, Span, Timeline


def from_picture(*rows, **about):
    """A row per rank, a cell per unit of time, "." where the rank computes nothing."""
    spans = []
    for rank, row in enumerate(rows):
        for time, cell in enumerate(row.split()):
            if cell != ".":
                kind, microbatch = cell[0], int(cell[1:])
                spans.append(Span(rank, "compute", kind, microbatch, time, time + 1))
    return Timeline(spans, n_ranks=len(rows), **about)


GPIPE = (
    "F0 F1 .  .  B1 B0",
    ".  F0 F1 B1 B0 . ",
)


def test_link_seconds():
    assert Link().seconds(10**9) == 0
    assert Link(latency=0.5, bandwidth=100).seconds(50) == 1.0


def test_sums_of_a_picture():
    timeline = from_picture(*GPIPE)
    assert timeline.n_ranks == 2
    assert timeline.makespan == 6
    assert timeline.compute() == 8
    assert timeline.compute(0) == 4
    assert timeline.bubble() == pytest.approx(1 / 3)
    assert timeline.idle(1) == pytest.approx(1 / 3)


def test_rows_of_a_picture():
    timeline = from_picture(*GPIPE)
    assert " ".join(map(str, timeline.order(0))) == "F0 F1 B1 B0"
    assert [span.op for span in timeline.ops(1)] == timeline.order(1)
    assert timeline.gaps(0) == [(2, 4)]
    assert timeline.gaps(1) == [(0, 1), (5, 6)]


def test_spans_are_sorted_by_start_then_rank():
    spans = [
        Span(1, "compute", "F", 0, 1, 2),
        Span(0, "compute", "F", 1, 1, 2),
        Span(0, "compute", "F", 0, 0, 1),
    ]
    assert Timeline(spans).spans == spans[::-1]


def test_a_rank_that_does_nothing_counts():
    timeline = from_picture("F0 B0", ".  .")
    assert timeline.bubble() == 0.5
    assert timeline.idle(1) == 1.0
    assert timeline.gaps(1) == [(0, 2)]


def test_overlapping_compute_counts_once():
    spans = [Span(0, "compute", "F", 0, 0, 4), Span(0, "compute", "F", 1, 1, 3)]
    timeline = Timeline(spans)
    assert timeline.compute() == 4
    assert timeline.bubble() == 0
    assert timeline.gaps(0) == []


def test_a_rank_that_never_rests_has_no_bubble_at_all():
    ends = [0.1 * i for i in range(11)]  # sums of such differences are not exact
    spans = [Span(0, "compute", "F", i, *pair) for i, pair in enumerate(pairwise(ends))]
    assert Timeline(spans).bubble() == Timeline(spans).idle(0) == 0.0


@pytest.mark.parametrize("n_ranks", [None, 0, 3])
def test_empty(n_ranks, tmp_path):
    timeline = Timeline([], n_ranks=n_ranks)
    assert timeline.makespan == timeline.compute() == timeline.bubble() == 0
    assert [timeline.idle(rank) for rank in range(timeline.n_ranks)] == [0] * (
        n_ranks or 0
    )
    assert "empty" in timeline.describe()
    assert len(timeline.table()) == (n_ranks or 0)
    timeline.to_chrome_trace(tmp_path / "empty.json")


def test_spans_without_length():
    timeline = Timeline([Span(0, "compute", "F", 0, 0, 0)])
    assert timeline.bubble() == timeline.idle(0) == 0
    assert timeline.gaps(0) == []


@pytest.mark.parametrize(
    "row, peak",
    [
        ("F0 F1 F2 B2 B1 B0", 3),
        ("F0 F1 B0 F2 B1 B2", 2),
        ("F0 B0 F1 B1 F2 B2", 1),
        ("F0 F1 B1 B0 F0 F1 B1 B0", 2),  # two steps in a row
        ("F0 W0", 1),  # only B sets free
        (".", 0),
    ],
)
def test_peak_live(row, peak):
    assert from_picture(row).peak_live(0) == peak


def test_peak_live_without_durations():
    order = [("F", 0), ("F", 1), ("B", 1), ("B", 0)]
    spans = [Span(0, "compute", kind, i, 0, 0) for kind, i in order]
    assert Timeline(spans).peak_live(0) == 2


@pytest.mark.parametrize("start, end", [(-1, 0), (2, 1), (nan, 1), (0, nan), (0, inf)])
def test_impossible_times_are_refused(start, end):
    with pytest.raises(ValueError, match="0 <= start <= end"):
        Timeline([Span(0, "compute", "F", 0, start, end)])


def test_unknown_lanes_and_ranks_are_refused():
    with pytest.raises(ValueError, match="no lane 'idle' of rank 0"):
        Timeline([Span(0, "idle", "F", 0, 0, 1)])
    with pytest.raises(ValueError, match="no lane 'compute' of rank 2"):
        Timeline([Span(2, "compute", "F", 0, 0, 1)], n_ranks=2)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        from_picture(*GPIPE).ops(2)


def late_starts(zero=0.0):
    """Four ranks; rank r starts r * 0.5 s late and then computes until 2 s."""
    return [
        [Span(rank, "compute", "F", 0, zero + rank * 0.5, zero + 2.0)]
        for rank in range(4)
    ]


def test_merge_keeps_late_starts_as_idle_time():
    timeline = Timeline.merge(late_starts(zero=1024.0), unit="s", clock="wall time")
    assert timeline.unit == "s" and timeline.clock == "wall time"
    assert timeline.makespan == 2.0
    assert [timeline.gaps(r) for r in range(4)] == [
        [], [(0.0, 0.5)], [(0.0, 1.0)], [(0.0, 1.5)]
    ]  # fmt: skip
    assert [timeline.idle(r) for r in range(4)] == [0.0, 0.25, 0.5, 0.75]


def test_merge_needs_one_list_per_rank():
    assert Timeline.merge([[], []]).n_ranks == 2
    with pytest.raises(ValueError, match="list 0 holds a span of rank 1"):
        Timeline.merge(late_starts()[::-1][2:])


def test_table():
    spans = [
        Span(0, "compute", "F", 0, 0, 2),
        Span(0, "transfer", "send", 0, 2, 3, peer=1, flow="0>1#0"),
        Span(1, "wait", "wait", 0, 0, 2, peer=0),
        Span(1, "transfer", "receive", 0, 2, 3, peer=0, flow="0>1#0"),
        Span(1, "compute", "F", 0, 3, 5),
        Span(1, "compute", "U", None, 5, 8),
    ]
    columns = ("rank", "compute", "transfer", "wait", "idle %", "order")
    assert [tuple(row[c] for c in columns) for row in Timeline(spans).table()] == [
        (0, 2, 1, 0, 75.0, "F0"),
        (1, 5, 1, 2, 37.5, "F0 U"),
    ]


def test_describe():
    assert from_picture("F0 .", "F0 B0", clock="unit costs", unit="s").describe() == (
        "2 ranks, 2 s from start to end (unit costs): "
        "the bubble is 25.0 % of the ranks' time. "
        "Rank 1 is idle least (0.0 %), rank 0 most (50.0 %)."
    )
    assert "1 rank, 3 units from start to end:" in from_picture("F0 . B0").describe()
    assert "Every rank is idle for 33.3 % of it." in repr(from_picture(*GPIPE))


# The trace file


def pipeline(link=Link(latency=0.25, bandwidth=8.0), nbytes=4):  # noqa: B008
    forward = [Op("F", i) for i in range(3)]
    backward = [Op("B", i) for i in reversed(range(3))]
    return simulate([forward + backward] * 4, {"F": 1, "B": 2}, link, nbytes)


def events_of(timeline, path):
    timeline.to_chrome_trace(path)
    return json.loads(path.read_text(encoding="utf-8"))["traceEvents"]


def test_trace_has_a_process_per_rank_and_a_thread_per_lane(tmp_path):
    events = events_of(pipeline(), tmp_path / "trace.json")
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2", 3: "rank 3"}
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert {name.split()[0] for name in threads} == {"compute", "transfer", "wait"}


def test_trace_tells_every_span(tmp_path):
    timeline = pipeline()
    slices = [e for e in events_of(timeline, tmp_path / "t.json") if e["ph"] == "X"]
    assert sorted((e["pid"], e["ts"], e["dur"]) for e in slices) == sorted(
        (s.rank, 1e6 * s.start, 1e6 * (s.end - s.start)) for s in timeline.spans
    )
    assert {"F0", "B2", "send to 1", "receive from 0", "wait for 1"} <= {
        e["name"] for e in slices
    }
    send = next(e for e in slices if e["name"] == "send to 1")
    assert send["args"] == {"microbatch": 0, "peer": 1, "bytes": 4}


def test_trace_arrows_lead_from_send_to_receive(tmp_path):
    events = events_of(pipeline(), tmp_path / "trace.json")
    tails = {e["id"]: i for i, e in enumerate(events) if e["ph"] == "s"}
    heads = {e["id"]: i for i, e in enumerate(events) if e["ph"] == "f"}
    assert len(tails) == 18 and tails.keys() == heads.keys()
    for number in tails:
        # A viewer reads in order, and gives an arrow's end to the slice before it.
        assert tails[number] < heads[number]
        send, tail = events[tails[number] - 1 : tails[number] + 1]
        receive, head = events[heads[number] - 1 : heads[number] + 1]
        assert send["name"] == f"send to {receive['pid']}"
        assert receive["name"] == f"receive from {send['pid']}"
        assert send["args"]["microbatch"] == receive["args"]["microbatch"]
        assert receive["ts"] + receive["dur"] >= send["ts"]
        for end, owner in ((tail, send), (head, receive)):
            assert all(end[key] == owner[key] for key in ("pid", "tid", "ts"))


def test_trace_has_no_loose_arrows(tmp_path):
    lost = Span(0, "transfer", "send", 0, 0, 1, peer=1, flow="0>1#0")
    events = events_of(Timeline([lost]), tmp_path / "trace.json")
    assert [e["name"] for e in events if e["ph"] != "M"] == ["send to 1"]


def test_trace_keeps_overlapping_spans_apart(tmp_path):
    """Perfetto drops a slice that overlaps another one of its thread."""
    spans = [
        Span(0, "transfer", "receive", i, i, i + 2.5, peer=1, flow=f"1>0#{i}")
        for i in range(4)
    ]
    events = events_of(Timeline(spans), tmp_path / "trace.json")
    slices = [(e["tid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert len(slices) == 4
    for (thread, start, duration), (other, later, _) in pairwise(sorted(slices)):
        assert thread != other or start + duration <= later
    threads = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert threads == ["transfer", "transfer 2", "transfer 3"]


def test_trace_neighbours_meet_exactly(tmp_path):
    spans = [Span(0, "compute", "F", i, i / 7e5, (i + 1) / 7e5) for i in range(50)]
    events = events_of(Timeline(spans), tmp_path / "trace.json")
    slices = [e for e in events if e["ph"] == "X"]
    for earlier, later in pairwise(slices):
        assert earlier["ts"] + earlier["dur"] == later["ts"]


def test_a_second_run_replaces_the_trace(tmp_path):
    path = tmp_path / "trace.json"
    pipeline().to_chrome_trace(path)
    events = events_of(from_picture("F7"), path)
    assert [e["name"] for e in events if e["ph"] == "X"] == ["F7"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_trace_that_fails_leaves_the_earlier_one(tmp_path):
    path = tmp_path / "trace.json"
    from_picture("F7").to_chrome_trace(path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        Timeline([Span(0, "compute", "F", object(), 0, 1)]).to_chrome_trace(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_trace_says_its_clock(tmp_path):
    path = tmp_path / "trace.json"
    from_picture("F0", clock="virtual time", hardware="CPU").to_chrome_trace(path)
    assert json.loads(path.read_text())["otherData"] == {
        "clock": "virtual time",
        "hardware": "CPU",
    }
