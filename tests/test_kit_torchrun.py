"""The same launches in a world that torchrun has started."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from processes import SECONDS, place, running

from labs.kit import messages, torchrun, world

pytestmark = [pytest.mark.timeout(180), pytest.mark.alone]


# ---- torchrun itself -----------------------------------------------------------------

SCRIPT = """
import sys
import torch, torch.distributed as dist
from labs.kit import messages, world

def works(rank, n_ranks):
    return messages.all_reduce(torch.tensor(rank + 1.0)).item()

def raises(rank, n_ranks):
    print("no end of line", end="")
    if rank == 1:
        raise ValueError("no such layer")
    messages.receive(1)

def waits(rank, n_ranks):
    dist.recv(torch.zeros(1), 1 - rank)

if sys.argv[1] == "works":
    results = world.launch(works, 2), world.launch(lambda rank, n_ranks: rank, 2)
    sys.stdout.write(f"{results}\\n")  # in one piece: two ranks share the terminal
else:
    print(world.launch(globals()[sys.argv[1]], 2))
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What torchrun with two ranks prints: {function: (exit code, text, end)}."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "lab.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    processes = {}
    for name in ("works", "raises", "waits"):
        with open(folder / name, "w") as log:
            processes[name] = subprocess.Popen(
                [*command, "--nproc-per-node", "2", "lab.py", name],
                cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
    yield {
        name: (process.wait(150), (folder / name).read_text())
        for name, process in processes.items()
    }
    for process in processes.values():
        process.kill()


def test_every_rank_has_all_results(runs):
    code, text = runs["works"]
    assert code == 0, text
    assert text.count("([3.0, 3.0], [0, 1])\n") == 2


def test_a_failure_is_told_once_with_rank_line_and_cause(runs):
    code, text = runs["raises"]
    assert code == 1
    told = (
        "rank 1 raised ValueError: no such layer\n"
        '  at lab.py, line 12: raise ValueError("no such layer")\n'
    )
    assert text.count(told) == text.count("no such layer\n") == 1
    assert text.count("no end of line") == 2  # what was printed is not lost


def test_a_deadlock_is_told_once(runs):
    code, text = runs["waits"]
    assert code == 1
    assert text.count("nothing has moved for 3 s.\n") == 1
    for rank in (0, 1):
        assert (
            f"  rank {rank}  waits in receive from rank {1 - rank}  "
            f"(lab.py, line 16: dist.recv(torch.zeros(1), 1 - rank))\n"
        ) in text


# ---- worlds that look like torchrun's, started faster --------------------------------


def started(rank, n_ranks, port, log, function, limit):
    """Be a process of torchrun: its variables, and an output that is a file."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(n_ranks), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(n_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID=f"test-{port}", TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    with open(log, "a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    print(f"began={time.time()}", flush=True)
    results = world.launch(function, n_ranks, limit=limit)
    print(results, world.launch(returns, n_ranks))


@pytest.fixture
def start(tmp_path):
    """start(function, n_ranks, limit) -> (exit codes, what was printed, seconds)."""

    def run(function, n_ranks=2, limit=60):
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        log = tmp_path / "log"
        context = multiprocessing.get_context("forkserver")
        world.warm_up()
        ranks = [
            context.Process(
                target=started, args=(rank, n_ranks, store.port, log, function, limit)
            )
            for rank in range(n_ranks)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        end, text = time.time(), log.read_text()
        assert running([rank.pid for rank in ranks]) == []
        begun = max(map(float, re.findall(r"began=([\d.]+)", text)))
        return [rank.exitcode for rank in ranks], text, end - begun

    return run


def returns(rank, n_ranks):
    return rank


def sums(rank, n_ranks):
    print("hello", rank)
    return messages.all_reduce(torch.tensor(rank + 1.0)).item()


def exits(rank, n_ranks):
    if rank == 0:
        sys.exit(3)  # here
    messages.receive(0)


def exits_at_once(rank, n_ranks):
    if rank == 0:
        os._exit(3)  # here
    messages.receive(0)


def is_killed(rank, n_ranks):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.recv(torch.zeros(1), 1)  # here


def returns_early(rank, n_ranks):
    if rank == 0:
        messages.receive(1)  # here


def launches(rank, n_ranks):
    world.launch(returns, 2)  # here


def never_returns(rank, n_ranks):
    if rank == 1:
        time.sleep(1000)  # here
    messages.barrier()


def is_slow(rank, n_ranks):
    if rank == 1:
        time.sleep(5)
    messages.barrier()
    return rank


def test_two_launches_in_a_world_of_three(start):
    codes, text, _ = start(sums, 3)
    assert codes == [0, 0, 0]
    assert text.count("[6.0, 6.0, 6.0] [0, 1, 2]\n") == 3
    assert all(f"hello {rank}\n" in text for rank in range(3))


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (exits, "rank 0 called sys.exit(3) instead of returning\n  at "),
        (exits_at_once, "rank 0 ended its process with os._exit(3)\n  at "),
        (launches, "launch() was called inside a rank: call it from outside.\n  at "),
        (returns_early, "  rank 0  waits in receive from rank 1  ("),
        (never_returns, "after 2 s, the limit of this run\n  last seen at "),
        (is_killed, "rank 0 raised RuntimeError: "),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_culprit_is_told_once(start, function, told):
    codes, text, seconds = start(function, limit=2 if function is never_returns else 60)
    assert all(codes) and seconds < SECONDS
    assert text.count(told) == 1
    assert place(function) in text.split(told)[1]


def test_a_lost_peer_is_no_cause(start):
    _, text, _ = start(is_killed)
    assert text.endswith("  Another rank had closed its connections, or had ended.\n")


def test_slow_is_not_stuck(start):
    codes, text, _ = start(is_slow)
    assert codes == [0, 0] and text.count("[0, 1] [0, 1]\n") == 2


def test_torchrun_is_known_by_its_run_id(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not torchrun.started_us()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert torchrun.started_us()


def test_another_number_of_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 2 ranks, but .* asks for 3"):
        world.launch(sums, 3)
