import sys
from dataclasses import dataclass

import cloudpickle
import pytest
import torch
import variants
from torch import nn

from labs import gpipe
from labs.gpipe import Config, Stage, bubble_fraction, measure
from labs.kit import clock, lab, messages, simulate, split, toy, world
from labs.kit.meter import Meter
from labs.kit.timeline import Link, Op, Timeline

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

UNIT = clock.Virtual(clock.Unit())


# ---- the schedule --------------------------------------------------------------------


def picture(schedule):
    """A schedule as the paper draws it: a row per stage, F and B one column each."""
    timeline = simulate.simulate(schedule, {"F": 1, "B": 1})
    rows = []
    for stage in range(timeline.n_ranks):
        row = ["  "] * int(timeline.makespan)
        for span in timeline.ops(stage):
            row[int(span.start)] = str(span.op)
        rows.append(" ".join(row).rstrip())
    return "\n" + "\n".join(rows)


def test_the_schedule_is_the_figure_of_the_paper():
    assert picture(gpipe.gpipe(4, 4)) == """
F0 F1 F2 F3                   B3 B2 B1 B0
   F0 F1 F2 F3             B3 B2 B1 B0
      F0 F1 F2 F3       B3 B2 B1 B0
         F0 F1 F2 F3 B3 B2 B1 B0"""
    assert picture(gpipe.gpipe(4, 2)) == """
F0 F1                   B1 B0
   F0 F1             B1 B0
      F0 F1       B1 B0
         F0 F1 B1 B0"""
    assert picture(gpipe.gpipe(3, 1)) == """
F0             B0
   F0       B0
      F0 B0"""
    assert picture(gpipe.gpipe(1, 3)) == """
F0 F1 F2 B2 B1 B0"""


def test_a_schedule_is_data_and_there_is_one():
    assert gpipe.gpipe(2, 2)[1] == [Op("F", 0), Op("F", 1), Op("B", 1), Op("B", 0)]
    assert gpipe.SCHEDULES["gpipe"](3, 5) == gpipe.gpipe(3, 5)
    assert Config(n_stages=3, n_microbatches=5).order() == gpipe.gpipe(3, 5)


# ---- the runner, on modules made by hand ---------------------------------------------


class Scale(nn.Module):
    """y = w x"""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, x):
        return self.w * x


