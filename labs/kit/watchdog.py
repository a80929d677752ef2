"""Who failed first, and who waits for whom, in words.

`rank.py` says where each rank is; `world.py` and `torchrun.py` ask here what it means.
"""

import linecache
import os
import re
import signal
import sysconfig
import time
from typing import NamedTuple

import torch

from labs.kit import carry

PATIENCE = 3.0  # seconds without any movement before waiting ranks are deadlocked
GRACE = 0.5  # seconds after a failure in which an earlier one may still be heard of
_FRESH = 1.0  # seconds for which a rank's word holds; a busy interpreter cannot speak
_LONGEST = 2000  # characters of an error's text
_KIT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMMUNICATION = os.path.join(_TORCH, "distributed") + os.sep
_LABS = os.path.dirname(os.path.dirname(_KIT)) + os.sep
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_ECHO = re.compile(
    r"[Cc]onnection (was )?(likely )?(closed|reset)|[Bb]roken pipe|[Ss]ocket closed"
    r"|Socket Timeout|Application timeout|unbound buffer|[Ff]ailed to recv"
    r"|remote process exited"
)
_NO_MEMORY = re.compile(r"out of memory|not enough memory|Cannot allocate memory")


class Place(NamedTuple):
    """A line of the reader's code."""

    source: str  # "Cell In[2]" or a path
    line: int
    text: str

    def __str__(self):
        shown = f": {self.text}" if self.text else ""
        return f"{self.source}, line {self.line}{shown}"


class Call(NamedTuple):
    """A communication call that a rank is in. `peer` None: every rank takes part."""

    name: str
    peer: int | None = None
    detail: str = ""

    def __str__(self):
        to = {"receive": " from", "exchange": " with"}.get(self.name, " to")
        peer = "" if self.peer is None else f"{to} rank {self.peer}"
        return f"{self.name}{peer}{self.detail}"


class Status(NamedTuple):
    """What a rank says of itself. `idle`: seconds for which nothing has changed."""

    place: Place | None = None
    call: Call | None = None
    idle: float = 0.0
    returned: bool = False

    def __str__(self):
        if self.returned:
            return "has returned"
        if not self.place:
            return "is getting ready"
        return f"waits in {self.call}  ({self.place})" if self.call else f"{self.place}"


class Failure(NamedTuple):
    """Why a rank did not return. `echo`: it only noticed that another one was gone."""

    rank: int
    kind: str  # "raised", "exited", "killed", "late" or "deadlock"
    text: str
    place: Place | None = None
    when: float = 0.0
    echo: bool = False
    trail: tuple = ()  # the places of user code on the way to the error
    peer: int | None = None  # of another rank that is gone, which it blames
    heard: tuple = ()  # what other ranks said of this one


class RankFailed(RuntimeError):
    """A run ended because of `failure`; the message names rank, place and cause."""

    def __init__(self, failure):
        super().__init__(tell(failure))
        self.failure = failure

    def __reduce__(self):
        return type(self), (self.failure,)

    def _render_traceback_(self):
        """Show a notebook the sentence, not the launcher's own frames."""
        return [f"{type(self).__name__}: {self}"]


class Deadlock(RankFailed):
    """Every unfinished rank waits for another one."""


# ---- where a rank is -----------------------------------------------------------------


def is_users(filename):
    """Is this the reader's code (a cell, a lab, a script) and not a library's?"""
    if filename.startswith((_KIT, _TORCH, _PYTHON, "<frozen", "<string>")):
        return False
    return filename.startswith(_LABS) or not _PACKAGES.search(filename)


def place_of(filename, line):
    return Place(carry.label(filename), line, linecache.getline(filename, line).strip())


def where(frame):
    """Return (place, call) of a running frame: the innermost line of the reader, and
    the communication call that it waits in, if it is in one."""
    inner, call = frame.f_code, None
    while frame is not None and not is_users(frame.f_code.co_filename):
        if inner.co_filename.startswith(_TORCH):
            call = _torch_call(frame) or call
        frame = frame.f_back
    if frame is None:
        return None, call
    users = frame.f_code, frame.f_lineno
    frame = None  # it keeps all its tensors alive: let go before any file is read
    place = place_of(users[0].co_filename, users[1])
    if users[0] is inner and ".wait(" in place.text:
        call = Call("work.wait()")  # of an isend or irecv; it has no frame of its own
    return place, call


