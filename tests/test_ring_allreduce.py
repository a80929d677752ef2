import functools
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import variants
from torch import nn

from labs import ring_allreduce as lab_
from labs.kit import clock, lab, messages, world
from labs.kit.timeline import Link
from labs.ring_allreduce import ALGORITHMS, Config, cost, crossover, measure, seconds

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

UNIT = clock.Virtual(clock.Unit())
LINK = Link(latency=1e-3, bandwidth=1e6)
SIZES = (0, 1, 2, 3, 4, 5, 10, 17)


def fitting(n_ranks):
    """The algorithms that run on so many ranks."""
    power = n_ranks & (n_ranks - 1) == 0
    return [name for name in ALGORITHMS if power or "doubling" not in name]


def everything(rank, n_ranks):
    """What the tests below look at, from one launch."""
    return {
        "wrong": every_kind(rank, n_ranks),
        "library": beside_the_library(rank, n_ranks),
        "timed": timed(rank, n_ranks, [840, 1000, 10]),
        "shifted": lab_.shift(torch.tensor(rank)).item(),
    }


@pytest.fixture(scope="module")
def ran():
    """n_ranks -> what `everything` gives, per rank; each is launched when asked for."""
    return functools.cache(lambda n_ranks: world.launch(everything, n_ranks))


# ---- sums: any size, shape, layout and type (C02, C04, C07) --------------------------


def numbers(rank, shape, dtype=torch.float32):
    """Whole numbers of a rank, so that sums are exact in every order."""
    n = torch.Size(shape).numel()
    return (torch.arange(n) % 7 + 10 * rank).reshape(shape).to(dtype)


def plain_sum(n_ranks, *args):
    return sum(numbers(rank, *args) for rank in range(n_ranks))


SHAPES = [(n,) for n in SIZES] + [(), (1, 0, 2), (3, 2), (2, 3, 5)]
DTYPES = [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32]


def every_kind(rank, n_ranks):
    """Return what went wrong, as (algorithm, case)."""
    wrong = []
    for name in fitting(n_ranks):
        for case in [(shape,) for shape in SHAPES] + [((10,), dt) for dt in DTYPES]:
            tensor = numbers(rank, *case)
            result = ALGORITHMS[name](tensor)
            right = plain_sum(n_ranks, *case)
            same = result is tensor and tensor.shape == right.shape
            if not (
                same and tensor.dtype == right.dtype and torch.equal(tensor, right)
            ):
                wrong.append((name, case, tensor))
        wrong += views(name, rank, n_ranks)
    return wrong


def views(name, rank, n_ranks):
    """Every second element, leaving the others alone; a transposed matrix; a leaf."""
    base = torch.arange(8.0) + 100 * rank
    ALGORITHMS[name](base[::2])
    right = torch.arange(8.0)[::2] * n_ranks + 50 * n_ranks * (n_ranks - 1)
    right = torch.stack([right, torch.arange(8.0)[1::2] + 100 * rank], 1).flatten()
    matrix = (torch.arange(6) + rank).reshape(2, 3)
    ALGORITHMS[name](matrix.t())
    more = n_ranks * (n_ranks - 1) // 2
    leaf = torch.ones(5, requires_grad=True)
    ALGORITHMS[name](leaf)
    found = {
        "slice": torch.equal(base, right),
        "matrix": torch.equal(matrix, torch.arange(6).reshape(2, 3) * n_ranks + more),
        "leaf": torch.equal(leaf.detach(), torch.full((5,), float(n_ranks))),
    }
    return [(name, case) for case, fine in found.items() if not fine]


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_all_kinds_of_tensors_are_summed_in_place(ran, n_ranks):
    assert [one["wrong"] for one in ran(n_ranks)] == [[]] * n_ranks