class Residual(nn.Module):
    """w3 (w2 (w1 x)) + w1 x: a skip connection inside one layer."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = Scale(1), Scale(3), Scale(5)

    def forward(self, x):
        y = self.a(x)
        return self.c(self.b(y)) + y


class Shift(nn.Module):
    """A layer without parameters that takes and returns integers or floats."""

    def forward(self, x):
        return x + 1


@dataclass
class Case:
    """What a pipeline is run on: a module per stage, the loss, the microbatches."""

    modules: list
    loss: object
    inputs: list
    recompute: bool = False
    steps: int = 1


def squared(targets, n):
    """The mean squared error over n samples, as shares of microbatches."""
    return lambda y, i: (y - targets[i]).square().sum() / n


def run_cases(rank, n_ranks, cases):
    """Run every case; return (losses, gradients, microbatches alive, random number)."""
    results = []
    for case in cases:
        torch.manual_seed(rank)
        module = case.modules[rank]
        stage = Stage(module, recompute=case.recompute)
        if rank == n_ranks - 1:
            stage.loss = case.loss
        order = gpipe.gpipe(n_ranks, len(case.inputs))[rank]
        for _ in range(case.steps):
            losses = gpipe.run(order, stage, case.inputs)
        gradients = {name: p.grad for name, p in module.named_parameters()}
        results.append((losses, gradients, len(stage.live), torch.rand(1).item()))
    return results


def linear(w, **kwargs):
    layer = nn.Linear(1, 1, bias=False, **kwargs)
    nn.init.constant_(layer.weight, w)
    return layer


def counting(n, **kwargs):
    """1, 2, ..., n as n samples of one feature."""
    return torch.arange(1.0, n + 1, **kwargs).reshape(n, 1)


def shares(rows):
    """The loss y.sum() over `rows` samples, as shares of microbatches."""
    return lambda y, i: y.sum() / rows


IDENTITY = nn.Identity
CASES = {
    # issue: B = 7, m = 3, x = t = 1..7, w = 0: the full batch's gradient
    "unequal": Case(
        [IDENTITY(), linear(0)],
        squared(counting(7).tensor_split(3), 7),
        counting(7).tensor_split(3),
    ),
    "3, 3, 1": Case(
        [IDENTITY(), linear(0)], squared(counting(7).chunk(3), 7), counting(7).chunk(3)
    ),
    "loss": Case(
        [IDENTITY(), linear(0)], squared(counting(4).chunk(4), 4), counting(4).chunk(4)
    ),
    "accumulated": Case(
        [IDENTITY(), Scale(1)], shares(4), torch.ones(4, 1).chunk(4), steps=2
    ),
    "skip within": Case(
        [IDENTITY(), Residual()], shares(2), torch.full((2, 1), 2.0).chunk(2)
    ),
    "skip first": Case(
        [Residual(), IDENTITY()], shares(2), torch.full((2, 1), 2.0).chunk(2)
    ),
    "no weights last": Case([linear(3), Shift()], shares(1), counting(2).chunk(2)),
    "frozen": Case(
        [linear(3).requires_grad_(False), linear(2)], shares(1), counting(2).chunk(2)
    ),
    "nothing to train first": Case(
        [nn.Embedding(4, 1).requires_grad_(False), linear(2)],
        shares(1),
        torch.tensor([[1], [2]]).chunk(2),
    ),
    "one and many": Case(
        [linear(3), linear(2)], shares(1), counting(32).split([1, 31])
    ),
    "many": Case([Scale(3), Scale(2)], shares(512), torch.ones(512, 1).chunk(512)),
    "float64": Case(
        [linear(3, dtype=torch.float64), linear(2, dtype=torch.float64)],
        shares(1),
        (counting(3, dtype=torch.float64) * 1e-9 + 1).chunk(3),
    ),
    "bfloat16": Case(
        [linear(3, dtype=torch.bfloat16), linear(2, dtype=torch.bfloat16)],
        shares(1),
        counting(3, dtype=torch.bfloat16).chunk(3),
    ),
    "dropout": Case(
        [nn.Sequential(Scale(3), nn.Dropout()), nn.Sequential(nn.Dropout(), Scale(2))],
        shares(1),
        torch.ones(4, 1000).chunk(4),
    ),
    "dropout again": Case(
        [nn.Sequential(Scale(3), nn.Dropout()), nn.Sequential(nn.Dropout(), Scale(2))],
        shares(1),
        torch.ones(4, 1000).chunk(4),
        recompute=True,
    ),
}


@pytest.fixture(scope="module")
def ran():
    """{name of a case: (loss, gradients of both stages, alive, random numbers)}"""
    both = world.launch(run_cases, 2, list(CASES.values()))
    return {
        name: (
            float(sum(second[0])),
            {f"{rank}.{key}": value for rank, one in enumerate((first, second))
             for key, value in one[1].items()},
            [first[2], second[2]],
            [first[3], second[3]],
        )
        for name, first, second in zip(CASES, *both)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["unequal", "3, 3, 1"])
def test_microbatches_of_unequal_size_count_by_their_samples(ran, name):
    loss, gradients, _, _ = ran[name]
    assert gradients["1.weight"].item() == pytest.approx(-40.0, abs=1e-5)
    assert loss == pytest.approx(20.0)


def test_the_loss_is_the_mean_of_the_batch_and_steps_add_up(ran):
    loss, gradients, _, _ = ran["loss"]
    assert (loss, gradients["1.weight"].item()) == (7.5, -15.0)
    loss, gradients, _, _ = ran["accumulated"]
    assert (loss, gradients["1.w"].item()) == (1.0, 2.0)


@pytest.mark.parametrize("name, stage", [("skip within", 1), ("skip first", 0)])
def test_a_skip_connection_inside_a_stage_is_right(ran, name, stage):
    loss, gradients, _, _ = ran[name]
    assert loss == 32
    assert [gradients[f"{stage}.{w}.w"].item() for w in "abc"] == [32, 10, 6]


@pytest.mark.parametrize(
    "name, loss, gradients",
    [
        ("no weights last", 11.0, {"0.weight": 3.0}),
        ("frozen", 18.0, {"0.weight": None, "1.weight": 9.0}),
        ("one and many", 6.0 * 528, {"0.weight": 2.0 * 528, "1.weight": 3.0 * 528}),
        ("many", 6.0, {"0.w": 2.0, "1.w": 3.0}),
        ("float64", 18 + 3.6e-8, {"0.weight": 6 + 1.2e-8, "1.weight": 9 + 1.8e-8}),
        ("bfloat16", 36.0, {"0.weight": 12.0, "1.weight": 18.0}),
    ],
)
def test_stages_of_many_kinds(ran, name, loss, gradients):
    found_loss, found, _, _ = ran[name]
    assert found_loss == pytest.approx(loss, rel=1e-14)
    assert found.keys() == gradients.keys()
    for key, expected in gradients.items():
        if expected is None:
            assert found[key] is None
        else:
            assert found[key].item() == pytest.approx(expected, rel=1e-14)


def test_gradients_have_the_type_of_their_weights(ran):
    for name in ("float64", "bfloat16"):
        dtype = getattr(torch, name)
        assert {g.dtype for g in ran[name][1].values()} == {dtype}


def test_a_first_stage_with_nothing_to_train(ran):
    _, gradients, _, _ = ran["nothing to train first"]
    rows = CASES["nothing to train first"].modules[0].weight[[1, 2]]
    assert gradients["0.weight"] is None
    assert gradients["1.weight"].item() == pytest.approx(rows.sum().item())


def test_recomputation_on_ranks_changes_nothing(ran):
    loss, gradients, _, random = ran["dropout"]
    again = ran["dropout again"]
    assert loss == again[0] and random == again[3]
    assert all(torch.equal(gradients[key], again[1][key]) for key in gradients)


def test_nothing_is_alive_after_a_step(ran):
    assert {name: alive for name, (_, _, alive, _) in ran.items() if any(alive)} == {}


# ---- one stage at a time, in this process --------------------------------------------


def forth_and_back(stages, inputs):
    """Run stages in one process, with other random calls in between; return the last
    stage's outputs and the gradients of the inputs."""
    outputs, gradients = [], []
    for i, x in enumerate(inputs):
        for stage in stages:
            x = stage.forward(i, x)
            torch.rand(5)
        outputs.append(x)
    for i in reversed(range(len(inputs))):
        gradient = torch.ones_like(outputs[i])
        for stage in reversed(stages):
            torch.rand(5)
            gradient = stage.backward(i, gradient)
        gradients.insert(0, gradient)
    return torch.stack(outputs), torch.stack(gradients)


