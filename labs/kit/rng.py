"""Draw the same random numbers again: what recomputation needs for its dropout."""

import contextlib

import torch


def state(device):
    """Return the random state of the host, and of `device` if it is a GPU."""
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu, device


@contextlib.contextmanager
def again(state):
    """Inside, random numbers repeat from `state`; outside, nothing has happened."""
    on_host, on_gpu, device = state
    with torch.random.fork_rng([device] if on_gpu is not None else []):
        torch.set_rng_state(on_host)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
        yield
