import os
import random
import sys
import time
from collections import defaultdict
from functools import cache
from math import inf
from unittest import mock

import cloudpickle
import pytest
import torch
from processes import left
from torch import nn

from labs import parameter_server as lab_
from labs.kit import clock, lab, messages, served, toy, training, world
from labs.kit.served import Turns
from labs.kit.timeline import Link
from labs.parameter_server import Config, Server, Worker, measure, step_seconds

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

LINK = Link(latency=0.25, bandwidth=1e6)  # the digits' 212 kB take 0.21
MODES = ("sync", "stale", "async")


def virtual(config, link=LINK):
    return clock.Virtual(clock.Unit(config.costs()), link, config.slow())


# ---- many runs, one launch for all that need as many ranks ---------------------------


class Sizes(Config):
    """A model whose weights are tensors of these sizes; its score is their sum."""

    sizes = (100, 10, 10, 10, 10, 10)

    def build(self, layers=None):
        return nn.Sequential(Total(self.sizes))


class Total(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(n, generator=generator) / 100) for n in sizes
        )

    def forward(self, x):
        return x.flatten(1)[:, :10] * sum(weight.sum() for weight in self.weights)


class Ten(Sizes):
    sizes = (7, 3)


class Two(Sizes):
    sizes = (2,)


class Masked(Config):
    """Some targets do not count, and the first two samples have none that does."""

    def data(self, step):
        inputs, targets = super().data(step)
        targets = targets.clone()
        targets[:2] = toy.IGNORE
        targets.view(-1)[3::7] = toy.IGNORE
        return inputs, targets


class Frozen(Config):
    def build(self, layers=None):
        module = super().build(layers)
        module[2].requires_grad_(False)
        return module


def digits(n_workers, n_servers, steps=3, batch=8, of=Config, **more):
    options = {"n_workers": n_workers, "n_servers": n_servers, **more}
    return of("digits", batch=batch, steps=steps, **options)


EQUAL = [
    *(digits(n, s) for n in range(1, 5) for s in range(1, 5) if n + s in (2, 3, 5)),
    digits(4, 4, batch=13),
    digits(4, 1, steps=20, batch=6),
    digits(2, 3, batch=1),  # one worker has no sample
    digits(4, 1, batch=3),
    digits(3, 2, of=Masked, batch=9),
    digits(2, 3, of=Frozen),
    digits(3, 2, slowest=4),
    Config(n_workers=2, n_servers=1, batch=6, steps=20),
    Config(n_workers=3, n_servers=2, batch=5, steps=2),
    digits(1, 4, of=Ten),
    digits(1, 4, of=Two),
    digits(2, 3, of=Sizes),
]
LATE = [
    digits(4, 1, mode="async"),
    digits(4, 1, mode="async", rate=0.5),
    digits(4, 1, mode="stale", slowest=3, steps=6),
    digits(3, 2, mode="async", slowest=4, steps=5),
    digits(3, 2, mode="stale", bound=2, slowest=4, steps=6),
    digits(2, 3, mode="async", batch=1),
    digits(1, 4, mode="stale"),
    digits(2, 1, mode="stale", bound=3, slowest=5, steps=8),
]


def train_all(rank, n_ranks, runs):
    found = []
    for config, clk in runs:
        found.append(training._train(rank, n_ranks, config, clk, False))
        messages.finish()
    return found


@cache
def _reports(n_ranks):
    """{config: report}; the first of LATE runs twice."""
    configs = [c for c in EQUAL + LATE + LATE[:1] if c.n_ranks() == n_ranks]
    runs = [(config, virtual(config)) for config in configs]
    reports = defaultdict(list)
    for (config, clk), results in zip(
        runs, zip(*world.launch(train_all, n_ranks, runs))
    ):
        with mock.patch.object(world, "launch", lambda *args, found=results: found):
            reports[config].append(measure(config, clk))
    return reports


@pytest.fixture
def report(request, one_thread):
    config = request.param
    return _reports(config.n_ranks())[config][0]


def each(configs):
    return pytest.mark.parametrize("report", configs, indirect=True, ids=str)


