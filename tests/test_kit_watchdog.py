"""Every way in which a run can fail ends soon, names the culprit and leaves nothing."""

import contextlib
import ctypes
import functools
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import SECONDS, left, pids_in, place, running
from torch.nn.parallel import DistributedDataParallel

from labs.kit import messages, watchdog, world
from labs.kit.watchdog import Call, Deadlock, Failure, Place, RankFailed, Status

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


# ---- runs that fail ------------------------------------------------------------------
# Each is (function of rank and n_ranks, n_ranks); the guilty line bears "# here".


def raises(rank, n_ranks):
    if rank == 1:
        raise ValueError("no such layer")  # here
    messages.receive(1)


def raises_late(rank, n_ranks):
    if rank == 2:
        time.sleep(0.7)
        raise ValueError("no such layer")  # here
    dist.recv(torch.zeros(1), (rank + 1) % n_ranks)


def raises_in_a_helper(rank, n_ranks):
    def helper():
        raise KeyError("lr")  # here

    helper()  # its caller


def raises_everywhere(rank, n_ranks):
    time.sleep(0.2 * (n_ranks - rank))
    assert rank > n_ranks  # here


def cannot_say_why(rank, n_ranks):
    class Shy(Exception):
        def __str__(self):
            raise RuntimeError

    raise Shy(open(os.devnull))  # here


def says_too_much(rank, n_ranks):
    raise ValueError("x" * 10**7)  # here


def interrupts_itself(rank, n_ranks):
    raise KeyboardInterrupt  # here


def exits(rank, n_ranks):
    if rank == 1:
        sys.exit(0)  # here
    dist.barrier()


def exits_at_once(rank, n_ranks):
    if rank == 1:
        os._exit(0)  # here
    dist.barrier()


def is_killed(rank, n_ranks):
    if rank == 1:
        time.sleep(2)  # here
        os.kill(os.getpid(), signal.SIGKILL)
    dist.irecv(torch.zeros(1), 1).wait()


def crashes(rank, n_ranks):
    if rank == 1:
        ctypes.string_at(0)  # here
    dist.recv(torch.zeros(1), 1)


def differs_in_size(rank, n_ranks):
    dist.all_reduce(torch.zeros(10 + 10_000 * rank))  # here


def wants_too_much(rank, n_ranks):
    torch.empty(10**15)  # here


def wants_too_much_of_python(rank, n_ranks):
    [0] * 10**15  # here


def returns_a_lock(rank, n_ranks):  # here
    import threading

    return threading.Lock()


def launches(rank, n_ranks):
    world.launch(print, 2)  # here


def leaves_the_group(rank, n_ranks):
    if rank == 1:
        dist.destroy_process_group()
    else:
        messages.receive(1)  # here


def leaves_a_child(rank, n_ranks):
    child = subprocess.Popen(["sleep", "1000"])
    print(f"pid={child.pid} pid={os.getpid()}")
    time.sleep(0.5)
    raise ValueError("no such layer")  # here


def never_returns(rank, n_ranks):
    if rank == 0:
        messages.receive(1)
    while True:
        time.sleep(0.1)  # here


# ---- runs that wait for ever ---------------------------------------------------------


def both_receive(rank, n_ranks):
    messages.receive(1 - rank)  # here


def both_send(rank, n_ranks):
    messages.send(torch.zeros(4), 1 - rank)  # here


def both_receive_raw(rank, n_ranks):
    dist.recv(torch.zeros(4), src=1 - rank)  # here


def both_send_raw(rank, n_ranks):
    dist.send(torch.zeros(4), 1 - rank)  # here


def one_reduces(rank, n_ranks):
    if rank == 0:
        messages.all_reduce(torch.zeros(1))  # here


def one_reduces_raw(rank, n_ranks):
    if rank == 2:
        dist.all_reduce(torch.zeros(1))  # here


def a_circle(rank, n_ranks):
    messages.receive((rank + 1) % n_ranks)  # here


def nobody_takes_it(rank, n_ranks):  # here
    if rank == 0:
        messages.isend(torch.zeros(1), 1)


