import functools
import gc
import sys

import cloudpickle
import pytest
import torch
import variants
from torch import nn

from labs import gpipe
from labs import model_parallel as lab_
from labs.kit import clock, messages, simulate, split, toy, training, world
from labs.kit.meter import Meter, OutOfMemory
from labs.kit.timeline import Link, Op, Timeline
from labs.model_parallel import Config, Stage, measure

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

UNIT = clock.Virtual(clock.Unit())
LINK = Link(latency=0.25, bandwidth=64.0)


# ---- the schedule --------------------------------------------------------------------


@pytest.mark.parametrize("d", range(1, 9))
def test_the_schedule_is_a_pipeline_of_one_microbatch(d):
    assert lab_.order(d) == gpipe.gpipe(d, 1) == [[Op("F", 0), Op("B", 0)]] * d


def test_one_works_and_the_others_wait():
    timeline = simulate.simulate(lab_.order(3), {"F": 1, "B": 1})
    rows = [["  "] * 6 for _ in range(3)]
    for stage, row in enumerate(rows):
        for span in timeline.ops(stage):
            row[int(span.start)] = str(span.op)
    assert (
        "\n" + "\n".join(" ".join(row).rstrip() for row in rows)
        == """
F0             B0
   F0       B0
      F0 B0"""
    )


# ---- what travels --------------------------------------------------------------------

PARCELS = {
    "a tensor": (torch.arange(6.0).reshape(2, 3),),
    "bf16": (torch.ones(3, dtype=torch.bfloat16),),
    "a scalar": (torch.tensor(1.5),),
    "empty": (torch.empty(0, 4),),
    "a transposed view": (torch.arange(6.0).reshape(2, 3).t(),),
    "integers alone": (torch.tensor([[1, 0], [2, 7]]),),
    "looks like a list of kinds": (torch.tensor([[2, 0]]),),
    "bools": (torch.tensor([True, False]),),
    "an integer": (7,),
    "a large and a negative integer": (2**63 - 1, -(2**63)),
    "None": (None,),
    "nothing": (),
    "two tensors": (torch.ones(2), torch.zeros(3, dtype=torch.float64)),
    "all kinds": (torch.ones(2, 2), 5, None, torch.tensor([3]), 0, torch.tensor(2.0)),
}


def travel(rank, n_ranks, parcels):
    """Rank 0 sends, rank 1 returns what comes; both return their spans too."""
    with clock.recording(clock.Virtual(clock.Unit()), rank) as clk:
        found = {}
        for name, values in parcels.items():
            if rank == 0:
                lab_.send(values, 1)
            else:
                found[name] = lab_.receive(0)
    return found, clk.spans


@pytest.fixture(scope="module")
def travelled():
    (_, sent), (found, _) = world.launch(travel, 2, PARCELS)
    return found, sent


def same(a, b):
    if not isinstance(a, torch.Tensor):
        return type(a) is type(b) and a == b
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


@pytest.mark.parametrize("name", PARCELS)
def test_what_is_sent_arrives(travelled, name):
    sent, found = PARCELS[name], travelled[0][name]
    assert type(found) is tuple and len(found) == len(sent)
    assert all(map(same, sent, found)), found


def test_one_float_tensor_costs_its_own_bytes_and_the_rest_a_row_each(travelled):
    expected = []
    for values in PARCELS.values():
        tensors = [messages.nbytes(v) for v in values if isinstance(v, torch.Tensor)]
        alone = len(values) == 1 and lab_.is_float(values[0])
        expected += tensors if alone else [16 * len(values), *tensors]
    assert [s.nbytes for s in travelled[1] if s.name == "send"] == expected


@pytest.mark.parametrize("wrong, name", [(1.5, "float"), (True, "bool"), ("a", "str")])
def test_other_things_do_not_travel(wrong, name):
    def both(rank, n_ranks):
        return lab_.send((wrong,), 1) if rank == 0 else lab_.receive(0)

    with pytest.raises(world.RankFailed, match=f"a message is a tensor, not {name}"):
        world.launch(both, 2)


