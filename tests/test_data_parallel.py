import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from labs import data_parallel
from labs.data_parallel import (
    Config,
    Reducer,
    average_flat,
    broadcast_start,
    buckets,
    indices,
    measure,
)
from labs.kit import clock, lab, messages, toy, training, world
from labs.kit.timeline import Link

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

UNIT = clock.Virtual(clock.Unit(within=True))
LINK = Link(latency=1e-5, bandwidth=1e9)


# ---- who sees which samples ----------------------------------------------------------


@pytest.mark.parametrize("n_samples, n_ranks", [(8, 2), (10, 4), (3, 7), (1, 1)])
def test_samples_are_dealt_as_the_library_does(n_samples, n_ranks):
    for rank in range(n_ranks):
        for epoch in (0, 1):
            theirs = DistributedSampler(range(n_samples), n_ranks, rank, seed=3)
            theirs.set_epoch(epoch)
            assert indices(n_samples, n_ranks, rank, epoch, seed=3) == list(theirs)


def test_d02_each_epoch_has_an_order_of_its_own_and_misses_nothing():
    epochs = [[indices(8, 2, rank, epoch) for rank in (0, 1)] for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert all(sorted(a + b) == list(range(8)) for a, b in epochs)
    astray = indices(8, 2, 0, epoch=0) + indices(8, 2, 1, epoch=1)
    assert sorted(astray) != list(range(8))


def test_d04_fewer_samples_than_ranks_are_repeated():
    assert len({tuple(indices(3, 7, rank)) for rank in range(7)}) == 3
    assert indices(0, 2, 1) == []


def test_buckets_follow_the_backward():
    layers = [nn.Parameter(torch.zeros(n)) for n in (4, 2, 3, 1)]
    sizes = [[p.numel() for p in bucket] for bucket in buckets(layers, 4 * 4)]
    assert sizes == [[1, 3], [2], [4]]
    assert [len(bucket) for bucket in buckets(layers, 1)] == [1, 1, 1, 1]
    assert [len(bucket) for bucket in buckets(layers, 10**9)] == [4]


# ---- one weight, by hand -------------------------------------------------------------


def linear():
    w = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(w.weight)
    return w


def squared(w, samples, divisor):
    """The squared errors of targets x, summed and divided; w = 0: gradient -2 x x."""
    x = torch.tensor(samples).reshape(-1, 1)
    return ((w(x) - x) ** 2).sum() / divisor


def exchanged(pieces, divisor, last_only=True):
    """The gradient after a step in these pieces, and how many messages that took."""
    w, sent = linear(), []
    reducer = Reducer(w.parameters(), 1 << 20)
    send, reducer.send = reducer.send, lambda: (sent.append(1), send())
    for i, samples in enumerate(pieces):
        reducer.on = i == len(pieces) - 1
        squared(w, samples, divisor).backward()
    reducer.finish()
    return w.weight.grad.item(), len(sent)


def by_hand(rank, n_ranks):
    """D01: own means, averaged. D05: sums over the samples of a rank on average.
    D07: two pieces, one message."""
    return (
        exchanged([[1.0 + rank]], 1),
        exchanged([[[1.0, 2.0], [3.0]][rank]], 3 / 2),
        exchanged([[[1.0], [3.0]][rank], [[2.0], [4.0]][rank]], 2),
    )


def test_d01_d05_d07_gradients_are_those_of_the_whole_batch():
    for one, unequal, pieces in world.launch(by_hand, 2):
        assert one == (-5.0, 1)
        assert unequal == (pytest.approx(-28 / 3), 1)
        assert pieces == (-15.0, 1)


def starts(rank, n_ranks):
    """D03: seeds that differ; the weights before and after the start, and 5 steps."""
    torch.manual_seed(rank)
    module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    module[1].running_mean.fill_(rank)
    seen = [module[0].weight.item()]
    broadcast_start(module)
    weight = module[0].weight
    seen += [weight.item(), module[1].running_mean.item()]
    for _ in range(5):
        weight.grad = torch.full_like(weight, float(rank))
        average_flat([weight])
        torch.optim.SGD([weight], 0.1).step()
        seen.append(weight.item())
    return seen


def test_d03_all_start_as_rank_0_and_stay_equal():
    first, second = world.launch(starts, 2)
    assert first[0] == pytest.approx(-0.0075, abs=1e-4)
    assert second[0] == pytest.approx(0.5153, abs=1e-4)
    assert first[1:] == second[1:] and first[1:3] == [first[0], 0.0]


def branches(rank, n_ranks):
    """C01: rank 0 uses a then b, rank 1 b then a; nobody c; only rank 0 d."""
    a, b, c, d = (nn.Parameter(torch.zeros(2)) for _ in "abcd")
    reducer = Reducer([a, b, c, d], 1)
    reducer.on = True
    first, second = (a, b) if rank == 0 else (b, a)
    value = {a: 1.0 + rank, b: 10.0 + rank}
    loss = (first * value[first]).sum()
    loss = loss + (second * value[second]).sum() + (d.sum() if rank == 0 else 0)
    loss.backward()
    reducer.finish()
    return [p.grad.tolist() for p in (a, b, c, d)]


def test_c01_messages_have_one_order_and_unused_parameters_are_zeros():
    expected = [[1.5, 1.5], [10.5, 10.5], [0.0, 0.0], [0.5, 0.5]]
    assert world.launch(branches, 2) == [expected] * 2


def unequal_batches(rank, n_ranks):
    """D06: rank 0 has three batches, rank 1 two; the third is an empty one there."""
    w, seen = linear(), []
    for samples in ([1.0], [2.0], [3.0] if rank == 0 else []):
        w.zero_grad()
        count = messages.all_reduce(torch.tensor(float(len(samples))), "avg").item()
        squared(w, samples, count).backward()
        average_flat(w.parameters())
        seen.append((w.weight.grad.item(), count * n_ranks))
    return seen


def test_d06_a_rank_without_a_batch_takes_part_and_counts_for_nothing():
    assert world.launch(unequal_batches, 2) == [[(-2.0, 2), (-8.0, 2), (-18.0, 1)]] * 2


# ---- the invariant -------------------------------------------------------------------


class Masked(Config):
    """Some targets do not count, and one sample has none that does."""

    def data(self, step):
        inputs, targets = super().data(step)
        targets = targets.clone()
        targets[0] = toy.IGNORE
        targets.view(-1)[5::7] = toy.IGNORE
        return inputs, targets


@pytest.mark.parametrize(
    "config",
    [
        Config(steps=20),
        Config(steps=20, model="digits", n_workers=3, bucket=50_000),
        Config(steps=20, model="digits", bucket=1, after=True, batch=7),
        Config(steps=20, model="digits", batch=2, n_workers=4),
        Config(steps=20, model="digits", n_workers=1),
        Config(steps=5, n_workers=2, n_pieces=3, batch=11, bucket=10**9),
        Masked(steps=5, n_workers=3, n_pieces=2, batch=8),
        Masked(steps=20, model="digits", n_workers=5, batch=32),
    ],
    ids=str,
)
def test_weights_are_those_of_one_process(config):
    report = measure(config, UNIT)
    assert report.weights_gap < 1e-6 and report.loss_gap < 1e-5
    assert report.remarks == []


def beside_the_library(rank, n_ranks):
    """Gradients of our exchange and of DDP, on the same work, bucket by bucket."""
    config = Config(model="digits", n_workers=n_ranks, bucket=50_000)
    inputs, targets = config.data(0)
    ours, theirs = config.worker(rank), DistributedDataParallel(config.build())
    config.step(ours, rank, inputs, targets)
    shard = inputs.tensor_split(n_ranks)[rank], targets.tensor_split(n_ranks)[rank]
    (toy.loss_sum(theirs(shard[0]), shard[1]) * n_ranks / len(targets)).backward()
    pairs = zip(ours.module.parameters(), theirs.parameters())
    return max((a.grad - b.grad).abs().max().item() for a, b in pairs)


def test_the_library_has_the_same_gradients():
    assert max(world.launch(beside_the_library, 3)) < 1e-6


# ---- ledger and timeline -------------------------------------------------------------


def rows(report):
    return {name: (predicted, counted) for name, predicted, counted, _ in report.rows}


@pytest.mark.parametrize("model", toy.MODELS)
@pytest.mark.parametrize("more", [{}, {"after": True}, {"bucket": 1, "n_pieces": 2}])
def test_the_ledger_counts_what_it_predicts(model, more):
    config = Config(model=model, steps=1, **more)
    report = measure(config, clock.Virtual(clock.Flops(1e11), LINK))
    counted = rows(report)
    step = counted.pop("step")
    assert step[1] == pytest.approx(step[0], rel=1e-9 if config.after else 0.06)
    assert counted.pop("idle")
    for predicted, found in counted.values():
        assert found == pytest.approx(predicted, rel=5e-3)
    assert report.explain(*report.timelines()).total == pytest.approx(
        100 * report.timeline.bubble()
    )


def test_traffic_and_memory_by_hand():
    report = measure(Config(model="digits", steps=2, bucket=10**9), UNIT)
    n = sum(p.numel() for p in toy.build("digits").parameters())
    assert rows(report)["messages"] == (2, 2)
    assert rows(report)["all-reduced"] == (4 * n + 4, 4 * n + 4)
    assert report.held == [12 * n] * 4


def picture(timeline):
    """What rank 0 does, five characters a unit: operations, and transfers below."""
    lanes = {"compute": [" "] * 20, "transfer": [" "] * 20}
    for span in (span for span in timeline.spans if span.rank == 0):
        for i in range(round(5 * span.start), round(5 * span.end)):
            lanes[span.lane][i] = span.name[0]
    return "\n" + "\n".join("".join(lane).rstrip() for lane in lanes.values())


def test_overlap_hides_what_leaves_before_the_end_of_the_backward():
    """A link that needs a unit for all gradients; the first bucket, the linear layers,
    has two thirds of the bytes and a tenth of the FLOPs."""
    model = toy.build("digits")
    link = Link(bandwidth=sum(4 * p.numel() for p in model.parameters()))
    clk = clock.Virtual(clock.Unit(within=True), link)
    config = {"model": "digits", "steps": 1, "bucket": 136_800, "n_workers": 2}
    after = measure(Config(**config, after=True), clk).timeline
    beside = measure(Config(**config), clk).timeline
    assert picture(after) == """
FFFFFBBBBBBBBBB
               aaaaa"""
    assert picture(beside) == """
FFFFFBBBBBBBBBB
      aaa      aa"""
    assert beside.compute() == after.compute()


def test_a_bucket_size_in_between_is_fastest():
    """Small buckets pay latency, one large bucket waits for the whole backward."""
    link = clock.Virtual(clock.Flops(1e11), Link(latency=1e-5, bandwidth=1e9))
    sizes = (1, 200_000, 10**9)
    small, middle, large = (
        measure(Config(steps=1, bucket=size), link).timeline.makespan for size in sizes
    )
    assert middle < small and middle < large


# ---- other ways to train -------------------------------------------------------------


def alone_then_averaged(config):
    """The same in one process: copies that meet every few steps."""
    copies = [config.build() for _ in range(config.n_workers)]
    optimizers = [training.sgd(copy, config.model) for copy in copies]
    for step in range(config.steps):
        shards = zip(*(part.tensor_split(len(copies)) for part in config.data(step)))
        for copy, optimizer, shard in zip(copies, optimizers, shards):
            toy.reference_step(copy, *shard, optimizer)
        if (step + 1) % config.every == 0:
            with torch.no_grad():
                for weights in zip(*(copy.parameters() for copy in copies)):
                    mean = torch.stack(weights).mean(0)
                    for weight in weights:
                        weight.copy_(mean)
    return copies[0].state_dict()


def test_averaging_every_few_steps_is_another_training_and_is_said_to_be():
    config = Config(model="digits", n_workers=2, steps=6, every=3, batch=8)
    report = measure(config, UNIT)
    _, synchronous = training.reference(config)
    expected = training.distance(alone_then_averaged(config), synchronous)
    assert report.weights_gap == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    assert report.remarks[0].startswith("Each rank takes 3 steps by itself")
    assert [s.name for s in report.timeline.lane(0, "transfer")] == ["all_reduce"]
    assert report.invariant()[1][1] == "(no claim)"
    for predicted, counted in rows(report).values():
        assert counted == pytest.approx(predicted, rel=5e-3)


def test_delayed_gradients():
    plain = toy.reference_run("digits", 10, 16)
    assert toy.delayed_run("digits", 10, 16, delay=0) == plain
    late = toy.delayed_run("digits", 10, 16, delay=2)
    assert late[0] == plain[0] and late[3:] != plain[3:]


class Normed(Config):
    def build(self, layers=None):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))


def test_batch_norm_sees_its_shard_and_equality_is_not_claimed():
    report = measure(Normed(model="digits", n_workers=2), clock.Wall())
    assert "BatchNorm" in report.remarks[0] and report.weights_gap > 1e-6


# ---- the command line ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        (["--workers", "0"], "n_workers must be a whole number from 1 up, not 0"),
        (["--bucket", "x"], "--bucket"),
        (["--model", "gpt"], "no model 'gpt': choose one of"),
        (["--every", "0"], "every must be a whole number"),
    ],
)
def test_what_cannot_run_is_one_sentence(options, words, capsys):
    with pytest.raises(SystemExit) as caught:
        lab.main("data_parallel", data_parallel.__doc__, Config, measure, options)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1


class Broken(Config):
    def data(self, step):
        inputs, targets = super().data(step)
        return inputs, targets.tensor_split(5)[0]


def test_a_mistake_names_rank_and_line():
    with pytest.raises(world.RankFailed, match=r"rank 0 raised .*\n.*labs/"):
        measure(Broken(model="digits", n_workers=2), clock.Wall())
