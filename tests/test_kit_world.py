"""One call runs a function on ranks: results, output, and what must not leak in."""

import collections
import contextlib
import ctypes
import dataclasses
import io
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from processes import SECONDS, alive, left, pids_in, running

from labs.kit import carry, messages, world
from labs.kit.watchdog import RankFailed

pytestmark = [pytest.mark.timeout(120), pytest.mark.alone]
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def reduced(rank, n_ranks):
    """The sum of rank + 1 over all ranks: 1, 3, 6, 10."""
    return messages.all_reduce(torch.tensor(rank + 1.0)).item()


# ---- functions, arguments, results ---------------------------------------------------


def test_results_come_in_rank_order():
    def slower_first(rank, n_ranks, letters):
        time.sleep(0.2 * (n_ranks - rank))
        return letters[rank], rank, n_ranks

    got = world.launch(slower_first, 3, "abc")
    assert got == [("a", 0, 3), ("b", 1, 3), ("c", 2, 3)]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_ranks_form_a_world(n_ranks):
    total = n_ranks * (n_ranks + 1) / 2
    assert world.launch(reduced, n_ranks) == [total] * n_ranks


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    name: str = "p"


Pair = collections.namedtuple("Pair", "left right")


class Stage(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 2)

    def __call__(self, rank, n_ranks):
        return rank


def test_lambdas_closures_objects_and_classes_of_the_caller():
    weights, shift = torch.arange(3.0), 10

    def closes_over(rank, n_ranks):
        return Point(weights * rank + shift), Pair(rank, Point)

    (zero, _), (one, pair) = world.launch(closes_over, 2)
    assert type(zero) is Point and zero.x.tolist() == [10, 10, 10]
    assert one.x.tolist() == [10, 11, 12] and pair == Pair(1, Point)
    assert world.launch(lambda rank, n_ranks: rank * shift, 2) == [0, 10]
    assert world.launch(Stage(), 2) == [0, 1]
    assert world.launch(max, 2, 5) == [5, 5]


def test_tensors_come_back_as_values():
    def trains(rank, n_ranks):
        weight = torch.ones(2, requires_grad=True)
        (weight * 3).sum().backward()
        return weight, weight * 2, weight.grad, torch.nn.Parameter(weight.detach())

    leaf, computed, grad, parameter = world.launch(trains, 1)[0]
    assert leaf.requires_grad and parameter.requires_grad
    assert computed.grad_fn is None and computed.tolist() == [2, 2]
    assert grad.tolist() == [3, 3] and type(parameter) is torch.nn.Parameter


def test_a_large_result():
    size = 200 * 2**20
    result = world.launch(
        lambda rank, n_ranks: torch.full((size,), rank, dtype=torch.uint8), 2
    )
    assert [(part.numel(), int(part[-1])) for part in result] == [(size, 0), (size, 1)]


@pytest.mark.parametrize("n_ranks", [0, -1, 2.5, True, "2"])
def test_a_wrong_number_of_ranks_is_refused(n_ranks):
    with pytest.raises(ValueError, match="n_ranks must be a whole number"):
        world.launch(reduced, n_ranks)


@pytest.mark.parametrize("limit", [0, -1, "5"])
def test_a_wrong_limit_is_refused(limit):
    with pytest.raises(ValueError, match="limit is a time in seconds above 0, or None"):
        world.launch(reduced, 1, limit=limit)


def test_what_cannot_be_sent_is_refused_before_a_rank_starts():
    with pytest.raises(TypeError, match="launch takes a function first, not int"):
        world.launch(2, 2)
    with pytest.raises(TypeError, match="cannot be sent to ranks .* open files in the"):
        world.launch(lambda rank, n_ranks, lock: rank, 2, threading.Lock())


def test_what_cannot_be_loaded_in_a_rank_is_told(tmp_path, monkeypatch):
    (tmp_path / "fleeting.py").write_text("def work(rank, n_ranks): return rank")
    monkeypatch.syspath_prepend(tmp_path)
    import fleeting

    assert world.launch(fleeting.work, 2) == [0, 1]
    (tmp_path / "fleeting.py").unlink()
    with pytest.raises(RankFailed, match="cannot be loaded in a rank .*fleeting"):
        world.launch(fleeting.work, 2)


class OneWay:
    """Its result can be sent but not be read."""

    def __reduce__(self):
        return int, ("nothing",)