def test_the_dropout_mask_of_recomputation_is_that_of_the_forward():
    found = {}
    for recompute in (False, True):
        torch.manual_seed(0)
        stages = [Stage(nn.Dropout(0.5), recompute=recompute) for _ in range(2)]
        outputs, gradients = forth_and_back(stages, [torch.ones(1000)] * 4)
        assert outputs.numel() == 4000
        assert ((outputs != 0) != (gradients != 0)).sum() == 0
        assert 0 < (outputs != 0).sum() < 4000
        found[recompute] = outputs, gradients, torch.get_rng_state()
    assert all(map(torch.equal, found[False], found[True]))


@pytest.mark.parametrize(
    "m, recompute, mean, variance, count",
    [
        (1, False, 0.3, 1.5667, 1),
        (2, False, 0.59, 1.19, 2),
        (1, True, 0.57, 2.0767, 2),
    ],
)
def test_what_batch_norm_does_is_known_and_said(m, recompute, mean, variance, count):
    norm = nn.BatchNorm1d(1, momentum=0.1)
    stage = Stage(norm, recompute=recompute)
    forth_and_back([stage], torch.tensor([[0.0], [2.0], [4.0], [6.0]]).chunk(m))
    assert norm.running_mean.item() == pytest.approx(mean, abs=1e-4)
    assert norm.running_var.item() == pytest.approx(variance, abs=1e-4)
    assert norm.num_batches_tracked == count
    assert "BatchNorm" in split.remarks(nn.Sequential(norm))[0]


def test_a_stage_keeps_one_microbatch_per_forward_and_no_graph_beyond_itself():
    first, second = Stage(linear(2)), Stage(linear(3), loss=lambda y, i: y.sum())
    y = first.forward(0, torch.ones(1, 1))
    assert not y.requires_grad
    second.forward(0, y)
    assert (len(first.live), len(second.live)) == (1, 1)
    gradient = second.backward(0)
    assert first.module.weight.grad is None and gradient.item() == 3
    first.backward(0, gradient)
    assert (first.module.weight.grad.item(), first.live, second.live) == (3, {}, {})


