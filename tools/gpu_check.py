"""Check what needs a GPU, on one that ranks share.

    python -m tools.gpu_check out.json

Takes some minutes, at most eight. Writes what it found, with the names of the device
and of the versions, and exits with 1 if a check failed, with 2 if there is no GPU.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise

import torch

from labs.kit import clock, messages
from labs.kit.timeline import Timeline
from labs.kit.world import launch, plan

BUDGET = 8 * 60  # seconds for everything
LIMIT = 90  # seconds for one run
SIZE = 4096  # of the matrices that are multiplied


def collectives(rank, n_ranks):
    """Send arange(4) + rank through every helper; return values and devices."""
    mine = torch.arange(4.0, device=messages.device) + rank
    into = torch.zeros(2, 4, device=messages.device).t()
    if rank == 0:
        for peer in range(1, n_ranks):
            messages.send(mine, peer)
            messages.send(torch.stack([mine, mine]).t(), peer)
        received = mine
    else:
        received = messages.receive(0)
        messages.receive(0, into=into)
    found = {
        "received": received,
        "into": into,
        "exchange": messages.exchange(mine, rank ^ 1),
        "all_reduce": messages.all_reduce(mine.clone()),
        "beside": messages.iall_reduce(mine.clone()).wait(),
        "no header": without_header(mine, rank ^ 1),
        "average": messages.all_reduce(mine.bfloat16(), "avg"),
        "broadcast": messages.broadcast(mine.clone(), 0),
        "all_gather": torch.stack(messages.all_gather(mine)),
    }
    return {name: (t.tolist(), str(t.device)) for name, t in found.items()}


def without_header(mine, peer):
    with messages.trusted():
        return messages.exchange(mine, peer, into=torch.empty_like(mine))


def expected(rank, n_ranks):
    """What `collectives` must find (case C03)."""
    first = torch.arange(4.0)
    tensors = {
        "received": first,
        "into": torch.stack([first, first]).t() * (rank > 0),
        "exchange": first + (rank ^ 1),
        "all_reduce": first * n_ranks + sum(range(n_ranks)),
        "beside": first * n_ranks + sum(range(n_ranks)),
        "no header": first + (rank ^ 1),
        "average": first + sum(range(n_ranks)) / n_ranks,
        "broadcast": first,
        "all_gather": torch.stack([first + peer for peer in range(n_ranks)]),
    }
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def check_collectives(n_ranks):
    """Every helper on the shared device: values, and the device they come back on."""
    where = plan(n_ranks).devices[0]
    for rank, found in enumerate(launch(collectives, n_ranks, limit=LIMIT)):
        values = {name: value for name, (value, _) in found.items()}
        assert values == expected(rank, n_ranks), (rank, values)
        assert {device for _, device in found.values()} == {where}, (rank, found)
    return {"place": plan(n_ranks).place, "device": where}


def staging(rank, n_ranks):
    """Return (pinned?, GB/s) of 64 MB from rank 0's device to rank 1's."""
    tensor = torch.arange(1 << 24, device=messages.device)[: 1 << 23]
    pinned = messages._to_wire(tensor).is_pinned()
    messages.barrier()
    start = time.perf_counter()
    for _ in range(5):
        if rank == 0:
            messages.send(tensor, 1)
        else:
            assert torch.equal(messages.receive(0), tensor)
    return pinned, 5 * messages.nbytes(tensor) / 1e9 / (time.perf_counter() - start)


def check_staging():
    """Messages of a GPU travel through pinned host memory."""
    (pinned, rate), _ = launch(staging, 2, limit=LIMIT)
    assert pinned, "the host buffer is not pinned"
    return {"GB/s for 64 MB": round(rate, 2)}


class Multiplier:
    """A worker whose forward only starts the GPU's work."""

    def __init__(self):
        self.a = torch.ones(SIZE, SIZE, device=messages.device)

    def forward(self, microbatch):
        for _ in range(20):
            self.a = self.a @ self.a / SIZE
        return self.a


def under_wall_time(rank, n_ranks):
    """Record forwards and messages; time the same by hand, synchronised."""
    worker = Multiplier()
    worker.forward(0)
    clock._synchronise()
    messages.barrier()
    with clock.recording(clock.Wall(), rank) as clk:
        clock.watch(worker, forward="F")
        start = clk.now()
        for i in range(3):
            y = worker.forward(i)
        launched = clk.now() - start
        clock._synchronise()
        total = clk.now() - start
        messages.exchange(y, 1 - rank)
    return clk.spans, launched, total


