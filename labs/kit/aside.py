"""A thread that carries out jobs in order, beside whatever this process computes.

Collectives must come in the same order on every rank, so they queue for one thread.
"""

import queue
import threading

import torch

_queue = queue.SimpleQueue()
_thread = None
_error = None  # of the first job that failed: those after it are not done
_stream = None  # on a GPU, the work of all jobs is on this one


class Job:
    """A function to call; on a GPU, in order after what was launched before."""

    def __init__(self, work, device):
        self.work, self.cuda = work, device.type == "cuda"
        if self.cuda:
            self.begun = torch.cuda.current_stream().record_event()

    def run(self):
        if not self.cuda:
            self.work()
            return
        with torch.cuda.stream(_stream):
            _stream.wait_event(self.begun)
            self.work()

    def join(self):
        """Make what is launched from now on follow all jobs."""
        if self.cuda:
            torch.cuda.current_stream().wait_stream(_stream)


def start(work, device):
    """Queue work(), which concerns tensors of `device`; return its Job."""
    global _thread, _stream
    if not _thread:
        _thread = threading.Thread(target=_carry_out, daemon=True)
        _thread.start()
    if device.type == "cuda" and not _stream:
        _stream = torch.cuda.Stream(device)
    job = Job(work, device)
    _queue.put(job)
    return job


def finish():
    """Wait until nothing is left to do; raise the first error, if there was one."""
    if _thread:
        empty = threading.Event()
        _queue.put(empty)
        empty.wait()
    if _error:
        raise _error


def _carry_out():
    global _error
    while True:
        job = _queue.get()
        if isinstance(job, threading.Event):
            job.set()
        elif not _error:
            try:
                job.run()
            except Exception as error:
                _error = error
