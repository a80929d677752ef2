"""Ratios that the course claims, each measured within one run: `make bench`.

Medians of interleaved rounds. Times on their own say little about another machine; the
ratio of two things measured side by side says more.
"""

import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from labs import gpipe
from labs.kit import messages, simulate, toy, world

N_STAGES, N_MICROBATCHES, BATCH, ROUNDS = 4, 8, 32, 40


def ours(stage, rank, inputs, targets):
    """One forward and backward of the whole batch with the course's runner."""
    order = gpipe.gpipe(N_STAGES, N_MICROBATCHES)[rank]
    cut, valid = targets.tensor_split(N_MICROBATCHES), toy.n_valid(targets)
    if rank == N_STAGES - 1:
        stage.loss = lambda y, i: toy.loss_sum(y, cut[i]) / valid
    gpipe.run(order, stage, inputs.tensor_split(N_MICROBATCHES))


def library(module, rank):
    """The same with torch.distributed.pipelining; returns the function of a step."""
    stage = PipelineStage(module, rank, N_STAGES, torch.device("cpu"))
    mean = torch.nn.CrossEntropyLoss()
    schedule = ScheduleGPipe(
        stage,
        N_MICROBATCHES,
        loss_fn=lambda y, target: mean(y.flatten(0, -2), target.flatten()),
    )

    def step(inputs, targets):
        if rank == 0:
            schedule.step(inputs)
        elif rank == N_STAGES - 1:
            schedule.step(target=targets)
        else:
            schedule.step()

    return step


def pipelines(rank, n_ranks):
    """Time both pipelines in turn; return their seconds per round, and the gap of
    their gradients (they must do the same work)."""
    config = gpipe.Config(n_stages=N_STAGES, batch=BATCH)
    stage = config.worker(rank)
    theirs = config.worker(rank).module
    inputs, targets = toy.batch(config.model, BATCH)
    step = library(theirs, rank)
    seconds = {"ours": [], "library": []}
    for _ in range(ROUNDS):
        for name in seconds:
            (stage.module if name == "ours" else theirs).zero_grad()
            dist.barrier()
            start = time.perf_counter()
            if name == "ours":
                ours(stage, rank, inputs, targets)
            else:
                step(inputs, targets)
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    pairs = zip(stage.module.parameters(), theirs.parameters())
    gaps = [(a.grad - b.grad).abs().max() for a, b in pairs]
    return {name: times[5:] for name, times in seconds.items()}, float(max(gaps))


def bench_pipeline():
    results = world.launch(pipelines, N_STAGES)
    assert max(gap for _, gap in results) < 1e-5, "the two pipelines disagree"
    ours, library = (
        [max(times) for times in zip(*(seconds[name] for seconds, _ in results))]
        for name in ("ours", "library")
    )
    ratio = statistics.median(a / b for a, b in zip(ours, library))
    medians = [1e3 * statistics.median(times) for times in (ours, library)]
    say("our GPipe step / ScheduleGPipe", ratio, "at most 0.95",
        f"{medians[0]:.1f} ms and {medians[1]:.1f} ms a step, {N_STAGES} stages, "
        f"{N_MICROBATCHES} microbatches, gloo")  # fmt: skip


def nothing(rank, n_ranks=4):
    return messages.n_ranks()


def bench_launch():
    world.launch(nothing, 4)
    warm = [seconds(world.launch, nothing, 4) for _ in range(7)]
    spawn = [seconds(mp.spawn, nothing, (4,), 4) for _ in range(3)]
    spawn, warm = statistics.median(spawn), statistics.median(warm)
    what = "torch.multiprocessing.spawn / warm launch, 4 ranks"
    say(what, spawn / warm, "at least 20", f"{spawn:.2f} s and {warm:.3f} s")


def bench_simulate():
    costs = {"F": 1, "B": 2}
    times = {}
    for m in (256, 1024):
        schedule = gpipe.gpipe(64, m)
        times[m] = statistics.median(
            seconds(simulate.simulate, schedule, costs) for _ in range(3)
        )
    say("simulate, 64 stages x 1024 microbatches, in s", times[1024], "under 2")
    say("its time / that of a quarter of the operations", times[1024] / times[256],
        "about 4 (linear)")  # fmt: skip


def seconds(function, *args):
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def say(what, value, goal, detail=""):
    print(f"{what:<52} {value:6.2f}   goal: {goal}", flush=True)
    if detail:
        print(f"    {detail}", flush=True)


def main():
    print(world.plan(N_STAGES).describe(world.here()), flush=True)
    bench_pipeline()
    bench_launch()
    bench_simulate()


if __name__ == "__main__":
    main()