def test_what_cannot_be_read_here_is_told():
    with pytest.raises(TypeError, match="a rank's result cannot be read here"):
        world.launch(lambda rank, n_ranks: OneWay(), 1)


# ---- output --------------------------------------------------------------------------


def test_output_is_whole_tagged_lines_in_rank_order(capfd):
    def speaks(rank, n_ranks):
        for line in range(3):
            os.write(1, f"line {line}".encode())  # torn on purpose
            time.sleep(0.02 * (n_ranks - rank))
            print(f" of {rank}", flush=True)
        print("to stderr", rank, file=sys.stderr)

    expected = [f"[rank {r}] line {i} of {r}" for r in range(4) for i in range(3)]
    for _ in range(3):
        world.launch(speaks, 4)
        out, err = capfd.readouterr()
        assert out.splitlines() == expected
        assert err.splitlines() == [f"[rank {r}] to stderr {r}" for r in range(4)]


def test_lines_of_the_first_unfinished_rank_are_shown_at_once(monkeypatch):
    seen = []

    class Screen(io.StringIO):
        def write(self, text):
            seen.append((time.time(), text))

    def speaks(rank, n_ranks):
        print(time.time())
        time.sleep(2)

    monkeypatch.setattr(sys, "stdout", Screen())
    world.launch(speaks, 1)
    ((shown, text),) = seen
    assert shown - float(text.removeprefix("[rank 0] ")) < 2


def printed(capsys, function, n_ranks=1):
    world.launch(function, n_ranks)
    return capsys.readouterr().out


def test_a_last_line_without_an_end(capsys):
    function = lambda rank, n_ranks: print(rank, end="")
    assert printed(capsys, function, 2) == "[rank 0] 0\n[rank 1] 1\n"


def test_a_progress_bar_shows_its_last_state(capsys):
    function = lambda rank, n_ranks: print("10 %\r50 %\r100 %\r\ndone")
    assert printed(capsys, function) == "[rank 0] 100 %\n[rank 0] done\n"


def test_bytes_that_are_no_text(capsys):
    function = lambda rank, n_ranks: os.write(1, b"\xff\x00caf\xc3\xa9\n") and None
    assert printed(capsys, function) == "[rank 0] \ufffd\0café\n"


def test_output_of_c_code(capsys):
    function = lambda rank, n_ranks: ctypes.CDLL(None).puts(b"hello") and None
    assert printed(capsys, function) == "[rank 0] hello\n"


def test_a_hundred_thousand_lines(capsys):
    def speaks(rank, n_ranks):
        for line in range(100_000):
            print("loss of step", line)

    lines = printed(capsys, speaks).splitlines()
    assert lines == [f"[rank 0] loss of step {line}" for line in range(100_000)]


def test_a_print_in_an_endless_loop_is_cut_and_can_be_ended(capsys):
    def speaks(rank, n_ranks):
        while True:
            print("x" * 1000)

    with pytest.raises(RankFailed, match="limit of this run"):
        world.launch(speaks, 1, limit=5)
    out = capsys.readouterr().out
    assert len(out) < 5 * 2**20
    assert out.endswith("[rank 0] (and more, which is not shown)\n")


def redirects(rank, n_ranks):
    sys.stdout = io.StringIO()
    print("not shown")


def closes(rank, n_ranks):
    print("shown")
    sys.stdout.close()


def unsets(rank, n_ranks):
    print("shown")
    sys.stdout = sys.stderr = None


@pytest.mark.parametrize("function", [redirects, closes, unsets])
def test_a_rank_may_do_anything_to_its_stdout(capsys, function):
    shown = "" if function is redirects else "[rank 0] shown\n"
    assert printed(capsys, function) == shown


def test_what_was_printed_before_a_failure_is_shown(capsys):
    def fails(rank, n_ranks):
        print("step", rank, end="")
        raise ValueError

    with pytest.raises(RankFailed):
        world.launch(fails, 2)
    assert "[rank 0] step 0\n" in capsys.readouterr().out


# ---- what ranks may do ---------------------------------------------------------------


