"""Judge answers: run them on ranks, compare what they give, say why it is wrong.

An exercise asks for plain values (numbers, orders, what a run counted) and compares
them with those of an oracle, which finds them in another way than the answer does. The
answer runs in ranks alone, with little time and memory: if it hangs, exits or eats
memory, that is a verdict in words. What it prints is not shown.
"""

import contextlib
import io
import math
import operator
import re
import resource
import signal
import sys
from functools import partial
from itertools import chain
from random import Random

import torch

from labs.kit import carry, messages, watchdog, world
from labs.kit.watchdog import RankFailed

SECONDS = 5  # for one call of an answer; it needs milliseconds
MEMORY = 1 << 30  # bytes that one call may add
LAST_RESORT = 60  # seconds for all of it, should an answer not hear its alarm
YOUR_TURN = "your turn"
ENDLESS = f"it has not returned after {SECONDS} s. Does a loop never end?"


class Trouble(Exception):
    """Says in a sentence why an answer gives no value."""


class Exercise:
    """A task, and how to tell whether an answer is right; a subclass for each.

    A case is a tuple of arguments, drawn anew for each seed. Facts are plain values:
    a dict of numbers, strings, lists or None, by what they are called in a verdict.
    """

    name = ""
    points = 0  # 0: practice
    n_ranks = 1

    def cases(self, random):
        """Return the list of cases, the simple ones first."""
        raise NotImplementedError

    def facts(self, answer, *case):
        """Return what an answer gives in a case; runs on every rank."""
        raise NotImplementedError

    def expected(self, *case):
        """Return the same facts, found in another way than an answer would."""
        raise NotImplementedError

    def hint(self, found, *case):
        """Return the usual mistake that gives these facts, or ""."""
        return ""

    def advice(self, trouble, *case):
        """Return what may help an answer that gives no facts, or ""."""
        return ""

    def arguments(self, *case):
        """Return the arguments as a verdict writes them."""
        return ", ".join(map(show, case))

    def probe(self, answer, seed):
        """Return the facts of all cases; {"trouble": a sentence} ends the list."""
        return look(self.facts, answer, self.cases(Random(seed)), self.n_ranks)

    def oracle(self, seed):
        """Return what `probe` returns for a right answer."""
        return [self.expected(*case) for case in self.cases(Random(seed))]


def judge(exercise, answer, seed=0):
    """Return the verdict on an answer: your turn, right, or not yet and why."""
    points = exercise.points
    worth = f"{points} point{'s' * (points > 1)}" if points else "practice"
    if not callable(answer):
        return f"{exercise.name}: not yet. Hand over the function, not what it returns."
    found = exercise.probe(answer, seed)
    if found[-1].get("trouble") == YOUR_TURN:
        return f"{exercise.name}: your turn ({worth})."
    for case, facts in zip(exercise.cases(Random(seed)), found):
        why = complaint(exercise, case, facts)
        if why:
            call = f"{exercise.name}({exercise.arguments(*case)})"
            return f"{exercise.name}: not yet. {call}: {why}".rstrip()
    return f"{exercise.name}: right ({worth})."


def complaint(exercise, case, found):
    """Say which fact of a case is wrong, and why; nothing if all are right."""
    if "trouble" in found:
        trouble = found["trouble"]
        return f"{trouble} {exercise.advice(trouble, *case)}"
    expected = exercise.expected(*case)
    for fact, value in found.items():
        if not equal(expected[fact], value):
            wanted, hint = show(expected[fact]), exercise.hint(found, *case)
            return f"{fact}: expected {wanted}, found {show(value)}. {hint}"
    return ""


def equal(a, b, rtol=1e-5, atol=1e-6):
    """Are two plain values equal, numbers up to rounding?"""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(equal(x, y, rtol, atol) for x, y in zip(a, b))
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=rtol, abs_tol=atol)
    return a == b


def usual(found, mistakes):
    """Return the sentence of the mistake whose value was found, or "".

    mistakes: {sentence: the value that this mistake gives}.
    """
    return next((text for text, value in mistakes.items() if equal(value, found)), "")