def place_of_crash(dump):
    """Return the innermost line of the reader in faulthandler's text, or None."""
    crashed = dump.partition("Current thread")[2] or dump
    for name, line in re.findall(r'File "(.+)", line (\d+)', crashed):
        if is_users(name):
            return place_of(name, int(line))
    return None


def _torch_call(frame):
    """Translate a frame of torch.distributed: recv(src=1) is a receive from rank 1."""
    name = frame.f_code.co_name
    if name == "_engine_run_backward":
        return Call("backward()")  # where DDP waits; a rank that computes is not idle
    if name == "wrapper" or not frame.f_code.co_filename.startswith(_COMMUNICATION):
        return None
    name = {"recv": "receive", "irecv": "receive", "isend": "send"}.get(name, name)
    keys = {"receive": ("src", "group_src"), "send": ("dst", "group_dst")}
    peers = [frame.f_locals.get(key) for key in keys.get(name, ())]
    return Call(name, next((peer for peer in peers if peer is not None), None))


# ---- why a rank failed ---------------------------------------------------------------


def failure_of(rank, error, when):
    """Describe an exception that ended a rank's function."""
    trail, step = [], error.__traceback__
    while step is not None:
        if is_users(step.tb_frame.f_code.co_filename):
            trail.append(place_of(step.tb_frame.f_code.co_filename, step.tb_lineno))
        step = step.tb_next
    place = trail[-1] if trail else None
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r}) instead of returning"
        return Failure(rank, "exited", text, place, when)
    if isinstance(error, SyntaxError) and error.filename:
        place = place_of(error.filename, error.lineno or 0)
    text = in_words(error)
    if type(error) is MemoryError or _NO_MEMORY.search(text):
        text += "\n  It ran out of memory: make the batch or the model smaller."
    echo = isinstance(error, RuntimeError) and bool(_ECHO.search(text))
    peer = getattr(error, "peer", None)
    return Failure(rank, "raised", text, place, when, echo, tuple(trail), peer)


