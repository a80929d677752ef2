"""What time it is for a rank: wall time, or a virtual time in which work is modelled.

Algorithms have no clock. `watch` wraps a worker's methods from outside, `messages`
tells the `current` clock of every message, and that clock writes spans.
"""

import contextlib
import functools
import os
import tempfile
import time
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from labs.kit.timeline import Link, Op, Span

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

offset = 0.0  # seconds to add to this host's time to get that of rank 0's host


def watch(worker, **names):
    """Record calls of a worker's methods: watch(stage, forward="F", backward="B").

    The first argument of a watched method is its microbatch, if it is a number. An
    operation that is called within another one is a part of it.
    """
    for method, name in names.items():
        setattr(worker, method, _watched(getattr(worker, method), name))
    return worker


def _watched(method, name):
    @functools.wraps(method)
    def call(*args, **kwargs):
        microbatch = args[0] if args and isinstance(args[0], int) else None
        work = functools.partial(method, *args, **kwargs)
        return current.run(name, microbatch, work)

    return call


@contextlib.contextmanager
def recording(clock, rank):
    """Make `clock` the clock of this rank; after the block, clock.spans is complete."""
    global current
    clock.begin(rank)
    outer, current = current, clock
    try:
        yield clock
        clock.finish()
    finally:
        current = outer


class Clock:
    """Hears all that a rank does. This one writes nothing down."""

    records = False
    measured = True  # do its times say something about the hardware?
    in_order = False  # must messages be taken in the order of their times?

    def run(self, name, microbatch, work):
        """Return work(), an operation."""
        return work()

    def now(self):
        return 0.0

    def ready(self):
        """Return the time at which this rank can begin a message."""
        return 0.0

    def sent(self, to, nbytes, microbatch, since):
        """Return the stamp of a message: (when it began, time in the port, number)."""
        return 0.0, 0.0, 0

    def waited(self, to, since):
        """Until now, the rank stood still for `to` to take a message."""

    def received(self, source, stamp, since, nbytes, microbatch):
        """A message has come; the rank called for it at `since`."""

    def together(self, name, times, nbytes, since):
        """A collective is over; `times`: when each rank was ready for it."""

    def mark(self):
        """Return now, as what `time_of` understands: a collective begins, perhaps
        within an operation."""

    def time_of(self, mark):
        """Return the time of a mark, once the operation is over."""
        return 0.0

    def overlapped(self, name, times, nbytes, end):
        """The rank has waited for a collective that ran beside its computation; `end`:
        when it was over by the host's clock, if known."""


current = Clock()  # the clock of this process


class _Recorder(Clock):
    """What both clocks share: the rank's spans, and a count of messages per peer."""

    unit, records = "s", True

    def begin(self, rank):
        self.rank, self.spans, self._sent, self._op = rank, [], {}, None
        self._net_free = 0.0  # when the collective before is over

    def finish(self):
        pass

    def run(self, name, microbatch, work):
        if self._op:
            return work()
        self._op = Op(name, microbatch)
        try:
            return self._run(name, microbatch, work)
        finally:
            self._op = None

    def _add(self, lane, name, start, end, microbatch=None, **more):
        span = Span(self.rank, lane, name, microbatch, start, end, **more)
        self.spans.append(span)

    def _wait(self, peer, start, end):
        if end > start:
            self._add("wait", "wait", start, end, peer=peer)

    def _send(self, to, start, end, nbytes, microbatch):
        number = self._sent[to] = self._sent.get(to, -1) + 1
        flow = f"{self.rank}>{to}#{number}"
        self._add("transfer", "send", start, end, microbatch, peer=to, nbytes=nbytes,
                  flow=flow)  # fmt: skip
        return number

    def _receive(self, source, number, start, end, nbytes, microbatch):
        flow = f"{source}>{self.rank}#{number}"
        self._add("transfer", "receive", start, end, microbatch, peer=source,
                  nbytes=nbytes, flow=flow)  # fmt: skip


