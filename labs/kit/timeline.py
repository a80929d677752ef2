"""What every rank did, and when: spans of compute, transfer and waiting.

    span      one thing that one rank did, from start to end
    Timeline  the spans of all ranks on one time axis, predicted or measured alike

The bubble of a timeline is the part of the ranks' time in which they compute nothing.
"""

import json
import os
from math import inf
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

LANES = ("compute", "transfer", "wait")


class Op(NamedTuple):
    """One operation of a schedule: what to do, and for which microbatch.

    The kinds are "F" (forward) and "B" (backward); a topic may add its own letters.
    A schedule is a list of such lists, one per stage, each in the order of execution.

    >>> print(*[Op("F", 0), Op("F", 1), Op("B", 1), Op("B", 0)])
    F0 F1 B1 B0
    """

    kind: str
    microbatch: int | None = None  # None: for the whole batch, such as an update

    def __str__(self):
        return self.kind if self.microbatch is None else f"{self.kind}{self.microbatch}"


class Link(NamedTuple):
    """What a message pays on its way: latency in seconds, bandwidth in bytes/second."""

    latency: float = 0.0
    bandwidth: float = inf

    def seconds(self, nbytes):
        return self.latency + nbytes / self.bandwidth


class Span(NamedTuple):
    """One thing that one rank did, from `start` to `end`, in the timeline's unit.

    lane "compute"   name is the kind of the operation: "F", "B", ...
    lane "transfer"  "send" occupies the sender, "receive" lasts from the moment at
                     which the transfer began to the arrival; both carry one `flow`
    lane "wait"      the rank stood still and `peer` had not begun to send
    """

    rank: int
    lane: str
    name: str
    microbatch: int | None
    start: float
    end: float
    peer: int | None = None
    nbytes: int = 0
    flow: str = ""

    @property
    def op(self):
        return Op(self.name, self.microbatch)


class Timeline:
    """Spans of `n_ranks` ranks on one time axis that begins at 0.

    `clock` says what the times are ("virtual time, unit costs (F = 1, B = 2)") and
    `hardware` on what; `unit` is "s", or "" where one forward is the unit.
    """

    def __init__(self, spans, n_ranks=None, clock="", hardware="", unit=""):
        self.spans = sorted(spans, key=attrgetter("start", "rank"))
        if n_ranks is None:
            n_ranks = max((span.rank + 1 for span in self.spans), default=0)
        self.n_ranks, self.clock = n_ranks, clock
        self.hardware, self.unit = hardware, unit
        self.makespan = max((span.end for span in self.spans), default=0.0)
        self._lanes = {(rank, lane): [] for rank in range(n_ranks) for lane in LANES}
        for span in self.spans:
            if not 0 <= span.start <= span.end < inf:
                raise ValueError(f"a span needs 0 <= start <= end < inf: {span}")
            self.lane(span.rank, span.lane).append(span)

    @classmethod
    def merge(cls, ranks, **about):
        """One timeline from one list of spans per rank; the earliest start becomes 0.

        All times must come from one time base: a rank that starts late is idle first.
        """
        for rank, spans in enumerate(ranks):
            for span in spans:
                if span.rank != rank:
                    raise ValueError(f"list {rank} holds a span of rank {span.rank}")
        spans = [span for spans in ranks for span in spans]
        zero = min((span.start for span in spans), default=0.0)
        shifted = [s._replace(start=s.start - zero, end=s.end - zero) for s in spans]
        return cls(shifted, n_ranks=len(ranks), **about)

    def lane(self, rank, lane):
        """The spans of one lane ("compute", "transfer", "wait") of a rank, by start."""
        try:
            return self._lanes[rank, lane]
        except KeyError:
            raise ValueError(
                f"no lane {lane!r} of rank {rank!r}: there are ranks 0 to "
                f"{self.n_ranks - 1}, each with {', '.join(LANES)}"
            ) from None

    def compute(self, rank=None):
        """Time spent computing, by one rank or by all of them together."""
        ranks = range(self.n_ranks) if rank is None else [rank]
        return sum(_busy(self.ops(rank)) for rank in ranks)

    def bubble(self):
        """The fraction of all ranks' time without compute, 0 to 1.

        1 - compute / (n_ranks * makespan); 0 for an empty timeline.
        """
        idle = [self.idle(rank) for rank in range(self.n_ranks)]
        return sum(idle) / len(idle) if idle else 0.0

    def idle(self, rank):
        """The fraction of one rank's time without compute, 0 to 1."""
        idle = sum(end - start for start, end in self.gaps(rank))
        return idle / self.makespan if self.makespan else 0.0

    def ops(self, rank):
        """The compute spans of a rank, in order."""
        return self.lane(rank, "compute")

    def order(self, rank):
        """The operations of a rank, in order: its row of the schedule."""
        return [span.op for span in self.ops(rank)]

    def gaps(self, rank):
        """When a rank computes nothing: (start, end) pairs from 0 to the makespan."""
        gaps, now = [], 0.0
        for span in self.ops(rank):
            if span.start > now:
                gaps.append((now, span.start))
            now = max(now, span.end)
        return gaps + [(now, self.makespan)] * (now < self.makespan)

    def exposed(self, rank):
        """Time in which a rank computes nothing while a transfer of its own runs."""
        gaps = self.gaps(rank)
        return sum(
            _busy(
                [
                    s._replace(start=max(s.start, start), end=min(s.end, end))
                    for s in self.lane(rank, "transfer")
                    if s.start < end and s.end > start
                ]
            )
            for start, end in gaps
        )

    def peak_live(self, rank):
        """The most microbatches alive at once: from the start of F to the end of B."""
        live, peak = set(), 0
        for op in self.order(rank):
            if op.kind == "F":
                live.add(op.microbatch)
                peak = max(peak, len(live))
            elif op.kind == "B":
                live.discard(op.microbatch)
        return peak

    def table(self):
        """One row (dict) per rank: the time of each lane, idle percent, the order."""
        return [
            {
                "rank": rank,
                **{lane: _busy(self.lane(rank, lane)) for lane in LANES},
                "idle %": round(100 * self.idle(rank), 1),
                "order": " ".join(map(str, self.order(rank))),
            }
            for rank in range(self.n_ranks)
        ]

    def describe(self):
        """The picture in a sentence or two, for those who do not see it."""
        if not self.spans:
            return f"An empty timeline of {_count(self.n_ranks, 'rank')}."
        about = ", ".join(filter(None, [self.clock, self.hardware]))
        return (
            f"{_count(self.n_ranks, 'rank')}, {self.makespan:.4g} "
            f"{self.unit or 'units'} from start to end{about and f' ({about})'}: "
            f"the bubble is {100 * self.bubble():.1f} % of the ranks' time. "
            f"{self._spread()}"
        )

    def _spread(self):
        idle = [f"{100 * self.idle(rank):.1f} %" for rank in range(self.n_ranks)]
        if len(set(idle)) == 1:
            return f"Every rank is idle for {idle[0]} of it."
        least, *_, most = sorted(range(self.n_ranks), key=self.idle)
        return (
            f"Rank {least} is idle least ({idle[least]}), rank {most} most "
            f"({idle[most]})."
        )

    def __repr__(self):
        return f"<Timeline: {self.describe()}>"

    def to_chrome_trace(self, path):
        """Write one JSON file for ui.perfetto.dev or chrome://tracing.

        A process per rank, a thread per lane, arrows from send to receive; 1 unit is
        shown as 1 s. The file of an earlier run is replaced as a whole.
        """
        path = Path(path)
        trace = {
            "traceEvents": _trace_events(self),
            "displayTimeUnit": "ms",
            "otherData": {"clock": self.clock, "hardware": self.hardware},
        }
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            partial.write_text(json.dumps(trace), encoding="utf-8")
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def _busy(spans):
    """Time covered by spans that are sorted by start; overlaps count once."""
    busy, now = 0.0, 0.0
    for span in spans:
        if span.end > now:
            busy += span.end - max(span.start, now)
            now = span.end
    return busy


