"""What a right answer to each exercise on parameter servers is, without the answers.

    check("ranges", ranges)               prints the verdict on an answer
    interleaved(shared_step)              what threads leave behind that take turns
    trained(backup_server, 2, 1)          the weight that three workers lead to
    times_of(backup_server, 6, [5, 6])    how long an update takes, for a figure
    rates_of(largest_rate, [0, 1])        what an answer gives, for a figure

A server of backup workers runs on a rank, in virtual time; threads take turns at each
read and write, in an order that is drawn from a seed.
"""

import threading
from functools import partial
from heapq import heappop, heappush
from math import pi, sin
from random import Random

import torch

from labs.checks import (
    Exercise,
    OnRanks,
    Trouble,
    ask,
    equal,
    judge,
    look,
    number,
    unfit,
    usual,
    whole,
)
from labs.kit import clock, messages, served, world
from labs.kit.timeline import Link
from labs.kit.watchdog import RankFailed


def check(name, answer, seed=0):
    """Print the verdict on an answer to the exercise `name`."""
    print(judge(EXERCISES[name], answer, seed))


def rates_of(answer, delays):
    """Return what an answer to largest_rate gives for each delay, for a figure.

    If it gives nothing, say so and return None.
    """
    found = look(EXERCISES["largest_rate"].facts, answer, [(d,) for d in delays])
    if "trouble" in found[-1]:
        print(f"No figure yet: {found[-1]['trouble'].rstrip('.')}.")
        return None
    return [facts["rate"] for facts in found]


def _list(value, wanted):
    """Return what an answer gives as a list; a tensor's elements are numbers."""
    try:
        if isinstance(value, (str, bytes, dict)):
            raise TypeError
        return value.tolist() if isinstance(value, torch.Tensor) else list(value)
    except TypeError:
        raise unfit(value, wanted) from None


def _wholes(value):
    return [whole(item) for item in _list(value, "a list of int")]


# ---- a synchronous run, by events ------------------------------------------------


