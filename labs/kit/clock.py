"""What time it is for a rank: wall time, or a virtual time that only durations model.

Algorithms have no clock. `watch` wraps a worker's methods from outside, `messages`
stamps every message, and the clock that is `current` writes spans.
"""

import contextlib
import functools
import os
import tempfile
import time

import torch
from torch.utils.flop_counter import FlopCounterMode

from labs.kit.timeline import Link, Span

current = None  # the clock of this process; None records nothing
offset = 0.0  # seconds to add to this host's time to get that of rank 0's host


@contextlib.contextmanager
def recording(clock, rank):
    """Make `clock` the clock of this rank; after the block, clock.spans is complete."""
    global current
    clock.begin(rank)
    current = clock
    try:
        yield clock
        clock.finish()
    finally:
        current = None


def watch(worker, **names):
    """Record calls of a worker's methods: watch(stage, forward="F", backward="B").

    The first argument of a watched method is its microbatch.
    """
    for method, name in names.items():
        setattr(worker, method, _watched(getattr(worker, method), name))
    return worker


def _watched(method, name):
    @functools.wraps(method)
    def call(microbatch, *args, **kwargs):
        work = functools.partial(method, microbatch, *args, **kwargs)
        return current.run(name, microbatch, work) if current else work()

    return call


class Clock:
    """What both clocks share: the rank's spans and a count of messages per peer."""

    unit = "s"

    def begin(self, rank):
        self.rank, self.spans, self._sent = rank, [], {}

    def finish(self):
        pass

    def _add(self, lane, name, start, end, **more):
        more.setdefault("microbatch", None)
        self.spans.append(Span(self.rank, lane, name, start=start, end=end, **more))

    def _flow(self, to):
        number = self._sent[to] = self._sent.get(to, -1) + 1
        return number

    def _received(self, source, number, called, begun, end, nbytes, microbatch):
        """Write a message down: standing still until it begins, then its transfer."""
        if begun > called:
            self._add("wait", "wait", called, begun, peer=source)
        self._add(
            "transfer", "receive", begun, end, peer=source, nbytes=nbytes,
            microbatch=microbatch, flow=f"{source}>{self.rank}#{number}",
        )  # fmt: skip


class Wall(Clock):
    """Real time of the host (one base for all its processes), or of a GPU's events."""

    phrase = "wall time"

    def __init__(self, event=None):
        self._event = event  # makes an event with record() and elapsed_time(later)

    def begin(self, rank):
        super().begin(rank)
        self._marked = []
        if self._event is None and torch.cuda.is_initialized():
            self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        if self._event:
            self._zero = self._mark()
            _synchronise()
            self._zero_time = self.now()

    def now(self):
        return time.perf_counter_ns() * 1e-9 + offset

    def run(self, name, microbatch, work):
        start = self._mark()
        result = work()
        self._marked.append((name, microbatch, start, self._mark()))
        return result

    def finish(self):
        """Read the marks: events can only be read once the GPU has passed them."""
        _synchronise()
        for name, microbatch, start, end in self._marked:
            times = self._seconds(start), self._seconds(end)
            self._add("compute", name, *times, microbatch=microbatch)
        self.spans.sort(key=lambda span: span.start)

    def _mark(self):
        if not self._event:
            return self.now()
        event = self._event()
        event.record()
        return event

    def _seconds(self, mark):
        if not self._event:
            return mark
        return self._zero_time + self._zero.elapsed_time(mark) / 1e3

    def sent(self, to, nbytes, microbatch=None):
        """Return the stamp of a message that leaves now: (time, port time, number)."""
        now, number = self.now(), self._flow(to)
        flow = f"{self.rank}>{to}#{number}"
        self._add("transfer", "send", now, now, peer=to, nbytes=nbytes,
                  microbatch=microbatch, flow=flow)  # fmt: skip
        return now, 0.0, number

    def received(self, source, stamp, called, nbytes, microbatch=None):
        """A transfer cannot begin before its send began: until then it is waiting."""
        end = self.now()
        begun = min(max(called, stamp[0]), end)
        self._received(source, stamp[2], called, begun, end, nbytes, microbatch)

    def together(self, name, called, times, nbytes):
        """A collective over all ranks begins when the last of them has come."""
        end = self.now()
        begun = min(max(called, *times), end)
        if begun > called:
            self._add("wait", "wait", called, begun)
        self._add("transfer", name, begun, end, nbytes=nbytes)


