import subprocess
import sys

import cloudpickle
import pytest
import torch
from torch import nn

from labs import single_gpu
from labs.kit import clock, lab, messages, simulate, toy, training, world
from labs.kit.meter import Meter
from labs.kit.timeline import Op
from labs.single_gpu import RULES, Config, Trainer, accumulate, measure, memory

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks need no pytest
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("one_thread")]

UNIT = clock.Virtual(clock.Unit({"L": 0.5, "F": 1.0, "B": 2.0, "U": 0.5}))


def trainer(model, batches=()):
    return Trainer(model, iter(batches), 0.1, 0.9)


def gradients(model):
    return [w.grad.clone() for w in model.parameters()]


# ---- one step equals the library's ---------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        Config(batch=8, steps=20),
        Config(batch=8, steps=20, n_microbatches=3),
        Config("digits", steps=20),
        Config("digits", steps=20, n_microbatches=32),
    ],
    ids=lambda config: f"{config.model} {config.n_microbatches}",
)
def test_weights_after_20_steps_are_those_of_the_library(config):
    """training.reference steps with torch.optim.SGD on the whole batch."""
    report = measure(config, UNIT)
    assert len(report.losses) == 20 and report.remarks == []
    assert report.loss_gap < 1e-5
    assert report.weights_gap < 1e-6
    assert report.losses[-1] < report.losses[0]


def test_the_update_is_sgd_bit_for_bit():
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, 0.9)
    by_hand = trainer(ours)
    for step in range(5):
        x = torch.full((4, 5), 0.5 + step)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).square().mean().backward()
        by_hand.update()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a, b)
    states = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, by_hand.momenta, states))


def test_no_update_reaches_a_graph():
    by_hand = trainer(nn.Linear(2, 1))
    by_hand.module(torch.ones(1, 2)).sum().backward()
    by_hand.update()
    assert not any(v.requires_grad for v in by_hand.momenta)
    assert all(w.is_leaf and w.requires_grad for w in by_hand.module.parameters())


# ---- gradient accumulation -----------------------------------------------------------