# ---- gradients and losses equal those of one process ---------------------------------


class Masked(Config):
    """Targets that do not count, unequally spread: all of the first microbatch."""

    def data(self, step):
        inputs, targets = super().data(step)
        targets[0 : self.batch // 3] = toy.IGNORE
        targets.view(-1)[-5:] = toy.IGNORE
        return inputs, targets


def gradients(rank, n_ranks, configs):
    """What this rank adds to: (loss, {name: gradient}, microbatch sizes) per config."""
    results = []
    for config in configs:
        stage = config.worker(rank)
        inputs, targets = config.data(0)
        loss = config.step(stage, rank, inputs, targets)
        named = {name: p.grad for name, p in stage.module.named_parameters()}
        results.append((loss, named, [len(part) for part in config.cut(inputs)]))
    return results


CONFIGS = {
    1: [
        Config(n_stages=1, batch=4, n_microbatches=4),
        Config(n_stages=1, batch=4, n_microbatches=1),
        Masked("digits", n_stages=1, batch=9, n_microbatches=3),
    ],
    2: [
        Config(n_stages=2, batch=7, n_microbatches=3),
        Config("digits", n_stages=2, batch=7, n_microbatches=3),
        Config("digits", n_stages=2, batch=7, n_microbatches=3, recompute=True),
        Masked(n_stages=2, batch=7, n_microbatches=3),
        Masked("digits", n_stages=2, batch=64, n_microbatches=3, partition="cost"),
    ],
    4: [
        *[Config(n_stages=4, batch=8, n_microbatches=m) for m in (1, 2, 3, 4, 8)],
        Config(n_stages=4, batch=6, n_microbatches=4),
        Config(n_stages=4, batch=6, n_microbatches=4, recompute=True),
        Config("digits", n_stages=4, batch=6, n_microbatches=4, partition="cost"),
        Config("digits", n_stages=4, batch=200, n_microbatches=200),
        Masked(n_stages=4, batch=9, n_microbatches=3, recompute=True),
    ],
}


@pytest.mark.parametrize("d", CONFIGS)
def test_gradients_are_those_of_the_whole_batch(d):
    results = world.launch(gradients, d, CONFIGS[d])
    for config, *parts in zip(CONFIGS[d], *results):
        whole = config.build()
        expected = toy.reference_step(whole, *config.data(0))
        assert [loss for loss, _, _ in parts] == [
            *[None] * (d - 1), pytest.approx(expected, abs=1e-5)
        ], config  # fmt: skip
        found = {name: g for _, named, _ in parts for name, g in named.items()}
        for name, weight in whole.named_parameters():
            torch.testing.assert_close(
                found[name], weight.grad, rtol=1e-5, atol=1e-5, msg=f"{name}: {config}"
            )
        assert parts[0][2] == split.chunk_sizes(config.batch, config.n_microbatches)


def test_microbatches_differ_by_at_most_one_sample():
    inputs = torch.arange(6)
    cut = Config(batch=6, n_microbatches=4).cut(inputs)
    assert [part.tolist() for part in cut] == [[0, 1], [2, 3], [4], [5]]


class Nothing(variants.Nothing, Config):
    pass


def test_a_batch_without_a_valid_target_is_refused():
    config = Nothing("digits", n_stages=2, batch=4, n_microbatches=2, steps=1)
    with pytest.raises(world.RankFailed, match="every target is -100"):
        measure(config, UNIT)


# ---- bubbles -------------------------------------------------------------------------


def test_the_bubble_in_numbers():
    found = [bubble_fraction(4, m) for m in (1, 2, 3, 4, 8)]
    assert found == pytest.approx([0.75, 0.6, 0.5, 0.4286, 0.2727], abs=5e-5)
    assert [bubble_fraction(1, m) for m in (1, 4, 32)] == [0, 0, 0]


@pytest.mark.parametrize("backward", [1, 2])
def test_the_bubble_is_no_overhead(backward):
    """d = 8, m = 32: 7/39 of the time, not 7/32, which is relative to the ideal."""
    timeline = simulate.simulate(gpipe.gpipe(8, 32), {"F": 1, "B": backward})
    assert timeline.makespan == 39 * (1 + backward)
    assert timeline.bubble() == pytest.approx(bubble_fraction(8, 32)) == 7 / 39


def unit_runs(rank, n_ranks, sizes, costs):
    """The spans of one step of a tiny pipeline for each number of microbatches."""
    found = []
    for m in sizes:
        stage = Stage(Scale(1), loss=shares(m) if rank == n_ranks - 1 else None)
        clk = clock.Virtual(clock.Unit(costs))
        with clock.recording(clk, rank):
            clock.watch(stage, forward="F", backward="B")
            gpipe.run(gpipe.gpipe(n_ranks, m)[rank], stage, [torch.ones(1)] * m)
        found.append(clk.spans)
    return found


def merged(results):
    return [Timeline.merge(spans) for spans in zip(*results)]


@pytest.mark.parametrize("d", range(1, 9))
def test_formula_and_run_agree(d):
    sizes = range(1, 33)
    runs = merged(world.launch(unit_runs, d, sizes, {"F": 1.0, "B": 2.0}))
    for m, run in zip(sizes, runs):
        schedule = gpipe.gpipe(d, m)
        assert [run.order(stage) for stage in range(d)] == schedule
        assert abs(run.bubble() - bubble_fraction(d, m)) < 1e-9
        assert run.makespan == 3 * (m + d - 1)
        for stage in range(d):
            idle = gpipe.idle_fraction(run, stage)
            assert abs(idle - bubble_fraction(d, m)) < 1e-9
            assert run.peak_live(stage) == m
        predicted = simulate.simulate(schedule, {"F": 1, "B": 2})
        assert predicted.bubble() == pytest.approx(run.bubble(), abs=1e-12)


def uneven(rank, name, microbatch):
    return (1.0 + rank % 3 + 0.25 * microbatch) * {"F": 1, "B": 2}[name]


def test_unequal_stages_explain_the_whole_gap():
    sizes = (2, 5, 9)
    runs = merged(world.launch(unit_runs, 4, sizes, uneven))
    for m, run in zip(sizes, runs):
        even = simulate.simulate(gpipe.gpipe(4, m), {"F": 1, "B": 2})
        points = dict(simulate.explain(even, run).rows)
        assert points["formula"] == pytest.approx(100 * bubble_fraction(4, m))
        assert points["imbalance"] > 1
        assert abs(points["transfer"]) < 1e-9 and abs(points["jitter"]) < 1e-9


# ---- measure: the ledger -------------------------------------------------------------

LEDGERS = [
    Config(n_stages=4, n_microbatches=8, batch=8, steps=1),
    Config(n_stages=4, n_microbatches=3, batch=7, steps=1),
    Config(n_stages=4, n_microbatches=3, batch=7, steps=1, recompute=True),
    Config("digits", n_stages=3, n_microbatches=5, steps=1),
    Config("digits", n_stages=3, n_microbatches=5, steps=1, recompute=True),
    Config("digits", n_stages=5, n_microbatches=4, batch=6, steps=1, partition="cost"),
    Config("digits", n_stages=1, n_microbatches=2, steps=1),
]


@pytest.mark.parametrize("config", LEDGERS, ids=repr)
def test_the_ledger_counts_what_it_predicts(config):
    report = measure(config, clock.Virtual(clock.Unit(config.costs())))
    rows = {name: (said, did) for name, said, did, _ in report.rows}
    d, m = config.n_stages, config.n_microbatches
    for name in ("bubble", "idle per stage", "activations", "sent"):
        said, did = rows[name]
        assert said == pytest.approx(did, rel=1e-12), name
    assert rows["microbatches alive"] == ([m] * d, [m] * d)
    assert rows["bubble"][0] == bubble_fraction(d, m)
    assert min(rows["activations"][1]) > 0 and report.remarks == []
    assert report.loss_gap < 1e-5 and report.weights_gap < 1e-6
    assert report.invariant()[1][1:3] == ("below 1e-06", "below 1e-06")


def test_sent_and_kept_by_hand():
    """digits in two stages: conv 32 to 6 x 6, tanh, conv 64 to 4 x 4, tanh, pool to
    256 | flatten, fc 128, tanh, fc 10."""
    config = Config("digits", n_stages=2, n_microbatches=2, batch=2, steps=1)
    assert config.sizes() == [5, 4]
    inside, boundary = split.weigh(config)
    conv, conv2, fc = 32 * 36, 64 * 16, 128
    first = 64 + conv + conv2 + 256  # x, two tanh, the output
    assert inside[0] == [4 * first] * 2 and boundary[0] == [4 * 64] * 2
    assert boundary[1] == [4 * 256] * 2
    assert gpipe.traffic([sum(row) for row in boundary]) == [2 * 4 * 256] * 2
    assert gpipe.memory(inside[0], boundary[0]) == 2 * 4 * first
    assert gpipe.memory([10, 30, 5], [1, 2, 4], recompute=True) == 1 + 30
    assert 4 * (256 + fc + 10) < inside[1][0] < 4 * (256 + fc + 10 + 40)


def test_recomputation_keeps_less_and_costs_a_forward():
    plain = Config("digits", n_stages=2, n_microbatches=4, steps=1)
    again = Config("digits", n_stages=2, n_microbatches=4, steps=1, recompute=True)
    assert (plain.costs(), again.costs()) == ({"F": 1, "B": 2}, {"F": 1, "B": 3})
    first = measure(plain, clock.Virtual(clock.Flops()))
    second = measure(again, clock.Virtual(clock.Flops()))
    assert all(b < a for a, b in zip(first.peaks, second.peaks))
    for rank in range(2):
        forward, _ = costs(first.timeline, rank)
        backward, backward_again = costs(first.timeline, rank)[1], costs(
            second.timeline, rank
        )[1]
        assert backward_again == pytest.approx(backward + forward)


def costs(timeline, rank):
    """Time of the first forward and of its backward."""
    spans = {str(span.op): span.end - span.start for span in timeline.ops(rank)}
    return spans["F0"], spans["B0"]


def test_counted_costs_and_a_link_leave_no_jitter():
    config = Config("digits", n_stages=3, n_microbatches=4, steps=1, partition="cost")
    clk = clock.Virtual(clock.Flops(), Link(latency=1e-6, bandwidth=1e9))
    report, twin = measure(config, clk), measure(config, clk)
    points = dict(simulate.explain(report.predicted, report.timeline).rows)
    assert abs(points["jitter"]) < 1e-9
    assert points["transfer"] > 1 and points["imbalance"] != 0
    assert sum(points.values()) == pytest.approx(100 * report.timeline.bubble())
    assert report.timeline.spans == twin.timeline.spans  # again, in the same process
    assert lab.ledger(report.rows) == lab.ledger(twin.rows)


def memory_of_steps(rank, n_ranks, config, steps):
    """(peak bytes, bytes, microbatches, messages, tensors) after each step."""
    import gc

    stage, found = config.worker(rank), []
    meter = Meter(stage.module)
    meter.watch(stage)
    for step in range(steps):
        meter.reset_peak()
        with meter:
            config.step(stage, rank, *config.data(step))
        tensors = sum(isinstance(one, torch.Tensor) for one in gc.get_objects())
        kept = len(stage.live), len(messages._unfinished), tensors
        found.append((meter.peak, meter.bytes, *kept))
    return found


def test_memory_is_flat_over_steps():
    config = Config("digits", n_stages=4, n_microbatches=8, batch=16)
    for found in world.launch(memory_of_steps, 4, config, 10):
        assert found[0][0] > 0 and {row[1:4] for row in found} == {(0, 0, 0)}
        assert len(set(found[1:])) == 1  # the first step makes the gradients


# ---- training equals one process -----------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Config(n_stages=2, n_microbatches=4, batch=8, steps=300),
        Config("digits", n_stages=3, n_microbatches=5, batch=32, steps=300),
    ],
    ids=["text", "digits"],
)
def test_training_falls_and_equals_one_process_in_every_step(config):
    report = measure(config, UNIT)
    assert len(report.losses) == len(report.truth) == 300
    assert report.losses == pytest.approx(report.truth, rel=0, abs=1e-5)
    tenth = [sum(report.losses[i : i + 30]) / 30 for i in range(0, 300, 30)]
    assert tenth[0] > tenth[3] > tenth[-1] and tenth[-1] < 0.6 * report.losses[0]