def test_threads_and_processes_of_a_rank():
    def busy(rank, n_ranks):
        threading.Thread(target=time.sleep, args=(1000,)).start()
        child = subprocess.Popen(["sleep", "1000"])
        data = torch.utils.data.TensorDataset(torch.arange(4))
        loader = torch.utils.data.DataLoader(data, num_workers=1)
        forked = multiprocessing.get_context("fork").Process(target=os._exit, args=(3,))
        forked.start()
        forked.join()
        total = sum(int(batch[0]) for batch in loader)
        return child.pid, total, forked.exitcode, multiprocessing.get_start_method()

    results = world.launch(busy, 2)
    usual = multiprocessing.get_start_method()
    assert [result[1:] for result in results] == [(6, 3, usual), (6, 3, usual)]
    assert left() == running([result[0] for result in results]) == []


def test_threads_of_torch(monkeypatch):
    count = lambda rank, n_ranks: torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert world.launch(count, 2) == [max(1, world.cores() // 2)] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert world.launch(count, 2) == [3, 3]


def test_a_rank_names_its_device():
    assert world.launch(lambda rank, n_ranks: world.here(), 1, backend="gloo")[0]


# ---- what must not leak in, or out ---------------------------------------------------


def test_a_world_left_over_in_the_environment_is_ignored(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "9")
    monkeypatch.setenv("LESSON", "ring")
    before = dict(os.environ)

    def asks(rank, n_ranks):
        names = "RANK", "WORLD_SIZE", "LESSON"
        return dist.get_rank(), dist.get_world_size(), *map(os.environ.get, names)

    expected = [(0, 2, "0", "2", "ring"), (1, 2, "1", "2", "ring")]
    assert world.launch(asks, 2) == expected
    assert dict(os.environ) == before


def test_a_group_of_the_caller_does_not_matter():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert world.launch(reduced, 2) == [3, 3]
        assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()
    assert world.launch(reduced, 1) == [1]
    assert not dist.is_initialized()


def test_ranks_are_fresh_every_time():
    def remembers(rank, n_ranks):
        torch.course = getattr(torch, "course", 0) + 1
        return torch.course, os.getpid()

    first, second = world.launch(remembers, 2), world.launch(remembers, 2)
    assert [count for count, _ in first + second] == [1] * 4
    assert len({pid for _, pid in first + second}) == 4


def test_a_port_in_use_does_not_matter():
    with socket.socket() as held:
        with contextlib.suppress(OSError):  # somebody else holds it
            held.bind(("127.0.0.1", 29500))
            held.listen()
        for _ in range(5):
            assert world.launch(reduced, 2) == [3, 3]


def test_worlds_side_by_side_do_not_mix():
    def meets(rank, n_ranks, name):
        time.sleep(0.2)
        names = [None] * n_ranks
        dist.all_gather_object(names, name)
        return set(names)

    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(world.launch, meets, 2, name) for name in "abc"]
        assert [run.result() for run in runs] == [[{name}, {name}] for name in "abc"]


def test_a_fork_server_that_died_is_started_again():
    world.launch(reduced, 1)
    server = forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGKILL)
    while alive(server):
        time.sleep(0.01)
    assert world.launch(reduced, 2) == [3, 3]


def test_no_descriptor_is_left_open():
    def open_files():
        return len(os.listdir("/proc/self/fd"))

    world.launch(reduced, 2)
    before = open_files()
    for _ in range(3):
        world.launch(reduced, 2)
    assert open_files() <= before + 1


# ---- scripts -------------------------------------------------------------------------

PLAIN = """
import os
import torch.distributed as dist
from labs.kit import world
print("the script runs")
def meets(rank, n_ranks, name):
    names = [None] * n_ranks
    dist.all_gather_object(names, name)
    return names
for _ in range(3):
    assert world.launch(meets, 2, os.getpid()) == [[os.getpid()] * 2] * 2
def fails(rank, n_ranks):
    raise ValueError("no such layer")
world.launch(fails, 2)
"""

HANGS = """
import os, subprocess, sys, time
from labs.kit import world
def work(rank, n_ranks):
    child = subprocess.Popen(["sleep", "1000"])
    print(f"pid={child.pid} pid={os.getpid()}", flush=True)
    if rank == 0:
        print("ready", flush=True)
    HANG
world.launch(work, 2)
"""