# ---- the invariant -------------------------------------------------------------------


@each(EQUAL)
def test_in_sync_the_weights_are_those_of_one_process(report):
    assert report.weights_gap < 1e-6 and report.loss_gap < 1e-5
    assert report.remarks == []
    assert report.invariant()[1][1:3] == ("below 1e-06", "below 1e-06")
    assert {staleness for one in report.facts if one for staleness in one} <= {0}


@each([config for config in LATE if config.n_workers > 1])
def test_otherwise_nothing_is_claimed(report):
    assert report.weights_gap > 1e-6
    assert report.remarks[0].startswith("Gradients may belong to older weights")
    assert report.invariant()[1][1] == "(no claim)"


def test_one_worker_alone_is_never_late():
    [report] = _reports(5)[digits(1, 4, mode="stale")]
    assert report.weights_gap < 1e-6 and report.facts[0] == [0, 0, 0]


def test_an_asynchronous_run_in_virtual_time_can_be_repeated():
    first, second = _reports(5)[LATE[0]]
    assert first.facts == second.facts and first.losses == second.losses
    assert first.timeline.spans == second.timeline.spans
    assert first.weights_gap == second.weights_gap > 0


def gradients(rank, n_ranks, configs):
    """What the server has to step along, and what one process finds."""
    found = []
    for config in configs:
        worker = config.worker(rank)
        if rank < config.n_servers:
            worker.optimizer.step = lambda: None
            worker.serve(config.n_workers)
            worker.serve()
            found.append(worker.weights.grad)
        else:
            config.step(worker, rank, *config.data(0))
            worker.leave()
    return found


@pytest.mark.parametrize("model", toy.MODELS)
def test_gradients_are_those_of_one_process(model):
    config = Config(model, n_workers=3, n_servers=2, batch=7)
    first, second, *_ = world.launch(gradients, 5, [config])
    module = config.build()
    toy.reference_step(module, *config.data(0))
    whole = torch.cat([weight.grad.flatten() for weight in module.parameters()])
    torch.testing.assert_close(torch.cat(first + second), whole, rtol=1e-5, atol=1e-6)


# ---- the ledger ----------------------------------------------------------------------


def rows(report):
    return {name: (said, did) for name, said, did, _ in report.rows}


ALL_ALIKE = [config for config in EQUAL + LATE if config.slowest == 1]


@each(ALL_ALIKE)
def test_the_ledger_counts_what_it_predicts(report):
    found = rows(report)
    for name in ("bubble", "whole run", "sent"):
        assert found[name][1] == pytest.approx(found[name][0], rel=1e-9), name
    config = report.config
    said, did = found["an update every"]
    if config.mode == "sync" and config.n_servers not in (1, config.n_workers):
        assert 0.999 * said < did < 1.1 * said
    else:  # ranges may differ by one element
        assert did == pytest.approx(said, rel=1e-5)


@each(EQUAL + LATE)
def test_bytes_and_staleness_do_not_depend_on_who_is_slow(report):
    found, config = rows(report), report.config
    assert found["sent"][0] == found["sent"][1]
    assert found["staleness, at most"][1] <= found["staleness, at most"][0]
    weights = config.build().parameters()
    frozen = sum(messages.nbytes(one) for one in weights if not one.requires_grad)
    (said, did), n_servers = found["held"], config.n_servers
    assert did == said[:n_servers] + [one + frozen for one in said[n_servers:]]


def times(timeline):
    """The operations of each rank, by start and end."""
    return [
        [
            (str(span.op), pytest.approx(span.start), pytest.approx(span.end))
            for span in timeline.ops(rank)
        ]
        for rank in range(timeline.n_ranks)
    ]