@pytest.mark.parametrize(
    "config",
    [
        Config(n_stages=1, n_microbatches=3, batch=8, steps=20),
        Config(n_stages=4, n_microbatches=8, batch=8, steps=20),
        Config(n_stages=8, n_microbatches=5, batch=8, steps=20, recompute=True),
        Config("digits", n_stages=1, n_microbatches=7, steps=20),
        Config("digits", n_stages=4, n_microbatches=3, steps=20, partition="cost"),
        Config("digits", n_stages=9, n_microbatches=32, steps=20, recompute=True),
    ],
    ids=lambda config: f"{config.model} {config.n_stages}",
)
def test_weights_after_20_steps_are_those_of_one_process(config):
    report = measure(config, UNIT)
    assert report.weights_gap < 1e-6
    assert report.loss_gap < 1e-5


class Double(variants.Double, Config):
    pass


def test_in_double_precision_nothing_is_lost():
    report = measure(Double(n_stages=3, n_microbatches=3, batch=4, steps=20), UNIT)
    assert report.weights_gap < 1e-13
    assert report.loss_gap < 1e-12


# ---- what is refused, and what is said -----------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch": 2, "n_microbatches": 4}, "2 samples cannot make 4 microbatches"),
        ({"n_stages": 9}, "8 layers cannot make 9 stages: choose 1 to 8"),
        ({"model": "digits", "n_stages": 10}, "9 layers cannot make 10 stages"),
        ({"n_stages": 0}, "n_stages must be a whole number from 1 up, not 0"),
        ({"n_stages": -1}, "n_stages must be a whole number from 1 up, not -1"),
        ({"n_stages": 2.0}, "n_stages must be a whole number from 1 up, not 2.0"),
        ({"n_stages": "4"}, "n_stages must be a whole number from 1 up, not '4'"),
        ({"n_stages": True}, "n_stages must be a whole number from 1 up, not True"),
        ({"n_microbatches": 0}, "n_microbatches must be a whole number from 1 up"),
        ({"batch": 0}, "batch must be a whole number from 1 up, not 0"),
        ({"steps": 0}, "steps must be a whole number from 1 up, not 0"),
        ({"schedule": "1f1b"}, "no schedule '1f1b': choose one of gpipe"),
        ({"partition": "odd"}, "no partition 'odd': choose one of even, cost"),
        ({"model": "image"}, "no model 'image': choose one of text, digits"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(monkeypatch, options, words):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match=words):
        measure(Config(**options), UNIT)