class Wall(_Recorder):
    """Real time of the host (one base for all its processes), or of a GPU's events.

    event: makes an event with record() and elapsed_time(later) in milliseconds; by
    default those of CUDA where it is in use.
    """

    phrase = "wall time"
    link = Link()  # not known: a prediction does without

    def __init__(self, event=None):
        self._event = event

    def begin(self, rank):
        super().begin(rank)
        self._marked = []
        if self._event is None and torch.cuda.is_initialized():
            self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        if self._event:
            _synchronise()
            self._zero, self._zero_time = self._mark(), self.now()

    def now(self):
        return time.perf_counter_ns() * 1e-9 + offset

    def ready(self):
        _synchronise()  # a GPU has then computed what is to be sent
        return self.now()

    def _run(self, name, microbatch, work):
        start = self._mark()
        result = work()
        self._marked.append((name, start, self._mark(), microbatch))
        return result

    def finish(self):
        """Read the marks: events can only be read once the GPU has passed them."""
        _synchronise()
        for name, start, end, microbatch in self._marked:
            times = self._seconds(start), self._seconds(end)
            self._add("compute", name, *times, microbatch)

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

    def sent(self, to, nbytes, microbatch, since):
        """Since then a GPU's tensor came to the host: its transfer had begun."""
        number = self._send(to, since, self.now(), nbytes, microbatch)
        return since, 0.0, number

    def waited(self, to, since):
        self._wait(to, since, self.now())

    def received(self, source, stamp, since, nbytes, microbatch):
        """A transfer cannot begin before its send began: until then it is waiting."""
        begun, _, number = stamp
        end = self.now()
        begun = min(max(since, begun), end)
        self._wait(source, since, begun)
        self._receive(source, number, begun, end, nbytes, microbatch)

    def together(self, name, times, nbytes, since):
        """A collective begins when the last rank has come."""
        end = self.ready()
        begun = min(max(times), end)
        self._wait(None, since, begun)
        self._add("transfer", name, begun, end, nbytes=nbytes)

    def mark(self):
        return self._mark()

    def time_of(self, mark):
        if self._event:
            _synchronise()
        return self._seconds(mark)

    def overlapped(self, name, times, nbytes, end):
        end = end or self.ready()
        begun = min(max(*times, self._net_free), end)
        self._net_free = end
        self._add("transfer", name, begun, end, nbytes=nbytes)


class Virtual(_Recorder):
    """A logical time per rank; the work and the messages are real, durations modelled.

    An operation advances it by its cost; a message arrives after the link's latency
    and bytes / bandwidth, each port serving one message at a time; a receiver's time
    becomes the later of its own and the arrival (Lamport 1978, with durations).
    slow: {rank: factor}, how many times as long a rank's operations take.
    """

    in_order = True

    def __init__(self, cost, link=Link(), slow=None):  # noqa: B008 (immutable)
        self.cost, self.link, self.unit = cost, link, cost.unit
        self.slow, self.measured = slow or {}, isinstance(cost, Timed)
        self.phrase = f"virtual time, {cost.phrase}, {_described(link, cost.unit)}"
        for rank, factor in self.slow.items():
            self.phrase += f", rank {rank} takes {factor:g} times as long"

    def begin(self, rank):
        super().begin(rank)
        self.time = self._out_free = self._in_free = 0.0
        self._marks = []

    def now(self):
        return self.time

    def ready(self):
        if self._op:
            raise RuntimeError(
                f"{self._op} communicates, but in virtual time its end is known only "
                "when it is over: watch methods that compute, and send between them."
            )
        return max(self.time, self._out_free)

    def mark(self):
        """Within an operation, its time is that of the part of the work then done."""
        mark = _Mark(self.time)
        if self._op:
            mark.done = self.cost.done()
            self._marks.append(mark)
        return mark

    def time_of(self, mark):
        return mark.time

    def _run(self, name, microbatch, work):
        self._marks.clear()
        result, cost = self.cost(self.rank, name, microbatch, work)
        cost *= self.slow.get(self.rank, 1)
        start, self.time = self.time, self.time + cost
        total = self.cost.done() if self._marks else 0
        for mark in self._marks:
            mark.time = start + cost * (mark.done / total if total else 1.0)
        self._add("compute", name, start, self.time, microbatch)
        return result

    def sent(self, to, nbytes, microbatch, since):
        busy = nbytes / self.link.bandwidth
        self._out_free = since + busy
        return since, busy, self._send(to, since, since + busy, nbytes, microbatch)

    def received(self, source, stamp, since, nbytes, microbatch):
        """Ports work beside the computation: a transfer may begin before the call."""
        begun, busy, number = stamp
        end = self._in_free = max(begun + self.link.latency, self._in_free) + busy
        self._wait(source, self.time, begun)
        self._receive(source, number, begun, end, nbytes, microbatch)
        self.time = max(self.time, end)

    def together(self, name, times, nbytes, since):
        """A collective is charged as a ring over all ranks: all_gather takes n - 1
        steps with a whole tensor each, the others 2 (n - 1) steps with 1/n of it."""
        begun = max(max(times), self._net_free)
        end = self._net_free = begun + ring_seconds(self.link, name, len(times), nbytes)
        self._wait(None, self.time, begun)
        self._add("transfer", name, begun, end, nbytes=nbytes)
        self.time = max(self.time, end)

    def overlapped(self, name, times, nbytes, end):
        """As `together`: what was computed meanwhile has its time already."""
        self.together(name, times, nbytes, self.time)