@each(EQUAL + LATE)
def test_without_ranks_the_timeline_is_the_same(report):
    """By `served.serve`, for every mode, link and slow worker."""
    config = report.config
    turns = [config.turns(server) for server in range(config.n_servers)]
    size = sum(w.numel() for w in config.build().parameters() if w.requires_grad)
    parts = messages.chunk_sizes(size, config.n_servers)
    nbytes, n = [4 * part + 4 for part in parts], config.n_workers
    said = served.serve(turns, n, cost(config), nbytes, config.steps, LINK)
    did = report.timeline
    assert len(did.ops(0)) > 0 and times(did) == times(said)
    assert did.makespan == pytest.approx(said.makespan, rel=1e-9)
    assert did.bubble() == pytest.approx(said.bubble(), rel=1e-9)
    points = report.explain(*report.timelines())
    assert points.total == pytest.approx(100 * did.bubble())
    assert dict(points.rows)["jitter"] == pytest.approx(0, abs=1e-6)
    assert (abs(dict(points.rows)["imbalance"]) > 1) == (config.slowest > 1)


def test_bytes_by_hand():
    """4 workers, 3 steps, one server; 53002 weights and a version in each message."""
    [report] = _reports(5)[digits(4, 1)]
    n = sum(weight.numel() for weight in toy.build("digits").parameters())
    assert report.sent == [4 * 4 * (4 * n + 4), *[3 * (4 * n + 4)] * 4]
    assert report.held == [12 * n, *[8 * n] * 4]
    assert report.peaks[0] == 0 and min(report.peaks[1:]) > 0


def test_a_slow_worker_stops_all_of_them_only_in_sync():
    def finished(mode, steps=6):
        config = digits(3, 1, mode=mode, slowest=4, steps=steps)
        last = served.serve(
            [config.turns(0)], 3, cost(config), [212012], steps, LINK
        ).ops(1)[-1]
        return last.end

    assert finished("async") < 0.4 * finished("sync")
    assert finished("async") < finished("stale") < finished("sync")


def test_in_wall_time():
    config = digits(2, 1, mode="async")
    report = measure(config, clock.Wall())
    found = rows(report)
    assert found["sent"][0] == found["sent"][1] and found["held"][0] == found["held"][1]
    assert len(report.facts[0]) == 6 and max(report.facts[0]) <= 5
    points = report.explain(*report.timelines())
    assert points.total == pytest.approx(100 * report.timeline.bubble())


# ---- the cost of a step --------------------------------------------------------------


def cost(config):
    costs = config.costs()

    def seconds(rank, op):
        return costs[op.kind] * config.slow().get(rank, 1)

    return seconds


def synchronous(n_workers, n_servers, nbytes=1000, link=LINK, compute=3.25):
    """The time from one update to the next, by the simulation."""
    config = digits(n_workers, n_servers)
    turns = [config.turns(server) for server in range(n_servers)]
    sizes = [nbytes / n_servers] * n_servers
    one = {"F": compute / 3.25, "B": 2 * compute / 3.25, "U": 0.25 * compute / 3.25}
    run = served.serve(turns, n_workers, lambda _, op: one[op.kind], sizes, 4, link)
    return served.interval(run)


@pytest.mark.parametrize("n_workers", range(1, 9))
def test_a_synchronous_step_takes_what_the_formula_says(n_workers):
    """Exactly, for one server, for as many as workers, and for one worker."""
    for link in (LINK, Link(0.0, 500.0), Link(2.0), Link(0.1, 30.0)):
        for n_servers in range(1, 9) if n_workers == 1 else (1, n_workers):
            expected = step_seconds(n_workers, n_servers, 1000, 3.25, link)
            found = synchronous(n_workers, n_servers, link=link)
            assert found == pytest.approx(expected, rel=1e-9), (n_servers, link)


@pytest.mark.parametrize("n_servers", range(1, 9))
def test_between_them_it_takes_a_little_longer(n_servers):
    """Up to two of the messages, which are one n_servers-th of the weights each."""
    link = Link(0.1, 500.0)
    for n_workers in range(n_servers, 9):
        least = step_seconds(n_workers, n_servers, 1000, 3.25, link)
        found = synchronous(n_workers, n_servers, link=link)
        assert least - 1e-9 < found < least + 2.01 * 2 / n_servers


