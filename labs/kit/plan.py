"""Where ranks run: a pure function of ranks, GPUs and settings."""

from typing import NamedTuple


class Plan(NamedTuple):
    """n_ranks ranks; `place` is "own" (a GPU each), "shared" (fewer GPUs) or "cpu"."""

    n_ranks: int
    place: str
    backend: str  # what init_process_group gets
    devices: tuple  # one device name per rank of this host
    threads: int  # CPU threads per rank
    n_gpus: int = 0

    def describe(self, hardware="CPU"):
        """Return the line that says what a run's figures stand on."""
        where = {
            "own": f"a GPU each ({hardware})",
            "shared": f"{self.n_gpus} × {hardware} shared",
            "cpu": f"{hardware}, {self.threads} thread{'s' * (self.threads > 1)} each",
        }[self.place]
        backend = "nccl" if "nccl" in self.backend else "gloo"
        ranks = f"{self.n_ranks} rank{'s' * (self.n_ranks > 1)}"
        return f"{ranks} · {where} · {backend}"


def plan(n_ranks, n_gpus=0, cores=1, env=(), backend="auto", local_ranks=None):
    """Decide where `n_ranks` ranks run on a host with `n_gpus` GPUs and `cores` cores.

    env: the environment; LABS_DEVICE=cpu ignores GPUs, OMP_NUM_THREADS sets threads.
    backend: "auto", "gloo" or "nccl". local_ranks: ranks on this host, if not all.
    Raises ValueError, before any rank starts, for what cannot run.
    """
    if isinstance(n_ranks, bool) or not isinstance(n_ranks, int) or n_ranks < 1:
        raise ValueError(f"n_ranks must be a whole number from 1 up, not {n_ranks!r}.")
    if backend not in ("auto", "gloo", "nccl"):
        raise ValueError(f"backend must be auto, gloo or nccl, not {backend!r}.")
    env = dict(env)
    here = local_ranks or n_ranks
    gpus = 0 if env.get("LABS_DEVICE") == "cpu" else n_gpus
    if backend == "nccl" and gpus < here:
        fewer = f", or start at most {_count(gpus, 'rank')}" if gpus else ""
        raise ValueError(
            f"nccl needs a GPU per rank, and this is {_count(here, 'rank')} on "
            f"{_count(gpus, 'GPU')}: use backend='auto' (over gloo, ranks share what "
            f"there is){fewer}."
        )
    wish = env.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(wish) if wish.isdecimal() else 0
    threads = threads or max(1, cores // here)
    if gpus == 0:
        return Plan(n_ranks, "cpu", "gloo", ("cpu",) * here, threads)
    devices = tuple(f"cuda:{rank % gpus}" for rank in range(here))
    if gpus >= here and backend != "gloo":
        # Headers and other host tensors go over gloo, data over nccl.
        return Plan(n_ranks, "own", "cpu:gloo,cuda:nccl", devices, threads, gpus)
    # NCCL refuses two ranks on one GPU, so messages are staged through the host.
    return Plan(n_ranks, "shared", "gloo", devices, threads, gpus)


def _count(n, noun):
    return f"{n} {noun}{'' if n == 1 else 's'}"
