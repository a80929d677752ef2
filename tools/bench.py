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
from torch.nn.parallel import DistributedDataParallel

from labs import data_parallel, gpipe, model_parallel, parameter_server, ring_allreduce
from labs.kit import messages, served, simulate, toy, world

N_STAGES, N_MICROBATCHES, BATCH, ROUNDS, WARM_UP = 4, 8, 32, 40, 5


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
    steps = {
        "ours": lambda: ours(stage, rank, inputs, targets),
        "library": lambda: step(inputs, targets),
    }
    return beside(steps, {"ours": stage.module, "library": theirs}, ROUNDS)


def beside(steps, modules, rounds):
    """Return the seconds of both steps, and the gap of the gradients they leave."""
    times = in_turn(steps, rounds, lambda name: modules[name].zero_grad())
    pairs = zip(*(module.parameters() for module in modules.values()))
    return times, float(max((a.grad - b.grad).abs().max() for a, b in pairs))


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


def wide():
    """A model of 32 MB, with enough work in a step to hide an exchange."""
    torch.manual_seed(0)
    layers = [
        layer
        for _ in range(8)
        for layer in (torch.nn.Linear(1024, 1024), torch.nn.Tanh())
    ]
    return torch.nn.Sequential(*layers)


def replicas(rank, n_ranks):
    """Time a forward, backward and exchange, in buckets of 8 MB beside the backward."""
    ours, theirs = wide(), DistributedDataParallel(wide(), bucket_cap_mb=8)
    reducer = data_parallel.Reducer(ours.parameters(), 8 << 20)
    inputs = torch.randn(256, 1024, generator=torch.Generator().manual_seed(rank))

    def our_step():
        reducer.on = True
        ours(inputs).square().mean().backward()
        reducer.finish()

    steps = {
        "ours": our_step,
        "library": lambda: theirs(inputs).square().mean().backward(),
    }
    return beside(steps, {"ours": ours, "library": theirs}, 15)


def in_turn(steps, rounds, prepare):
    """Return the seconds of each step per round, taken in turn by all ranks at once;
    prepare(name) comes before each."""
    times = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            prepare(name)
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    return {name: all_of[WARM_UP:] for name, all_of in times.items()}


def bench_data_parallel():
    results = world.launch(replicas, 2)
    assert max(gap for _, gap in results) < 1e-5, "the two gradients disagree"
    times = results[0][0]
    ratio = statistics.median(map(float.__truediv__, times["ours"], times["library"]))
    medians = [1e3 * statistics.median(times[name]) for name in times]
    say("our bucketed step / DistributedDataParallel", ratio, "at most 1.02",
        f"{medians[0]:.1f} ms and {medians[1]:.1f} ms a step, 2 ranks, 32 MB of "
        "gradients, gloo")  # fmt: skip


def rings(rank, n_ranks, size):
    """Time the ring, which keeps its buffer, and the library on as many bytes."""
    tensor = torch.ones(size // 4)
    buffer = torch.empty(-(-tensor.numel() // n_ranks))
    steps = {
        "ours": lambda: ring_allreduce.ring(tensor, buffer),
        "library": lambda: dist.all_reduce(tensor),
    }
    return in_turn(
        steps, max(10, min(60, (128 << 20) // size)), lambda name: tensor.fill_(1)
    )


def bench_ring():
    for n_ranks in (2, 4):
        for size in (1 << 16, 1 << 20, 4 << 20, 16 << 20, 64 << 20):
            times = world.launch(rings, n_ranks, size)[0]
            library, ours = times["library"], times["ours"]
            ratio = statistics.median(map(float.__truediv__, library, ours))
            name = (
                f"speed of our ring / all_reduce, {n_ranks} ranks, {size / 2**20:g} MiB"
            )
            say(name, ratio, "at least 0.95" if size >= 4 << 20 else "none")


class Weights(torch.nn.Module):
    """As many bytes of weights as asked for, each with a gradient of 1."""

    def __init__(self, size):
        super().__init__()
        self.weights = torch.nn.Parameter(torch.zeros(size // 4))
        self.weights.grad = torch.ones(size // 4)


def sgd(module):
    return torch.optim.SGD(module.parameters(), 0.1)


def exchanges(rank, n_ranks, n_servers, size):
    """Time synchronous rounds of pull, push and update, without any computation."""
    workers = range(n_servers, n_ranks)
    if rank < n_servers:
        part = torch.zeros(size // 4).tensor_split(n_servers)[rank]
        server = parameter_server.Server(part, sgd, served.Turns(workers))
        steps = {"round": lambda: server.serve(len(workers))}
    else:
        order = served.order(n_servers, rank, True)
        worker = parameter_server.Worker(Weights(size), order)
        steps = {"round": lambda: (worker.pull(), worker.push())}
    times = in_turn(steps, 20, lambda name: None)["round"]
    server.serve() if rank < n_servers else worker.leave()
    return statistics.median(times)


def bench_parameter_server(size=16 << 20, counts=(1, 2, 4)):
    """Time against the number of workers: one server, one for each worker, a ring."""
    launch, median = world.launch, statistics.median
    times = {
        "one server": [launch(exchanges, 1 + n, 1, size)[0] for n in counts],
        "a server per worker": [launch(exchanges, 2 * n, n, size)[0] for n in counts],
        "ring all-reduce": [median(launch(rings, n, size)[0]["ours"]) for n in counts],
    }
    for what, seconds in times.items():
        shown = ", ".join(f"{1e3 * each:.0f}" for each in seconds)
        say(f"{what}: time of 4 workers / of 2", seconds[2] / seconds[1], "none",
            f"{shown} ms with 1, 2, 4 workers, {size >> 20} MiB; all share this "
            "machine's cores and memory")  # fmt: skip


def stages(rank, n_ranks):
    """Time a step of a model that is cut in two, and of the whole on one rank."""
    config = model_parallel.Config(n_stages=n_ranks, batch=BATCH)
    cut, whole = config.worker(rank), config.build()
    inputs, targets = config.data(0)
    cut.loss = config.loss(rank, targets)
    alone = lambda: rank == 0 and toy.reference_step(whole, inputs, targets)
    steps = {"cut": lambda: model_parallel.in_turn(cut, inputs), "whole": alone}
    return in_turn(steps, ROUNDS, lambda name: cut.module.zero_grad())


def bench_model_parallel():
    times = world.launch(stages, 2)[0]
    ratio = statistics.median(map(float.__truediv__, times["cut"], times["whole"]))
    medians = [1e3 * statistics.median(times[name]) for name in times]
    say("model-parallel step, 2 stages / single process", ratio, "about 1",
        f"{medians[0]:.1f} ms and {medians[1]:.1f} ms a step, gloo")  # fmt: skip


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
    print(f"{what:<56} {value:6.2f}   goal: {goal}", flush=True)
    if detail:
        print(f"    {detail}", flush=True)


def main():
    print(world.plan(N_STAGES).describe(world.here()), flush=True)
    bench_pipeline()
    bench_data_parallel()
    bench_ring()
    bench_parameter_server()
    bench_model_parallel()
    bench_launch()
    bench_simulate()


if __name__ == "__main__":
    main()