def test_one_server_is_linear_in_workers_and_as_many_servers_are_flat():
    link = Link(bandwidth=1000.0)  # a unit of time for all weights
    one = [step_seconds(n, 1, 1000, 3.25, link) - 3.25 for n in (1, 2, 3, 64)]
    as_many = [step_seconds(n, n, 1000, 3.25, link) - 3.25 for n in (1, 2, 4, 64)]
    assert one == [2, 3, 4, 65] and as_many == [2, 2, 2, 2]
    assert step_seconds(64, 64, 1000, 0, Link(latency=7.0)) == 14


# ---- by hand, on ranks ---------------------------------------------------------------


def flat(*values):
    return nn.ParameterList([nn.Parameter(torch.tensor(values))])


def plain_sgd(lr):
    return lambda module: torch.optim.SGD(module.parameters(), lr)


def serve(start, workers, lr=1.0, together=False, bound=inf):
    """Serve until nobody is left; return the server."""
    server = Server(torch.tensor(start), plain_sgd(lr), Turns(workers, together, bound))
    server.serve()
    return server


def work(module, gradients, servers=(0,)):
    """Pull and push these gradients; return (what was pulled each time, versions)."""
    worker, seen = Worker(module, servers), []
    for gradient in gradients:
        worker.pull()
        [weight] = worker.module
        seen.append((weight.tolist(), [int(v) for v in worker.versions.values()]))
        weight.grad = torch.tensor(gradient)
        worker.push()
    worker.leave()
    return seen


def four_push(rank, n_ranks):
    """P02: four workers push -1 five hundred times each."""
    if rank == 0:
        server = serve([0.0], range(1, 5))
        return server.weights.item(), server.version, len(server.staleness)
    return len(work(flat(0.0), [[-1.0]] * 500))


def test_p02_no_update_is_lost():
    assert world.launch(four_push, 5)[0] == (2000.0, 2000, 2000)


@pytest.mark.parametrize(
    "of, n_servers, sizes",
    [(Sizes, 3, [50, 50, 50]), (Ten, 4, [3, 3, 2, 2]), (Two, 4, [1, 1, 0, 0]),
     (Sizes, 1, [150])],
)  # fmt: skip
def test_p03_ranges_are_flat(of, n_servers, sizes):
    config = digits(2, n_servers, of=of)
    servers = [config.worker(rank) for rank in range(n_servers)]
    assert [server.weights.numel() for server in servers] == sizes
    whole = nn.utils.parameters_to_vector(config.build().parameters())
    assert torch.equal(torch.cat([server.weights for server in servers]), whole)


@pytest.mark.parametrize("config, sizes", [
    (digits(2, 3, of=Sizes), [50, 50, 50]),
    (digits(1, 4, of=Ten), [3, 3, 2, 2]),
    (digits(1, 4, of=Two), [1, 1, 0, 0]),
])  # fmt: skip
def test_p03_bytes_of_each_server(config, sizes):
    n, [report] = config.n_workers, _reports(5)[config]
    assert report.sent[: len(sizes)] == [n * 4 * (4 * size + 4) for size in sizes]


def pulls_once(rank, n_ranks):
    config = digits(2, 3)
    worker = config.worker(rank)
    if rank < 3:
        return worker.serve()
    for weight in worker.module.parameters():
        nn.init.zeros_(weight)
    worker.leave()
    return worker.module.state_dict()


def test_p03_what_is_pulled_are_the_bits_that_the_servers_have():
    whole = toy.build("digits").state_dict()
    for pulled in world.launch(pulls_once, 5)[3:]:
        assert all(torch.equal(pulled[name], weight) for name, weight in whole.items())


# ---- staleness -----------------------------------------------------------------------


def test_p04_in_turn_staleness_is_that_of_the_others():
    [report, _] = _reports(5)[LATE[0]]
    assert report.facts[0] == [0, 1, 2] + [3] * 9


def descend(rank, n_ranks, rates):
    """f(w) = w^2 / 2 from 1, whose gradient is w: all weights of the server."""
    return [_descend(rank, n_ranks, lr) for lr in rates]