# ---- stages made by hand -------------------------------------------------------------


class Scale(nn.Module):
    """y = w x; with `aside`, the input is handed on too."""

    def __init__(self, w, aside=False):
        super().__init__()
        self.w, self.aside = nn.Parameter(torch.tensor(float(w))), aside

    def forward(self, x):
        return (self.w * x, x) if self.aside else self.w * x


class Add(nn.Module):
    """w z + y: the end of a skip connection."""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, z, y):
        return self.w * z + y


class Mixed(nn.Module):
    """Hands on what is no float tensor, and one that nobody uses."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        return self.w * x, torch.tensor([0, 1]), 2, None, self.w * 100


class Uses(nn.Module):
    def forward(self, x, places, times, nothing, unused):
        assert (places.dtype, times, nothing) == (torch.int64, 2, None)
        return x[places] * times, x[places] * times


def by_hand(rank, n_ranks, cases):
    """Run each (modules, input, loss) in turn; return (loss, gradients, alive)."""
    found = {}
    for name, (modules, inputs, loss) in cases.items():
        stage = Stage(modules[rank], loss if rank == n_ranks - 1 else None)
        out = lab_.in_turn(stage, inputs)
        gradients = [weight.grad for weight in stage.module.parameters()]
        found[name] = out, gradients, len(stage.live)
    return found


def total(y):
    return y.sum()


CASES = {
    # d = 3: y = w1 x, z = w2 y, out = w3 z + y, x = 2, w = (1, 3, 5)
    "skip": ([Scale(1), Scale(3, aside=True), Add(5)], torch.tensor(2.0), total),
    "plain": ([Scale(1), Scale(3), Scale(5)], torch.tensor(2.0), total),
    "frozen first": (
        [Scale(1).requires_grad_(False), Scale(3), Scale(5)], torch.tensor(2.0), total
    ),
    "frozen": (
        [Scale(w).requires_grad_(False) for w in (1, 3, 5)], torch.tensor(2.0), total
    ),
    "no weights between": ([Scale(2), nn.Tanh(), Scale(5)], torch.tensor(0.0), total),
    "mixed": (
        [Mixed(), Uses(), Add(5)], torch.tensor([1.0, 2.0, 4.0]), total
    ),
    "tokens": (
        [nn.Embedding(4, 1), Scale(3), Scale(5)], torch.tensor([[1, 2]]), total
    ),
    "bfloat16": (
        [Scale(w).bfloat16() for w in (1, 3, 5)],
        torch.tensor(2.0, dtype=torch.bfloat16), total,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def ran():
    """name -> (loss, gradients of all stages, what is alive)"""
    per_rank = world.launch(by_hand, 3, CASES)
    return {
        name: (
            [one[name][0] for one in per_rank],
            [g for one in per_rank for g in one[name][1]],
            [one[name][2] for one in per_rank],
        )
        for name in CASES
    }


def test_a_skip_connection_crosses_a_boundary(ran):
    losses, gradients, _ = ran["skip"]
    assert losses == [None, None, 32.0]
    assert [g.item() for g in gradients] == [32, 10, 6]


@pytest.mark.parametrize(
    "name, loss, gradients",
    [
        ("plain", 30.0, [30, 10, 6]),
        ("frozen first", 30.0, [None, 10, 6]),
        ("frozen", 30.0, [None, None, None]),
        ("no weights between", 0.0, [0, 0]),
        ("mixed", 6 * (5 * 3 + 3), [6 * 6, 6 * 3]),
        ("bfloat16", 30.0, [30, 10, 6]),
    ],
)
def test_stages_of_many_kinds(ran, name, loss, gradients):
    losses, found, _ = ran[name]
    assert losses == [None, None, loss]
    assert [None if g is None else g.item() for g in found] == gradients


def test_tokens_have_no_gradient_and_their_embedding_has(ran):
    _, gradients, _ = ran["tokens"]
    assert gradients[0].flatten().tolist() == [0, 15, 15, 0]


def test_nothing_is_alive_after_a_step(ran):
    assert [alive for _, _, alive in ran.values()] == [[0, 0, 0]] * len(CASES)


def test_a_graph_ends_at_its_stage():
    first, second = Stage(Scale(2)), Stage(Scale(3), loss=total)
    [y] = first.forward(0, (torch.tensor(1.0),))
    [out] = second.forward(0, (y,))
    assert not y.requires_grad and not out.requires_grad
    [gradient] = second.backward(0, (torch.tensor(1.0),))
    assert first.module.w.grad is None and gradient == 3
    first.backward(0, (gradient,))
    assert first.module.w.grad == 3 and first.live == second.live == {}


def test_a_stage_of_several_tensors_is_metered():
    """What it keeps is its two inputs, which the product needs, and its output."""
    stage, x = Stage(Add(1)), (torch.ones(10), torch.ones(10))
    with Meter(stage.module) as meter:
        meter.watch(stage).forward(0, x)
        assert meter.peak == 3 * 40
        stage.backward(0, (torch.ones(10),))
        assert meter.bytes == 0


# ---- gradients and weights equal those of one process --------------------------------


class Masked(Config):
    def data(self, step):
        inputs, targets = super().data(step)
        targets[0 : self.batch // 3] = toy.IGNORE
        return inputs, targets


def gradients(rank, n_ranks, configs):
    """(loss, {name: gradient}) of one step, per config."""
    results = []
    for config in configs:
        stage = config.worker(rank)
        loss = config.step(stage, rank, *config.data(0))
        results.append((loss, {n: p.grad for n, p in stage.module.named_parameters()}))
    return results


@pytest.mark.parametrize("d", range(1, 6))
def test_gradients_are_those_of_one_process(d):
    configs = [
        Config(n_stages=d, batch=3),
        Masked(n_stages=d, batch=4, partition="cost"),
        Config("digits", n_stages=d, batch=5),
        Masked("digits", n_stages=d, batch=7, partition="1," * (d - 1) + str(10 - d)),
    ]  # fmt: skip
    for config, *found in zip(configs, *world.launch(gradients, d, configs)):
        whole = config.build()
        expected = toy.reference_step(whole, *config.data(0))
        losses = [loss for loss, _ in found]
        assert losses == [*[None] * (d - 1), pytest.approx(expected, abs=1e-5)]
        mine = {name: g for _, named in found for name, g in named.items()}
        for name, weight in whole.named_parameters():
            torch.testing.assert_close(
                mine[name], weight.grad, rtol=1e-5, atol=1e-6, msg=f"{name}: {config}"
            )


@pytest.mark.parametrize(
    "config",
    [
        Config(n_stages=1, batch=4, steps=20),
        Config(n_stages=3, batch=4, steps=20, partition="1,2,5"),
        Config("digits", n_stages=2, steps=20, partition="cost"),
        Config("digits", n_stages=5, steps=100),
    ],
    ids=lambda config: f"{config.model} {config.n_stages}",
)
def test_weights_are_those_of_one_process(config):
    report = measure(config, UNIT)
    assert report.weights_gap < 1e-6 and report.loss_gap < 1e-5
    assert report.losses[-1] < 0.9 * report.losses[0]


class Double(variants.Double, Config):
    pass


def test_in_double_precision_nothing_is_lost():
    report = measure(Double(n_stages=3, batch=2, steps=10), UNIT)
    assert report.weights_gap < 1e-13 and report.loss_gap < 1e-12


class Normed(variants.Normed, Config):
    pass


def test_batch_norm_sees_the_whole_batch_so_equality_is_claimed():
    report = measure(Normed("digits", n_stages=2, batch=8, steps=5), UNIT)
    assert report.remarks == [] and report.weights_gap < 1e-6


class Dropped(Config):
    def build(self, layers=None):
        model = super().build(layers)
        return nn.Sequential(model, nn.Dropout()) if layers is None else model


def test_of_dropout_equality_is_not_claimed():
    assert ["Dropout" in said for said in Dropped("digits").remarks()] == [True]


# ---- time ----------------------------------------------------------------------------


def unit_runs(rank, n_ranks, links, costs):
    """The spans of one step of a tiny model, for each link."""
    found = []
    for link in links:
        stage = Stage(Scale(1), total if rank == n_ranks - 1 else None)
        with clock.recording(clock.Virtual(clock.Unit(costs), link), rank) as clk:
            clock.watch(stage, forward="F", backward="B")
            lab_.in_turn(stage, torch.ones(4))
        found.append(clk.spans)
    return found


@functools.cache
def unit_timelines(d, costs=None):
    links = [Link(), LINK, Link(latency=2.0), Link(bandwidth=5.0)]
    results = world.launch(unit_runs, d, links, costs)
    return dict(zip(links, map(Timeline.merge, zip(*results))))


@pytest.mark.parametrize("d", range(1, 9))
def test_formula_and_run_agree(d):
    for link, run in unit_timelines(d).items():
        expected = lab_.step_time(3 * d, [16] * d, link)
        assert expected == pytest.approx(3 * d + 2 * (d - 1) * link.seconds(16))
        assert abs(run.makespan - expected) < 1e-9
        idle = lab_.idle_fraction(d, 3 * d / expected)
        assert abs(run.bubble() - idle) < 1e-9
        assert [run.order(stage) for stage in range(d)] == lab_.order(d)
    free = unit_timelines(d)[Link()]
    assert abs(free.bubble() - (d - 1) / d) < 1e-9
    assert lab_.idle_fraction(d) == pytest.approx((d - 1) / d)
    assert all(abs(free.idle(stage) - (d - 1) / d) < 1e-9 for stage in range(d))


def uneven(rank, name, microbatch):
    return (1.0, 5.0, 0.5)[rank] * {"F": 1, "B": 2}[name]


def test_an_unequal_cut_costs_no_time_here_and_some_in_a_pipeline():
    run = unit_timelines(3, uneven)[Link()]
    assert run.makespan == pytest.approx(3 * 6.5)
    assert run.bubble() == pytest.approx(lab_.idle_fraction(3))
    idle = [1 - cost / 6.5 for cost in (1.0, 5.0, 0.5)]  # who does little, waits long
    assert [run.idle(stage) for stage in range(3)] == pytest.approx(idle)
    cost = lambda stage, op: uneven(stage, op.kind, 0) / 6.5
    equal = simulate.simulate(gpipe.gpipe(3, 8), {"F": 1 / 3, "B": 2 / 3})
    piped = simulate.simulate(gpipe.gpipe(3, 8), cost)
    assert piped.makespan > 1.5 * equal.makespan


@pytest.mark.parametrize("link", [Link(), LINK], ids=["free", "link"])
def test_the_prediction_is_that_of_the_simulator(link):
    for d in (1, 2, 5):
        run = unit_timelines(d)[link]
        twin = simulate.simulate(lab_.order(d), {"F": 1, "B": 2}, link, 16)
        assert run.makespan == pytest.approx(twin.makespan, abs=1e-9)
        assert run.bubble() == pytest.approx(twin.bubble(), abs=1e-9)


# ---- measure: the ledger -------------------------------------------------------------

LEDGERS = [
    (Config(n_stages=4, batch=4, steps=2), UNIT),
    (Config(n_stages=2, batch=3, partition="3,5"), clock.Virtual(clock.Flops())),
    (Config("digits", n_stages=3, steps=1), clock.Virtual(clock.Unit(), Link(1, 4096))),
    (
        Config("digits", n_stages=5, batch=5, partition="cost"),
        clock.Virtual(clock.Flops(), Link(1e-6, 1e9)),
    ),
    (Config("digits", n_stages=1, batch=2, steps=1), UNIT),
]


@pytest.mark.parametrize("config, clk", LEDGERS, ids=[repr(one) for one, _ in LEDGERS])
def test_the_ledger_counts_what_it_predicts(config, clk):
    report = measure(config, clk)
    rows = {name: (said, did) for name, said, did, _ in report.rows}
    assert rows.keys() == {
        "step", "idle", "weights, gradients, momenta", "activations", "sent"
    }  # fmt: skip
    for name in ("step", "idle"):
        assert rows[name][0] == pytest.approx(rows[name][1], abs=1e-9), name
    for name in ("weights, gradients, momenta", "activations", "sent"):
        assert list(rows[name][0]) == rows[name][1], name  # to the byte
    assert min(rows["activations"][1]) > 0 and report.remarks == []
    assert sum(rows["sent"][1]) == 2 * sum(x for _, _, x in config.needs()) - 2 * (
        messages.nbytes(config.data(0)[0])
    )
    assert report.invariant()[1][1:3] == ("below 1e-06", "below 1e-06")
    points = dict(report.explain(*report.timelines()).rows)
    assert abs(points["jitter"]) < 1e-9


def test_needs_by_hand():
    """digits in two stages: conv 32 to 6 x 6, tanh, conv 64 to 4 x 4, tanh, pool to
    256 | flatten, fc 128, tanh, fc 10."""
    config = Config("digits", n_stages=2, batch=2)
    assert config.sizes() == [5, 4]
    (first, kept, x), (second, _, y) = config.needs()
    assert first == 4 * (32 * 9 + 32 + 64 * 32 * 9 + 64)
    assert second == 4 * (256 * 128 + 128 + 128 * 10 + 10)
    assert kept == 2 * 4 * (64 + 32 * 36 + 64 * 16 + 256)  # x, two tanh, the output
    assert (x, y) == (2 * 4 * 64, 2 * 4 * 256)
    assert lab_.memory(first, kept) == 3 * first + kept
    assert lab_.memory(100, 7, copies=4) == 407
    assert lab_.traffic([9, 1, 2, 4]) == [1, 3, 6, 4]
    assert lab_.traffic([9]) == [0]


def test_what_a_rank_holds_falls_with_the_number_of_stages():
    one, *more = (list(Config(n_stages=d, batch=4).needs()) for d in range(1, 9))
    for needs in more:
        assert sum(weights for weights, _, _ in needs) == one[0][0]
        assert max(lab_.memory(*need[:2]) for need in needs) < lab_.memory(*one[0][:2])


def memory_of_steps(rank, n_ranks, config, steps):
    """(peak, bytes, batches alive, messages, tensors) after each step."""
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
    for found in world.launch(memory_of_steps, 3, Config("digits", n_stages=3), 8):
        assert found[0][0] > 0 and {row[1:4] for row in found} == {(0, 0, 0)}
        assert len(set(found[1:])) == 1  # the first step makes the gradients


# ---- the budget ----------------------------------------------------------------------

SMALL = 4_000_000  # bytes: less than the text model's weights, gradients and momenta


def test_what_fits_no_device_trains_when_split(monkeypatch):
    for d in (2, 4):
        config = Config(n_stages=d, batch=4, budget=SMALL, steps=2)
        report = measure(config, UNIT)
        assert report.weights_gap < 1e-6
        assert max(map(sum, zip(report.held, report.peaks))) <= SMALL
    monkeypatch.setattr(world, "launch", None)
    [(weights, _, _)] = Config(n_stages=1, batch=1).needs()
    assert lab_.memory(weights) > SMALL  # no batch is small enough
    words = (
        r"stage 0 needs 7,391,496 B, but a device holds 4,000,000 B: take more stages"
    )
    with pytest.raises(ValueError, match=words):
        measure(Config(n_stages=1, batch=4, budget=SMALL), UNIT)


def test_the_budget_is_kept_to_the_byte(monkeypatch):
    config = Config("digits", n_stages=2, batch=4, steps=2)
    most = max(lab_.memory(*need[:2]) for need in config.needs())
    exact = Config("digits", n_stages=2, batch=4, steps=2, budget=most)
    assert measure(exact, UNIT).weights_gap < 1e-6
    monkeypatch.setattr(world, "launch", None)
    less = Config("digits", n_stages=2, batch=4, budget=most - 1)
    words = f"needs {most:,} B, but a device holds {most - 1:,} B"
    with pytest.raises(ValueError, match=words):
        measure(less, UNIT)


class Careless(Config):
    """Nobody asks beforehand."""

    def check(self):
        pass


def test_who_does_not_ask_runs_out_of_memory():
    with pytest.raises(world.RankFailed, match="a device holds 4,000,000 B") as caught:
        training.train(Careless(n_stages=1, batch=4, budget=SMALL), UNIT)
    assert OutOfMemory.__name__ in str(caught.value)
    with pytest.raises(world.RankFailed, match="a device holds 2,000,000 B"):
        training.train(Careless(n_stages=4, batch=4, budget=2_000_000), UNIT)


# ---- what is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"n_stages": 9}, "8 layers cannot make 9 stages: choose 1 to 8"),
        ({"model": "digits", "n_stages": 10}, "9 layers cannot make 10 stages"),
        ({"n_stages": 9, "partition": "cost"}, "8 layers cannot make 9 stages"),
        ({"n_stages": 0}, "n_stages must be a whole number from 1 up, not 0"),
        ({"n_stages": "4"}, "n_stages must be a whole number from 1 up, not '4'"),
        ({"batch": 0}, "batch must be a whole number from 1 up, not 0"),
        ({"steps": 0}, "steps must be a whole number from 1 up, not 0"),
        ({"budget": 0}, "budget must be a whole number from 1 up, not 0"),
        ({"budget": 1e9}, "budget must be a whole number from 1 up, not 1000000000.0"),
        (
            {"budget": 1000},
            "stage 0 needs 5,318,656 B, but a device holds 1,000 B",
        ),
        ({"model": "image"}, "no model 'image': choose one of text, digits"),
        ({"partition": "odd"}, "no partition 'odd': choose one of even, cost, 4 layer"),
        ({"partition": "1,3,4"}, "no partition '1,3,4': choose .* 4 layer counts"),
        ({"partition": "0,2,3,3"}, "no partition '0,2,3,3'"),
        ({"partition": "2,2,2,-1"}, "no partition '2,2,2,-1'"),
        ({"partition": "2,2,2,3"}, "layers do not make 8 layers"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(monkeypatch, options, words):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match=words):
        measure(Config(**options), UNIT)


class Tied(Config):
    """The output layer uses the embedding's weights."""

    def build(self, layers=None):
        model = super().build()
        model[-1][-1].weight = model[0].token.weight
        return model if layers is None else model[layers.start : layers.stop]


class Skips(variants.Skips, Config):
    pass


@pytest.mark.parametrize(
    "config, words",
    [(Tied(n_stages=2), "one tied weight"), (Skips(), "both ends of a connection")],
)
def test_a_hidden_connection_is_refused_before_any_rank_starts(
    monkeypatch, config, words
):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match=words):
        measure(config, UNIT)


class Nothing(variants.Nothing, Config):
    pass


def test_a_batch_without_a_valid_target_is_refused(monkeypatch):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match="every target is -100"):
        measure(Nothing("digits", n_stages=2, batch=4), UNIT)


def test_partitions():
    def sizes(partition, d, model="text"):
        return Config(model, n_stages=d, partition=partition).sizes()

    assert sizes("even", 3) == [3, 3, 2] and sizes("cost", 3) == [3, 2, 3]
    assert sizes("1,3,4", 3) == [1, 3, 4] and sizes("8", 1) == [8]
    costs = toy.layer_costs("digits", 1)
    assert sizes("cost", 3, "digits") == split.by_cost(costs, 3)