def beside_the_library(rank, n_ranks):
    """Largest difference to the library's sum, relative; are all ranks' bits equal?"""
    found = {}
    generator = torch.Generator().manual_seed(rank)
    tensor = torch.randn(1003, generator=generator)
    theirs = tensor.clone()
    dist.all_reduce(theirs)
    for name in fitting(n_ranks):
        ours = ALGORITHMS[name](tensor.clone())
        off = float((ours - theirs).norm() / theirs.norm())
        everyone = messages.all_gather(ours)
        same = all(torch.equal(one, everyone[0]) for one in everyone)
        found[name] = off, same
    return found


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_sums_are_the_librarys_up_to_rounding(ran, n_ranks):
    for found in [one["library"] for one in ran(n_ranks)]:
        assert {name: off for name, (off, _) in found.items() if off > 1e-6} == {}
        # a whole tensor that goes around is added up in another order by each rank
        assert {name for name, (_, same) in found.items() if not same} == (
            {"pass_around"} if n_ranks > 2 else set()
        )


def ones_and_256(rank, n_ranks):
    """256 + 1 + 1 + 1 in bfloat16, whose numbers above 256 are even."""
    value = torch.full((4,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    ours = [ALGORITHMS[name](value.clone()).tolist() for name in ALGORITHMS]
    return ours, messages.all_reduce(value.clone()).tolist()


def test_half_precision_is_rounded_once_and_not_at_every_hop():
    hop_by_hop = torch.tensor(256.0, dtype=torch.bfloat16)
    for _ in range(3):
        hop_by_hop += 1
    assert hop_by_hop == 256
    for ours, theirs in world.launch(ones_and_256, 4):
        assert theirs == [260.0] * 4 and ours == [theirs] * len(ALGORITHMS)


def kept_buffer(rank, n_ranks):
    buffer = torch.full((300,), float("nan"))
    return [lab_.ring(torch.ones(n), buffer).sum().item() for n in (1000, 10, 0, 1000)]


def test_a_buffer_can_be_kept():
    assert world.launch(kept_buffer, 4) == [[4000, 40, 0, 4000]] * 4


# ---- the two halves ------------------------------------------------------------------


def halves_of_the_ring(rank, n_ranks):
    tensor = numbers(rank, (10,))
    chunks = tensor.tensor_split(n_ranks)
    lab_.reduce_scatter(chunks, torch.empty(3))
    between = [chunk.clone() for chunk in chunks]
    lab_.all_gather(chunks)
    return between, tensor


def test_after_the_first_half_each_rank_has_one_whole_chunk():
    right = plain_sum(4, (10,))
    for rank, (between, tensor) in enumerate(world.launch(halves_of_the_ring, 4)):
        assert [len(chunk) for chunk in between] == messages.chunk_sizes(10, 4)
        whole = [torch.equal(a, b) for a, b in zip(between, right.tensor_split(4))]
        assert [i for i in range(4) if whole[i]] == [(rank + 1) % 4]
        assert torch.equal(tensor, right)


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_a_shift_around_any_ring_does_not_block(ran, n_ranks):
    left = [(rank - 1) % n_ranks for rank in range(n_ranks)]
    assert [one["shifted"] for one in ran(n_ranks)] == left


def in_another_order(rank, n_ranks):
    a, b = torch.tensor(1.0 + rank), torch.tensor([10.0 + rank, 0])
    for tensor in (a, b) if rank == 0 else (b, a):
        lab_.ring(tensor)


def test_ranks_that_sum_in_different_orders_are_told():
    with pytest.raises(world.RankFailed, match="rank . expects float32"):
        world.launch(in_another_order, 2)


# ---- cost ----------------------------------------------------------------------------


def timed(rank, n_ranks, sizes):
    """(algorithm, elements) -> (virtual seconds, bytes sent, messages sent)."""
    found = {}
    for name in fitting(n_ranks):
        for n in sizes:
            clk = clock.Virtual(clock.Unit(), LINK)
            with clock.recording(clk, rank):
                ALGORITHMS[name](torch.ones(n))
            sends = [span for span in clk.spans if span.name == "send"]
            found[name, n] = clk.now(), sum(s.nbytes for s in sends), len(sends)
    return found


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_virtual_time_is_the_alpha_beta_model(ran, n_ranks):
    """840 elements divide by 2 to 8."""
    for name in fitting(n_ranks):
        time = max(one["timed"][name, 840][0] for one in ran(n_ranks))
        expected = seconds(name, n_ranks, 4 * 840, LINK)
        assert time == pytest.approx(expected, rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize("n_ranks", range(1, 9))
def test_bytes_are_counted_one_by_one(ran, n_ranks):
    for name in fitting(n_ranks):
        sent = [one["timed"][name, 840][1] for one in ran(n_ranks)]
        assert sent == pytest.approx(lab_.traffic(name, n_ranks, 4 * 840))
    sizes = messages.chunk_sizes(10, n_ranks)
    for rank, one in enumerate(ran(n_ranks)):
        kept = sizes[(rank + 1) % n_ranks] + sizes[(rank + 2) % n_ranks]
        sent = 4 * (2 * 10 - kept) if n_ranks > 1 else 0
        assert one["timed"]["ring", 10][1:] == (sent, 2 * (n_ranks - 1))


def test_a_thousand_numbers_on_four_ranks_are_6000_bytes_each(ran):
    assert [one["timed"]["ring", 1000][1] for one in ran(4)] == [6000] * 4
    assert lab_.traffic("ring", 4, 4000) == [6000] * 4


def test_costs_by_hand():
    latency, tensor = Link(latency=1.0), Link(bandwidth=1.0)
    on_8 = {name: (seconds(name, 8, 1, latency), seconds(name, 8, 1, tensor))
            for name in ALGORITHMS}  # fmt: skip
    assert on_8 == {
        "reduce_broadcast": (2, 14),
        "pass_around": (7, 7),
        "ring": (14, 1.75),
        "recursive_doubling": (3, 3),
        "halving_doubling": (6, 1.75),
    }
    assert {cost(name, 1) for name in ALGORITHMS} == {(0, 0)}


@pytest.mark.parametrize("n_ranks", [4, 8, 1024])
def test_at_a_crossover_both_take_as_long(n_ranks):
    pairs = [(a, b) for a in ALGORITHMS for b in ALGORITHMS if a < b]
    points = {pair: crossover(*pair, n_ranks, LINK) for pair in pairs}
    assert crossover("ring", "recursive_doubling", n_ranks, LINK) > 0
    for (a, b), nbytes in points.items():
        sides = [1, 1e12] if nbytes is None else [nbytes / 2, nbytes * 2]
        first, last = (
            seconds(a, n_ranks, n, LINK) - seconds(b, n_ranks, n, LINK) for n in sides
        )
        if nbytes is None:
            assert first * last >= 0
            continue
        assert first * last < 0
        assert seconds(a, n_ranks, nbytes, LINK) == pytest.approx(
            seconds(b, n_ranks, nbytes, LINK)
        )
    assert crossover("ring", "halving_doubling", n_ranks, LINK) is None


def test_bus_bandwidth_is_the_links_where_latency_is_nothing():
    for n_ranks in range(2, 9):
        time = seconds("ring", n_ranks, 10**9, Link(bandwidth=5e9))
        assert lab_.busbw(10**9, time, n_ranks) == pytest.approx(5e9)


# ---- data parallelism ----------------------------------------------------------------


@pytest.mark.parametrize("model", ["text", "digits"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_weights_after_20_steps_are_those_of_one_process(name, model):
    n_workers = 2 if model == "text" else 4
    config = Config(model, n_workers=n_workers, algorithm=name, batch=6, steps=20)
    report = measure(config, UNIT)
    assert report.weights_gap < 1e-6 and report.loss_gap < 1e-5
    assert report.remarks == []


@pytest.mark.parametrize(
    "config",
    [
        Config(n_workers=1, batch=5, steps=20),
        Config("digits", n_workers=7, batch=3, steps=20),  # four ranks without samples
        Config(n_workers=3, batch=2, steps=20),
        Config("digits", n_workers=5, batch=13, steps=20),
    ],
    ids=lambda config: f"{config.model} {config.n_workers}",
)
def test_any_batch_on_any_number_of_workers(config):
    report = measure(config, UNIT)
    assert report.weights_gap < 1e-6 and report.loss_gap < 1e-5


class Double(variants.Double, Config):
    def data(self, step):
        inputs, targets = super().data(step)
        return inputs.double() if inputs.is_floating_point() else inputs, targets


def test_in_double_precision_nothing_is_lost():
    report = measure(Double("digits", n_workers=3, batch=8, steps=20), UNIT)
    assert report.weights_gap < 1e-13 and report.loss_gap < 1e-12


class Branch(nn.Module):
    """A layer that looks at its input, and may not use its weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(10))
        self.frozen = nn.Parameter(torch.ones(10), requires_grad=False)

    def forward(self, x):
        return x * self.scale if len(x) > 2 else x


class Branching(Config):
    def build(self, layers=None):
        return nn.Sequential(*super().build(), Branch())

    def data(self, step):
        return super().data(0)


def test_a_weight_that_a_rank_does_not_use_counts_with_zeros():
    report = measure(Branching("digits", n_workers=2, batch=5, steps=1), UNIT)
    model = Branching("digits").build()
    assert (
        sum(p.numel() for p in model.parameters() if p.requires_grad) * 4
        == (report.sent[0])
    )


LEDGERS = [
    Config("digits", n_workers=4, batch=8, steps=1),
    Config("digits", n_workers=2, batch=8, steps=1, algorithm="reduce_broadcast"),
    Config("digits", n_workers=4, batch=8, steps=1, algorithm="pass_around"),
    Config("digits", n_workers=4, batch=8, steps=1, algorithm="recursive_doubling"),
    Config("digits", n_workers=4, batch=8, steps=1, algorithm="halving_doubling"),
    Config("text", n_workers=1, batch=2, steps=1),
]


@pytest.mark.parametrize("config", LEDGERS, ids=lambda config: config.algorithm)
def test_the_ledger_counts_what_it_predicts(config):
    report = measure(config, clock.Virtual(clock.Unit(), Link(0.1, 1e6)))
    for name, said, did, _ in report.rows:
        assert did == pytest.approx(said, rel=1e-4, abs=1e-12), name
    points = dict(report.explain(*report.timelines()).rows)
    assert abs(points["imbalance"]) < 1e-6
    if config.algorithm != "reduce_broadcast":  # where all but rank 0 also wait
        assert abs(points["jitter"]) < 0.1
    assert report.invariant()[1][1:3] == ("below 1e-06", "below 1e-06")


def test_a_run_with_counted_costs_can_be_repeated():
    config = Config("digits", n_workers=3, batch=7, steps=1)
    clk = clock.Virtual(clock.Flops(), Link(1e-5, 1e9))
    report, twin = measure(config, clk), measure(config, clk)
    assert report.timeline.spans == twin.timeline.spans
    points = dict(report.explain(*report.timelines()).rows)
    assert points["imbalance"] > 0.001  # shards of 3, 2 and 2 samples


def test_on_a_wall_clock_the_prediction_does_without_links():
    report = measure(Config("digits", n_workers=2, steps=1), clock.Wall())
    rows = {name: (said, did) for name, said, did, _ in report.rows}
    assert rows["all-reduce"][0] == 0 < rows["all-reduce"][1]
    assert rows["sent"][0] == rows["sent"][1]


# ---- the command line ----------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_workers": 0}, "n_workers must be a whole number from 1 up, not 0"),
        ({"n_workers": 2.0}, "n_workers must be a whole number from 1 up, not 2.0"),
        ({"algorithm": "tree"}, "no algorithm 'tree': choose one of reduce_broadcast"),
        (
            {"algorithm": "recursive_doubling", "n_workers": 3},
            "doubling needs 2, 4, 8, ... ranks, not 3: use ring",
        ),
        (
            {"algorithm": "halving_doubling", "n_workers": 6},
            "doubling needs 2, 4, 8, ... ranks, not 6: use ring",
        ),
        ({"model": "image"}, "no model 'image': choose one of text, digits"),
        ({"batch": 0}, "batch must be a whole number from 1 up, not 0"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(monkeypatch, options, words):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match=words):
        measure(Config(**options), UNIT)


def test_an_error_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        lab.main("ring_allreduce", "", Config, measure, ["--algorithm", "tree"])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == ""
    assert said.err.startswith("labs.ring_allreduce: no algorithm 'tree'")
    assert said.err.count("\n") == 1