class Script:
    """A script that runs beside the test, with what it prints in a file."""

    def __init__(self, folder, name, source):
        self.file, self.log = folder / f"{name}.py", folder / f"{name}.log"
        self.file.write_text(source)
        self.begin()

    def begin(self):
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", self.file.name], cwd=self.file.parent,
                stdout=log, stderr=log, env=dict(os.environ, RANK="5", WORLD_SIZE="9"),
                start_new_session=True,
            )  # fmt: skip

    def text(self):
        return self.log.read_text()

    def wait_for(self, word):
        while word not in self.text():
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)

    def end(self, number):
        """Send a signal; return the exit code and the seconds that it took."""
        begun = time.monotonic()
        os.killpg(self.process.pid, number)
        code = self.process.wait(60)
        return code, time.monotonic() - begun


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scripts")
    holds_the_interpreter = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
    found = {
        "one": Script(folder, "one", PLAIN),
        "two": Script(folder, "two", PLAIN),
        "sleeps": Script(folder, "sleeps", HANGS.replace("HANG", "time.sleep(1000)")),
        "holds": Script(folder, "holds", HANGS.replace("HANG", holds_the_interpreter)),
    }
    yield found
    for script in found.values():
        script.process.kill()
        script.process.wait()


@pytest.mark.parametrize("name", ["one", "two"])  # they run at the same time
def test_a_script_without_a_guard_runs_once_and_fails_with_a_code(scripts, name):
    script = scripts[name]
    assert script.process.wait(100) == 1
    assert script.text().count("the script runs") == 1
    assert script.text().endswith(
        "RankFailed: rank 0 raised ValueError: no such layer\n"
        f'  at {name}.py, line 13: raise ValueError("no such layer")\n'
    )


def test_an_interrupted_script_says_where_its_ranks_were(scripts):
    script = scripts["sleeps"]
    script.wait_for("ready")
    time.sleep(2)  # until the ranks have said so
    code, seconds = script.end(signal.SIGINT)
    assert code == -signal.SIGINT and seconds < SECONDS
    assert (
        "Interrupted. The ranks were here:\n"
        "  rank 0  sleeps.py, line 9: time.sleep(1000)\n"
        "  rank 1  sleeps.py, line 9: time.sleep(1000)\n"
    ) in script.text()
    assert len(pids_in(script.text())) == 4
    assert running(pids_in(script.text())) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_script_leaves_nothing_even_if_its_ranks_are_busy(scripts, number):
    script = scripts["holds"]
    if script.process.poll() is not None:
        script.begin()
    script.wait_for("ready")
    ranks_and_children = pids_in(script.text())
    assert ranks_and_children and all(map(alive, ranks_and_children))
    code, _ = script.end(number)
    assert code == -number
    assert running(ranks_and_children) == []


# ---- ranks that may fail -------------------------------------------------------------


def somebody_fails(rank, n_ranks, how, who):
    """The others go on for a while, and meet."""
    if rank == who:
        if how == "exits":
            os._exit(1)
        raise ValueError("no")
    others = [other for other in range(n_ranks) if other not in (rank, who)]
    for peer in others:
        messages.exchange(torch.ones(2), peer)
    time.sleep(0.3)
    return rank


@pytest.mark.parametrize(
    "how, kind, text",
    [("raises", "raised", "ValueError: no"), ("exits", "exited", "ended its process")],
)
def test_a_run_goes_on_without_a_rank_that_may_fail(how, kind, text):
    first, failure, third = world.launch(somebody_fails, 3, how, 1, may_fail=(1,))
    assert (first, third) == (0, 2)
    assert (failure.rank, failure.kind) == (1, kind) and text in failure.text
    assert left() == []


def test_who_may_fail_need_not():
    assert world.launch(somebody_fails, 3, "", None, may_fail=range(3)) == [0, 1, 2]


def test_others_may_not_fail():
    with pytest.raises(RankFailed, match="rank 2 raised ValueError: no"):
        world.launch(somebody_fails, 3, "raises", 2, may_fail=[1])


# ---- sources -------------------------------------------------------------------------


def test_a_function_without_a_file_takes_its_source_along():
    source = "def work(rank, n_ranks):\n    raise ValueError('here')\n"
    carry.linecache.cache["<cell>"] = len(source), None, source.splitlines(True), ""
    scope = {"__name__": "__main__"}
    exec(compile(source, "<cell>", "exec"), scope)
    with pytest.raises(RankFailed) as failed:
        world.launch(scope["work"], 1)
    assert failed.value.failure.place == ("<cell>", 2, "raise ValueError('here')")