def nobody_sends_it(rank, n_ranks):
    if rank == 0:
        work = dist.irecv(torch.zeros(1), 1)
        work.wait()  # here


def anybody_may_send(rank, n_ranks):
    if rank == 0:
        dist.recv(torch.zeros(1))  # here


def another_collective(rank, n_ranks):
    if rank == 0:
        dist.barrier()  # here
    dist.broadcast(torch.zeros(1), 0)  # there


def each_waits_for_the_other(rank, n_ranks):
    if rank == 0:
        messages.receive(1, tag=7)  # here
    else:
        messages.send(torch.zeros(1), 0)  # there


def one_batch_more(rank, n_ranks):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    for _ in range(3 - rank):
        loss = model(torch.ones(1, 1)).sum()
        loss.backward()  # here
    print(f"one_batch_more began={time.time()}")


def a_group_of_two_of_three(rank, n_ranks):
    if rank < 2:
        pair = dist.new_group([0, 1])
        dist.all_reduce(torch.zeros(1), group=pair)
        dist.barrier()  # here


# ---- runs that are slow but right ----------------------------------------------------


def computes_long(rank, n_ranks):
    if rank == 1:
        end = time.monotonic() + 6
        while time.monotonic() < end:
            torch.ones(100, 100) @ torch.ones(100, 100)
    dist.barrier()
    return rank


def sleeps_long(rank, n_ranks):
    if rank == 1:
        time.sleep(6)
        messages.send(torch.ones(1), 0)
        return 1
    return int(messages.receive(1).item()) - 1


def waits_for_a_program(rank, n_ranks):
    if rank == 1:
        program = subprocess.Popen(["sleep", "6"])
        program.wait()
    dist.barrier()
    return rank


def holds_the_interpreter(rank, n_ranks):
    """After a long wait in a receive, rank 0 computes where no thread can speak."""
    if rank == 0:
        messages.receive(1)
        ctypes.PyDLL(None).sleep(6)
        messages.send(torch.ones(1), 1)
    else:
        time.sleep(4)
        messages.send(torch.ones(1), 0)
        messages.receive(0)
    return rank


def sends_a_gigabyte(rank, n_ranks):
    if rank == 0:
        dist.send(torch.ones(2**30, dtype=torch.uint8), 1)
        return 0
    data = torch.zeros(2**30, dtype=torch.uint8)
    dist.recv(data, 0)
    return int(data[-1])


FAIL = {
    raises: 2, raises_late: 3, raises_in_a_helper: 2, raises_everywhere: 3,
    cannot_say_why: 1, says_too_much: 1, interrupts_itself: 1, exits: 2,
    exits_at_once: 2, is_killed: 2, crashes: 2, differs_in_size: 2, wants_too_much: 2,
    wants_too_much_of_python: 2, returns_a_lock: 2, launches: 2, leaves_the_group: 2,
    leaves_a_child: 2, never_returns: 2,
}  # fmt: skip
WAIT = {
    both_receive: 2, both_send: 2, both_receive_raw: 2, both_send_raw: 2,
    one_reduces: 2, one_reduces_raw: 3, a_circle: 3, nobody_takes_it: 2,
    nobody_sends_it: 2, anybody_may_send: 2, another_collective: 2,
    each_waits_for_the_other: 2, one_batch_more: 2, a_group_of_two_of_three: 3,
}  # fmt: skip
SLOW = {
    computes_long: 2, sleeps_long: 2, waits_for_a_program: 2, holds_the_interpreter: 2,
    sends_a_gigabyte: 2,
}  # fmt: skip


def timed(function):
    """Let the ranks say when they begin, for the time from the fault to the end."""

    @functools.wraps(function)
    def run(rank, n_ranks):
        print(f"{function.__name__} began={time.time()}")
        return function(rank, n_ranks)

    return run