def _count(n, noun):
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _trace_events(timeline):
    """Metadata, then the spans, each followed by its end of an arrow if it has one."""
    events, placed = [], []
    for rank in range(timeline.n_ranks):
        events.append(_metadata("process_name", rank, 0, f"rank {rank}"))
        for thread, (name, spans) in enumerate(_threads(timeline, rank)):
            events.append(_metadata("thread_name", rank, thread, name))
            placed += [(span, thread) for span in spans]
    sent = {span.flow for span in timeline.spans if span.name == "send"}
    received = {span.flow for span in timeline.spans if span.name == "receive"}
    numbers = {flow: i for i, flow in enumerate(sorted(sent & received - {""}))}
    # Viewers read in this order: of an arrow within one instant the tail comes first.
    placed.sort(key=lambda pair: (pair[0].start, pair[0].name == "receive"))
    for span, thread in placed:
        events.append(_slice(span, thread))
        if span.lane == "transfer" and span.flow in numbers:
            events.append(_arrow(events[-1], span.name, numbers[span.flow]))
    return events


def _threads(timeline, rank):
    """(name, spans) per lane; a viewer drops a span that overlaps another in a thread,
    so a lane gets as many threads as it has spans at once."""
    threads = []
    for lane in LANES:
        rows = []
        for span in timeline.lane(rank, lane):
            row = next((row for row in rows if row[-1].end <= span.start), None)
            if row is None:
                rows.append([span])
            else:
                row.append(span)
        names = [lane, *(f"{lane} {i}" for i in range(2, len(rows) + 1))]
        threads += zip(names, rows)
    return threads


def _metadata(kind, rank, thread, name):
    return {
        "ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}
    }  # fmt: skip


def _slice(span, thread):
    """A complete event; whole microseconds, so that neighbours still meet exactly."""
    start, end = round(span.start * 1e6), round(span.end * 1e6)
    words = {"send": "send to", "receive": "receive from", "wait": "wait for"}
    name = str(span.op)
    if span.name in words and span.peer is not None:
        name = f"{words[span.name]} {span.peer}"
    args = {"microbatch": span.microbatch, "peer": span.peer, "bytes": span.nbytes}
    return {
        "ph": "X", "name": name, "cat": span.lane, "pid": span.rank, "tid": thread,
        "ts": start, "dur": end - start,
        "args": {key: value for key, value in args.items() if value is not None},
    }  # fmt: skip


def _arrow(event, end, number):
    """The tail ("send") or the head ("receive") of an arrow, at a slice's beginning."""
    phase = {"ph": "s"} if end == "send" else {"ph": "f", "bp": "e"}
    place = {key: event[key] for key in ("pid", "tid", "ts")}
    return {**phase, "name": "message", "cat": "message", "id": number, **place}
