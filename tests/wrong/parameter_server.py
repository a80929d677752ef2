"""Wrong answers to the exercises on parameter servers, as students give them, and what
each hears."""

import os

import torch
from wrong.notes import notes

from labs.kit import messages
from labs.kit.toy import delayed_descent

WRONG, told = notes()


# ---- any exercise ----------------------------------------------------------------


@told("traffic", "returned None, not a list of int")
@told("step_seconds", "returned None, not a number")
@told("ranges", "returned None, not a list of int")
@told("backup_server", "returned None, not a tensor")
@told("staleness_of", "returned None, not a list of int")
@told("most_stale", "returned None, not a whole number")
@told("largest_rate", "returned None, not a number")
@told("shared_step", "A step computes one gradient")
def nothing(*arguments):
    pass


@told("backup_server", "it raised ZeroDivisionError: division by zero (")
@told("shared_step", "it raised ZeroDivisionError: division by zero (")
def broken(*arguments):
    return 1 / 0


@told("shared_step", "Does a loop never end?")
def endless(*arguments):
    while True:
        pass


@told("backup_server", "os._exit(0)")
def gone(*arguments):
    os._exit(0)


@told("shared_step", "raised TypeError")
def too_few_parameters():
    pass


# ---- traffic ---------------------------------------------------------------------


def sent(n_workers, ranges, n_pulls, n_steps, more=4):
    each = [nbytes + more for nbytes in ranges]
    return [n_workers * n_pulls * n for n in each] + [n_steps * sum(each)] * n_workers


@told("traffic", "the workers pull once more")
def without_the_last_pull(n_workers, ranges, n_steps):
    return sent(n_workers, ranges, n_steps, n_steps)


@told("traffic", "With each message travels the version")
def without_versions(n_workers, ranges, n_steps):
    return sent(n_workers, ranges, n_steps + 1, n_steps, more=0)


@told("traffic", "Servers are the first ranks")
def workers_first(n_workers, ranges, n_steps):
    out = sent(n_workers, ranges, n_steps + 1, n_steps)
    return out[len(ranges) :] + out[: len(ranges)]


@told("traffic", "a number for each server and for each worker")
def of_servers(n_workers, ranges, n_steps):
    return sent(n_workers, ranges, n_steps + 1, n_steps)[: len(ranges)]


@told("traffic", "takes one message from each server")
def as_a_ring(n_workers, ranges, n_steps):
    return [2 * n_steps * sum(ranges)] * (n_workers + len(ranges))


@told("traffic", "returned float, not a whole number")
def floats(n_workers, ranges, n_steps):
    return [float(n) for n in sent(n_workers, ranges, n_steps + 1, n_steps)]


# ---- step_seconds ----------------------------------------------------------------


@told("step_seconds", "The workers compute, too")
def communication_alone(n_workers, n_servers, nbytes, compute, link):
    return 2 * link.latency + (n_workers / n_servers + 1) * nbytes / link.bandwidth


@told("step_seconds", "A pull and a push: each pays the latency")
def one_latency(n_workers, n_servers, nbytes, compute, link):
    port = (n_workers / n_servers + 1) * nbytes
    return compute + link.latency + port / link.bandwidth


@told("step_seconds", "messages follow each other closely")
def latency_of_each(n_workers, n_servers, nbytes, compute, link):
    port = (n_workers / n_servers + 1) * nbytes
    return compute + 2 * n_workers * link.latency + port / link.bandwidth


@told("step_seconds", "only the last gradient adds to the time")
def fan_out_then_fan_in(n_workers, n_servers, nbytes, compute, link):
    return compute + 2 * n_workers / n_servers * nbytes / link.bandwidth


@told("step_seconds", "others want the same port")
def of_one_worker(n_workers, n_servers, nbytes, compute, link):
    return compute + 2 * link.seconds(nbytes / n_servers)