@pytest.fixture(scope="module")
def runs():
    """All runs, some at a time: {function: (results or error, seconds)}."""

    def run(function, n_ranks):
        limit = 2 if function is never_returns else 60
        try:
            result = world.launch(timed(function), n_ranks, limit=limit)
        except Exception as error:
            result = error
        return result, time.time()

    world.warm_up()
    cases = {**WAIT, **SLOW, **FAIL}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        with ThreadPoolExecutor(8) as pool:
            ended = dict(zip(cases, pool.map(run, cases, cases.values())))
    text = printed.getvalue()
    assert left() == running(pids_in(text)) == []
    assert world.launch(lambda rank, n_ranks: rank, 2) == [0, 1]
    begun = {}
    for name, when in re.findall(r"(\w+) began=([\d.]+)", text):
        begun[name] = max(float(when), begun.get(name, 0))
    return {
        function: (result, end - begun[function.__name__])
        for function, (result, end) in ended.items()
    }


def failed(runs, function, kind=RankFailed):
    """Return the error that a run ended with, soon after its fault."""
    error, seconds = runs[function]
    assert type(error) is kind, error
    assert seconds < SECONDS
    return error


ENDS = {
    raises: "rank 1 raised ValueError: no such layer",
    raises_late: "rank 2 raised ValueError: no such layer",
    raises_in_a_helper: "rank 0 raised KeyError: 'lr'",
    raises_everywhere: "rank 0 raised AssertionError",
    cannot_say_why: "rank 0 raised Shy: (its message cannot be shown)",
    says_too_much: f"rank 0 raised ValueError: {'x' * 1000} … {'x' * 1000}",
    interrupts_itself: "rank 0 raised KeyboardInterrupt",
    exits: "rank 1 called sys.exit(0) instead of returning",
    exits_at_once: "rank 1 ended its process with os._exit(0)",
    is_killed: "rank 1 was killed by SIGKILL: usually the system ran out of memory",
    crashes: "rank 1 was killed by SIGSEGV: a crash in compiled code",
    differs_in_size: "rank 0 was killed by SIGABRT: compiled code gave up, often ",
    wants_too_much: "rank 0 raised RuntimeError: ",
    wants_too_much_of_python: "rank 0 raised MemoryError",
    returns_a_lock: "rank 0 raised TypeError: a result of type lock cannot be sent ",
    launches: "rank 0 raised RuntimeError: launch() was called inside a rank",
    leaves_the_group: "rank 0 raised PeerGone: rank 1 is gone: its connection was ",
    leaves_a_child: "rank 0 raised ValueError: no such layer",
    never_returns: "rank 1 had not returned after 2 s, the limit of this run",
}


@pytest.mark.parametrize("function", FAIL, ids=lambda f: f.__name__)
def test_a_failure_names_the_culprit_its_line_and_the_cause(runs, function):
    error = failed(runs, function)
    first, *lines = str(error).splitlines()
    assert first.startswith(ENDS[function])
    at = "  last seen at " if error.failure.kind in ("killed", "late") else "  at "
    assert at + place(function) in lines
    assert str(error.failure.place) == place(function)


def test_a_failure_adds_what_helps(runs):
    for function in (wants_too_much, wants_too_much_of_python):
        assert "ran out of memory: make the batch" in str(failed(runs, function))
    assert "return tensors, numbers, lists" in str(failed(runs, returns_a_lock))
    assert "Another rank had closed" in str(failed(runs, leaves_the_group))
    called = f"  called from {place(raises_in_a_helper, '# its caller')}"
    assert called in str(failed(runs, raises_in_a_helper)).splitlines()


