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
import signal
import socket
import sys
import threading
import time
import types
from multiprocessing import forkserver
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from labs.kit import carry, clock, messages, rank, torchrun, watchdog
from labs.kit import plan as planning
from labs.kit.watchdog import Deadlock, Failure, RankFailed, Status

_TICK = 0.1  # seconds between two looks at ranks that say nothing
_MAX_OUTPUT = 4 << 20  # bytes shown per rank: a print in an endless loop stops there
_starting = threading.Lock()  # launches from several threads start one after the other


def launch(fn, n_ranks, *args, backend="auto", limit=None, may_fail=()):
    """Run fn(rank, n_ranks, *args) on n_ranks ranks; return all results in rank order.

    fn: any function, also a lambda or closure from a notebook cell. backend: "auto",
    "gloo" or "nccl". limit: seconds after which the run is ended (None: no limit; a
    deadlock is found in seconds all the same). may_fail: ranks without which the run
    goes on when they end too early; their results are then watchdog.Failure.
    Raises RankFailed (Deadlock) naming the rank, its line and the cause; ValueError or
    TypeError, before a rank starts, for what cannot run. No process is left.
    """
    if not callable(fn):
        raise TypeError(f"launch takes a function first, not {type(fn).__name__}.")
    if "LABS_RANK" in os.environ:
        raise RuntimeError("launch() was called inside a rank: call it from outside.")
    if limit is not None and not (isinstance(limit, (int, float)) and limit > 0):
        raise ValueError(f"limit is a time in seconds above 0, or None, not {limit!r}.")
    if sys.platform == "win32":
        raise RuntimeError("ranks need Linux or macOS: on Windows, use WSL.")
    if torchrun.started_us():  # it ends all ranks when one has failed
        return torchrun.join(fn, n_ranks, args, backend, limit)
    run = _Run(plan(n_ranks, backend), may_fail)
    try:
        run.start(_packed(fn, args))
        return run.results(limit)
    finally:
        run.end()


def plan(n_ranks, backend="auto"):
    """Return the Plan for this machine as it is now."""
    return planning.plan(n_ranks, *rank.machine(), os.environ, backend)


def cores():
    """Return how many CPU cores this process may use."""
    return rank.machine()[1]


def here():
    """Return, inside a rank, the name of the device that it computes on."""
    if messages.device.type == "cuda":
        return torch.cuda.get_device_name(messages.device)
    return f"CPU with {cores()} core{'s' * (cores() > 1)}"


def warm_up():
    """Start the fork server now, so that the first launch need not wait for it."""
    if _context().get_start_method() == "forkserver":
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            with _without_main():
                forkserver.ensure_running()  # it inherits that interrupts are blocked
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


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


def _unpacked(result):
    try:
        return carry.unpack(result)
    except Exception as error:
        raise TypeError(f"a rank's result cannot be read here: {error}.") from None


@contextlib.contextmanager
def _without_main():
    """Keep multiprocessing from running the caller's script again in every rank."""
    with _starting:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


class _Rank:
    """The parent's view of one rank: what it has said and printed."""

    def __init__(self, number, context):
        self.number, self.process = number, None
        self.control, control = context.Pipe()
        lifeline, self._lifeline = context.Pipe(duplex=False)
        ends = {name: context.Pipe(duplex=False) for name in ("out", "err", "crash")}
        self.pipes = {name: ours for name, (ours, _) in ends.items()}
        self._theirs = control, lifeline, *(theirs for _, theirs in ends.values())
        self.text = dict.fromkeys(ends, b"")
        self._room = dict.fromkeys(ends, _MAX_OUTPUT)
        self.status = self.failure = self.result = None

    def start(self, context, *args):
        self.process = context.Process(
            target=rank.main, args=(self.number, *args, *self._theirs)
        )
        self.process.start()
        for end in self._theirs:
            end.close()

    def handles(self):
        """Return what may have news."""
        pipes = [p for p in (self.control, *self.pipes.values()) if not p.closed]
        over = self.result or self.failure
        return pipes if over else [*pipes, self.process.sentinel]

    def pump(self):
        """Take in what the rank has said and printed, without waiting.

        The order matters: what it said before it ended is in the pipes when it has
        ended, and what it printed before it said so is there when it has said so.
        """
        ended = not self.process.is_alive()
        while not self.control.closed and self.control.poll():
            try:
                self._hear(*self.control.recv())
            except (EOFError, OSError):
                self.control.close()
        for name, pipe in self.pipes.items():
            self._keep(name, _read(pipe))
        if ended and not (self.result or self.failure):
            self._bury()

    def _hear(self, kind, payload):
        if kind == "status" and not self.result:
            self.status = payload
        elif kind == "returned":
            self.result, self.status = payload, Status(returned=True)
        elif kind == "failed":
            self.failure = self.failure or payload

    def _keep(self, name, data):
        room = self._room[name]
        self._room[name] = max(0, room - len(data))
        self.text[name] += data[:room]
        if len(data) > room > 0:
            self.text[name] += b"\n(and more, which is not shown)\n"

    def _bury(self):
        """A process that is gone without a word was killed, or exited."""
        crash = self.text["crash"].decode(errors="replace")
        place = watchdog.place_of_crash(crash) or (self.status and self.status.place)
        why = watchdog.exit_in_words(self.process.exitcode)
        self.failure = Failure(self.number, "killed", why, place, time.time())

    def show(self, last=False):
        """Print what the rank has printed, as whole lines with its number."""
        for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
            done, newline, rest = self.text[name].rpartition(b"\n")
            if last and rest:
                done, rest = self.text[name], b""
            elif not newline:
                continue
            self.text[name] = rest
            # Of a progress bar, which goes back by \r, the last state is shown.
            lines = done.decode(errors="replace").split("\n")
            lines = [line.rstrip("\r").rpartition("\r")[2] for line in lines]
            stream.write("".join(f"[rank {self.number}] {line}\n" for line in lines))
            stream.flush()

    def kill(self):
        """Kill the process with all that it has started."""
        if self.process and self.process.pid:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()

    def close(self):
        if self.process and self.process.pid:
            self.process.join(5)
            with contextlib.suppress(ValueError):  # not ended: the system holds it
                self.process.close()
        for pipe in (self.control, self._lifeline, *self.pipes.values(), *self._theirs):
            pipe.close()