def _descend(rank, n_ranks, lr, n_updates=60):
    with clock.recording(clock.Virtual(clock.Unit({"F": 1})), rank):
        if rank == 0:
            start = torch.ones(1, dtype=torch.float64)
            server = Server(start, plain_sgd(lr), Turns(range(1, n_ranks), False, inf))
            path, step = [1.0], server.optimizer.step
            server.optimizer.step = lambda: (step(), path.append(server.weights.item()))
            server.serve()
            return path, server.staleness
        worker = Descent(flat(0.0).double(), [0])
        clock.watch(worker, gradient="F")
        for i in range(n_updates // (n_ranks - 1)):
            worker.pull()
            worker.gradient(i)
            worker.push()
        worker.leave()


class Descent(Worker):
    def gradient(self, step):
        [weight] = self.module
        weight.grad = weight.detach().clone()


def test_p04_gradients_one_update_old_need_a_smaller_rate():
    by_rate = world.launch(descend, 3, [0.9, 1.2])[0]
    for lr, (path, staleness) in zip([0.9, 1.2], by_rate):
        assert staleness == [0] + [1] * 59
        assert path == pytest.approx(toy.delayed_descent(lr, 60), rel=1e-12)
    assert abs(by_rate[0][0][-1]) == pytest.approx(0.0066, abs=5e-5)
    assert abs(by_rate[1][0][-1]) > 200
    for path, _ in [*world.launch(descend, 2, [0.9, 1.2])[0]]:  # one worker: no delay
        assert abs(path[-1]) < 1e-9


@each([config for config in LATE if config.mode == "stale"])
def test_p04_staleness_has_a_bound(report):
    config = report.config
    most = lab_.most_stale(config.n_workers, config.bound)
    assert max(max(one) for one in report.facts if one) <= most < inf


def worst(n_workers, bound, seed):
    """Let workers take random turns as the bound allows; return the most staleness."""
    order, turns = random.Random(seed), Turns(range(n_workers), False, bound)
    seen, version, most = {}, 0, 0
    for _ in range(300):
        seen |= dict.fromkeys(turns.answer(), version)
        worker = order.choice(turns.expected()[:: order.choice((1, -1))][:2])
        most = max(most, version - seen[worker])
        turns.push(worker)
        version += len(turns.update())
        ahead = turns.pushes.values()
        assert max(ahead) - min(ahead) <= bound + 1
    return most


@pytest.mark.parametrize("n_workers, bound", [(2, 0), (2, 1), (2, 3), (3, 1), (4, 2)])
def test_p04_no_order_of_turns_makes_more_staleness(n_workers, bound):
    found = max(worst(n_workers, bound, seed) for seed in range(50))
    assert found <= lab_.most_stale(n_workers, bound)
    if n_workers == 2:
        assert found == lab_.most_stale(n_workers, bound)


# ---- P05: any number of workers, with any number of batches --------------------------


def unequal(rank, n_ranks):
    """Worker 1 has three batches, worker 2 two."""
    if rank == 0:
        server = serve([0.0], (1, 2), together=True, bound=0)
        return server.weights.item(), server.version
    return [w for [w], _ in work(flat(0.0), [[[2.0]] * 3, [[4.0]] * 2][rank - 1])]


def seven(rank, n_ranks):
    """Seven samples in batches of two; sample i has a gradient of 1 at place i."""
    if rank == 0:
        server = serve([0.0] * 7, (1, 2), together=True, bound=0)
        return server.weights.tolist(), server.version
    batches = torch.eye(7).split(2)[rank - 1 :: 2]
    return len(work(flat(*[0.0] * 7), [b.sum(0).tolist() for b in batches]))


def both(rank, n_ranks, *programs):
    return [program(rank, n_ranks) for program in programs]


def test_p05_workers_may_have_unequal_numbers_of_batches():
    ((weight, version), (used, updates)), *others = world.launch(
        both, 3, unequal, seven
    )
    # two updates along the mean of 2 and 4; the third along 2 alone, divided by 1
    assert (weight, version) == (-8.0, 3)
    assert [one[0] for one in others] == [[0.0, -3.0, -6.0], [0.0, -3.0]]
    # both rounds have two gradients, whose mean is half of each: none twice, none lost
    assert (used, updates) == ([-0.5] * 7, 2)


# ---- P06: torn pulls -----------------------------------------------------------------


def pairs(rank, n_ranks, n_pulls):
    """One worker pushes -1 to two tensors, the other looks at them; one server."""
    if rank == 0:
        return serve([0.0, 0.0], (1, 2)).version
    gradient = -1.0 if rank == 1 else 0.0
    module = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in "ab"])
    worker, torn, seen = Worker(module, [0]), 0, set()
    for _ in range(n_pulls):
        worker.pull()
        a, b = (weight.item() for weight in module)
        torn, seen = torn + (a != b), seen | {a}
        for weight in module:
            weight.grad = torch.full((1,), gradient)
        worker.push()
    worker.leave()
    return torn, len(seen)


