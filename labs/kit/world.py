"""Start ranks, run a function on each, and end with all results or one clear reason.

    launch(fn, n_ranks, *args) -> [fn(0, n_ranks, *args), fn(1, n_ranks, *args), ...]

Ranks are fresh processes of a fork server that has already imported torch: quick to
start, and nothing that the notebook did (CUDA, threads, process groups) gets into them.
Under torchrun the same call joins the world that torchrun has started.
"""

import contextlib
import multiprocessing
import os
import shutil
import sys
import time
import types
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from labs.kit import carry, clock, messages, rank, torchrun, watchdog
from labs.kit import plan as planning
from labs.kit.watchdog import Deadlock, Failure, RankFailed, Status

_GRACE = 0.5  # seconds in which the true cause may still arrive after an echo of it
_MAX_OUTPUT = 1 << 20  # bytes printed per rank; a print in an endless loop stops there


def launch(fn, n_ranks, *args, backend="auto", limit=None):
    """Run fn(rank, n_ranks, *args) on n_ranks ranks; return their results in rank order.

    fn: any function, also a lambda or closure from a notebook cell. backend: "auto",
    "gloo" or "nccl". limit: seconds after which the run is ended (None: no limit; a
    deadlock is found in seconds all the same).
    Raises RankFailed (Deadlock) naming the rank, its line and the cause; ValueError for
    what cannot run. Whatever happens, no process is left.
    """
    if not callable(fn):
        raise TypeError(f"launch takes a function first, not {type(fn).__name__}.")
    if "LABS_RANK" in os.environ:
        raise RuntimeError("launch() was called inside a rank: call it from outside.")
    if torchrun.started_us():
        return torchrun.join(fn, n_ranks, args, backend)
    run = _Run(plan(n_ranks, backend), limit)
    try:
        run.start(_packed(fn, args))
        return run.results()
    finally:
        run.end()


def plan(n_ranks, backend="auto"):
    """Return the Plan for this machine as it is now."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return planning.plan(n_ranks, gpus, cores(), os.environ, backend)


def cores():
    """Return how many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def here():
    """Return, inside a rank, the name of the device that it computes on."""
    if messages.device.type == "cuda":
        return torch.cuda.get_device_name(messages.device)
    return f"CPU with {cores()} core{'s' * (cores() > 1)}"


def warm_up():
    """Start the fork server now, so that the first launch need not wait for it."""
    context = _context()
    if context.get_start_method() == "forkserver":
        from multiprocessing import forkserver

        with _without_main():
            forkserver.ensure_running()


def _context():
    methods = multiprocessing.get_all_start_methods()
    if "forkserver" not in methods or sys.platform == "darwin":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["labs.kit.rank"])
    return context


def _packed(fn, args):
    try:
        return carry.pack((fn, args))
    except Exception as error:
        raise TypeError(
            f"the function or its arguments cannot be sent to ranks ({error}): pass "
            "tensors, numbers, functions or classes, and open files in the rank."
        ) from None


@contextlib.contextmanager
def _without_main():
    """Keep multiprocessing from running the caller's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class _Rank:
    """The parent's view of one rank."""

    def __init__(self, number, context):
        self.number, self.process = number, None
        self.control, self._control = context.Pipe()
        self.out, self._out = context.Pipe(duplex=False)
        self.err, self._err = context.Pipe(duplex=False)
        self.status, self.failure, self.result = Status(), None, None
        self.text = {"out": b"", "err": b"", "crash": b""}
        self.printed = 0

    def start(self, context, plan, meeting, packed, environment):
        theirs = self._control, self._out, self._err
        self.process = context.Process(
            target=rank.main,
            args=(self.number, plan, meeting, packed, environment, *theirs),
            daemon=True,
        )
        self.process.start()
        for end in theirs:
            end.close()

    def pump(self, ready):
        """Read what the rank has printed and said, without waiting."""
        for name, pipe in (("out", self.out), ("err", self.err)):
            while pipe in ready or (not pipe.closed and pipe.poll()):
                data = _read(pipe)
                if not data:
                    break
                self.text[name] += data
                ready = [other for other in ready if other is not pipe]
        # A crash in C ends with a dump of all threads: it is read, not printed.
        err, start, dump = self.text["err"].partition(b"Fatal Python error")
        if start or self.text["crash"]:
            self.text["err"] = err if start else b""
            self.text["crash"] += dump or err
        while not self.control.closed and self.control.poll():
            try:
                self._hear(*self.control.recv())
            except (EOFError, OSError):
                self.control.close()

    def _hear(self, kind, payload):
        if kind == "status" and self.result is None:
            self.status = payload
        elif kind == "returned":
            self.result, self.status = payload, Status(returned=True)
        elif kind == "failed" and self.failure is None:
            self.failure = payload

    def check(self):
        """A process that is gone without a word was killed, or exited."""
        if self.result or self.failure or self.process.is_alive():
            return
        self.pump([])
        self.failure = self.failure or self._gone()

    def _gone(self):
        code = self.process.exitcode
        dump = self.text["crash"].decode(errors="replace")
        place = rank.where_is(dump) or self.status.place
        text = watchdog.exit_in_words(code)
        return Failure(self.number, "killed", text, place, time.time())

    def end(self):
        """Kill the process with all that it started, and close the pipes."""
        if self.process is not None and self.process.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, 9)
            if self.process.is_alive():
                self.process.kill()
            self.process.join(5)
            self.process.close()
        for pipe in (self.control, self._control, self.out, self._out, self.err,
                     self._err):  # fmt: skip
            pipe.close()