STUCK = {
    both_receive: """
  rank 0  waits in receive from rank 1  (here)
  rank 1  waits in receive from rank 0  (here)
rank 0 is stuck in receive from rank 1; rank 1 is stuck in receive from rank 0: \
everyone receives and nobody sends. Let one of them send first, or use exchange().""",
    both_send: """
  rank 0  waits in send to rank 1  (here)
  rank 1  waits in send to rank 0  (here)
rank 0 is stuck in send to rank 1; rank 1 is stuck in send to rank 0: everyone sends \
and nobody receives. Let one of them receive first, or use exchange().""",
    a_circle: """
  rank 0  waits in receive from rank 1  (here)
  rank 1  waits in receive from rank 2  (here)
  rank 2  waits in receive from rank 0  (here)
rank 0 is stuck in receive from rank 1; rank 1 is stuck in receive from rank 2; \
rank 2 is stuck in receive from rank 0: \
everyone receives and nobody sends. Let one of them send first, or use exchange().""",
    each_waits_for_the_other: """
  rank 0  waits in receive from rank 1 (tag 7)  (here)
  rank 1  waits in send to rank 0  (there)
rank 0 is stuck in receive from rank 1 (tag 7); rank 1 is stuck in send to rank 0: \
each waits for a message that the other has not sent or does not take. \
Compare the order of their calls, and the tags.""",
    one_reduces: """
  rank 0  waits in all_reduce  (here)
  rank 1  has returned
rank 0 is stuck in all_reduce, which every rank must call; \
rank 1 has already returned.""",
    one_reduces_raw: """
  rank 0  has returned
  rank 1  has returned
  rank 2  waits in all_reduce  (here)
rank 2 is stuck in all_reduce, which every rank must call; \
rank 0 has already returned; rank 1 has already returned.""",
    another_collective: """
  rank 0  waits in barrier  (here)
  rank 1  waits in broadcast  (there)
rank 0 is stuck in barrier, which every rank must call; rank 1 is in broadcast.""",
    nobody_takes_it: """
  rank 0  waits in send to rank 1  (here)
  rank 1  has returned
rank 0 is stuck in send to rank 1; rank 1 has already returned.""",
    nobody_sends_it: """
  rank 0  waits in work.wait()  (here)
  rank 1  has returned
rank 0 waits for a message that no rank sends or takes.""",
    anybody_may_send: """
  rank 0  waits in receive  (here)
  rank 1  has returned
rank 0 waits for a message that no rank sends or takes.""",
    one_batch_more: """
  rank 0  waits in backward()  (here)
  rank 1  has returned
rank 0 is stuck in backward(), which every rank must call; \
rank 1 has already returned.""",
    a_group_of_two_of_three: """
  rank 0  waits in barrier  (here)
  rank 1  waits in barrier  (here)
  rank 2  has returned
rank 0 is stuck in barrier, which every rank must call; rank 2 has already returned.""",
}
STUCK[both_receive_raw] = STUCK[both_receive]
STUCK[both_send_raw] = STUCK[both_send]


@pytest.mark.parametrize("function", WAIT, ids=lambda f: f.__name__)
def test_a_deadlock_shows_who_waits_where_for_whom(runs, function):
    error = failed(runs, function, Deadlock)
    expected = "nothing has moved for 3 s." + STUCK[function]
    for mark in ("here", "there"):
        if f"({mark})" in expected:
            shown = f"({place(function, f'# {mark}')})"
            expected = expected.replace(f"({mark})", shown)
    assert str(error) == expected


@pytest.mark.parametrize("function", SLOW, ids=lambda f: f.__name__)
def test_slow_is_not_stuck(runs, function):
    assert runs[function][0] == [0, 1]


# ---- who failed first ----------------------------------------------------------------


def failure(rank, when=0.0, line=1, echo=False):
    return Failure(rank, "raised", "", Place("lab.py", line, ""), when, echo)


def test_the_culprit_is_the_first_that_is_no_echo():
    late, early = failure(0, when=2), failure(1, when=1, line=2)
    first_victim = failure(2, when=0, line=3, echo=True)
    assert watchdog.culprit([late, early, first_victim]) is early
    assert watchdog.culprit([first_victim]) is first_victim


def test_of_ranks_that_fail_together_the_lowest_speaks():
    assert watchdog.culprit([failure(3, when=1), failure(2, when=2)]).rank == 2


@pytest.mark.parametrize(
    "text",
    [
        "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:46",
        "[gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer",
        "[gloo/transport/tcp/pair.cc] writev: Broken pipe",
        "Connection was likely closed. Did the remote server shutdown or crash?",
    ],
)
def test_a_lost_connection_is_an_echo(text):
    assert watchdog.failure_of(0, RuntimeError(text), 0).echo


def test_another_error_is_no_echo():
    wrong = RuntimeError("The size of tensor a (3) must match that of tensor b (4)")
    assert not watchdog.failure_of(0, wrong, 0).echo
    assert not watchdog.failure_of(0, OSError("Broken pipe"), 0).echo