def _served(n_workers, nbytes, n_steps, link, compute=0.0):
    """Return the Timeline of workers and servers that wait for each other."""
    n_servers = len(nbytes)
    workers = range(n_servers, n_servers + n_workers)
    turns = [
        served.Turns(served.rotated(workers, server * n_workers // n_servers))
        for server in range(n_servers)
    ]
    seconds = lambda rank, op: {"F": 0.25, "B": 0.5, "U": 0.25}[op.kind] * compute
    return served.serve(turns, n_workers, seconds, nbytes, n_steps, link)


class Traffic(Exercise):
    name = "traffic"

    def cases(self, random):
        def case(n_workers, n_servers, n_steps):
            ranges = [4 * random.randint(9, 99) for _ in range(n_servers)]
            return n_workers, ranges, n_steps

        return [
            case(random.randint(3, 5), 1, 1),
            case(random.randint(2, 4), random.randint(2, 3), random.randint(2, 5)),
            case(1, 3, 2),
        ]

    def facts(self, answer, *case):
        return {"bytes sent by each rank": ask(answer, *case, read=_wholes)}

    def expected(self, n_workers, ranges, n_steps):
        run = _served(n_workers, [n + 4 for n in ranges], n_steps, Link(0.0, 1.0))
        sent = [0] * run.n_ranks
        for span in run.spans:
            sent[span.rank] += span.nbytes * (span.name == "send")
        return {"bytes sent by each rank": sent}

    def hint(self, found, n_workers, ranges, n_steps):
        [sent], n_servers = found.values(), len(ranges)

        def made(n_pulls, more=4, server_first=True):
            each = [nbytes + more for nbytes in ranges]
            out = [n_workers * n_pulls * nbytes for nbytes in each]
            rest = [n_steps * sum(each)] * n_workers
            return out + rest if server_first else rest + out

        return usual(sent, {
            "After the last step the workers pull once more.": made(n_steps),
            "With each message travels the version: 4 bytes more.":
                made(n_steps + 1, more=0),
            "Servers are the first ranks.": made(n_steps + 1, server_first=False),
        }) or self.by_parts(sent, n_workers, n_servers)  # fmt: skip

    def by_parts(self, sent, n_workers, n_servers):
        if len(sent) != n_workers + n_servers:
            return "There is a number for each server and for each worker."
        return "Each worker takes one message from each server, and sends it one."


class StepSeconds(Exercise):
    name = "step_seconds"

    def cases(self, random):
        def case(n_workers, n_servers, latency):
            nbytes = 100 * n_workers * random.randint(2, 9)
            link = Link(latency, 100.0 * random.randint(5, 20))
            return n_workers, n_servers, nbytes, random.randint(3, 9), link

        n = random.randint(3, 6)
        return [
            case(n, 1, 0.0),
            case(n, 1, random.randint(1, 9) / 4),
            case(n, n, 0.5),
            case(1, 2, 0.5),
        ]

    def facts(self, answer, *case):
        return {"seconds": ask(answer, *case, read=number)}

    def expected(self, n_workers, n_servers, nbytes, compute, link):
        each = [nbytes / n_servers] * n_servers
        return {"seconds": served.interval(_served(n_workers, each, 4, link, compute))}

    def hint(self, found, n_workers, n_servers, nbytes, compute, link):
        def made(times, compute=compute, latencies=2):
            transfer = times * nbytes / link.bandwidth
            return compute + latencies * link.latency + transfer

        share = n_workers / n_servers
        return usual(found["seconds"], {
            "The workers compute, too: add that.": made(share + 1, compute=0),
            "A pull and a push: each pays the latency.": made(share + 1, latencies=1),
            "The latency counts once for all pulls and once for all pushes: messages "
            "follow each other closely.": made(share + 1, latencies=2 * n_workers),
            "Gradients come back while the last workers still pull: only the last "
            "gradient adds to the time.": made(2 * share),
            "That is the step of one worker: others want the same port.":
                made(2 / n_servers),
            "Each server has 1/n_servers of the bytes.": made(n_workers + 1),
        }) or "Count what passes one port from update to update."  # fmt: skip


# ---- ranges for unequal ports ----------------------------------------------------

KEPT = "weights kept by all servers together"
SLOWEST = "time of the slowest, weights / bandwidth"


def _proportional(n, bandwidths):
    return [n * speed / sum(bandwidths) for speed in bandwidths]


def _slowest(sizes, bandwidths):
    return max(size / speed for size, speed in zip(sizes, bandwidths))


def _rest_to(which, n, bandwidths):
    """Round down, and give the rest to one server."""
    sizes = [int(size) for size in _proportional(n, bandwidths)]
    sizes[which] += n - sum(sizes)
    return sizes


class Ranges(Exercise):
    name, points = "ranges", 2

    def cases(self, random):
        """Cases in which the usual mistakes cost time."""
        fast = random.randint(3, 6)
        return [
            (4 * (fast + 1) + 1, [1, fast]),
            self.drawn(random, random.randint(20, 60), 4),
            self.drawn(random, random.randint(300, 400), 7),
            (2, [random.randint(5, 9), 1, 9]),
            (3, [2, 2, 2]),
            (0, [1, 3]),
        ]

    def drawn(self, random, n, n_servers):
        while True:
            speeds = [random.randint(1, 20) for _ in range(n_servers)]
            least = self.least(n, speeds)
            ways = [_rest_to(which, n, speeds) for which in (0, -1)]
            rounded = list(map(round, _proportional(n, speeds)))
            bad = [_slowest(sizes, speeds) > 1.01 * least for sizes in ways]
            if all(bad) and sum(rounded) != n:
                return n, speeds

    def least(self, n, bandwidths):
        """Return the shortest time in which all servers together can take n weights."""
        times = {k / speed for speed in bandwidths for k in range(n + 1)}
        fits = lambda time: sum(int(time * s * (1 + 1e-12)) for s in bandwidths) >= n
        return min(filter(fits, times))

    def facts(self, answer, n_weights, bandwidths):
        sizes = ask(answer, n_weights, list(bandwidths), read=_wholes)
        if len(sizes) != len(bandwidths):
            raise Trouble(f"it gives {len(sizes)} ranges to {len(bandwidths)} servers.")
        if min(sizes) < 0:
            raise Trouble(f"a range has {min(sizes)} weights.")
        return {KEPT: sum(sizes), SLOWEST: _slowest(sizes, bandwidths)}

    def expected(self, n_weights, bandwidths):
        return {KEPT: n_weights, SLOWEST: self.least(n_weights, bandwidths)}

    def hint(self, found, n_weights, bandwidths):
        n, many = n_weights, len(bandwidths)
        if found[KEPT] != n:
            return self.hint_about_rounding(found[KEPT], n, bandwidths)
        backwards = _proportional(n, [1 / speed for speed in bandwidths])
        equal_ones = _slowest(messages.chunk_sizes(n, many), bandwidths)
        return usual(found[SLOWEST], {
            "Those are equal ranges: a fast port can take more.": equal_ones,
            "That is all on one server.": n / max(bandwidths),
            "What is left by rounding goes where it takes the least time, weight by "
            "weight, and not all to one server.":
                _slowest(_rest_to(-1, n, bandwidths), bandwidths),
        }) or self.far(found[SLOWEST], _slowest(backwards, bandwidths))  # fmt: skip

    def far(self, found, backwards):
        if found > 0.9 * backwards:
            return "A server of twice the bandwidth takes twice as many weights."
        return "Which server has the next weight first, with what it keeps already?"

    def hint_about_rounding(self, kept, n, bandwidths):
        parts = _proportional(n, bandwidths)
        if kept == sum(map(int, parts)):
            return "Rounding down leaves some over: who keeps those?"
        if kept == sum(map(round, parts)):
            return "Rounded one by one, the ranges need not add up."
        return "Every weight is kept by one server."


# ---- backup workers --------------------------------------------------------------

WEIGHTS = "weights at the end"
LAST = "time at which weights left last"
TAKEN = "gradients taken from each worker"
LR = 0.25


def _seconds(key, worker, number):
    """Return what a worker's gradient takes: one unit, and now and then much more."""
    return 1 + Random(f"{key} {worker} {number}").expovariate(1.5)


def _targets(key, n_workers):
    """Return where each worker wants two weights: its gradient is weights - target."""
    random = Random(f"{key}")
    return [[random.randint(10, 60) for _ in range(2)] for _ in range(n_workers)]


def _work(target):
    """Be a worker of rank 0; return when it got each version."""
    times, number = {}, 0
    target = torch.tensor(target, dtype=torch.float32, device=messages.device)
    while len(message := messages.receive(0).flatten()):
        if len(message) != len(target) + 1:
            raise Trouble(
                f"a message to a worker has {len(message)} elements: send the "
                f"{len(target)} weights and then the version."
            )
        weights, version = message[:-1], message[-1:]
        times[int(version)] = clock.current.now()
        gradient = clock.current.run("F", number, lambda w=weights: w - target)
        messages.isend(torch.cat([gradient, version]), 0)
        number += 1
    return times


def _on_rank(answer, n_needed, n_updates, targets, seconds):
    """Run a case on this rank; return what the answer or the worker gave, and spans."""
    cost = lambda rank, name, number: seconds(rank, number)
    virtual, rank = clock.Virtual(clock.Unit(cost)), messages.rank()
    with clock.recording(virtual, rank):
        if rank:
            given = _work(targets[rank - 1])
        else:
            start = torch.zeros(len(targets[0]), device=messages.device)
            given = ask(answer, start, n_needed, n_updates, LR, read=_numbers)
    return given, virtual.spans


def _numbers(value):
    return [number(item) for item in _list(value, "a tensor")]


def trained(answer, n_needed, n_updates):
    """Return the weight after a run of a backup_server, with a learning rate of 0.25.

    The weight begins at 0. There are three workers: worker r wants it to be 10 r, and
    takes r units of time.
    """

    def on_rank(rank, n_ranks):
        targets, seconds = [[10], [20], [30]], lambda worker, number: worker
        return _on_rank(answer, n_needed, n_updates, targets, seconds)[0]

    return world.launch(on_rank, 4)[0][0]


def times_of(answer, n_workers, counts, n_updates=20):
    """Return the time from update to update with each number of gradients needed.

    answer: to backup_server. If it does not come to its end, say so and return None.
    """

    def on_rank(rank, n_ranks):
        workers = _targets("figure", n_workers), partial(_seconds, "figure")
        return [_on_rank(answer, count, n_updates, *workers)[0] for count in counts]

    try:
        _, *workers = world.launch(on_rank, n_workers + 1)
    except RankFailed:
        print("No figure yet: the check says why.")
        return None
    last = n_updates - 1
    return [min(t[last] for t in times if last in t) / last for times in zip(*workers)]


def _raced(n_ranks, n_needed, n_updates, key, *, late="drop", divisor=0, again=False):
    """Return the facts of a run, found by events on one clock.

    late: what happens to a gradient of older weights: "drop", "use", or "hold": its
    worker, too, waits for the next version. divisor: of the sum, 0 for the number of
    gradients. again: a worker whose gradient counts gets the same weights once more.
    """
    targets, taken = _targets(key, n_ranks - 1), [0] * (n_ranks - 1)
    weights, version, now, last = [0.0] * 2, 0, 0.0, 0.0
    ready, waiting, fresh, busy = list(range(1, n_ranks)), [], [], []
    while True:
        for worker in ready if version < n_updates else []:
            end, last = now + _seconds(key, worker, taken[worker - 1]), now
            heappush(busy, (end, worker, version, weights))
        if not busy:
            return {WEIGHTS: weights, LAST: last, TAKEN: taken}
        now, worker, of, seen = heappop(busy)
        taken[worker - 1] += 1
        used = of == version or late == "use"
        if used:
            fresh.append([w - t for w, t in zip(seen, targets[worker - 1])])
        waits = late == "hold" or (used and not again)
        ready, waiting = [worker][waits:], waiting + [worker] * waits
        if used and len(fresh) == n_needed and version < n_updates:
            rate = LR / (divisor or n_needed)
            weights = [w - rate * sum(gs) for w, gs in zip(weights, zip(*fresh))]
            version, ready, waiting, fresh = version + 1, ready + waiting, [], []


class BackupServer(OnRanks):
    name, points = "backup_server", 3

    def cases(self, random):
        return [
            self.drawn(random, 4, 2, 3),
            self.drawn(random, 5, 3, 4),
            (3, 2, 2, random.randint(0, 10**6)),
        ]

    def drawn(self, random, *case):
        """Return a case in which every mistake shows."""
        while True:
            drawn = *case, random.randint(0, 10**6)
            ways = [_raced(*drawn)[WEIGHTS], *self.mistakes(*drawn).values()]
            if len(set(map(tuple, ways))) == len(ways):
                return drawn

    def arguments(self, n_ranks, n_needed, n_updates, key):
        return f"weights, {n_needed}, {n_updates}, {LR}, with {n_ranks - 1} workers"

    def facts(self, answer, n_ranks, n_needed, n_updates, key):
        workers = _targets(key, n_ranks - 1), partial(_seconds, key)
        weights, spans = _on_rank(answer, n_needed, n_updates, *workers)
        if messages.rank():
            return {}
        sent = [s.start for s in spans if s.name == "send" and s.nbytes]
        came = [s.peer for s in spans if s.name == "receive"]
        taken = [came.count(worker) for worker in range(1, n_ranks)]
        return {WEIGHTS: weights, LAST: max(sent, default=0.0), TAKEN: taken}

    def expected(self, *case):
        return _raced(*case)

    def mistakes(self, n_ranks, n_needed, n_updates, key):
        """Return the weights after each."""
        made = partial(_raced, n_ranks, n_needed, n_updates, key)
        n_workers = n_ranks - 1
        ways = {
            "No update has been made of them: return the new weights.":
                _raced(n_ranks, n_needed, 0, key),
            "That is one update more than wanted.":
                _raced(n_ranks, n_needed, n_updates + 1, key),
            "That is one update less than wanted.":
                _raced(n_ranks, n_needed, n_updates - 1, key),
            "That waits for all workers: n_needed gradients are enough.":
                _raced(n_ranks, n_workers, n_updates, key),
            "That is the sum of the gradients: use their mean.": made(divisor=1),
            "The divisor is the number of gradients in the update, not of workers.":
                made(divisor=n_workers),
            "That goes uphill: subtract the gradient.": made(divisor=-n_needed),
            "The learning rate is missing.": made(divisor=n_needed * LR),
            "A late gradient belongs to older weights: drop it.": made(late="use"),
            "A worker that comes late gets the newest weights at once.":
                made(late="hold"),
            "A worker whose gradient counts waits for the next version; with the same "
            "weights once more, its samples count twice.": made(again=True),
        }  # fmt: skip
        return {text: facts[WEIGHTS] for text, facts in ways.items()}

    def hint(self, found, *case):
        if equal(found[WEIGHTS], _raced(*case)[WEIGHTS]):
            return "At the end, too, take all gradients that are under way."
        told = usual(found[WEIGHTS], self.mistakes(*case))
        return told or "Take what was sent first; count it if it is of this version."

    def advice(self, trouble, *case):
        if "rank 0 has already returned" in trouble:
            return "A worker ends when it receives an empty tensor: send one to each."
        if "rank 0 waits for" in trouble or "stuck in receive" in trouble:
            return "Take only from workers that have weights to work on."
        if "at least one rank" in trouble:
            return "Nobody has weights to work on: who should have got some?"
        return ""


# ---- staleness -------------------------------------------------------------------


def _accepted(events, limit, *, strict=False, unlimited=False, since="pull", own=True):
    """Return the staleness of each push, counted by looking back; or after a mistake.

    since: the worker's event after which updates count. own: do its own count?
    """
    found, updates = [], []  # (when, by whom)
    for now, (what, worker) in enumerate(events):
        if what == "pull":
            continue
        before = [t for t in range(now) if events[t][1] == worker]
        begun = max((t for t in before if events[t][0] == since), default=-1)
        later = [by for when, by in updates if when > begun and (own or by != worker)]
        found.append(len(later))
        if unlimited or len(later) < limit + (not strict):
            updates.append((now, worker))
    return found


class StalenessOf(Exercise):
    name, points = "staleness_of", 2

    def cases(self, random):
        start = [("pull", worker) for worker in range(4)]
        turns = [(what, w) for w in (0, 1, 2, 3) * 2 for what in ("push", "pull")]
        return [
            (start + turns[:-2], 9),
            (start + turns[:-2], 2),
            self.drawn(random, 2, 14, 1),
            self.drawn(random, 3, 24, 2),
            self.drawn(random, 5, 40, 3),
            ([], 3),
        ]

    def drawn(self, random, n_workers, n_events, limit):
        """Return events in which every mistake shows."""
        start = [("pull", worker) for worker in range(n_workers)]
        while True:
            kinds = random.choices(["pull", "push"], [2, 3], k=n_events)
            events = start + [(kind, random.randrange(n_workers)) for kind in kinds]
            ways = [_accepted(events, limit), *self.mistakes(events, limit).values()]
            if len(set(map(tuple, ways))) == len(ways):
                return events, limit

    def arguments(self, events, limit):
        if len(events) > 20:
            return f"{len(events)} events, limit={limit}"
        told = ", ".join(f"{what} {worker}" for what, worker in events)
        return f"[{told}], limit={limit}"

    def facts(self, answer, events, limit):
        return {"staleness": ask(answer, list(events), limit, read=_wholes)}

    def expected(self, events, limit):
        return {"staleness": _accepted(events, limit)}

    def mistakes(self, events, limit):
        made, right = partial(_accepted, events, limit), _accepted(events, limit)
        accepted = [s for s in right if s <= limit]
        versions = [sum(s <= limit for s in right[:i]) for i in range(len(right))]
        return {
            "A gradient that is dropped makes no update.": made(unlimited=True),
            "Staler than the limit is dropped: what is just as stale is used.":
                made(strict=True),
            "Count from the worker's last pull, not from its last push.":
                made(since="push"),
            "A worker's own updates since its pull count as well.": made(own=False),
            "A push that is dropped has a staleness, too.": accepted,
            "That is the version when the push came; which one did its worker pull?":
                versions,
            "Its own update comes after the push, and does not count.":
                [s + 1 for s in right],
        }  # fmt: skip

    def hint(self, found, *case):
        told = usual(found["staleness"], self.mistakes(*case))
        return told or "Count the updates between a worker's pull and its push."

    def advice(self, trouble, events, limit):
        if "KeyError" in trouble:
            return "A worker may push several times after one pull."
        return ""


class MostStale(Exercise):
    name = "most_stale"

    def cases(self, random):
        few, many = random.randint(3, 5), random.randint(6, 9)
        return [(few, 2), (2, random.randint(3, 5)), (many, 0), (1, 3), (many, 1)]

    def facts(self, answer, *case):
        return {"staleness": ask(answer, *case, read=whole)}

    def expected(self, n_workers, bound):
        """Let one worker run ahead, then pull and wait for all others to be held."""
        turns = served.Turns(range(n_workers), together=False, bound=bound)
        turns.answer()
        for _ in range(bound):
            self.push(turns, 0)
        updates, others = 0, range(1, n_workers)
        while free := [worker for worker in others if worker not in turns.held]:
            updates += self.push(turns, free[0])
        return {"staleness": updates}

    def push(self, turns, worker):
        turns.push(worker)
        updates = len(turns.update())
        turns.answer()
        return updates

    def hint(self, found, n_workers, bound):
        others = n_workers - 1
        return usual(found["staleness"], {
            "The slow worker makes no update itself.": n_workers * (2 * bound + 1),
            "A worker that is just `bound` ahead may still pull, and push once more.":
                others * 2 * bound,
            "The slow worker may have been `bound` ahead of the others when it pulled.":
                others * (bound + 1),
            "How far ahead may each of the others get, from how far behind?":
                others * bound,
            "That is one of the others; all of them push.": 2 * bound + 1,
        }) or "Let one worker get far ahead, then pull and stop."  # fmt: skip


# ---- the largest learning rate ---------------------------------------------------


class LargestRate(Exercise):
    name, points = "largest_rate", 2

    def cases(self, random):
        return [(0,), (2,), (1,), (random.randint(3, 5),), (random.randint(6, 9),)]

    def facts(self, answer, delay):
        """One percent is near enough, and counts as the limit itself."""
        found, limit = ask(answer, delay, read=number), self.limit(delay)
        return {"rate": limit if abs(found - limit) <= 0.0101 * limit else found}

    def expected(self, delay):
        return {"rate": self.limit(delay)}

    def limit(self, delay):
        """Where z^(delay + 1) = z^delay - rate has its largest root on the circle."""
        return 2 * sin(pi / (4 * delay + 2))

    def hint(self, found, delay):
        rate, right = found["rate"], self.limit(delay)
        near = lambda value: abs(rate - value) <= 0.011 * value
        smooth = delay**delay / (delay + 1) ** (delay + 1)
        mistakes = {
            "That is the limit without delay.": 2,
            "The limit does not just fall as 1 / (delay + 1): try that rate.":
                2 / (delay + 1),
            "There w no longer swings; it may, if it gets smaller in the end.": smooth,
            "That is the limit for one update more of delay.": self.limit(delay + 1),
            "That is the limit for one update less of delay.": self.limit(delay - 1),
        }  # fmt: skip
        for text, value in mistakes.items():
            if near(value):
                return text
        if abs(rate - right) < 0.1 * right:
            return "Just at the limit |w| changes slowly: take more steps, and compare."
        return "Try rates with delayed_descent: below the limit w goes to 0."


# ---- threads that take turns -----------------------------------------------------

SHARED = "weights"
TORN = "gradients of weights that belong to no version"
LOCKED = "gradients computed under the lock"
COMPUTED = "gradients computed"


class _Ended(BaseException):
    """Ends a thread once another one has failed."""


class Threads:
    """Threads of which one runs at a time. At each pause a draw says which goes on."""

    def __init__(self, functions, random):
        self.random, self.error, self.over = random, None, threading.Semaphore(0)
        self.gates = [threading.Semaphore(0) for _ in functions]
        self.may = {i: lambda: True for i in range(len(functions))}
        for i, function in enumerate(functions):
            threading.Thread(target=self.live, args=(i, function), daemon=True).start()

    def run(self):
        """Let all come to their ends; raise what one of them raised."""
        self.go_on()
        self.over.acquire()
        if self.error:
            raise self.error

    def live(self, me, function):
        self.gates[me].acquire()
        try:
            function()
        except _Ended:
            pass
        except BaseException as error:
            self.error = self.error or error
        del self.may[me]
        self.go_on()

    def pause(self, may=lambda: True):
        """Let others go on; return when it is this one's turn again, and it may."""
        me, self.may[self.here] = self.here, may
        self.go_on()
        self.gates[me].acquire()
        if self.error:
            raise _Ended

    def go_on(self):
        ready = [i for i, may in self.may.items() if self.error or may()]
        if self.may and not ready:
            self.error = Trouble("it deadlocks: every thread waits for the lock.")
            ready = list(self.may)
        if ready:
            self.here = self.random.choice(ready)
            self.gates[self.here].release()
        else:
            self.over.release()


class Lock:
    """What one thread has at a time: `with lock`, or acquire() and release()."""

    def __init__(self, threads):
        self.threads, self.holder = threads, None

    def acquire(self):
        self.threads.pause(lambda: self.holder is None)
        self.holder = self.threads.here
        return True

    def release(self):
        if self.holder != self.threads.here:
            raise Trouble("it gives back a lock that it does not have.")
        self.holder = None

    def __enter__(self):
        self.acquire()

    def __exit__(self, *error):
        self.release()


class Store:
    """Weights that threads share, and a lock."""

    def __init__(self, n_weights, functions, random):
        self._weights = [0.0] * n_weights
        self.threads = Threads([partial(f, self) for f in functions], random)
        self.lock = Lock(self.threads)

    def __len__(self):
        return len(self._weights)

    def read(self, i):
        self.threads.pause()
        return self._weights[self._place(i)]

    def write(self, i, value):
        self.threads.pause()
        self._weights[self._place(i)] = number(value)

    def _place(self, i):
        if not 0 <= whole(i) < len(self):
            raise Trouble(f"there is no weight {i}: they are 0 to {len(self) - 1}.")
        return i


def _interleave(step, n_workers, n_steps, n_weights, slope, seed):
    """Let threads call step(store, gradient) again and again; return the facts."""
    torn = locked = computed = 0

    def gradient(store, weights):
        nonlocal torn, locked, computed
        if len(weights) != len(store):
            raise Trouble(f"gradient takes a list of all {len(store)} weights.")
        torn += len(set(weights)) > 1  # updates change all weights alike
        locked += store.lock.holder == store.threads.here
        computed += 1
        store.threads.pause()
        return [float(slope)] * len(store)

    def work(store):
        for _ in range(n_steps):
            step(store, partial(gradient, store))

    store = Store(n_weights, [work] * n_workers, Random(seed))
    store.threads.run()
    weights = list(store._weights)
    return {SHARED: weights, TORN: torn, LOCKED: locked, COMPUTED: computed}


def interleaved(step, n_workers=4, n_steps=500):
    """Run step(store, gradient) in threads that take turns; return what was found.

    Two weights begin at 0; every gradient is -1 for both. The order is the same in
    every call: after each read, write or gradient another thread may go on.
    """
    return _interleave(step, n_workers, n_steps, 2, -1, 0)


class SharedStep(Exercise):
    name, points = "shared_step", 3

    def cases(self, random):
        return [
            (4, 500, 1, -1, random.randint(0, 10**6)),
            (2, 100, 2, random.randint(2, 9), random.randint(0, 10**6)),
            (4, 100, 3, -random.randint(2, 9), random.randint(0, 10**6)),
            (1, 5, 2, 1, 0),
        ]

    def arguments(self, n_workers, n_steps, n_weights, slope, seed):
        weights = f"{n_weights} weight{'s' * (n_weights > 1)}"
        return f"{n_workers} threads, {n_steps} times each, {weights}, gradient {slope}"

    def facts(self, answer, *case):
        return ask(partial(_interleave, answer), *case, read=dict)

    def expected(self, n_workers, n_steps, n_weights, slope, seed):
        steps = n_workers * n_steps
        weights = [-float(slope * steps)] * n_weights
        return {SHARED: weights, TORN: 0, LOCKED: 0, COMPUTED: steps}

    def hint(self, found, *case):
        right = self.expected(*case)
        ratio = min(w / r for w, r in zip(found[SHARED], right[SHARED]))
        if found[COMPUTED] != right[COMPUTED]:
            return "A step computes one gradient, with gradient(weights)."
        if ratio == 0:
            return "Nothing has been added: write the new weights into the store."
        if ratio == -1:
            return "That goes uphill: subtract the gradient."
        if ratio < 1:
            return (
                "Updates are lost: between a read and its write, another thread has "
                "written. Read anew and write under one lock."
            )
        if found[LOCKED]:
            return "Others wait meanwhile: give the lock back before you compute."
        if found[TORN]:
            return "Another thread has written between two reads: lock the pull, too."
        return "Every gradient is to be subtracted once from each weight."

    def advice(self, trouble, *case):
        if "deadlocks" in trouble:
            return "It is taken twice, or not given back: `with store.lock:` does that."
        return ""


EXERCISES = {
    exercise.name: exercise
    for exercise in (
        Traffic(),
        StepSeconds(),
        Ranges(),
        BackupServer(),
        StalenessOf(),
        MostStale(),
        LargestRate(),
        SharedStep(),
    )
}