def in_words(error):
    """Return an exception's type and message, whatever that message is."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be shown)"
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]} … {text[-half:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_in_words(code):
    """Say what an exit code of a process means."""
    if code is None or code >= 0:
        return f"exited with code {code} before it returned"
    hints = {
        signal.SIGKILL: "SIGKILL: usually the system ran out of memory",
        signal.SIGSEGV: "SIGSEGV: a crash in compiled code",
        signal.SIGABRT: "SIGABRT: compiled code gave up, often over a wrong size",
    }
    known = {one.value: one.name for one in signal.Signals}
    return f"was killed by {hints.get(-code, known.get(-code, f'signal {-code}'))}"


def culprit(failures):
    """Return the failure that came first; one that only echoes another comes last.

    Ranks that fail on one line fail together: then it is the lowest of them, so that
    the message is the same every time.
    """
    failures = list(failures)
    failed = {failure.rank for failure in failures}
    first = min(failures, key=lambda f: (f.echo or f.peer in failed, f.when))
    alike = [f for f in failures if (f.place, f.echo) == (first.place, first.echo)]
    found = min(alike, key=lambda failure: failure.rank)
    heard = [f"rank {f.rank} raised {f.text}" for f in failures
             if f.peer == found.rank and not f.echo]  # fmt: skip
    return found._replace(heard=tuple(heard)) if heard else found


def cause(failures, pause):
    """Wait a moment for the true cause, longer while only echoes of it are known.

    failures: returns those known so far; pause: lets a little time pass.
    """
    begun = time.monotonic()
    while True:
        failure = culprit(failures())
        if time.monotonic() - begun > (PATIENCE if failure.echo else GRACE):
            return failure
        pause()


def tell(failure):
    """Return the failure in words: who, where, what."""
    if failure.kind == "deadlock":
        return failure.text
    verb = "raised " if failure.kind == "raised" else ""
    lines = [f"rank {failure.rank} {verb}{failure.text}"]
    if failure.place:
        at = "last seen at" if failure.kind in ("killed", "late") else "at"
        lines.append(f"  {at} {failure.place}")
    lines += [f"  called from {place}" for place in reversed(failure.trail[:-1])][:4]
    lines += [f"  {said}" for said in failure.heard]
    if failure.echo:
        lines.append("  Another rank had closed its connections, or had ended.")
    return "\n".join(lines)


# ---- who waits for whom --------------------------------------------------------------


class Watch:
    """What has been heard of each rank, and when."""

    def __init__(self, n_ranks, limit=None):
        self.statuses, self._heard = [Status()] * n_ranks, [0.0] * n_ranks
        self._limit = limit
        self._begun = self._changed = time.monotonic()

    def hear(self, rank, status):
        self._heard[rank] = time.monotonic()
        if status.returned and not self.statuses[rank].returned:
            self._changed = self._heard[rank]  # the others may go on because of it
        self.statuses[rank] = status

    def verdict(self):
        """Return why the run must end, as a Failure, or None."""
        now = time.monotonic()
        if self._limit is not None and now - self._begun > self._limit:
            return late(self.statuses, self._limit)
        statuses = [
            status if now - heard < _FRESH else status._replace(idle=0.0)
            for status, heard in zip(self.statuses, self._heard)
        ]
        return deadlock(statuses, now - self._changed)


def table(statuses):
    """Return a line per rank: where it is."""
    return "\n".join(f"  rank {rank}  {one}" for rank, one in enumerate(statuses))


def late(statuses, limit):
    """Describe a run that was ended at its time limit: blame a rank that computes."""
    running = [r for r, status in enumerate(statuses) if not status.returned]
    busy = [r for r in running if not statuses[r].call] or running
    text = f"had not returned after {limit:g} s, the limit of this run"
    return Failure(busy[0], "late", text, statuses[busy[0]].place)


def deadlock(statuses, since_change):
    """Return the verdict as a Failure, or None while anything may still move.

    statuses: one Status per rank; since_change: seconds since a rank last returned.
    """
    stuck = [rank for rank, status in enumerate(statuses) if not status.returned]
    waiting = all(
        statuses[rank].call and statuses[rank].idle >= PATIENCE for rank in stuck
    )
    if not stuck or not waiting or since_change < PATIENCE:
        return None
    first, why = _explain(statuses, stuck)
    text = f"nothing has moved for {PATIENCE:.0f} s.\n{table(statuses)}\n{why}"
    return Failure(first, "deadlock", text, statuses[first].place)


def _explain(statuses, stuck):
    """Return (a rank to blame, one sentence that says why nobody can go on)."""
    for rank in stuck:
        call = statuses[rank].call
        if call.peer is not None and call.peer not in stuck:
            why = f"rank {call.peer} has already returned."
            return rank, f"rank {rank} is stuck in {call}; {why}"
    for rank in stuck:
        if statuses[rank].call.peer is None:
            return _absentees(statuses, rank)
    cycle = _cycle({rank: statuses[rank].call.peer for rank in stuck})
    calls = "; ".join(f"rank {r} is stuck in {statuses[r].call}" for r in cycle)
    names = {statuses[rank].call.name for rank in cycle}
    advice = _ADVICE.get(names.pop() if len(names) == 1 else "mixed")
    return cycle[0], f"{calls}: {advice}"


_ADVICE = {
    "receive": "everyone receives and nobody sends. "
    "Let one of them send first, or use exchange().",
    "send": "everyone sends and nobody receives. "
    "Let one of them receive first, or use exchange().",
    "mixed": "each waits for a message that the other has not sent or does not take. "
    "Compare the order of their calls, and the tags.",
    "exchange": "each waits for a partner that is waiting for another one.",
}


def _absentees(statuses, rank):
    """Blame the ranks that did not come to the call that `rank` waits in."""
    call = statuses[rank].call
    if call.name in ("work.wait()", "receive"):  # raw calls that name no peer
        return rank, f"rank {rank} waits for a message that no rank sends or takes."
    absent = [
        other
        for other, status in enumerate(statuses)
        if status.returned or status.call.name != call.name
    ]
    if not absent:
        return rank, f"all ranks are in {call.name}, but not in the same one."
    doing = "; ".join(
        f"rank {other} "
        + ("has already returned" if status.returned else f"is in {status.call}")
        for other, status in enumerate(statuses)
        if other in absent
    )
    return absent[0], (
        f"rank {rank} is stuck in {call.name}, which every rank must call; {doing}."
    )


def _cycle(waits_for):
    """Follow who waits for whom until a rank comes twice; return that circle."""
    path = [next(iter(waits_for))]
    while waits_for[path[-1]] not in path:
        path.append(waits_for[path[-1]])
    return path[path.index(waits_for[path[-1]]) :]
