"""Launches from a real notebook: functions from cells, output, failures, interrupts."""

import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from xml.etree import ElementTree

import nbformat
import psutil
import pytest
from jupyter_client.manager import start_new_kernel
from nbformat.v4 import new_code_cell, new_notebook, new_output
from processes import SECONDS, alive, pids_in, running

pytestmark = [pytest.mark.timeout(240), pytest.mark.alone]

IMPORTS = """
import ctypes, os, signal, subprocess, sys, time
import torch, torch.distributed as dist
from labs.kit import messages, world
"""


class Notebook:
    """A kernel and what its cells have answered."""

    def __init__(self, folder):
        self.manager, self.client = start_new_kernel(cwd=str(folder))

    def run(self, source, on=(), do=None):
        """Run a cell; return its number, printed text, result and error. `do` is called
        once when the cell has printed `on`."""
        cell = SimpleNamespace(out="", err="", result=None, error=None)
        cell.source = source.strip("\n")  # as IPython does before it counts lines
        todo = [do] if do else []

        def take(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                name = {"stdout": "out", "stderr": "err"}[content["name"]]
                setattr(cell, name, getattr(cell, name) + content["text"])
            elif kind == "execute_result":
                cell.result = content["data"]["text/plain"]
            elif kind == "error":
                cell.ename = content["ename"]
                cell.error = "\n".join(content["traceback"])
            if todo and on in cell.out:
                todo.pop()()

        reply = self.client.execute_interactive(source, output_hook=take, timeout=100)
        cell.number = reply["content"]["execution_count"]
        return cell

    def begin(self, source, word):
        """Start a cell; return what it has printed when it has printed `word`."""
        self.client.execute(source)
        text = ""
        while word not in text:
            message = self.client.get_iopub_msg(timeout=100)
            text += message["content"].get("text", "")
        return text

    @property
    def pid(self):
        return self.manager.provisioner.process.pid

    def ranks(self):
        """The processes below the kernel's fork server."""
        servers = psutil.Process(self.pid).children()
        return [rank.pid for one in servers for rank in one.children(recursive=True)]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    notebook = Notebook(tmp_path_factory.mktemp("notebook"))
    assert notebook.run(IMPORTS).error is None
    yield notebook
    notebook.client.stop_channels()
    notebook.manager.shutdown_kernel(now=True)


def place(cell, mark="# here"):
    """The line of a cell that bears a mark, as messages show it."""
    for number, line in enumerate(cell.source.splitlines(), 1):
        if mark in line:
            return f"Cell In[{cell.number}], line {number}: {line.strip()}"


# ---- what works ----------------------------------------------------------------------

PRINTS = """
def work(rank, n_ranks):
    for line in range(3):
        print("line", line, flush=True)
    return rank
world.launch(work, 4)
"""
PRINTED = "".join(f"[rank {r}] line {i}\n" for r in range(4) for i in range(3))


def test_output_and_results(notebook):
    for _ in range(5):
        cell = notebook.run(PRINTS)
        assert (cell.out, cell.err, cell.result) == (PRINTED, "", "[0, 1, 2, 3]")


def test_a_magic_does_not_matter(notebook):
    cell = notebook.run("%%time\nprint(world.launch(lambda rank, n_ranks: rank, 2))")
    assert cell.error is None and "[0, 1]\n" in cell.out


def test_functions_and_classes_of_several_cells(notebook):
    notebook.run("""
import dataclasses
weights = torch.arange(3.0)
@dataclasses.dataclass
class Point:
    x: torch.Tensor
""")
    notebook.run("""
class Model(torch.nn.Linear):
    def point(self, rank):
        return Point(weights * rank)
def work(rank, n_ranks):
    return Model(1, 1).point(rank)
""")
    cell = notebook.run("""
points = world.launch(work, 2)
all(type(point) is Point for point in points), points[1].x.tolist()
""")
    assert cell.result == "(True, [0.0, 1.0, 2.0])"


def test_a_stale_world_in_the_kernel(notebook):
    source = """
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.update(RANK="5", WORLD_SIZE="9", MASTER_PORT="1")
before = dict(os.environ)
size = lambda rank, n_ranks: (dist.get_rank(), dist.get_world_size())
sizes = world.launch(size, 2)
dist.destroy_process_group()
print(sizes, world.launch(size, 1), before == dict(os.environ), dist.is_initialized())
for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
    del os.environ[name]
"""
    for _ in range(2):
        assert notebook.run(source).out == "[(0, 2), (1, 2)] [(0, 1)] True False\n"


# ---- what fails ----------------------------------------------------------------------

FAIL = """
[1] rank 1 raised ZeroDivisionError: division by zero
if rank == 1:
    1 / 0  # here
dist.barrier()

[1] rank 1 called sys.exit(0) instead of returning
if rank == 1:
    sys.exit(0)  # here
dist.barrier()

[1] rank 1 ended its process with os._exit(0)
if rank == 1:
    os._exit(0)  # here
dist.barrier()

[1] rank 1 was killed by SIGKILL: usually the system ran out of memory
if rank == 1:
    time.sleep(2)  # here
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()

[1] rank 1 was killed by SIGSEGV: a crash in compiled code
if rank == 1:
    ctypes.string_at(0)  # here
dist.barrier()

[0] rank 0 was killed by SIGABRT: compiled code gave up, often over a wrong size
dist.all_reduce(torch.zeros(10 + 10_000 * rank))  # here

[0] rank 0 raised MemoryError
[0] * 10**15  # here

[0] rank 0 raised KeyboardInterrupt
raise KeyboardInterrupt  # here

[1] rank 1 had not returned after 1 s, the limit of this run
if rank == 1:
    time.sleep(1000)  # here
dist.barrier()
"""


@pytest.mark.parametrize("case", FAIL.strip().split("\n\n"), ids=lambda c: c[4:36])
def test_a_failure_names_rank_cell_line_and_cause(notebook, case):
    title, body = case.split("\n", 1)
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    limit = ", limit=1" if "limit" in title else ""
    begun = time.monotonic()
    cell = notebook.run(
        f"def work(rank, n_ranks):\n{lines}world.launch(work, 2{limit})"
    )
    assert time.monotonic() - begun < SECONDS
    first, *rest = cell.error.splitlines()
    assert first == f"RankFailed: {title[4:]}"
    at = "last seen at" if "killed" in title or "limit" in title else "at"
    assert rest[-1] == f"  {at} {place(cell)}"
    assert "Error" not in cell.err and notebook.ranks() == []


def test_the_way_to_an_error_goes_through_cells(notebook):
    helper = notebook.run("def helper(rank):\n    raise KeyError(rank)  # here")
    caller = notebook.run(
        "work = lambda rank, n_ranks: helper(rank)  # here\nworld.launch(work, 1)"
    )
    assert caller.error == (
        f"RankFailed: rank 0 raised KeyError: 0\n"
        f"  at {place(helper)}\n"
        f"  called from {place(caller)}"
    )


def test_a_cell_that_is_run_again_has_its_new_number(notebook):
    source = "def fails(rank, n_ranks):\n    assert rank  # here"
    notebook.run(source)
    notebook.run("world.launch(lambda rank, n_ranks: fails, 1)")
    again = notebook.run(source)
    assert place(again) in notebook.run("world.launch(fails, 1)").error


def test_a_deadlock_shows_both_cells(notebook):
    helper = notebook.run("def get(peer):\n    messages.receive(peer)  # here")
    cell = notebook.run("""
def work(rank, n_ranks):
    if rank == 0:
        get(1)
    else:
        dist.recv(torch.zeros(1), 0)  # here
world.launch(work, 2)
""")
    assert cell.ename == "Deadlock"
    expected = f"""\
Deadlock: nothing has moved for 3 s.
  rank 0  waits in receive from rank 1  ({place(helper)})
  rank 1  waits in receive from rank 0  ({place(cell)})
rank 0 is stuck in receive from rank 1; rank 1 is stuck in receive from rank 0: \
everyone receives and nobody sends. Let one of them send first, or use exchange()."""
    assert cell.error == expected


def test_bad_arguments(notebook):
    cell = notebook.run("world.launch(lambda rank, n_ranks: rank, 0)")
    assert "n_ranks must be a whole number from 1 up, not 0." in cell.error
    cell = notebook.run("world.launch(lambda rank, n_ranks, file: rank, 2, sys.stdout)")
    assert "cannot be sent to ranks" in cell.error


def test_the_next_launch_works(notebook):
    assert notebook.run(PRINTS).out == PRINTED


# ---- who ends it from outside --------------------------------------------------------

HANGS = """
def work(rank, n_ranks):
    child = subprocess.Popen(["sleep", "1000"])
    print(f"pid={child.pid} pid={os.getpid()}")
    if rank == 0:
        time.sleep(2)
        print("ready")
        ctypes.PyDLL(None).sleep(1000)  # holds the interpreter
    dist.barrier()  # here
world.launch(work, 2)
"""


def test_an_interrupt_shows_where_the_ranks_are(notebook):
    begun = []

    def interrupt():
        begun.append(time.monotonic())
        notebook.manager.interrupt_kernel()

    cell = notebook.run(HANGS, on="ready", do=interrupt)
    assert time.monotonic() - begun[0] < SECONDS
    assert cell.ename == "KeyboardInterrupt"
    assert f"  rank 1  waits in barrier  ({place(cell)})\n" in cell.err
    assert len(pids_in(cell.out)) == 4 and running(pids_in(cell.out)) == []
    assert notebook.ranks() == []
    assert notebook.run(PRINTS).out == PRINTED


def restart(notebook):
    notebook.manager.restart_kernel()


def kill(notebook):
    os.kill(notebook.pid, signal.SIGKILL)
    while alive(notebook.pid):
        time.sleep(0.01)


@pytest.mark.parametrize("end", [restart, kill])
def test_a_kernel_that_is_gone_leaves_nothing(notebook, end):
    text = notebook.begin(HANGS, "ready")
    children = psutil.Process(notebook.pid).children(recursive=True)
    pids = [*pids_in(text), *(child.pid for child in children)]
    assert len(set(pids)) >= 5  # two ranks, their children, the fork server
    end(notebook)
    assert running(pids) == []
    if end is kill:
        notebook.manager.restart_kernel(now=True)
    notebook.client.wait_for_ready(timeout=60)
    notebook.run(IMPORTS)
    assert notebook.run(PRINTS).out == PRINTED


# ---- nbval ---------------------------------------------------------------------------

LAUNCH = "from labs.kit import world\nwork = lambda rank, n_ranks: print('step')"
FAILS = "world.launch(lambda rank, n_ranks: 1 / rank, 2)"
SLEEPS = HANGS.replace("print(f", "open(f'pid{rank}', 'w').write(f")


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """What `pytest --nbval` says of three notebooks: {name: [outcome of a cell, ...]}.
    It runs beside the other tests; that it is slow to start does not matter."""
    folder = tmp_path_factory.mktemp("nbval")
    for name, sources in {
        "good": [IMPORTS, PRINTS, PRINTS, PRINTS],
        "bad": [IMPORTS, PRINTS, FAILS, PRINTS],
        "stuck": [IMPORTS, PRINTS, SLEEPS],
    }.items():
        cells = [new_code_cell(source, execution_count=1) for source in sources]
        for cell in cells:
            if cell.source == PRINTS:
                shown = {"text/plain": "[0, 1, 2, 3]"}
                cell.outputs = [
                    new_output("stream", name="stdout", text=PRINTED),
                    new_output("execute_result", shown, execution_count=1),
                ]
        nbformat.write(new_notebook(cells=cells), folder / f"{name}.ipynb")
    command = "-m pytest --nbval --nbval-cell-timeout 25 --junitxml report.xml".split()
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, stdout=log, stderr=log
        )
    yield SimpleNamespace(folder=folder, process=process)
    process.kill()


@pytest.fixture(scope="module", autouse=True)
def early(checked):
    """Let nbval begin before the other tests."""


def test_nbval_passes_what_is_right_and_fails_what_fails(checked):
    checked.process.wait(200)
    outcomes = {"good": "", "bad": "", "stuck": ""}
    for case in ElementTree.parse(checked.folder / "report.xml").iter("testcase"):
        name = re.search("good|bad|stuck", case.get("classname")).group()
        outcomes[name] += "." if case.find("failure") is None else "F"
    log = (checked.folder / "log").read_text()
    assert outcomes == {"good": "....", "bad": "..F.", "stuck": "..F"}, log
    assert "rank 0 raised ZeroDivisionError: division by zero" in log
    assert "Timeout of 25 seconds exceeded executing cell" in log
    written = "".join((checked.folder / f"pid{rank}").read_text() for rank in (0, 1))
    assert len(pids_in(written)) == 4 and running(pids_in(written)) == []
