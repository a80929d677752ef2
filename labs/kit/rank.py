"""What one rank does: get ready, run the function, say where it is, keep still.

`world.py` starts it. A rank that has returned keeps its connections open until all ranks
are judged: closing them early would make a stuck peer fail with a misleading error.
"""

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import threading
import time
import warnings

import torch
import torch.distributed as dist

from labs.kit import carry, messages, watchdog
from labs.kit.watchdog import Call, Failure, Status

_TICK = 0.2  # seconds between two looks at the main thread
leave = os._exit  # the real one: inside a rank, os._exit says where it was called
_QUIET = 0.02  # seconds of CPU time that count as standing still


def main(rank, plan, meeting, packed, environment, control, out, err):
    """The life of a rank that `launch` has started, until the parent lets go.

    meeting: (host, port) of the store where ranks meet; packed: (function, args);
    control: a pipe to the parent; out, err: pipes for what the rank prints.
    """
    _settle(rank, plan, environment, out, err)
    reporter = Reporter(rank, control.send, lambda: _while_held(control))
    try:
        function, args = _load(packed)
        reporter.start(function)
        _join(rank, plan, meeting)
        result = function(rank, plan.n_ranks, *args)
        messages.finish()
        sys.stdout.flush()
        sys.stderr.flush()
        reporter.say("returned", _pack(result))
    except BaseException as error:  # a rank reports whatever ends its function
        reporter.say("failed", watchdog.failure_of(rank, error, time.time()))
    threading.Event().wait()  # the parent ends this process


def _while_held(control):
    """Sleep a tick. The parent never writes: what can be read is the end of the pipe."""
    if control.poll(_TICK):
        leave(0)


def _settle(rank, plan, environment, out, err):
    """Make this process a rank: own process group, own output, its share of threads."""
    if sys.platform != "win32":
        os.setsid()  # Ctrl-C and a kernel's interrupt go to the parent, which decides
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    sys.stdout = open(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = open(2, "w", buffering=1, errors="replace", closefd=False)
    faulthandler.enable(file=2)  # a crash in C still names the Python line
    os.environ.clear()
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(plan.n_ranks))
    prepare(plan, plan.devices[rank])


def prepare(plan, device):
    """Set what torch needs in this process before a group is made."""
    warnings.filterwarnings("ignore", message=".*NumPy.*", module="torch")
    torch.set_num_threads(plan.threads)
    messages.device = torch.device(device)
    messages.staged = plan.place == "shared"
    if messages.device.type == "cuda":
        torch.cuda.set_device(messages.device)


def _die_with_parent():
    """Linux: the kernel ends this process when its parent is gone, however that went."""
    with contextlib.suppress(OSError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _load(packed):
    try:
        return carry.unpack(packed)
    except Exception as error:
        raise RuntimeError(
            f"the function cannot be loaded in a rank ({type(error).__name__}: {error}):"
            " ranks import modules from sys.path, so install or save what it needs."
        ) from None


def _pack(result):
    try:
        return carry.pack(result)
    except Exception as error:
        raise TypeError(
            f"the result of type {type(result).__name__} cannot be sent back ({error}): "
            "return tensors, numbers, lists or dicts."
        ) from None


def _join(rank, plan, meeting):
    """Meet the other ranks at the parent's store. The watchdog, not a time-out of the
    group, decides when waiting is hopeless: slow is not stuck."""
    from datetime import timedelta

    store = dist.TCPStore(*meeting, plan.n_ranks, False, wait_for_workers=False)
    dist.init_process_group(
        plan.backend,
        store=store,
        rank=rank,
        world_size=plan.n_ranks,
        timeout=timedelta(days=1) if plan.place != "own" else timedelta(minutes=1),
    )


class Reporter:
    """A thread that tells the judge where the main thread is, a few times a second.

    send: takes (kind, payload); wait: sleeps a tick, and returns True to stop.
    """

    def __init__(self, rank, send, wait):
        self.rank, self._send, self._wait = rank, send, wait
        self._lock = threading.Lock()
        self._main = threading.main_thread().ident

    def start(self, function):
        """Begin to report; until the first look, the rank stands at its first line."""
        code = getattr(function, "__code__", None)
        place = code and watchdog.place_of(code.co_filename, code.co_firstlineno)
        self.say("status", Status(place))
        self._name_exits()
        threading.Thread(target=self._watch, daemon=True).start()

    def say(self, kind, payload):
        with self._lock, contextlib.suppress(OSError):
            self._send((kind, payload))

    def _watch(self):
        seen, since, quiet_cpu = None, time.monotonic(), 0.0
        while not self._wait():
            place, call = self._look()
            cpu = time.process_time() - time.thread_time()
            now = place, call, messages.moved
            if now != seen or cpu - quiet_cpu > _QUIET or call is None:
                seen, since, quiet_cpu = now, time.monotonic(), cpu
            self.say("status", Status(place, call, time.monotonic() - since))

    def _look(self):
        place, call = watchdog.where(sys._current_frames()[self._main])
        doing = messages.doing
        if doing:
            call = Call(doing[0], doing[1], doing[2])
        return place, call

    def _name_exits(self):
        """os._exit leaves no trace: say first where it was called."""

        def named(code):
            place, _ = watchdog.where(sys._getframe(1))
            text = f"ended its process with os._exit({code})"
            failure = Failure(self.rank, "exited", text, place, time.time())
            self.say("failed", failure)
            leave(code)

        os._exit = named


def where_is(frame_dump):
    """Return the innermost place of user code in faulthandler's text, or None."""
    for line in frame_dump.splitlines():
        if line.strip().startswith('File "') and ", line " in line:
            name, _, rest = line.strip()[6:].partition('", line ')
            number = rest.split()[0].rstrip(",")
            if number.isdigit() and watchdog.is_users(name):
                return watchdog.place_of(name, int(number))
    return None


def loads(packed):
    """Unpack a result on the parent's side."""
    try:
        return carry.unpack(packed)
    except (pickle.UnpicklingError, ImportError, AttributeError) as error:
        raise TypeError(f"a rank's result cannot be read here: {error}.") from None
