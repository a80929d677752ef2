"""Fixtures that several test files use."""

import pytest
import torch


@pytest.fixture
def one_thread(monkeypatch):
    """For ranks and for the single process beside them: more threads only wait here."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