class Skips(variants.Skips, Config):
    pass


def test_a_skip_over_a_boundary_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match="both ends of a connection"):
        measure(Skips(n_stages=4), UNIT)


def test_a_skip_inside_a_stage_runs():
    report = measure(Skips(n_stages=2, n_microbatches=3, batch=4, steps=2), UNIT)
    assert report.loss_gap < 1e-5 and report.weights_gap < 1e-6


class Normed(variants.Normed, Config):
    pass


def test_a_model_with_batch_norm_runs_and_equality_is_not_claimed():
    report = measure(Normed("digits", n_stages=2, n_microbatches=4, steps=2), UNIT)
    assert len(report.remarks) == 1 and "BatchNorm" in report.remarks[0]
    assert report.weights_gap > 1e-3
    loss, weights = report.invariant()
    assert weights[1] == "(no claim)" and weights[2] == report.weights_gap


class Diverging(Config):
    """Data that is not a number from the second step on."""

    def data(self, step):
        inputs, targets = super().data(step)
        return inputs * (float("nan") if step else 1), targets


def test_a_loss_that_is_not_a_number_is_reported():
    config = Diverging("digits", n_stages=2, n_microbatches=4, steps=3)
    report = measure(config, UNIT)
    assert "The loss of step 1 is nan: training has diverged" in report.remarks[0]
    assert report.loss_gap != report.loss_gap  # nan
    assert report.weights_gap != report.weights_gap
    assert lab.ledger(report.invariant()).count("nan") == 3


class Broken(Config):
    def worker(self, rank):
        stage = super().worker(rank)
        if rank == 1:
            stage.module = nn.Sequential(stage.module, Fault())
        return stage


class Fault(nn.Module):
    def forward(self, x):
        raise KeyError("this layer is broken")


def test_an_error_in_a_stage_names_rank_and_line():
    with pytest.raises(world.RankFailed) as caught:
        measure(Broken("digits", n_stages=3, steps=1), UNIT)
    assert caught.value.failure.rank == 1
    assert "KeyError" in str(caught.value)
    assert 'raise KeyError("this layer is broken")' in str(caught.value)