def test_the_readers_code_is_what_no_library_holds():
    libraries = torch.__file__, pytest.__file__, os.__file__, world.__file__
    assert not any(map(watchdog.is_users, libraries))
    lab = os.path.join(os.path.dirname(os.path.dirname(world.__file__)), "gpipe.py")
    assert all(map(watchdog.is_users, (lab, __file__, "/tmp/ipykernel_1/23.py")))


def test_a_name_with_alloc_in_it_is_not_out_of_memory():
    told = watchdog.failure_of(0, NameError("name 'allocate' is not defined"), 0).text
    assert told == "NameError: name 'allocate' is not defined"


def test_an_exit_code_in_words():
    assert watchdog.exit_in_words(7) == "exited with code 7 before it returned"
    assert watchdog.exit_in_words(-signal.SIGTERM) == "was killed by SIGTERM"
    assert watchdog.exit_in_words(-60) == "was killed by signal 60"


def test_a_crash_is_placed_in_the_thread_that_crashed():
    dump = f"""Fatal Python error: Segmentation fault

Thread 0x1 (most recent call first):
  File "{__file__}", line 1 in helper

Current thread 0x2 (most recent call first):
  File "{torch.__file__}", line 5 in call
  File "{__file__}", line 3 in train
"""
    assert watchdog.place_of_crash(dump).line == 3
    assert watchdog.place_of_crash("nothing of ours") is None


def test_a_failure_is_an_exception_like_others():
    error = Deadlock(failure(1))
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (Deadlock, str(error))
    assert again.failure == failure(1)
    assert error._render_traceback_() == [f"Deadlock: {error}"]


# ---- who waits for whom, from what the ranks say -------------------------------------


def waiting(peer, idle=3.0, name="receive"):
    return Status(Place("lab.py", 1, ""), Call(name, peer), idle)


def test_all_must_wait_and_stand_still():
    still = [waiting(1), waiting(0)]
    assert watchdog.deadlock(still, since_change=3.0)
    assert not watchdog.deadlock(still, since_change=2.9)
    assert not watchdog.deadlock([waiting(1), waiting(0, idle=2.9)], since_change=9)
    computing = Status(Place("lab.py", 1, ""), None, 9)
    assert not watchdog.deadlock([waiting(1), computing], since_change=9)
    assert not watchdog.deadlock([waiting(1), Status()], since_change=9)
    assert not watchdog.deadlock([Status(returned=True)] * 2, since_change=9)


def test_a_circle_is_found_behind_those_who_wait_for_it():
    statuses = [waiting(1), waiting(2), waiting(3), waiting(2)]
    blamed = watchdog.deadlock(statuses, 9)
    assert blamed.rank == 2
    assert "rank 2 is stuck in receive from rank 3; rank 3 is stuck in " in blamed.text


def test_a_word_holds_for_a_second_only(monkeypatch):
    """A rank that computes without letting go of the interpreter cannot speak; what it
    said last, in an old receive, must not count against it."""
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = watchdog.Watch(2)
    watch.hear(0, waiting(1, idle=3.5))
    now = 104.0
    watch.hear(1, waiting(0, idle=3.5))
    assert watch.verdict() is None
    watch.hear(0, waiting(1, idle=3.5))
    assert watch.verdict().kind == "deadlock"


def test_others_get_time_to_go_on_when_a_rank_returns(monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watch = watchdog.Watch(2)
    now = 104.0
    watch.hear(1, Status(returned=True))
    watch.hear(0, waiting(1, idle=4.0))
    assert watch.verdict() is None
    now = 107.0
    watch.hear(1, Status(returned=True))
    watch.hear(0, waiting(1, idle=7.0))
    assert "rank 1 has already returned" in watch.verdict().text


def test_at_the_limit_a_rank_that_computes_is_blamed():
    computing = Status(Place("lab.py", 8, "loss()"))
    late = watchdog.late([waiting(1), computing, Status(returned=True)], 5)
    assert watchdog.tell(late) == (
        "rank 1 had not returned after 5 s, the limit of this run\n"
        "  last seen at lab.py, line 8: loss()"
    )
    assert watchdog.late([waiting(1), waiting(0)], 5).rank == 0