def test_p06_of_one_server_a_pull_is_a_snapshot():
    updates, pusher, reader = world.launch(pairs, 3, 1000)
    assert updates == 2000 and pusher == (0, 1000)
    assert reader[0] == 0 and reader[1] > 1  # it has seen the others' updates


# ---- P01: who dies, and what the others do -------------------------------------------


def mortal(rank, n_ranks, config, victim):
    """Train; the victim ends its process after two pushes (a server: two steps)."""
    worker = config.worker(rank)
    for step in range(config.steps):
        if rank == victim and step == 2:
            if rank >= config.n_servers:
                worker.pull()  # so both pushes have arrived
            os._exit(1)
        config.step(worker, rank, *config.data(step))
        config.finish(worker, rank, step)
    return len(worker.staleness) if rank < config.n_servers else step + 1


def failed(mode, victim):
    start = time.monotonic()
    with pytest.raises(world.RankFailed) as caught:
        world.launch(mortal, 3, digits(2, 1, mode=mode, steps=5), victim)
    assert time.monotonic() - start < 20 and left() == []
    return str(caught.value)


def test_p01_in_sync_a_dead_worker_ends_the_run_and_is_named():
    said = failed("sync", victim=2)
    assert said.startswith("rank 2 ended its process")
    assert "rank 2 is gone: it had pushed 2 times" in said


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_p01_a_dead_server_ends_the_run_and_is_named(mode):
    assert failed(mode, victim=0).startswith("rank 0 ended its process")


@pytest.mark.parametrize("mode", ["async", "stale"])
def test_p01_without_rounds_the_others_go_on(mode):
    config = digits(2, 1, mode=mode, steps=5)
    pushes, steps, dead = world.launch(mortal, 3, config, 2, may_fail=[2])
    assert (pushes, steps) == (7, 5)
    assert dead.rank == 2 and left() == []


# ---- the command line ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_workers": 0}, "n_workers must be a whole number from 1 up, not 0"),
        ({"n_servers": 0}, "n_servers must be a whole number from 1 up, not 0"),
        ({"bound": 0}, "bound must be a whole number from 1 up, not 0"),
        ({"rate": 0.0}, "rate must be a number above 0, not 0.0"),
        ({"rate": float("nan")}, "rate must be a number above 0, not nan"),
        ({"rate": "full"}, "rate must be a number above 0, not 'full'"),
        ({"slowest": 1.5}, "slowest must be a whole number from 1 up, not 1.5"),
        ({"mode": "ssp"}, "no mode 'ssp': choose one of sync, stale, async"),
        ({"model": "image"}, "no model 'image': choose one of text, digits"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(monkeypatch, options, words):
    monkeypatch.setattr(world, "launch", None)
    config = Config(**options)
    with pytest.raises(ValueError, match=words):
        measure(config, clock.Virtual(clock.Unit()))


def test_an_error_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        lab.main("parameter_server", "", Config, measure, ["--mode", "ssp"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("labs.parameter_server: no mode 'ssp'")
    assert said.err.count("\n") == 1


def test_a_slow_worker_needs_virtual_time(capsys):
    with pytest.raises(SystemExit):
        options = ["--slowest", "3", "--clock", "wall"]
        lab.main("parameter_server", "", Config, measure, options)
    assert "a slow rank needs virtual time" in capsys.readouterr().err
