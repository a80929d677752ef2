"""For tests of launches: where a line is, what is left behind, when a fault was."""

import inspect
import os
import re
import time
from multiprocessing import forkserver, resource_tracker

import psutil

SECONDS = 10  # after its fault, a run has ended


def place(function, mark="# here"):
    """Return "file, line 7: text" of the one line of a function that bears a mark."""
    lines, first = inspect.getsourcelines(function)
    ((number, text),) = [(i, line) for i, line in enumerate(lines) if mark in line]
    path = os.path.relpath(inspect.getsourcefile(function))
    return f"{path}, line {first + number}: {text.strip()}"


def alive(pid):
    """Does this process run? One that only waits to be collected does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def running(pids):
    """Return which of these processes still run, after a moment to end in."""
    deadline = time.monotonic() + 5
    while any(map(alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if alive(pid)]


def left():
    """Return what runs below this process, but for what launches start only once."""
    kept = {
        forkserver._forkserver._forkserver_pid,
        resource_tracker._resource_tracker._pid,
    }
    below = {child.pid for child in psutil.Process().children(recursive=True)}
    return running(below - kept)


def pids_in(text):
    """Return the numbers of processes that ranks have printed as pid=123."""
    return [int(number) for number in re.findall(r"pid=(\d+)", text)]
