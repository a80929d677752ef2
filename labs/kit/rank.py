"""What one rank does: get ready, run the function, say where it is, keep still.

`world.py` starts it. A rank that has returned keeps its connections open until all
ranks are judged: closed early, they would make a stuck peer fail with another error.
"""

import contextlib
import ctypes
import faulthandler
import inspect
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.fx.experimental.symbolic_shapes

from labs.kit import carry, messages, watchdog
from labs.kit.watchdog import Call, Failure, Status

_TICK = 0.2  # seconds between two looks at the main thread
_QUIET = 0.02  # seconds of CPU time that count as standing still
leave = os._exit  # the real one: inside a rank, os._exit says where it was called


def main(rank, plan, meeting, packed, environment, control, lifeline, *output):
    """The life of a rank that `launch` has started, until the parent ends it.

    meeting: (host, port) of the store where ranks meet; packed: (function, args);
    control: a pipe to the parent; lifeline: one that closes when the parent is gone;
    output: pipes for stdout, stderr and the trace of a crash.
    """
    os.setsid()  # Ctrl-C and a kernel's interrupt go to the parent, which decides
    _end_with(lifeline)
    _print_to(*output)
    multiprocessing.set_start_method(None, force=True)  # for DataLoaders
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(plan.n_ranks))
    reporter = Reporter(rank, control.send, lambda: _while_held(lifeline))
    try:
        function, args = _load(packed)
        reporter.start(function)
        prepare(plan, plan.devices[rank])
        _join(rank, plan, meeting)
        result = function(rank, plan.n_ranks, *args)
        messages.finish()
        flush()
        reporter.say("returned", pack(result))
    except BaseException as error:  # a rank reports whatever ends its function
        flush()
        reporter.fail(error)
    threading.Event().wait()


def _end_with(lifeline):
    """Let the system end this rank, with all that it has started, when the parent is
    gone, however it went: a busy interpreter would not notice."""
    import fcntl  # not on Windows

    with contextlib.suppress(OSError):  # a system that cannot do it
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    _while_held(lifeline, 0)


def _while_held(lifeline, seconds=_TICK):
    """Sleep a tick. Nothing is ever sent: what can be read is the end of the pipe."""
    if lifeline.poll(seconds):
        os.killpg(0, signal.SIGKILL)


def _print_to(out, err, crash):
    """Send what Python and C code print into the pipes."""
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    how = {"buffering": 1, "encoding": "utf-8", "errors": "replace", "closefd": False}
    sys.stdout = sys.__stdout__ = open(1, "w", **how)
    sys.stderr = sys.__stderr__ = open(2, "w", **how)
    faulthandler.enable(crash.fileno())  # a crash in C still names the Python line


def machine():
    """Return (GPUs, CPU cores) that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return torch.cuda.device_count(), len(os.sched_getaffinity(0))
    return torch.cuda.device_count(), os.cpu_count() or 1


def prepare(plan, device):
    """Set what torch needs in this process before a group is made."""
    warnings.filterwarnings("ignore", message=".*NumPy.*", module="torch")
    torch.set_num_threads(plan.threads)
    messages.device = torch.device(device)
    messages.staged = plan.place == "shared"
    if messages.device.type == "cuda":
        torch.cuda.set_device(messages.device)


def _load(packed):
    try:
        return carry.unpack(packed)
    except Exception as error:
        raise RuntimeError(
            f"the function cannot be loaded in a rank ({watchdog.in_words(error)}): "
            "ranks import modules from sys.path, so install or save what it needs."
        ) from None


def pack(result):
    """Return a rank's result as bytes."""
    try:
        return carry.pack(result)
    except Exception as error:
        raise TypeError(
            f"a result of type {type(result).__name__} cannot be sent back ({error}): "
            "return tensors, numbers, lists or dicts."
        ) from None


def _join(rank, plan, meeting):
    """Meet the other ranks at the parent's store."""
    store = dist.TCPStore(*meeting, plan.n_ranks, False, wait_for_workers=False)
    dist.init_process_group(
        plan.backend,
        store=store,
        rank=rank,
        world_size=plan.n_ranks,
        timeout=timeout(plan),
    )


def timeout(plan):
    """Return how long a group waits: on the CPU the watchdog, not a time-out, decides
    when waiting is hopeless; a rank that waits in NCCL spins, and looks busy to it."""
    return timedelta(minutes=1) if plan.place == "own" else timedelta(days=1)


def flush():
    """Write out what was printed, also by C code and into a stream of the reader's."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


class Reporter:
    """A thread that tells the judge where the function is, a few times a second.

    send: takes (kind, payload); wait: sleeps a tick, and returns True to stop.
    """

    def __init__(self, rank, send, wait):
        self.rank, self._send, self._wait = rank, send, wait
        self._lock = threading.Lock()
        self._thread, self._process = threading.get_ident(), os.getpid()
        self._first = None  # the function's first line
        self._returned = False

    def start(self, function):
        """Begin to report on the calling thread, which will run the function."""
        function = inspect.unwrap(getattr(function, "func", function))  # of a partial
        code = getattr(function, "__code__", None)
        if code and watchdog.is_users(code.co_filename):
            self._first = watchdog.place_of(code.co_filename, code.co_firstlineno)
        self.say("status", Status(self._first))
        self._name_exits()
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, kind, payload):
        with self._lock, contextlib.suppress(OSError, RuntimeError):
            self._send((kind, payload))

    def returned(self):
        """From now on, say that the function has returned."""
        self._returned = True
        self.say("status", Status(returned=True))

    def fail(self, error):
        """Say what ended the function; return it."""
        failure = watchdog.failure_of(self.rank, error, time.time())
        failure = failure._replace(place=failure.place or self._first)
        self.say("failed", failure)
        return failure

    def _watch(self):
        seen, since, quiet_cpu = None, time.monotonic(), 0.0
        while not self._wait():
            place, call = self._look()
            cpu = time.process_time() - time.thread_time()
            now = place, call, messages.moved
            if now != seen or cpu - quiet_cpu > _QUIET or call is None:
                seen, since, quiet_cpu = now, time.monotonic(), cpu
            status = Status(place, call, time.monotonic() - since)
            self.say("status", Status(returned=True) if self._returned else status)

    def _look(self):
        place, call = watchdog.where(sys._current_frames()[self._thread])
        doing = messages.doing
        return place or self._first, Call(*doing) if doing else call

    def _name_exits(self):
        """os._exit leaves no trace: say first where it was called."""

        def named(code):
            if os.getpid() == self._process:  # not a process that the rank has forked
                place, _ = watchdog.where(sys._getframe(1))
                text = f"ended its process with os._exit({code})"
                failure = Failure(self.rank, "exited", text, place, time.time())
                self.say("failed", failure)
            leave(code)

        os._exit = named
