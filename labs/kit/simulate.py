"""The timeline of a schedule, computed from costs and a link: no ranks needed.

    simulate(schedule, cost, link)  ->  the timeline that the schedule would have
    explain(predicted, measured)    ->  where a run's bubble comes from, step by step

A stage runs its operations in the order of its list, each as soon as what it needs is
there. The message model is that of the virtual clock: a stage has one port out and one
port in, each carries one message at a time, and computing goes on meanwhile.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from itertools import zip_longest

from labs.kit.timeline import Link, Op, Span, Timeline


class ScheduleDeadlock(ValueError):
    """The schedule cannot finish; the message names who waits for whom."""


def pipeline_needs(n_stages, stage, op):
    """What an operation of a pipeline needs, as a list of (stage, op).

    F(s, i) needs F(s-1, i); B(s, i) needs F(s, i) and B(s+1, i); any other kind needs
    no more than its place in its stage's list.

    >>> pipeline_needs(2, 0, Op("B", 7)) == [(0, Op("F", 7)), (1, Op("B", 7))]
    True
    """
    if op.kind == "F":
        return [(stage - 1, op)] if stage > 0 else []
    if op.kind == "B":
        own = (stage, Op("F", op.microbatch))
        return [own, (stage + 1, op)] if stage < n_stages - 1 else [own]
    return []


def simulate(
    schedule,
    cost,
    link=Link(),  # noqa: B008 (immutable)
    nbytes=0,
    delay=None,
    needs=pipeline_needs,
    clock="virtual time",
    unit="",
):
    """The timeline of a schedule, in time linear in the number of operations.

    schedule  a list of Op per stage
    cost      {kind: time}, or a function (stage, op) -> time
    link      between any two stages
    nbytes    of a message: a number, or a function (stage, op) of the sending operation
    delay     a function (stage, op) of the receiving operation -> time; it replaces
              the link and its ports
    needs     a function (n_stages, stage, op) -> list of (stage, op); what comes from
              another stage is a message, in the order of the list

    Raises ScheduleDeadlock, in words, for a schedule that cannot finish.

    >>> F, B = Op("F", 0), Op("B", 0)
    >>> simulate([[F, B], [F, B]], {"F": 1, "B": 2}).bubble()
    0.5
    """
    if not (link.latency >= 0 and link.bandwidth > 0):
        raise ValueError(f"a link needs latency >= 0 and bandwidth > 0: {link}")
    if not callable(cost):
        cost = _cost_by_kind(schedule, cost)
    network = _Network(len(schedule), link, nbytes, delay)
    run = _Run(schedule, cost, network, needs)
    run.to_the_end()
    spans = run.spans + network.spans
    return Timeline(spans, n_ranks=len(schedule), clock=clock, unit=unit)


def _cost_by_kind(schedule, table):
    unknown = {op.kind for order in schedule for op in order} - table.keys()
    if unknown:
        raise ValueError(f"cost has no entry for kind {', '.join(sorted(unknown))}")
    return lambda stage, op: table[op.kind]


class _Run:
    """Every stage runs ahead until it lacks something; what it lacks wakes it.

    Operations go by number: tasks[number] is (stage, op).
    """

    def __init__(self, schedule, cost, network, needs):
        self.cost, self.network = cost, network
        number = _numbered(schedule)
        self.tasks = list(number)
        self.needs = []  # number -> the numbers that it needs
        self.receivers = [()] * len(number)  # number -> who on other stages needs it
        for task in self.tasks:
            self._connect(task, needs(len(schedule), *task), number)
        self.to_do = [
            deque(number[stage, op] for op in order)
            for stage, order in enumerate(schedule)
        ]
        self.done = [False] * len(number)
        self.time = [0.0] * len(schedule)  # up to which a stage has come
        self.sleepers, self.messages, self.spans = {}, {}, []

    def _connect(self, task, needed, number):
        for need in needed:
            if need not in number:
                raise ScheduleDeadlock(
                    f"{_waits(task, need)}, which is not in that stage's list"
                )
            if need[0] != task[0]:
                self.receivers[number[need]] += (number[task],)
        self.needs.append(tuple([number[need] for need in needed]))

    def to_the_end(self):
        awake = list(range(len(self.to_do)))
        while awake:
            awake += self._advance(awake.pop())
        if any(self.to_do):
            raise ScheduleDeadlock("; ".join(self._circle()))

    def _advance(self, stage):
        """Run operations until one lacks something; return the stages that wake."""
        awake, to_do = [], self.to_do[stage]
        while to_do:
            lacking = self._lacking(to_do[0])
            if lacking is not None:
                self.sleepers.setdefault(lacking, []).append(stage)
                break
            this = to_do.popleft()
            self._execute(this)
            awake += self.sleepers.pop(this, [])
        return awake

    def _lacking(self, this):
        for need in self.needs[this]:
            if not self.done[need]:
                return need
        return None

    def _execute(self, this):
        stage, op = self.tasks[this]
        for need in self.needs[this]:
            if self.tasks[need][0] != stage:
                self._receive(need, this)
        start = self.time[stage]
        end = self.time[stage] = start + self.cost(stage, op)
        self.spans.append(Span(stage, "compute", op.kind, op.microbatch, start, end))
        self.done[this] = True
        for receiver in self.receivers[this]:
            self.messages[this, receiver] = self.network.send(stage, op, end)

    def _receive(self, need, this):
        """Stand still until the transfer begins, then until the message arrives."""
        (peer, sent), (stage, op) = self.tasks[need], self.tasks[this]
        message = self.messages.pop((need, this))
        arrival = self.network.receive(message, peer, sent, stage, op)
        now, begun = self.time[stage], message[0]
        if begun > now:
            self.spans.append(Span(stage, "wait", "wait", None, now, begun, peer))
        self.time[stage] = max(now, arrival)

    def _circle(self):
        """Follow who waits for whom until it closes; one phrase per stage in it."""
        stuck = {
            stage: (to_do[0], self._lacking(to_do[0]))
            for stage, to_do in enumerate(self.to_do)
            if to_do
        }
        path, stage = [], min(stuck)
        while stage not in path:
            path.append(stage)
            stage, _ = self.tasks[stuck[stage][1]]
        circle = [stuck[stage] for stage in path[path.index(stage) :]]
        return [_waits(self.tasks[this], self.tasks[need]) for this, need in circle]


def _numbered(schedule):
    """{(stage, op): number}, in the order of the stages and their lists."""
    number = {}
    for stage, order in enumerate(schedule):
        for op in order:
            if not isinstance(op, Op):
                raise TypeError(f"stage {stage} lists {op!r}: use Op(kind, microbatch)")
            if (stage, op) in number:
                raise ScheduleDeadlock(f"stage {stage} lists {op} twice: list it once")
            number[stage, op] = len(number)
    return number


def _waits(task, need):
    (stage, op), (peer, needed) = task, need
    if peer == stage:
        return f"stage {stage} is at {op} and has not yet done its own {needed}"
    return f"stage {stage} is at {op} and waits for {needed} of stage {peer}"


class Ports:
    """A port out and a port in for each rank; each carries one message at a time."""

    def __init__(self, n_ranks, link):
        self.link = link
        self.out_free, self.in_free = [0.0] * n_ranks, [0.0] * n_ranks

    def send(self, rank, nbytes, now):
        """Return when a message of `rank` begins, and how long it is in a port."""
        begun, busy = max(now, self.out_free[rank]), nbytes / self.link.bandwidth
        self.out_free[rank] = begun + busy
        return begun, busy

    def receive(self, rank, begun, busy):
        """Return when a message arrives at `rank`."""
        free = max(begun + self.link.latency, self.in_free[rank])
        self.in_free[rank] = free + busy
        return self.in_free[rank]


class _Network:
    """Messages between stages."""

    def __init__(self, n_stages, link, nbytes, delay):
        self.ports, self.delay = Ports(n_stages, Link() if delay else link), delay
        self.nbytes = nbytes if callable(nbytes) else lambda stage, op: nbytes
        self.count = Counter()  # (source, target) -> messages so far
        self.spans = []

    def send(self, stage, op, now):
        """Return a message: (begun, port time, bytes); it queues for the port."""
        nbytes = self.nbytes(stage, op)
        return *self.ports.send(stage, nbytes, now), nbytes

    def receive(self, message, peer, sent, stage, op):
        """Return when the message arrives."""
        begun, busy, nbytes = message
        if self.delay:
            seconds = self.delay(stage, op)
            arrival = begun + seconds
        else:
            seconds = self.ports.link.latency + busy
            arrival = self.ports.receive(stage, begun, busy)
        if seconds:
            self._record(message, arrival, peer, sent, stage)
        return arrival

    def _record(self, message, arrival, peer, sent, stage):
        begun, busy, nbytes = message
        flow, i = f"{peer}>{stage}#{self.count[peer, stage]}", sent.microbatch
        self.count[peer, stage] += 1
        self.spans += [
            Span(peer, "transfer", "send", i, begun, begun + busy, stage, nbytes, flow),
            Span(stage, "transfer", "receive", i, begun, arrival, peer, nbytes, flow),
        ]


def replicas(n_ranks, ops, transfers, start=0.0, clock="equal operations", unit=""):
    """Return the Timeline of ranks that all do the same.

    ops: (Op, duration), one after the other from `start` on. transfers: (name, when it
    can begin, duration, bytes), one at a time, beside the operations.
    """
    spans, now, free = [], start, 0.0
    for op, duration in ops:
        spans.append(Span(0, "compute", op.kind, op.microbatch, now, now + duration))
        now += duration
    for name, ready, duration, nbytes in transfers:
        begun = max(ready, free)
        free = begun + duration
        spans.append(Span(0, "transfer", name, None, begun, free, nbytes=nbytes))
    ranks = range(n_ranks)
    spans = [span._replace(rank=rank) for span in spans for rank in ranks]
    return Timeline(spans, n_ranks, clock=clock, unit=unit)


MEANING = {
    "formula": "equal operations, free links",
    "imbalance": "the operation times of this run",
    "transfer": "its messages",
    "jitter": "the rest: launch overhead, noise",
}
MEANING_OF_REPLICAS = {
    **MEANING,
    "formula": "equal operations, and what the link should take",
    "transfer": "what its messages took besides",
}


@dataclass(frozen=True)
class Explanation:
    """Where a measured bubble comes from: (name, percentage points), which add up."""

    rows: list
    meaning: dict = field(default_factory=lambda: MEANING)

    @property
    def total(self):
        return sum(points for _, points in self.rows)

    def __str__(self):
        said = self.meaning
        lines = [f"{name:<10}{_text(p):>6}  {said[name]}" for name, p in self.rows]
        return "\n".join([*lines, f"{'bubble':<10}{_text(self.total):>6}  in all"])

    def sentence(self):
        parts = [f"{name} {_text(p)} ({self.meaning[name]})" for name, p in self.rows]
        return f"The bubble of {_text(self.total)} % is, in points: {', '.join(parts)}."


def _text(points):
    return f"{round(points, 1) + 0.0:.1f}"  # + 0.0 turns -0.0 into 0.0


def explain(predicted, measured, needs=pipeline_needs):
    """Walk from the predicted bubble (equal operations, free links) to the measured.

    formula    the predicted bubble
    imbalance  what the measured operation times change, with free links
    transfer   what the measured messages change on top of that
    jitter     what is left: launch overhead, noise

    Both timelines hold one step, with the same order of operations on every rank;
    otherwise a ValueError names the first rank and operation that differ.
    """
    schedule = _common_order(predicted, measured)
    ops = {
        (rank, span.op): span
        for rank in range(measured.n_ranks)
        for span in measured.ops(rank)
    }
    messages = _message_times(schedule, measured, ops, needs)

    def cost(stage, op):
        return ops[stage, op].end - ops[stage, op].start

    def delay(stage, op):
        return messages[stage, op]

    bubbles = [
        predicted.bubble(),
        simulate(schedule, cost, needs=needs).bubble(),
        simulate(schedule, cost, delay=delay, needs=needs).bubble(),
        measured.bubble(),
    ]
    return Explanation(steps(bubbles))


def explain_replicas(predicted, measured):
    """The same walk where every rank does the same work, and they meet in collectives.

    imbalance: all wait for the slowest rank; transfer: what its transfers, beside no
    computation, took in the run and not in the prediction.
    """
    if predicted.n_ranks != measured.n_ranks:
        raise ValueError(_other_size(predicted, measured))
    work, n_ranks = measured.compute(), measured.n_ranks
    slowest = max(range(n_ranks), key=measured.compute)

    def bubble(transfers):
        makespan = measured.compute(slowest) + transfers
        return 1 - work / (n_ranks * makespan) if makespan else 0.0

    bubbles = [
        predicted.bubble(),
        bubble(predicted.exposed(slowest)),
        bubble(measured.exposed(slowest)),
        measured.bubble(),
    ]
    return Explanation(steps(bubbles), MEANING_OF_REPLICAS)


def steps(bubbles):
    """Return what each bubble adds to the one before, by name, in points."""
    points = [100 * (b - a) for a, b in zip([0.0, *bubbles], bubbles)]
    return list(zip(MEANING, points))


def _other_size(predicted, measured):
    return (
        f"predicted are {predicted.n_ranks} ranks, measured {measured.n_ranks}: "
        "explain compares runs of the same size"
    )


def _common_order(predicted, measured):
    if predicted.n_ranks != measured.n_ranks:
        raise ValueError(_other_size(predicted, measured))
    schedule = [predicted.order(rank) for rank in range(predicted.n_ranks)]
    for rank, order in enumerate(schedule):
        for i, (said, did) in enumerate(zip_longest(order, measured.order(rank))):
            if said != did:
                raise ValueError(
                    f"rank {rank}, operation {i}: predicted {said or 'none'}, measured "
                    f"{did or 'none'}: explain compares runs of the same order"
                )
    return schedule


def _message_times(schedule, measured, ops, needs):
    """(stage, op) -> how long its message was under way, the longest if several.

    Receives are matched by peer, by microbatch where the run noted it, and by order.
    """
    received = defaultdict(deque)
    for span in measured.spans:
        if span.name == "receive":
            received[span.rank, span.peer, span.microbatch].append(span)
    queued, times = _queued(measured), defaultdict(float)
    for stage, order in enumerate(schedule):
        for op in order:
            for peer, sent in needs(len(schedule), stage, op):
                noted, bare = (stage, peer, sent.microbatch), (stage, peer, None)
                if spans := received[noted] or received[bare]:
                    span = spans.popleft()
                    begun = ops[peer, sent].end if span.flow in queued else span.start
                    times[stage, op] = max(times[stage, op], span.end - begun)
    return times


def _queued(measured):
    """The flows that left when the one before them freed the sender's port."""
    queued = set()
    for rank in range(measured.n_ranks):
        free = None
        for span in measured.lane(rank, "transfer"):
            if span.name == "send" and span.start < span.end:
                if span.start == free:
                    queued.add(span.flow)
                free = span.end
    return queued