def check_events():
    """Events time the GPU's work and not its launch; staging counts as transfer."""
    results = launch(under_wall_time, 2, limit=LIMIT)
    timeline = Timeline.merge([spans for spans, _, _ in results])
    facts = []
    for rank, (_, launched, total) in enumerate(results):
        seconds = timeline.compute(rank)
        assert 0.5 * total <= seconds <= 1.05 * total, (rank, seconds, total)
        transfers = timeline.lane(rank, "transfer")
        moved = {span.name: span.end - span.start for span in transfers}
        assert moved["send"] > 0 and moved["receive"] > 0, (rank, transfers)
        facts.append({"launched": launched, "events": seconds, "synchronised": total})
    return {"seconds": facts}


def timed(rank, n_ranks):
    """Return the virtual spans of timed operations, and when they really ran."""
    ran, worker = [], Multiplier()
    forward = worker.forward

    def noted(microbatch):
        clock._synchronise()
        start = time.perf_counter()
        forward(microbatch)
        clock._synchronise()
        ran.append((start, time.perf_counter()))

    worker.forward = noted
    with clock.recording(clock.Virtual(clock.Timed()), rank) as clk:
        clock.watch(worker, forward="F")
        for i in range(5):
            worker.forward(i)
    return clk.spans, ran


def check_timed(n_ranks=3):
    """Timed operations of ranks that share the GPU do not overlap."""
    results = launch(timed, n_ranks, limit=LIMIT)
    real = sorted(interval for _, ran in results for interval in ran)
    assert all(end <= start for (_, end), (start, _) in pairwise(real)), real
    return {"operations": len(real)}


def check_lab(key, options, clk):
    """The command of a lab runs, and says on what."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", f"labs.{key}"]
        more = [
            word for name, n in options.items() for word in (f"--{name[2:]}", str(n))
        ]
        done = subprocess.run(
            [*command, *more, "--clock", clk, "--out", folder],
            capture_output=True,
            text=True,
            timeout=2 * LIMIT,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {"output": done.stdout.splitlines()}


def check_equality(key, options):
    """A lab on the GPU ends with the weights of one process there."""
    from labs.kit import lab, training

    config = importlib.import_module(f"labs.{key}").Config(**options)
    report = training.train(config, lab.make_clock("unit", config))
    assert report.weights_gap < 1e-4, report.weights_gap
    return {"weights differ by": report.weights_gap, "loss by": report.loss_gap}


LABS = {
    "gpipe": {"n_stages": 4},
    "model_parallel": {"n_stages": 4},
    "single_gpu": {},
    "data_parallel": {"n_workers": 4},
    "parameter_server": {"n_servers": 1, "n_workers": 3},
    "ring_allreduce": {"n_workers": 4},
}


def checks():
    """Return {name: function}, the quick ones first."""
    found = {
        "2 ranks": lambda: check_collectives(2),
        "4 ranks": lambda: check_collectives(4),
        "pinned staging": check_staging,
        "events": check_events,
        "timed in turn": check_timed,
    }
    for lab in LABS.items():
        found[f"{lab[0]}, equality"] = partial(check_equality, *lab)
    for clk in ("wall", "timed", "unit"):
        for lab in LABS.items():
            found[f"{lab[0]}, {clk}"] = partial(check_lab, *lab, clk)
    return found


def run(found, budget=BUDGET):
    """Run checks one after the other; return {name: {"ok", "seconds", ...}}."""
    results, start = {}, time.monotonic()
    for name, check in found.items():
        begun = time.monotonic()
        if begun - start > budget - 2 * LIMIT:
            results[name] = {"ok": False, "error": "no time was left for it"}
            continue
        try:
            results[name] = {"ok": True, **check()}
        except Exception as error:
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = round(time.monotonic() - begun, 1)
        print(f"{'ok' if results[name]['ok'] else 'FAILED':6} {name}", flush=True)
    return results


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", help="where to write the JSON file")
    path = parser.parse_args(argv).path
    os.environ["CUDA_VISIBLE_DEVICES"] = "0"  # so that ranks share it
    if not torch.cuda.is_available():
        print("This machine has no CUDA GPU, so nothing was checked.")
        return 2
    report = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "checks": run(checks()),
    }
    with open(path, "w", encoding="utf-8") as file:
        json.dump(report, file, indent=2)
    return 0 if all(check["ok"] for check in report["checks"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