def show(value):
    """Return a value as a verdict writes it."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    return str(value)


# ---- on the ranks ----------------------------------------------------------------


def look(facts, answer, cases, n_ranks=1):
    """Return facts(answer, *case) for each case, computed on ranks, up to a trouble."""
    unseen = io.StringIO()
    try:
        with contextlib.redirect_stdout(unseen), contextlib.redirect_stderr(unseen):
            found = world.launch(
                _look, n_ranks, facts, answer, cases, limit=LAST_RESORT
            )
    except RankFailed as error:
        text = " ".join(error.failure.text.split())
        endless = "SIGALRM" in text or error.failure.kind == "late"
        text = ENDLESS if endless else f"rank {error.failure.rank} {text}."
        return [{"trouble": text}]
    except TypeError as error:  # an answer that cannot be sent to ranks
        return [{"trouble": str(error)}]
    return found[0]


def _look(rank, n_ranks, facts, answer, cases):
    found = []
    for case in cases:
        try:
            found.append(facts(answer, *case))
        except Trouble as trouble:
            return [*found, {"trouble": str(trouble)}]
    return found


def ask(answer, *arguments, read):
    """Return read(answer(*arguments)), called with little time and memory.

    Raises Trouble, in words, for whatever goes wrong in it.
    """
    try:
        with _little_time(), _little_memory():
            return read(answer(*arguments))
    except Trouble:
        raise
    except NotImplementedError:
        raise Trouble(YOUR_TURN) from None
    except _TimeIsUp:
        raise Trouble(ENDLESS) from None
    except MemoryError:
        text = f"it needs more than {MEMORY >> 30} GB of memory. Does a list never end?"
        raise Trouble(text) from None
    except (Exception, SystemExit) as error:
        raise Trouble(_told(error)) from None


def _told(error):
    """Say what an answer raised, and where."""
    failure = watchdog.failure_of(0, error, 0.0)
    places = [p for p in failure.trail if p.source != carry.label(__file__)]
    place = f" ({places[-1]})" if places else ""
    verb = "it " if failure.kind == "exited" else "it raised "
    return f"{verb}{failure.text.splitlines()[0]}{place}."


class _TimeIsUp(BaseException):
    """Not an Exception, so that an answer's own `except Exception` does not take it."""


@contextlib.contextmanager
def _little_time():
    """Interrupt an answer that takes too long, and soon kill it if it goes on."""

    def ring(number, frame):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SECONDS, 1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _little_memory():
    """Limit what can be allocated, where the system can (macOS does not)."""
    if sys.platform != "linux":
        yield
        return
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + MEMORY, *known]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# ---- answers that send messages --------------------------------------------------


class OnRanks(Exercise):
    """The answer runs on several ranks at once. A case's first number is n_ranks.

    Each case has a launch of its own, so that a deadlock is a verdict on that case.
    """

    def probe(self, answer, seed):
        return look_on_ranks(self.facts, answer, self.cases(Random(seed)))


def look_on_ranks(facts, answer, cases):
    """Return what `look` does, with as many ranks as the first number of each case."""
    found = []
    for case in cases:
        found += look(partial(_or_stop, facts), answer, [case], case[0])
        if "trouble" in found[-1]:
            return [*found[:-1], {"trouble": _plain(found[-1]["trouble"])}]
    return found


class Stopped(Exception):
    """An answer is in trouble on this rank: the others need not wait for it."""


def _or_stop(facts, answer, *case):
    try:
        return facts(answer, *case)
    except Trouble as trouble:
        raise Stopped(str(trouble)) from None


def _plain(trouble):
    """Say in one sentence why a launch ended."""
    stopped = re.match(r"(rank \d+) Stopped: (.*)\.$", trouble)
    if stopped:
        rank, why = stopped.groups()
        trouble = why if rank == "rank 0" or why == YOUR_TURN else f"on {rank}, {why}"
    apart = re.search(r"rank 0 comes with (.+), rank (\d+) with (.+?\])", trouble)
    if apart and _MEETING in apart[0]:
        ours, other, theirs = apart.groups()
        if _MEETING in ours:
            return f"rank {other} is in {theirs}, but rank 0 has returned."
        return f"rank 0 is in {ours}, but rank {other} has returned."
    if stopped:
        return trouble
    stuck = re.search(r"(rank \d+ (is stuck|waits for a)|all ranks are in) .*", trouble)
    if not stuck:
        return trouble
    # Who has returned is in the collective of `everywhere`, and waits for the others.
    in_ours = r"is stuck in all_gather, which every rank must call; rank"
    why = re.sub(in_ours, "has returned, but rank", stuck[0])
    return f"it deadlocks: {why.rstrip('.')}."


_MEETING = "all_gather done"


def everywhere(value):
    """Return a number, or a flat list of numbers, of all ranks in rank order."""
    mine = torch.tensor(value, dtype=torch.float64, device=messages.device)
    return [theirs.tolist() for theirs in messages.all_gather(mine, "done")]


# ---- what an answer returns ------------------------------------------------------


def unfit(value, wanted):
    """Return the Trouble of a value that is not what was wanted."""
    if value is None:
        return Trouble(f"it returned None, not {wanted}. Is a return missing?")
    return Trouble(f"it returned {type(value).__name__}, not {wanted}.")


def number(value):
    """Return a number, also one in a tensor or array, as a float."""
    try:
        if isinstance(value, (bool, str, bytes)):
            raise TypeError
        result = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise unfit(value, "a number") from None
    if not math.isfinite(result):
        raise Trouble(f"it returned {result}, not a finite number.")
    return result


def whole(value):
    """Return a whole number as an int."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        raise unfit(value, "a whole number (int)") from None


def flat(*tensors):
    """Return the numbers of tensors as one list; None if one of them is None."""
    if any(tensor is None for tensor in tensors):
        return None
    return list(chain.from_iterable(tensor.flatten().tolist() for tensor in tensors))