def _read(pipe):
    """Return what is in a pipe; close it and return nothing at its end."""
    try:
        data = os.read(pipe.fileno(), 1 << 16)
    except OSError:
        data = b""
    if not data:
        pipe.close()
    return data


class _Run:
    """One launch: the ranks, and what has been heard of them."""

    def __init__(self, plan, limit):
        self.plan, self.limit = plan, limit
        self.context = _context()
        self.ranks = []
        self.changed = self.begun = time.monotonic()
        self.name = f"{os.getpid()}-{time.monotonic_ns()}"

    def start(self, packed):
        store = dist.TCPStore("127.0.0.1", 0, self.plan.n_ranks, True,
                              wait_for_workers=False)  # fmt: skip
        self.store = store  # it lives as long as the run; the port is a free one
        environment = self._environment()
        with _without_main():
            for number in range(self.plan.n_ranks):
                self.ranks.append(_Rank(number, self.context))
                self.ranks[-1].start(
                    self.context, self.plan, ("127.0.0.1", store.port), packed,
                    environment,
                )  # fmt: skip

    def _environment(self):
        """The notebook's environment, without a world that it may have left there."""
        stale = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        kept = {k: v for k, v in os.environ.items() if k not in stale}
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        if loopback:
            kept.setdefault("GLOO_SOCKET_IFNAME", loopback)
        kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return {**kept, "LABS_RUN": self.name, "LABS_RANK": "1"}

    def results(self):
        """Watch until all have returned; raise as soon as one cannot."""
        while not all(one.result for one in self.ranks):
            self._listen()
            self._judge()
        self._drain()
        return [rank.loads(one.result) for one in self.ranks]

    def _listen(self, seconds=0.1):
        pipes = [
            pipe
            for one in self.ranks
            for pipe in (one.control, one.out, one.err, one.process.sentinel)
            if isinstance(pipe, int) or not pipe.closed
        ]
        ready = wait(pipes, seconds)
        for one in self.ranks:
            had = one.result
            one.pump(ready)
            one.check()
            if one.result is not had:
                self.changed = time.monotonic()
        self._print_live()

    def _judge(self):
        failures = [one.failure for one in self.ranks if one.failure]
        if failures:
            self._wait_for_the_cause()
            failures = [one.failure for one in self.ranks if one.failure]
            self._raise(watchdog.culprit(failures))
        now = time.monotonic()
        statuses = [one.status for one in self.ranks]
        verdict = watchdog.deadlock(statuses, now - self.changed)
        if verdict:
            self._raise(verdict)
        if self.limit and now - self.begun > self.limit:
            self._raise(watchdog.late(statuses, self.limit))

    def _wait_for_the_cause(self):
        until = time.monotonic() + _GRACE
        while time.monotonic() < until:
            self._listen(until - time.monotonic())

    def _raise(self, failure):
        self._drain()
        raise (Deadlock if failure.kind == "deadlock" else RankFailed)(failure)

    def _print_live(self):
        """Print whole lines of the first rank that is not finished; the others' lines
        wait for their turn, so that the order is always the same."""
        for one in self.ranks:
            _print_lines(one, last=False)
            if not one.result:
                return

    def _drain(self):
        for one in self.ranks:
            one.pump([])
            _print_lines(one, last=True)

    def end(self):
        for one in self.ranks:
            one.end()
        self.store = None
        shutil.rmtree(clock.folder_of(self.name), ignore_errors=True)


def _print_lines(one, last):
    """Print a rank's output as whole lines with its number."""
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        done, newline, rest = one.text[name].rpartition(b"\n")
        if last and rest:
            done, newline, rest = one.text[name], b"\n", b""
        one.text[name] = rest
        for line in done.decode(errors="replace").split("\n") if newline else ():
            one.printed += len(line)
            if one.printed > _MAX_OUTPUT:
                continue
            shown = line.rstrip("\r").rpartition("\r")[2]  # the last state of a bar
            print(f"[rank {one.number}] {shown}", file=stream)
        stream.flush()


if "ipykernel" in sys.modules and "LABS_RANK" not in os.environ:
    warm_up()  # while the student reads the first cell
