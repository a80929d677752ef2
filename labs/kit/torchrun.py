"""The same launch in a world that torchrun has started: no parent, a store instead.

Each rank reports to the store that torchrun provides; rank 0's reporter judges, and all
reporters read the verdict.
"""

import os
import pickle
import sys
import threading
import time

import torch
import torch.distributed as dist

from labs.kit import carry, clock, messages, rank, watchdog
from labs.kit import plan as planning
from labs.kit.watchdog import Failure, Status

_TICK = 0.3
_runs = 0  # launches so far; each reports under keys of its own


def started_us():
    """Did torchrun start this process? RANK alone may be left over from anything."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def join(fn, n_ranks, args, backend="auto"):
    """Run fn as this process's rank; return all results, in rank order, on every rank."""
    env = os.environ
    mine, world, local = (int(env[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if n_ranks != world:
        raise ValueError(
            f"torchrun started {world} ranks, but the run asks for {n_ranks}: "
            "make --nproc-per-node (times --nnodes) and the option agree."
        )
    _join_group(n_ranks, local, backend)
    board = _Board(mine, n_ranks)
    reporter = rank.Reporter(mine, board.post, board.wait)
    reporter.start(fn)
    try:
        result = fn(mine, n_ranks, *args)
        messages.finish()
        packed = carry.pack(result)
    except BaseException as error:
        failure = watchdog.failure_of(mine, error, time.time())
        board.post(("failed", failure))
        board.leave(board.first_failure() or failure)
    results = [None] * n_ranks
    dist.all_gather_object(results, packed)
    board.post(("status", Status(returned=True)))
    board.stop()
    return [carry.unpack(one) for one in results]


def _join_group(n_ranks, local, backend):
    """Make the process group once, and compare clocks where there are several hosts."""
    global _runs
    _runs += 1
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    plan = planning.plan(n_ranks, gpus, cores, os.environ, backend, here)
    rank.prepare(plan, plan.devices[local])
    if not dist.is_initialized():
        os.environ["LABS_RUN"] = "-".join(
            os.environ.get(key, "") for key in ("TORCHELASTIC_RUN_ID", "MASTER_PORT")
        )
        dist.init_process_group(plan.backend)
        if here < n_ranks:
            clock.offset = messages.clock_offset()


class _Board:
    """What ranks write for each other in the store; one client per process, because a
    client that waits holds up all other calls on it."""

    def __init__(self, mine, n_ranks):
        self.mine, self.n_ranks, self.over = mine, n_ranks, threading.Event()
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, None, False, wait_for_workers=False)
        self.store = dist.PrefixStore(f"labs/{_runs}", store)
        self.changed, self.returned = time.monotonic(), 0

    def post(self, message):
        kind, payload = message
        self.store.set(f"{kind}/{self.mine}", pickle.dumps(payload))

    def read(self, kind):
        """Return what the ranks have posted under `kind`, None for those that have not."""
        keys = [f"{kind}/{other}" for other in range(self.n_ranks)]
        there = [self.store.check([key]) for key in keys]
        return [
            pickle.loads(self.store.get(key)) if has else None
            for key, has in zip(keys, there)
        ]

    def wait(self):
        """Sleep a tick; then end this process if the run has been judged."""
        if self.over.wait(_TICK):
            return True
        if self.mine == 0:
            self._judge()
        if self.store.check(["failed/verdict"]):
            self.leave(pickle.loads(self.store.get("failed/verdict")))
        return False

    def _judge(self):
        statuses = [status or Status() for status in self.read("status")]
        returned = sum(status.returned for status in statuses)
        if returned != self.returned:
            self.returned, self.changed = returned, time.monotonic()
        since = time.monotonic() - self.changed
        verdict = self.first_failure() or watchdog.deadlock(statuses, since)
        if verdict:
            self.store.set("failed/verdict", pickle.dumps(verdict))

    def first_failure(self):
        """Wait a moment for the true cause; return the first failure posted."""
        if not any(self.read("failed")):
            return None
        time.sleep(0.5)
        return watchdog.culprit([one for one in self.read("failed") if one])

    def leave(self, failure: Failure):
        """End this process; only the rank that is to blame speaks."""
        speaker = failure.rank
        if self.mine == speaker:
            print(watchdog.tell(failure), file=sys.stderr, flush=True)
        else:
            time.sleep(0.5)  # torchrun ends all ranks when one has gone
        rank.leave(1)

    def stop(self):
        self.over.set()