class Virtual(Clock):
    """A logical time per rank; the work and the messages are real, durations modelled.

    An operation advances it by its cost; a message arrives after the link's latency and
    bytes / bandwidth, each port serving one message at a time; a receiver's time becomes
    the later of its own and the arrival (Lamport 1978, with durations).
    """

    def __init__(self, cost, link=Link()):  # noqa: B008 (immutable)
        self.cost, self.link = cost, link
        self.phrase = f"virtual time, {cost.phrase}" + _words(link, cost.unit)
        self.unit = cost.unit

    def begin(self, rank):
        super().begin(rank)
        self.time = self._out_free = self._in_free = 0.0

    def now(self):
        return self.time

    def run(self, name, microbatch, work):
        result, cost = self.cost(self.rank, name, microbatch, work)
        self._add(
            "compute", name, self.time, self.time + cost, microbatch=microbatch
        )
        self.time += cost
        return result

    def sent(self, to, nbytes, microbatch=None):
        busy, number = nbytes / self.link.bandwidth, self._flow(to)
        begun = max(self.time, self._out_free)
        self._out_free = begun + busy
        flow = f"{self.rank}>{to}#{number}"
        self._add("transfer", "send", begun, begun + busy, peer=to, nbytes=nbytes,
                  microbatch=microbatch, flow=flow)  # fmt: skip
        return begun, busy, number

    def received(self, source, stamp, called, nbytes, microbatch=None):
        begun, busy, number = stamp
        end = max(begun + self.link.latency, self._in_free) + busy
        self._in_free = end
        if begun > self.time:
            self._add("wait", "wait", self.time, begun, peer=source)
        # The port works beside the computation: a transfer may begin before the call.
        self._received(source, number, begun, begun, end, nbytes, microbatch)
        self.time = max(self.time, end)

    def together(self, name, called, times, nbytes):
        """A collective is charged as a ring: 2(n - 1) steps of 1/n of the bytes."""
        begun, n_ranks = max(times), len(times)
        step = self.link.latency + nbytes / n_ranks / self.link.bandwidth
        end = begun + 2 * (n_ranks - 1) * step
        if begun > self.time:
            self._add("wait", "wait", self.time, begun)
        self._add("transfer", name, begun, end, nbytes=nbytes)
        self.time = end


class Unit:
    """Costs from a table: {"F": 1, "B": 2}, or a function (rank, name, microbatch)."""

    unit = ""

    def __init__(self, costs=None, phrase=None):
        self.costs = costs or {"F": 1.0, "B": 2.0}
        self.phrase = phrase or "unit costs" + (
            "" if callable(self.costs)
            else " (" + ", ".join(f"{k} = {v:g}" for k, v in self.costs.items()) + ")"
        )  # fmt: skip

    def __call__(self, rank, name, microbatch, work):
        if callable(self.costs):
            return work(), self.costs(rank, name, microbatch)
        if name not in self.costs:
            raise ValueError(f"no unit cost for {name!r}: add it to {self.costs}.")
        return work(), self.costs[name]


class Flops:
    """Costs from counted floating-point operations, at `rate` of them a second."""

    unit = "s"

    def __init__(self, rate=1e12):
        self.rate = rate
        self.phrase = f"counted FLOPs at {rate / 1e12:g} TFLOP/s"

    def __call__(self, rank, name, microbatch, work):
        with FlopCounterMode(display=False) as counter:
            result = work()
        return result, counter.get_total_flops() / self.rate


class Timed:
    """Costs measured: each operation is timed while it has a core or GPU to itself.

    Ranks take turns at `slots` locks (files of this run), so only the overlap is virtual.
    """

    unit = "s"

    def __init__(self, slots=1):
        self.slots = slots
        self.phrase = f"operations timed in turn ({slots} at a time)"

    def __call__(self, rank, name, microbatch, work):
        with _turn(self.slots):
            _synchronise()
            start = time.perf_counter_ns()
            result = work()
            _synchronise()
            return result, (time.perf_counter_ns() - start) * 1e-9


@contextlib.contextmanager
def _turn(slots):
    """Hold one of `slots` locks that the ranks of this run on this host share."""
    try:
        import fcntl
    except ImportError:
        raise NotImplementedError(
            "timed costs need file locks of Linux or macOS: use unit or flops costs."
        ) from None
    folder = run_folder()
    files = [open(os.path.join(folder, f"slot-{i}"), "w") for i in range(slots)]
    try:
        while True:
            for file in files:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    yield
                    return
            time.sleep(0.0005)
    finally:
        for file in files:
            file.close()  # closing gives the lock back


def run_folder():
    """Return a folder that the ranks of one run share; `launch` removes it."""
    folder = folder_of(os.environ.get("LABS_RUN", f"alone-{os.getpid()}"))
    os.makedirs(folder, exist_ok=True)
    return folder


def folder_of(run):
    return os.path.join(tempfile.gettempdir(), f"labs-{run}")


def _synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _words(link, unit):
    if link == Link():
        return ", free links"
    return f", link {link.latency:g}{unit} + bytes / {link.bandwidth:g} B{'/s' * (unit == 's')}"