def ring_seconds(link, name, n_ranks, nbytes):
    """Return what a collective takes as a ring over all ranks, in a link's time."""
    if name == "all_gather":
        return (n_ranks - 1) * link.seconds(nbytes)
    return 2 * (n_ranks - 1) * link.seconds(nbytes / n_ranks)


@dataclass
class _Mark:
    """A moment: its time, or how much of an operation was done."""

    time: float
    done: float = 0.0


def _described(link, unit):
    if link == Link():
        return "free links"
    seconds, rate = (" s", " B/s") if unit else ("", "")
    return f"link {link.latency:g}{seconds} + bytes / {link.bandwidth:g}{rate}"


class Unit:
    """Costs from a table: {"F": 1, "B": 2}, or a function (rank, name, microbatch).

    within: may a rank communicate within an operation? Then FLOPs are counted, to know
    how much of it was done.
    """

    unit = ""

    def __init__(self, costs=None, within=False):
        self._counter = _FlopCounter() if within else None
        self.costs = {"F": 1.0, "B": 2.0} if costs is None else costs
        self.phrase = "unit costs" + _listed(self.costs)

    def __call__(self, rank, name, microbatch, work):
        if not callable(self.costs) and name not in self.costs:
            raise ValueError(f"no unit cost for {name!r}: add it to {self.costs}.")
        if self._counter:
            self._counter.total = 0
        with self._counter or contextlib.nullcontext():
            result = work()
        if callable(self.costs):
            return result, self.costs(rank, name, microbatch)
        return result, self.costs[name]

    def done(self):
        if not self._counter:
            raise RuntimeError("communication within an operation: Unit(within=True).")
        return self._counter.total


def _listed(costs):
    if callable(costs):
        return ""
    return " (" + ", ".join(f"{name} = {cost:g}" for name, cost in costs.items()) + ")"


class Flops:
    """Costs from counted floating-point operations, at `rate` of them a second."""

    unit = "s"

    def __init__(self, rate=1e12):
        self.rate = rate
        self.phrase = f"counted FLOPs at {rate / 1e12:g} TFLOP/s"

    def __call__(self, rank, name, microbatch, work):
        with _FlopCounter() as self._counter:
            result = work()
        return result, self.done() / self.rate

    def done(self):
        return self._counter.total


_attention = torch.ops.aten._scaled_dot_product_flash_attention
_AS = {  # attention on the CPU, which torch does not count
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


class _FlopCounter(TorchDispatchMode):
    """Counts what torch's FlopCounterMode counts, but starts at once; and attention."""

    total = 0

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or every new process imports the compiler, for seconds

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        packet = function.overloadpacket
        count = flop_registry.get(_AS.get(packet, packet))
        if count:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


class Timed:
    """Costs measured: each operation is timed while it has a core or GPU to itself.

    Ranks take turns, so only the overlap is virtual: `slots` of them at a time on the
    CPU, one at a time on each GPU.
    """

    unit = "s"

    def __init__(self, slots=1):
        self.slots = slots
        self.phrase = f"operations timed in turn ({slots} at a time)"

    def __call__(self, rank, name, microbatch, work):
        with _turn(self.slots):
            _synchronise()
            self._start = time.perf_counter_ns()
            result = work()
            return result, self.done()

    def done(self):
        _synchronise()
        return (time.perf_counter_ns() - self._start) * 1e-9


@contextlib.contextmanager
def _turn(slots):
    """Hold one of the locks that the ranks of this run share on this host."""
    if "LABS_RUN" not in os.environ:  # there are no others
        yield
        return
    if fcntl is None:
        raise NotImplementedError(
            "timed costs need file locks of Linux or macOS: use unit or flops costs."
        )
    with contextlib.ExitStack() as stack:  # closing a file gives its lock back
        locks = [stack.enter_context(open(path, "w")) for path in _paths(slots)]
        while not any(map(_taken, locks)):
            time.sleep(0.0005)
        yield


def _taken(lock):
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _paths(slots):
    folder = folder_of(os.environ["LABS_RUN"])
    os.makedirs(folder, exist_ok=True)
    names = [f"core-{slot}" for slot in range(slots)]
    if torch.cuda.is_initialized():
        names = [f"gpu-{torch.cuda.current_device()}"]
    return [os.path.join(folder, name) for name in names]


def folder_of(run):
    """Return the folder of a run's locks; `launch` removes it."""
    return os.path.join(tempfile.gettempdir(), f"labs-{run}")


def _synchronise():
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
