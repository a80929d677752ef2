import pickle

import pytest
import torch
from torch import nn

from labs.kit import toy, training
from labs.kit.meter import Meter, OutOfMemory

FLOAT = 4  # bytes of a float32
DEVICES = ["cpu"] + ["cuda"] * torch.cuda.is_available()


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def test_linear_keeps_its_input():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    with Meter(layer) as meter:
        y = layer(x)
    assert meter.bytes == 5 * 3 * FLOAT == 60
    y.sum().backward()
    assert (meter.bytes, meter.peak) == (0, 60)


def test_relu_keeps_its_output_and_a_linear_after_it_keeps_the_same_storage():
    layer = nn.Linear(3, 2)
    with Meter(layer) as meter:
        y = leaf(5, 3).relu()
        assert meter.bytes == 60
        z = layer(y)
        assert meter.bytes == 60
    z.sum().backward()
    assert meter.bytes == 0


def test_addition_keeps_nothing():
    with Meter() as meter:
        y = leaf(5, 3) + leaf(5, 3)
    assert y.requires_grad and meter.peak == 0


@pytest.mark.parametrize("device", DEVICES)
def test_mlp_by_hand(device):
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    meter = Meter(model)
    model.to(device)  # the meter looks for parameters when it is entered
    x = torch.randn(5, 3, device=device, requires_grad=True)
    with meter:
        y = model(x)
        assert meter.bytes == 60 + 5 * 4 * FLOAT == 140  # x, output of ReLU
        y.sum().backward()
    assert (meter.bytes, meter.peak) == (0, 140)


def test_parameters_and_buffers_do_not_count():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, 3))
    model.register_buffer("factor", torch.ones(3))
    for meter, nbytes in ((Meter(model), 60), (Meter(), 60 + (9 + 3) * FLOAT)):
        with meter:
            y = (leaf(5, 3) @ model.weight) * model.factor
            assert meter.bytes == nbytes
        del y
        assert meter.bytes == 0


def test_a_view_counts_as_its_whole_storage_once():
    layer = nn.Linear(3, 2)
    whole = torch.randn(10, 3)
    with Meter(layer) as meter:
        first = layer(whole[:5])
        assert meter.bytes == 120
        second = layer(whole[5:])
        assert meter.bytes == 120
    first.sum().backward()
    assert meter.bytes == 120
    second.sum().backward()
    assert meter.bytes == 0


def test_microbatches_kept_at_once_make_the_peak():
    layer = nn.Linear(3, 2)
    meter = Meter(layer)

    def forward():
        return layer(torch.randn(5, 3)).sum()

    with meter:
        for loss in [forward() for _ in range(4)]:  # F F F F B B B B
            loss.backward()
    assert (meter.bytes, meter.peak) == (0, 4 * 60)

    meter.reset_peak()
    with meter:
        for _ in range(4):  # F B F B F B F B
            forward().backward()
    assert (meter.bytes, meter.peak) == (0, 60)


def test_kept_until_autograd_lets_go():
    with Meter() as meter:
        y = leaf(5, 3).exp()
    y.sum().backward(retain_graph=True)
    assert meter.bytes == 60
    y.sum().backward()
    assert meter.bytes == 0
    with meter:
        y = leaf(5, 3).exp()
    assert meter.bytes == 60
    del y  # a graph that nobody walks back
    assert meter.bytes == 0


def test_only_what_is_saved_inside_counts():
    meter = Meter()
    outside = leaf(5, 3).exp()
    with meter, torch.no_grad():
        leaf(5, 3).exp()
    assert outside.requires_grad and meter.peak == 0


def test_hold_and_drop():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    meter = Meter(layer)
    meter.hold("input", x, torch.zeros(7))
    assert meter.bytes == 60 + 28
    with meter:
        y = layer(x)
    assert meter.bytes == 60 + 28  # x is there already
    meter.hold("input", x[1:], torch.zeros(1))
    assert meter.bytes == 60 + 28 + 4
    meter.drop("input")
    assert meter.bytes == 60  # backward still needs x
    y.sum().backward()
    assert (meter.bytes, meter.peak) == (0, 92)
    with pytest.raises(ValueError, match="nothing is held under 'input'"):
        meter.drop("input")


def test_hold_keeps_no_graph_alive():
    meter = Meter()
    with meter:
        y = leaf(5, 3).sin()  # sin keeps its input
    meter.hold(0, y)
    assert meter.bytes == 120
    del y
    assert meter.bytes == 60


def test_empty_tensors_weigh_nothing():
    with Meter() as meter:
        leaf(0, 3).exp().sum().backward()
    assert (meter.bytes, meter.peak) == (0, 0)


def test_gradients_are_those_of_a_run_without_meter():
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))
    x = leaf(5, 3)
    tensors = [x, *model.parameters()]
    expected = torch.autograd.grad(model(x).square().sum(), tensors)
    with Meter(model):
        got = torch.autograd.grad(model(x).square().sum(), tensors)
    assert all(map(torch.equal, got, expected))


def test_weights_changed_between_forward_and_backward_are_still_an_error():
    layer = nn.Linear(3, 2)
    with Meter(layer):
        y = layer(leaf(5, 3))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"shape \(3, 2\).* changed in place"):
        y.sum().backward()


def test_results_changed_before_backward_are_still_an_error():
    with Meter():
        y = leaf(5, 3).exp()
    with pytest.raises(RuntimeError, match="changed in place"):
        y.add_(1).sum().backward()


def test_operations_that_work_in_place_are_none():
    with Meter() as meter:
        y = (leaf(5, 3) * 1).relu_()
    y.sum().backward()
    assert (meter.bytes, meter.peak) == (0, 60)


# ---- a budget ------------------------------------------------------------------------


def test_at_most_what_is_allowed_may_be_kept():
    layer, x = nn.Linear(3, 2), leaf(5, 3)
    with Meter(layer) as meter:
        meter.allow(1060, fixed=1000)
        layer(x).sum().backward()
        y = layer(x)  # keeps 60 bytes
        with pytest.raises(OutOfMemory) as caught:
            x.exp()
    assert str(caught.value) == (
        "a device holds 1,060 B, but this rank needs 1,000 B for its parameters, "
        "gradients and optimizer state, and by now 120 B for activations: split the "
        "model over more ranks, or make the batch smaller."
    )
    del y


def test_what_is_kept_already_and_for_good_counts_too():
    with Meter() as meter, pytest.raises(OutOfMemory, match="a device holds 10 B"):
        meter.allow(10, fixed=11)
    with Meter() as meter:
        y = leaf(5, 3).exp()
        with pytest.raises(OutOfMemory, match="by now 60 B"):
            meter.allow(59)
    del y


def test_running_out_of_memory_can_be_sent_to_another_process():
    error = OutOfMemory(3_000, 2_000, 1_500)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, MemoryError) and str(again) == str(error)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_a_step_will_hold_is_known_before_it(frozen):
    config = training.Config("digits", batch=4)
    module = config.build()
    module[0].requires_grad_(not frozen)
    expected = training.needed(config, module)
    assert all(weight.grad is None for weight in module.parameters())
    optimizer = config.optimizer(module)
    toy.reference_step(module, *config.data(0), optimizer)
    assert training.held(module, optimizer) == expected