@told("step_seconds", "Each server has 1/n_servers of the bytes")
def of_one_server(n_workers, n_servers, nbytes, compute, link):
    return compute + 2 * link.latency + (n_workers + 1) * nbytes / link.bandwidth


@told("step_seconds", "Count what passes one port")
def compute_of_all(n_workers, n_servers, nbytes, compute, link):
    return n_workers * compute + 2 * link.seconds(nbytes)


# ---- ranges ----------------------------------------------------------------------


@told("ranges", "Those are equal ranges")
def equal_ranges(n_weights, bandwidths):
    return messages.chunk_sizes(n_weights, len(bandwidths))


def rounded_down(n_weights, bandwidths):
    total = sum(bandwidths)
    return [n_weights * speed // total for speed in bandwidths]


@told("ranges", "Rounding down leaves some over")
def the_rest_is_lost(n_weights, bandwidths):
    return rounded_down(n_weights, bandwidths)


@told("ranges", "the ranges need not add up")
def rounded_one_by_one(n_weights, bandwidths):
    total = sum(bandwidths)
    return [round(n_weights * speed / total) for speed in bandwidths]


@told("ranges", "not all to one server")
def the_rest_to_the_last(n_weights, bandwidths):
    sizes = rounded_down(n_weights, bandwidths)
    sizes[-1] += n_weights - sum(sizes)
    return sizes


@told("ranges", "Which server has the next weight first")
def the_rest_to_the_first(n_weights, bandwidths):
    sizes = rounded_down(n_weights, bandwidths)
    sizes[0] += n_weights - sum(sizes)
    return sizes


@told("ranges", "Which server has the next weight first")
def the_rest_in_turn(n_weights, bandwidths):
    sizes = rounded_down(n_weights, bandwidths)
    for i in range(n_weights - sum(sizes)):
        sizes[i] += 1
    return sizes


@told("ranges", "That is all on one server")
def all_on_the_fastest(n_weights, bandwidths):
    best = bandwidths.index(max(bandwidths))
    return [n_weights * (i == best) for i in range(len(bandwidths))]


@told("ranges", "A server of twice the bandwidth takes twice as many")
def upside_down(n_weights, bandwidths):
    sizes = rounded_down(n_weights, [1 / speed for speed in bandwidths])
    sizes = [int(size) for size in sizes]
    sizes[0] += n_weights - sum(sizes)
    return sizes


@told("ranges", "Every weight is kept by one server")
def where_they_begin(n_weights, bandwidths):
    sizes = rounded_down(n_weights, bandwidths)
    return [sum(sizes[:i]) for i in range(len(sizes))]


@told("ranges", "it gives 3 ranges to 2 servers")
def cuts(n_weights, bandwidths):
    sizes = rounded_down(n_weights, bandwidths)
    return [sum(sizes[:i]) for i in range(len(sizes) + 1)]


@told("ranges", "returned float, not a whole number")
def not_whole(n_weights, bandwidths):
    return [n_weights * speed / sum(bandwidths) for speed in bandwidths]


@told("ranges", "a range has -1 weights")
def less_than_none(n_weights, bandwidths):
    return [n_weights + 1, -1]


# ---- backup_server ---------------------------------------------------------------


class Backup:
    """A right server; each wrong one changes a part of it."""

    def __init__(self, weights, n_needed, n_updates, lr):
        self.weights, self.n_needed, self.lr = weights, n_needed, lr
        self.n_updates, self.version, self.gradients = n_updates, 0, []
        self.n_workers, self.inbox = messages.n_ranks() - 1, messages.Inbox()
        self.busy, self.waiting = [], list(range(1, self.n_workers + 1))

    def run(self):
        while self.version < self.n_updates:
            self.hand_out()
            while len(self.gradients) < self.n_needed:
                self.take()
            self.update()
        self.end()
        return self.weights

    def hand_out(self):
        for worker in self.waiting:
            self.send(worker)
        self.waiting = []

    def send(self, worker):
        stamp = self.weights.new_full((1,), self.version)
        messages.isend(torch.cat([self.weights, stamp]), worker)
        self.busy.append(worker)

    def take(self):
        worker, pushed = self.inbox.take(self.busy)
        self.busy.remove(worker)
        if pushed[-1] < self.version:
            self.late(worker, pushed[:-1])
        else:
            self.use(worker, pushed[:-1])

    def late(self, worker, gradient):
        self.send(worker)

    def use(self, worker, gradient):
        self.waiting.append(worker)
        self.gradients.append(gradient)

    def update(self):
        self.weights = self.weights - self.lr * self.mean(self.gradients)
        self.version, self.gradients = self.version + 1, []

    def mean(self, gradients):
        return torch.stack(gradients).mean(0)

    def end(self):
        while self.busy:
            worker, _ = self.inbox.take(self.busy)
            self.busy.remove(worker)
            self.waiting.append(worker)
        for worker in self.waiting:
            messages.isend(torch.empty(0), worker)


def server(words):
    """Note what an answer hears that runs a changed server."""

    def note(kind):
        def answer(*arguments):
            return kind(*arguments).run()

        answer.__name__ = kind.__name__
        told("backup_server", words)(answer)
        return kind

    return note


@server("n_needed gradients are enough")
class WaitsForAll(Backup):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.n_needed = self.n_workers


@server("belongs to older weights: drop it")
class UsesLateOnes(Backup):
    def late(self, worker, gradient):
        self.use(worker, gradient)


@server("the number of gradients in the update, not of workers")
class DividesByWorkers(Backup):
    def mean(self, gradients):
        return sum(gradients) / self.n_workers


@server("That is the sum of the gradients")
class AddsUp(Backup):
    def mean(self, gradients):
        return sum(gradients)


@server("That goes uphill")
class GoesUphill(Backup):
    def mean(self, gradients):
        return -super().mean(gradients)


@server("The learning rate is missing")
class ForgetsTheRate(Backup):
    def mean(self, gradients):
        return super().mean(gradients) / self.lr


@server("return the new weights")
class ReturnsTheOldWeights(Backup):
    def run(self):
        old = self.weights
        super().run()
        return old


@server("its samples count twice")
class AnswersAtOnce(Backup):
    def take(self):
        super().take()
        if len(self.gradients) < self.n_needed:
            self.hand_out()


@server("gets the newest weights at once")
class HoldsLateWorkers(Backup):
    def late(self, worker, gradient):
        self.waiting.append(worker)


@server("one update more than wanted")
class OneMore(Backup):
    def __init__(self, weights, n_needed, n_updates, lr):
        super().__init__(weights, n_needed, n_updates + 1, lr)


@server("one update less than wanted")
class OneLess(Backup):
    def __init__(self, weights, n_needed, n_updates, lr):
        super().__init__(weights, n_needed, n_updates - 1, lr)


@server("take all gradients that are under way")
class LeavesLateOnesBehind(Backup):
    def end(self):
        for worker in range(1, self.n_workers + 1):
            messages.isend(torch.empty(0), worker)


@server("A worker ends when it receives an empty tensor")
class TellsThoseWhoWait(Backup):
    def end(self):
        for worker in self.waiting:
            messages.isend(torch.empty(0), worker)


@server("Take only from workers that have weights to work on")
class TakesFromAll(Backup):
    def take(self):
        everyone, busy = list(range(1, self.n_workers + 1)), self.busy
        self.busy = everyone
        super().take()
        self.busy = busy


@server("Nobody has weights to work on")
class HandsOutNothing(Backup):
    def hand_out(self):
        pass


@server("on rank 1, a message to a worker has 2 elements")
class ForgetsTheVersion(Backup):
    def send(self, worker):
        messages.isend(self.weights, worker)
        self.busy.append(worker)


@server("Take what was sent first")
class TakesTheLowest(Backup):
    def take(self):
        worker = min(self.busy)
        pushed = messages.receive(worker)
        self.busy.remove(worker)
        (self.late if pushed[-1] < self.version else self.use)(worker, pushed[:-1])


# ---- staleness_of ----------------------------------------------------------------


def counted(events, limit, drops=lambda s, limit: s > limit, own=True):
    """Return (staleness, was it dropped) of each push."""
    version, pulled, found = 0, {}, []
    for what, worker in events:
        if what == "pull":
            pulled[worker] = version
            continue
        found.append((version - pulled[worker], drops(version - pulled[worker], limit)))
        version += not found[-1][1]
        pulled[worker] += not own and not found[-1][1]
    return found


@told("staleness_of", "A gradient that is dropped makes no update")
def counts_what_is_dropped(events, limit):
    return [s for s, _ in counted(events, limit, drops=lambda s, limit: False)]


@told("staleness_of", "what is just as stale is used")
def drops_too_much(events, limit):
    return [s for s, _ in counted(events, limit, drops=lambda s, limit: s >= limit)]


@told("staleness_of", "A push that is dropped has a staleness, too")
def used_ones_alone(events, limit):
    return [s for s, dropped in counted(events, limit) if not dropped]


@told("staleness_of", "not from its last push")
def since_the_last_push(events, limit):
    version, pushed, found = 0, {}, []
    for what, worker in events:
        if what == "push":
            found.append(version - pushed.get(worker, 0))
            version += found[-1] <= limit
            pushed[worker] = version
    return found


@told("staleness_of", "A worker's own updates since its pull count as well")
def of_others_alone(events, limit):
    return [s for s, _ in counted(events, limit, own=False)]


@told("staleness_of", "That is the version when the push came")
def versions(events, limit):
    version, found = 0, []
    for _, dropped in counted(events, limit):
        found.append(version)
        version += not dropped
    return found


@told("staleness_of", "Its own update comes after the push")
def one_more(events, limit):
    return [s + 1 for s, _ in counted(events, limit)]


@told("staleness_of", "A worker may push several times after one pull")
def forgets_the_pull(events, limit):
    version, pulled, found = 0, {}, []
    for what, worker in events:
        if what == "pull":
            pulled[worker] = version
        else:
            found.append(version - pulled.pop(worker))
            version += found[-1] <= limit
    return found


@told("staleness_of", "Count the updates between a worker's pull and its push")
def workers_less_one(events, limit):
    n_workers = len({worker for _, worker in events})
    return [n_workers - 1 for what, _ in events if what == "push"]


# ---- most_stale ------------------------------------------------------------------


@told("most_stale", "The slow worker makes no update itself")
def of_all_workers(n_workers, bound):
    return n_workers * (2 * bound + 1)


@told("most_stale", "may still pull, and push once more")
def one_push_less(n_workers, bound):
    return (n_workers - 1) * 2 * bound


@told("most_stale", "may have been `bound` ahead")
def from_equal_counts(n_workers, bound):
    return (n_workers - 1) * (bound + 1)


@told("most_stale", "How far ahead may each of the others get")
def bound_each(n_workers, bound):
    return (n_workers - 1) * bound


@told("most_stale", "all of them push")
def of_one_other(n_workers, bound):
    return 2 * bound + 1


@told("most_stale", "Let one worker get far ahead")
def the_bound(n_workers, bound):
    return bound


# ---- largest_rate ----------------------------------------------------------------


@told("largest_rate", "That is the limit without delay")
def without_delay(delay):
    return 2.0


@told("largest_rate", "does not just fall as 1 / (delay + 1)")
def shared_out(delay):
    return 2 / (delay + 1)


@told("largest_rate", "There w no longer swings")
def without_swinging(delay):
    return delay**delay / (delay + 1) ** (delay + 1) if delay else 2


def searched(delay, steps, shrinks):
    low, high = 0.0, 2.0
    for _ in range(30):
        lr = (low + high) / 2
        good = shrinks([abs(w) for w in delayed_descent(lr, steps, delay)])
        low, high = (lr, high) if good else (low, lr)
    return low


@told("largest_rate", "for one update more of delay")
def one_more_delay(delay):
    return searched(delay + 1, 3000, lambda path: path[-1] < 1) if delay else 2


@told("largest_rate", "for one update less of delay")
def one_less_delay(delay):
    return searched(max(0, delay - 1), 3000, lambda path: path[-1] < 1)


@told("largest_rate", "take more steps, and compare")
def after_few_steps(delay):
    return searched(delay, 40, lambda path: path[-1] < 0.1)


@told("largest_rate", "below the limit w goes to 0")
def a_small_one(delay):
    return 0.1


@told("largest_rate", "returned list, not a number")
def a_path(delay):
    return delayed_descent(1.0, 10, delay)


# ---- shared_step -----------------------------------------------------------------


def pull(store):
    return [store.read(i) for i in range(len(store))]


@told("shared_step", "Updates are lost")
def as_given(store, gradient):
    old = pull(store)
    for i, g in enumerate(gradient(old)):
        store.write(i, old[i] - g)


@told("shared_step", "Updates are lost")
def locks_the_write_alone(store, gradient):
    with store.lock:
        old = pull(store)
    for i, g in enumerate(gradient(old)):
        new = store.read(i) - g
        with store.lock:
            store.write(i, new)


@told("shared_step", "Updates are lost")
def writes_what_it_pulled(store, gradient):
    with store.lock:
        old = pull(store)
    change = gradient(old)
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, old[i] - g)


