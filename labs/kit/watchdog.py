"""Who failed first, and who waits for whom, in words.

Pure functions of what each rank says about itself; `rank.py` says it, `world.py` asks.
"""

import linecache
import os
import re
import signal
import sysconfig
from typing import NamedTuple

import torch

from labs.kit import carry

PATIENCE = 3.0  # seconds without any movement before waiting ranks are deadlocked
_KIT = os.path.dirname(os.path.abspath(__file__)) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMMUNICATION = (os.path.join(_TORCH, "distributed") + os.sep,)
_LIBRARIES = (_KIT, *{sysconfig.get_path(p) + os.sep for p in ("stdlib", "purelib")})
_ECHO = re.compile(
    r"[Cc]onnection (was )?(closed|reset)|[Bb]roken pipe|[Ss]ocket (closed|Timeout)"
    r"|Application timeout|unbound buffer|Failed to recv"
)


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


class Failure(NamedTuple):
    """Why a rank did not return. `echo`: it only noticed that another one failed."""

    rank: int
    kind: str  # "raised", "exited", "killed", "late" or "deadlock"
    text: str
    place: Place | None = None
    when: float = 0.0
    echo: bool = False
    trail: tuple = ()  # the places of user code on the way to the error


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


def is_users(filename):
    """Is this the reader's code (a cell, a lab, a script) and not a library's?"""
    if filename.startswith("<frozen") or filename.startswith(_TORCH):
        return False
    return not filename.startswith(_LIBRARIES)


def place_of(filename, line):
    return Place(carry.label(filename), line, linecache.getline(filename, line).strip())


def where(frame):
    """Return (place, call) of a running frame: the innermost line of the reader, and
    the torch.distributed call that it is in, if it is in one."""
    call = None
    while frame is not None and not is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_COMMUNICATION):
            name = frame.f_code.co_name
            if name != "wrapper":  # torch's own logging around every call
                call = _torch_call(name, frame.f_locals)
        frame = frame.f_back
    if frame is None:
        return None, call
    place = place_of(frame.f_code.co_filename, frame.f_lineno)
    if call is None and ".wait(" in place.text:
        call = Call("work.wait()")  # the Work of an isend or irecv: no Python frame inside
    return place, call


def _torch_call(name, arguments):
    """Translate a frame of torch.distributed: recv(src=1) is a receive from rank 1."""
    name = {"recv": "receive", "irecv": "receive", "isend": "send"}.get(name, name)
    keys = {"receive": ("src", "group_src"), "send": ("dst", "group_dst")}
    peers = [arguments.get(key) for key in keys.get(name, ())]
    return Call(name, next((peer for peer in peers if peer is not None), None))


def failure_of(rank, error, when):
    """Describe an exception that ended a rank's function."""
    trail, innermost = [], ""
    step = error.__traceback__
    while step is not None:
        innermost = step.tb_frame.f_code.co_filename
        if is_users(innermost):
            trail.append(place_of(innermost, step.tb_lineno))
        step = step.tb_next
    place = trail[-1] if trail else None
    if isinstance(error, SystemExit):
        text = f"called sys.exit({error.code!r}) instead of returning"
        return Failure(rank, "exited", text, place, when)
    if isinstance(error, SyntaxError) and error.filename:
        place = Place(carry.label(error.filename), error.lineno, error.text or "")
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "alloc" in text:
        text += "\nIt ran out of memory: make the batch or the model smaller."
    in_kit = innermost.startswith((_KIT, *_COMMUNICATION))
    echo = in_kit and bool(_ECHO.search(text))
    return Failure(rank, "raised", text, place, when, echo, tuple(trail))


def culprit(failures):
    """Return the failure that came first; one that only echoes another comes last."""
    return min(failures, key=lambda failure: (failure.echo, failure.when))


def tell(failure):
    """Return the failure in words: who, where, what."""
    if failure.kind == "deadlock":
        return failure.text
    lines = [f"rank {failure.rank} {_VERBS[failure.kind]}{failure.text}"]
    if failure.place:
        at = "last seen" if failure.kind in ("killed", "late") else "at"
        lines.append(f"  {at} {failure.place}")
    lines += [f"  called from {place}" for place in reversed(failure.trail[:-1])][:4]
    return "\n".join(lines)


_VERBS = {"raised": "raised ", "exited": "", "killed": "", "late": ""}


def deadlock(statuses, since_change):
    """Return the verdict as a Failure, or None while anything may still move.

    statuses: one Status per rank; since_change: seconds since a rank last finished.
    """
    stuck = [rank for rank, status in enumerate(statuses) if not status.returned]
    waiting = all(
        statuses[rank].call and statuses[rank].idle >= PATIENCE for rank in stuck
    )
    if not stuck or not waiting or since_change < PATIENCE:
        return None
    rows = [
        f"  rank {rank}  " + (_row(status) if rank in stuck else "has returned")
        for rank, status in enumerate(statuses)
    ]
    first, why = _explain(statuses, stuck)
    title = f"nothing has moved for {PATIENCE:.0f} s."
    text = "\n".join([title, *rows, why])
    return Failure(first, "deadlock", text, statuses[first].place)


def _row(status):
    return f"waits in {status.call}  ({status.place})"


def _explain(statuses, stuck):
    """Return (a rank to blame, one sentence that says why nobody can go on)."""
    for rank in stuck:
        call = statuses[rank].call
        if call.peer is not None and call.peer not in stuck:
            return rank, (
                f"rank {rank} is stuck in {call}; rank {call.peer} has already returned."
            )
    together = [rank for rank in stuck if statuses[rank].call.peer is None]
    if together:
        return _absentees(statuses, stuck, together)
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


def _absentees(statuses, stuck, together):
    """Blame the ranks that did not come to a call in which all must take part."""
    rank = together[0]
    call = statuses[rank].call
    absent = [
        other
        for other, status in enumerate(statuses)
        if other not in stuck or status.call.name != call.name
    ]
    if call.name == "work.wait()":
        return rank, f"rank {rank} waits for a message that no rank sends or takes."
    if not absent:
        return rank, f"all ranks are in {call.name}, but not in the same one."
    doing = "; ".join(
        f"rank {other} "
        + ("has already returned" if other not in stuck else f"is in {status.call}")
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


def late(statuses, limit):
    """Describe a run that was ended at its time limit: blame a rank that computes."""
    running = [r for r, status in enumerate(statuses) if not status.returned]
    busy = [r for r in running if not statuses[r].call] or running
    text = f"had not returned after {limit:g} s, the limit of this run"
    return Failure(busy[0], "late", text, statuses[busy[0]].place)


def exit_in_words(code):
    """Say what an exit code of a process means."""
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = {
            "SIGKILL": ": usually the system ran out of memory",
            "SIGSEGV": ": a crash in compiled code",
            "SIGABRT": ": compiled code gave up, often over a wrong size",
        }.get(name, "")
        return f"was killed by {name}{hint}"
    return f"exited with code {code} before it returned"