@pytest.mark.parametrize("model, size", [("text", 7), ("digits", 7)])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
def test_the_gradient_of_pieces_is_that_of_the_batch(model, size, n):
    inputs, targets = toy.batch(model, size)
    whole, pieces = toy.build(model), toy.build(model)
    expected = toy.reference_step(whole, inputs, targets)
    assert float(accumulate(trainer(pieces), inputs, targets, n)) == pytest.approx(
        expected, abs=1e-5
    )
    for a, b in zip(gradients(pieces), gradients(whole)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_masked_targets_do_not_count_wherever_they_are():
    """Microbatches of 3, 2, 2 samples with 96, 11 and no valid targets."""
    inputs, targets = toy.batch("text", 7)
    targets = targets.clone()
    targets[3, 10:], targets[4] = toy.IGNORE, toy.IGNORE
    targets[4, 5], targets[5:] = 7, toy.IGNORE
    assert [toy.n_valid(t) for t in targets.tensor_split(3)[:2]] == [96, 11]
    whole, pieces = toy.build("text"), toy.build("text")
    toy.reference_step(whole, inputs, targets)
    accumulate(trainer(pieces), inputs, targets, 3)
    for a, b in zip(gradients(pieces), gradients(whole)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    means = toy.build("text")  # what one gets from the mean of means: another gradient
    for x, t in list(zip(inputs.tensor_split(3), targets.tensor_split(3)))[:2]:
        (toy.loss_sum(means(x), t) / toy.n_valid(t) / 2).backward()
    gap = max((a - b).abs().max() for a, b in zip(gradients(means), gradients(whole)))
    assert gap > 1e-3


class Weight(nn.Module):
    """One weight w = 0, for the squared error of w x to t."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return self.w * x


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_scale_of_the_gradient(monkeypatch, n):
    """x = t = 1..4: the mean's gradient is -15; of unscaled microbatch means, -60."""
    monkeypatch.setattr(toy, "loss_sum", lambda y, t: (y - t).square().sum())
    by_hand, x = trainer(Weight()), torch.arange(1.0, 5.0)
    assert float(accumulate(by_hand, x, x, n)) == 7.5
    assert by_hand.module.w.grad.item() == -15.0
    assert by_hand.live == {}
    accumulate(by_hand, x, x, n)
    assert by_hand.module.w.grad.item() == -30.0  # gradients add up until zero_grad


def test_a_batch_without_a_valid_target_is_refused():
    x, t = toy.batch("digits", 4)
    with pytest.raises(ValueError, match="every target is -100"):
        accumulate(trainer(toy.build("digits")), x, torch.full_like(t, toy.IGNORE), 2)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def test_accumulation_serves_adamw_as_well():
    whole, pieces = toy.build("digits"), toy.build("digits")
    optimizers = adamw(whole), adamw(pieces)
    for step in range(20):
        batch = toy.batch("digits", 8, step)
        pieces.zero_grad()
        toy.reference_step(whole, *batch, optimizers[0])
        accumulate(trainer(pieces), *batch, 3)
        optimizers[1].step()
    assert training.distance(pieces.state_dict(), whole.state_dict()) < 1e-6


# ---- memory --------------------------------------------------------------------------


def kept(model, batch, n):
    """Bytes at the peak of a batch in n microbatches, by the meter."""
    by_hand = trainer(toy.build(model))
    meter = Meter(by_hand.module)
    meter.watch(by_hand)
    with meter:
        accumulate(by_hand, *toy.batch(model, batch), n)
    assert meter.bytes == 0
    return meter.peak


@pytest.mark.parametrize("model", toy.MODELS)
@pytest.mark.parametrize(
    "batch, n, largest", [(1, 1, 1), (8, 1, 8), (8, 3, 3), (7, 7, 1)]
)
def test_activations_to_the_byte(model, batch, n, largest):
    assert single_gpu.activations(model, batch, largest) == kept(model, batch, n)


def test_a_block_keeps_sixteen_vectors_of_each_token():
    x = torch.zeros(3, toy.CONTEXT, toy.WIDTH, requires_grad=True)
    block = toy.Block()
    with Meter(block) as meter:
        block(x).sum()
    n_tokens = 3 * toy.CONTEXT
    rest = 4 * n_tokens * (4 + toy.HEADS)
    assert meter.peak - rest == 4 * n_tokens * 16 * toy.WIDTH
    # The 34 bytes of Korthikanti et al. are these in 16 bits, and two masks of dropout.
    assert 2 * 16 + 2 == 34


@pytest.mark.parametrize("model", toy.MODELS)
@pytest.mark.parametrize("n", [1, 3])
def test_the_ledger_counts_what_it_predicts(model, n):
    report = measure(Config(model, batch=8, steps=1, n_microbatches=n), UNIT)
    rows = {name: (said, did) for name, said, did, _ in report.rows}
    on_cpu = report.hardware.startswith("CPU")
    for name in ("parameters", "gradients", "optimizer states", "activations"):
        said, did = rows[name]
        assert 0 < did == pytest.approx(said, rel=0 if on_cpu else 0.01), name
    assert rows["idle"] == (0.0, 0.0)
    said, did = rows["in turn, samples/unit"]
    assert said == pytest.approx(did) == 8 / (1 + 3 * n)
    assert rows["loading, training, samples/unit"][1] == [16, 8 / (3 * n + 0.5)]
    assert rows["bottleneck"][1] == "training"
    assert ("peak on the GPU" in rows) is not on_cpu
    assert (
        report.timeline.order(0) == report.predicted.order(0) == report.config.order()
    )
    assert report.loss_gap < 1e-5 and report.weights_gap < 1e-6


def test_slow_data_is_named_as_the_bottleneck():
    clk = clock.Virtual(clock.Unit({"L": 4, "F": 1, "B": 2, "U": 0.5}))
    report = measure(Config("digits", batch=4, steps=1), clk)
    rows = {name: did for name, _, did, _ in report.rows}
    assert rows["bottleneck"] == "loading"
    assert rows["loading, training, samples/unit"] == [1, 4 / 3.5]


def states(optimizer, *names):
    return [state[name] for state in optimizer.state.values() for name in names]


@pytest.mark.parametrize(
    "rule, make, names",
    [
        (
            "SGD with momentum",
            lambda p: torch.optim.SGD(p, 0.1, 0.9),
            ["momentum_buffer"],
        ),
        ("Adam", torch.optim.Adam, ["exp_avg", "exp_avg_sq"]),
        ("Adam", torch.optim.AdamW, ["exp_avg", "exp_avg_sq"]),
    ],
)
def test_a_rule_is_what_torch_allocates(rule, make, names):
    model = toy.build("digits")
    optimizer = make(model.parameters())
    toy.reference_step(model, *toy.batch("digits", 4), optimizer)
    weights = list(model.parameters())
    tensors = weights, [w.grad for w in weights], states(optimizer, *names)
    found = [sum(map(messages.nbytes, some)) for some in tensors]
    assert memory(sum(w.numel() for w in weights), rule) == found


def test_the_rules_in_bytes_per_parameter():
    sums = {name: sum(memory(1, name)) for name in RULES}
    assert sums == {
        "SGD with momentum": 12,
        "Adam": 16,
        "mixed, 16-bit gradients": 16,
        "mixed, fp32 gradients": 18,
        "mixed, gradients in both": 20,
        "mixed, 8-bit moments": 12,
    }
    assert memory(1, "mixed, 16-bit gradients") == [2, 2, 12]


def test_an_unknown_rule_is_refused():
    with pytest.raises(ValueError, match="no rule 'Adagrad': choose one of SGD with"):
        memory(1, "Adagrad")


# ---- FLOPs and time ------------------------------------------------------------------


def weighed(model, batch=4):
    [(_, peak, flops)] = world.launch(single_gpu.weigh, 1, Config(model, batch=batch))
    assert peak == 0 or torch.cuda.is_available()
    return flops


def test_the_flops_of_a_transformer_are_those_counted():
    shape = toy.BLOCKS, toy.WIDTH, toy.VOCAB, toy.CONTEXT
    said = single_gpu.transformer_flops(4 * toy.CONTEXT, *shape)
    assert weighed("text") == said == 3 * sum(toy.layer_costs("text", 4))


def test_of_the_first_layer_nobody_needs_the_gradient_of_the_data():
    first, *others = toy.layer_costs("digits", 4)
    assert weighed("digits") == 2 * first + 3 * sum(others)


def test_6nd_fits_a_transformer_and_not_a_convolution():
    """A convolution uses each parameter at many places."""
    for model, low, high in (("text", 0.99, 1.01), ("digits", 6, 7)):
        report = measure(Config(model, batch=4, steps=1), UNIT)
        [(said, did)] = [row[1:3] for row in report.rows if row[0] == "FLOPs, 6ND"]
        assert low < did / said < high, model


def test_turns_and_prefetch():
    assert single_gpu.throughput(300, 600) == pytest.approx(200)
    assert single_gpu.throughput(300, 600, prefetch=True) == 300
    assert single_gpu.throughput(float("inf"), 600) == pytest.approx(600)


def test_prefetch_as_a_simulated_schedule():
    """After the first batch, loading and training go at the slower one's pace."""
    steps = range(50)
    rows = [[Op("L", i) for i in steps], [Op("F", i) for i in steps]]

    def needs(n_stages, stage, op):
        return [(0, Op("L", op.microbatch))] * (stage == 1)

    for load, train in ((2, 3), (3, 2)):
        run = simulate.simulate(rows, {"L": load, "F": train}, needs=needs)
        pace = single_gpu.throughput(1 / load, 1 / train, prefetch=True)
        assert run.makespan == 50 / pace + min(load, train)


def test_time_and_utilisation():
    assert single_gpu.training_time(2, 3, 4) == 9
    assert single_gpu.training_time(2, 3, 4, factor=8) == 12
    assert single_gpu.mfu(10.0, 2.0, 20.0) == 0.25


def test_wall_time_has_gaps_and_explains_them():
    report = measure(Config("digits", batch=8, steps=2, n_microbatches=2), clock.Wall())
    assert report.timeline.order(0) == report.config.order()
    points = dict(report.explain(*report.timelines()).rows)
    assert points["jitter"] == pytest.approx(100 * report.timeline.bubble())
    assert abs(points["formula"]) + abs(points["transfer"]) < 1e-9


def test_counted_costs_repeat():
    config = Config("digits", batch=8, steps=1, n_microbatches=2)
    first, second = (measure(config, clock.Virtual(clock.Flops())) for _ in range(2))
    assert first.timeline.spans == second.timeline.spans
    assert lab.ledger(first.rows) == lab.ledger(second.rows)
    assert "inf" in lab.ledger(first.rows)  # loading has no FLOPs


# ---- what is refused, and what is said -----------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"batch": 2, "n_microbatches": 4}, "2 samples cannot make 4 microbatches"),
        ({"n_microbatches": 0}, "n_microbatches must be a whole number from 1 up"),
        ({"batch": 0}, "batch must be a whole number from 1 up, not 0"),
        ({"steps": True}, "steps must be a whole number from 1 up, not True"),
        ({"model": "image"}, "no model 'image': choose one of text, digits"),
    ],
)
def test_what_cannot_run_is_refused_before_any_rank_starts(monkeypatch, options, words):
    monkeypatch.setattr(world, "launch", None)
    with pytest.raises(ValueError, match=words):
        measure(Config(**options), UNIT)


def run(*options):
    command = [sys.executable, "-m", "labs.single_gpu", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("model", toy.MODELS)
def test_the_command_prints_the_ledger_and_leaves_two_files(tmp_path, model):
    done = run("--model", model, "--steps", "1", "--batch", "4", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "optimizer states" in done.stdout and "below 1e-06" in done.stdout
    assert (tmp_path / "single_gpu.svg").exists()
    assert (tmp_path / "single_gpu.trace.json").exists()


@pytest.mark.parametrize(
    "options, words",
    [
        (["--microbatches", "33"], "32 samples cannot make 33 microbatches"),
        (["--model", "image"], "no model 'image'"),
        (["--batch", "many"], "invalid int value: 'many'"),
        (["--stages", "2"], "unrecognized arguments: --stages 2"),
    ],
)
def test_a_wrong_option_is_answered_in_one_sentence(capsys, options, words):
    with pytest.raises(SystemExit) as caught:
        lab.main("single_gpu", single_gpu.__doc__, Config, measure, options)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1