@told("shared_step", "Updates are lost")
def without_a_lock(store, gradient):
    for i, g in enumerate(gradient(pull(store))):
        store.write(i, store.read(i) - g)


@told("shared_step", "give the lock back before you compute")
def one_at_a_time(store, gradient):
    with store.lock:
        as_given(store, gradient)


@told("shared_step", "lock the pull, too")
def pulls_without_a_lock(store, gradient):
    change = gradient(pull(store))
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) - g)


@told("shared_step", "lock the pull, too")
def locks_each_read(store, gradient):
    old = []
    for i in range(len(store)):
        with store.lock:
            old.append(store.read(i))
    change = gradient(old)
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) - g)


@told("shared_step", "lock the pull, too")
def locks_each_write(store, gradient):
    with store.lock:
        old = pull(store)
    for i, g in enumerate(gradient(old)):
        with store.lock:
            store.write(i, store.read(i) - g)


@told("shared_step", "That goes uphill")
def adds(store, gradient):
    with store.lock:
        old = pull(store)
    change = gradient(old)
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) + g)


@told("shared_step", "Nothing has been added")
def computes_alone(store, gradient):
    with store.lock:
        old = pull(store)
    gradient(old)


@told("shared_step", "it deadlocks: every thread waits for the lock")
def takes_it_twice(store, gradient):
    with store.lock:
        old = pull(store)
    change = gradient(old)
    with store.lock:
        for i, g in enumerate(change):
            with store.lock:
                store.write(i, store.read(i) - g)


@told("shared_step", "or not given back")
def keeps_it(store, gradient):
    store.lock.acquire()
    as_given(store, gradient)


@told("shared_step", "gives back a lock that it does not have")
def gives_it_back_twice(store, gradient):
    with store.lock:
        as_given(store, gradient)
        store.lock.release()


@told("shared_step", "there is no weight 1")
def counts_from_one(store, gradient):
    gradient([store.read(i + 1) for i in range(len(store))])


@told("shared_step", "gradient takes a list of all 2 weights")
def one_weight(store, gradient):
    with store.lock:
        old = store.read(0)
    change = gradient([old])
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) - g)


@told("shared_step", "A step computes one gradient")
def computes_twice(store, gradient):
    with store.lock:
        old = pull(store)
    change = gradient(old)
    change = gradient(old)
    with store.lock:
        for i, g in enumerate(change):
            store.write(i, store.read(i) - g)
