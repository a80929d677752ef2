"""The same launch in a world that torchrun has started: no parent, a store instead.

Each rank reports to the store that torchrun provides; rank 0's reporter judges, and all
reporters read the verdict.
"""

import atexit
import contextlib
import os
import pickle
import shutil
import sys
import threading
import time

import torch.distributed as dist

from labs.kit import carry, clock, messages, rank, watchdog
from labs.kit import plan as planning

_TICK = 0.3
_runs = 0  # launches so far; each reports under keys of its own


def started_us():
    """Did torchrun start this process? RANK alone may be left over from anything."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def join(fn, n_ranks, args, backend="auto", limit=None):
    """Run fn as this process's rank; every rank returns all results, in rank order."""
    env = os.environ
    mine, world, local = (int(env[k]) for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if n_ranks != world:
        raise ValueError(
            f"torchrun started {world} ranks, but the run asks for {n_ranks}: "
            "make --nproc-per-node (times --nnodes) and the option agree."
        )
    _join_group(n_ranks, local, backend)
    board = _Board(mine, n_ranks, limit)
    reporter = rank.Reporter(mine, board.post, board.wait)
    with _marked():
        reporter.start(fn)
        try:
            result = fn(mine, n_ranks, *args)
            messages.finish()
            packed = rank.pack(result)
            reporter.returned()
            results = [None] * n_ranks
            dist.all_gather_object(results, packed)
        except BaseException as error:
            board.leave(reporter.fail(error))
    board.over.set()
    return [carry.unpack(one) for one in results]


@contextlib.contextmanager
def _marked():
    """As long as the function runs, this process is a rank, which cannot launch."""
    os.environ["LABS_RANK"] = "1"
    try:
        yield
    finally:
        os.environ.pop("LABS_RANK", None)


def _join_group(n_ranks, local, backend):
    """Make the process group once, and compare clocks where there are several hosts."""
    here = int(os.environ["LOCAL_WORLD_SIZE"])
    plan = planning.plan(n_ranks, *rank.machine(), os.environ, backend, here)
    rank.prepare(plan, plan.devices[local])
    if not dist.is_initialized():
        keys = "TORCHELASTIC_RUN_ID", "MASTER_PORT"
        run = os.environ["LABS_RUN"] = "-".join(os.environ[key] for key in keys)
        atexit.register(shutil.rmtree, clock.folder_of(run), ignore_errors=True)
        dist.init_process_group(plan.backend, timeout=rank.timeout(plan))
        if here < n_ranks:
            clock.offset = messages.clock_offset()


class _Board:
    """What ranks write for each other in the store; one client per process, because a
    client that waits holds up all other calls on it."""

    def __init__(self, mine, n_ranks, limit):
        global _runs
        _runs += 1
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(host, port, None, False, wait_for_workers=False)
        self.store = dist.PrefixStore(f"labs/{attempt}/{_runs}", store)
        self.mine, self.n_ranks, self.over = mine, n_ranks, threading.Event()
        self.watch = watchdog.Watch(n_ranks, limit)

    def post(self, message):
        kind, payload = message
        self.store.set(f"{kind}/{self.mine}", pickle.dumps(payload))
        if kind == "failed" and payload.kind == "exited":
            self._tell(payload)  # this process may not live to do it later

    def read(self, kind):
        """Return {rank: what it has posted under `kind`}."""
        keys = {other: f"{kind}/{other}" for other in range(self.n_ranks)}
        return {
            other: pickle.loads(self.store.get(key))
            for other, key in keys.items()
            if self.store.check([key])
        }

    def wait(self):
        """Sleep a tick; then end this process if the run has been judged, or if the
        store, and so torchrun, is gone."""
        if self.over.wait(_TICK):
            return True
        try:
            if self.mine == 0:
                self._judge()
            if self.store.check(["verdict"]):
                self._end(pickle.loads(self.store.get("verdict")))
        except RuntimeError:
            rank.leave(1)
        return False

    def _judge(self):
        for other, status in self.read("status").items():
            if status != self.watch.statuses[other]:
                self.watch.hear(other, status)
        verdict = self._cause() if self.read("failed") else self.watch.verdict()
        if verdict:
            self.store.set("verdict", pickle.dumps(verdict))

    def _cause(self):
        failures = lambda: self.read("failed").values()
        return watchdog.cause(failures, lambda: time.sleep(_TICK))

    def leave(self, failure):
        """End this process once it is known which failure came first."""
        with contextlib.suppress(RuntimeError):
            failure = self._cause()
        self._end(failure)

    def _end(self, failure):
        """One rank says what happened; torchrun ends the others when one has gone."""
        rank.flush()
        if not self._tell(failure):
            time.sleep(watchdog.GRACE)
        rank.leave(1)

    def _tell(self, failure):
        first = self.store.add("told", 1) == 1
        if first:
            print(watchdog.tell(failure), file=sys.stderr, flush=True)
        return first