def _read(pipe):
    """Return what is in a pipe, up to about 1 MB; close it at its end."""
    data = b""
    while not pipe.closed and len(data) < 1 << 20 and pipe.poll():
        more = os.read(pipe.fileno(), 1 << 16)
        data += more
        if not more:
            pipe.close()
    return data


def _store(n_ranks):
    """Return a store where ranks can meet, and its (host, port), which is a free one.

    Its socket is ours, for IPv4 alone: one for both asks the name server who 127.0.0.1
    in the form of IPv6 is, and waits 5 s when the answer gets lost.
    """
    listener = socket.create_server(("127.0.0.1", 0))
    meeting = listener.getsockname()
    store = dist.TCPStore(
        *meeting,
        n_ranks,
        True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, meeting


class _Run:
    """One launch: its ranks, and what has been heard of them."""

    def __init__(self, plan, may_fail=()):
        self.plan, self.ranks, self.store = plan, [], None
        self.may_fail = set(may_fail)
        self.name = f"{os.getpid()}-{time.monotonic_ns()}"

    def start(self, packed):
        warm_up()
        context, n_ranks = _context(), self.plan.n_ranks
        self.store, meeting = _store(n_ranks)  # it lives as long as the run
        environment = self._environment()
        with _without_main():
            for number in range(n_ranks):
                one = _Rank(number, context)
                self.ranks.append(one)
                one.start(context, self.plan, meeting, packed, environment)

    def _environment(self):
        """The notebook's environment, without a world that it may have left there."""
        stale = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        kept = {k: v for k, v in os.environ.items() if k not in stale}
        loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
        if loopback:
            kept.setdefault("GLOO_SOCKET_IFNAME", loopback)
        kept.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return {**kept, "LABS_RUN": self.name, "LABS_RANK": "1"}

    def results(self, limit):
        """Watch until all have returned; raise as soon as one cannot."""
        self.watch = watchdog.Watch(self.plan.n_ranks, limit)
        try:
            while not all(one.result or self._spared(one) for one in self.ranks):
                self._listen()
                self._judge()
        except KeyboardInterrupt:
            self._show_rest()
            where = watchdog.table(self.watch.statuses)
            print(f"Interrupted. The ranks were here:\n{where}", file=sys.stderr)
            raise
        self._show_rest()
        return [
            one.failure if self._spared(one) else _unpacked(one.result)
            for one in self.ranks
        ]

    def _spared(self, one):
        """Is this a rank that has failed, and without which the run goes on?"""
        return one.failure and one.number in self.may_fail

    def _listen(self):
        wait([pipe for one in self.ranks for pipe in one.handles()], _TICK)
        for one in self.ranks:
            known = one.status
            one.pump()
            if self._spared(one):
                one.kill()  # then the others notice
                one.status = Status(returned=True)
            if one.status is not known:
                self.watch.hear(one.number, one.status)
        self._show_live()

    def _judge(self):
        failures = lambda: [
            one.failure for one in self.ranks if one.failure and not self._spared(one)
        ]
        if failures():
            self._raise(watchdog.cause(failures, self._listen))
        verdict = self.watch.verdict()
        if verdict:
            self._raise(verdict)

    def _raise(self, failure):
        self._show_rest()
        raise (Deadlock if failure.kind == "deadlock" else RankFailed)(failure)

    def _show_live(self):
        """Print whole lines of the first rank that is not finished; the others' lines
        wait for their turn, so that the order is always the same."""
        for one in self.ranks:
            one.show()
            if not (one.result or self._spared(one)):
                return

    def _show_rest(self):
        for one in self.ranks:
            one.pump()
            one.show(last=True)

    def end(self):
        for one in self.ranks:
            one.kill()
        for one in self.ranks:
            one.close()
        self.store = None
        shutil.rmtree(clock.folder_of(self.name), ignore_errors=True)


if "ipykernel" in sys.modules and "LABS_RANK" not in os.environ:
    warm_up()  # while the student reads the first cell
