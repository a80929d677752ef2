import sys
from itertools import pairwise
from math import log

import pytest
import torch
from torch.nn import functional as F

from labs.kit import toy
from labs.kit.toy import MODELS, batch, build, loss_sum, n_valid, reference_step

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = {"text": 16, "digits": 32}


def same(a, b):
    """Equal state dicts: the same names, in the same order, with equal values."""
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


def test_the_layers():
    kinds = {name: [type(layer).__name__ for layer in build(name)] for name in MODELS}
    assert kinds == {
        "text": ["Embedding", *["Block"] * 6, "Head"],
        "digits": ["Conv2d", "Tanh", "Conv2d", "Tanh", "AvgPool2d", "Flatten"]
        + ["Linear", "Tanh", "Linear"],
    }
    assert [toy.n_layers(name) for name in MODELS] == [8, 9]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [(0, 3, 5, 99), (0, 99), (0, 1, 1, 99)])
def test_stages_start_as_slices_of_the_whole(name, cuts):
    whole = build(name, seed=3)
    for start, stop in pairwise(cuts):
        stage = build(name, seed=3, layers=slice(start, stop))
        assert same(stage.state_dict(), whole[start:stop].state_dict())


def test_layers_may_be_a_range():
    whole, stage = build("text"), build("text", layers=range(2, 4))
    assert same(stage.state_dict(), whole[2:4].state_dict())


def test_weights_depend_on_seed_and_index():
    model, other = build("text", seed=0), build("text", seed=1)
    assert not torch.equal(model[1].mlp[1].weight, model[2].mlp[1].weight)
    assert not torch.equal(model[1].mlp[1].weight, other[1].mlp[1].weight)


@pytest.mark.parametrize("name", MODELS)
def test_global_random_state_neither_matters_nor_moves(name):
    first = build(name).state_dict(), batch(name, 4)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    again = build(name).state_dict(), batch(name, 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(first[0], again[0])
    assert all(map(torch.equal, first[1], again[1]))


def test_text_batch_is_bytes_and_the_bytes_that_follow():
    inputs, targets = batch("text", 5, step=2)
    assert inputs.shape == targets.shape == (5, toy.CONTEXT)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert b" the " in bytes(batch("text", 100)[0].flatten().tolist())


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    data, (images, labels) = load_digits(), toy._digits()
    assert torch.equal(images, torch.tensor(data.images / 8 - 1).float()[:, None])
    assert labels.dtype == torch.int64 and labels.tolist() == data.target.tolist()


def test_digits_batch():
    inputs, targets = batch("digits", 50)
    assert inputs.shape == (50, 1, 8, 8) and inputs.dtype == torch.float32
    assert (inputs.min(), inputs.max()) == (-1, 1)
    assert targets.shape == (50,) and targets.dtype == torch.int64
    assert set(targets.tolist()) == set(range(10))


@pytest.mark.parametrize("name", MODELS)
def test_each_step_and_seed_has_its_own_batch(name):
    first, step, seed = batch(name, 9), batch(name, 9, step=1), batch(name, 9, seed=1)
    assert not torch.equal(first[0], step[0])
    assert not torch.equal(first[0], seed[0])
    assert not torch.equal(step[0], seed[0])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: build("letters"), ValueError, "'letters': choose one of text, digits"),
        (lambda: batch("letters", 4), ValueError, "no model 'letters'"),
        (lambda: build("text", layers=range(6, 9)), ValueError, "choose from 0 to 7"),
        (lambda: batch("text", 0), ValueError, "at least 1 sample"),
        (lambda: batch("text", 2.5), TypeError, "float"),
    ],
)
def test_bad_input_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_a_python_without_the_text_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(RuntimeError, match="no pydoc_data.topics"):
        toy._text.__wrapped__()


def test_text_model_does_not_look_ahead():
    model = build("text")
    tokens = batch("text", 2)[0]
    changed = tokens.clone()
    changed[:, 20] = 0
    before, after = model(tokens), model(changed)
    assert before.shape == (2, toy.CONTEXT, toy.VOCAB)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_loss_is_a_sum_over_valid_targets():
    targets = torch.tensor([[1, -100, 3], [0, 2, -100]])
    assert n_valid(targets) == 4
    uniform = torch.zeros(2, 3, 10)
    assert loss_sum(uniform, targets).item() == pytest.approx(4 * log(10))
    assert loss_sum(uniform, torch.full((2, 3), -100)).item() == 0


@pytest.mark.parametrize("name", MODELS)
def test_reference_step_is_the_mean_over_valid_targets(name):
    inputs, targets = batch(name, 6)
    targets[1] = targets[4] = -100
    model, plain = build(name), build(name)
    scores = plain(inputs).flatten(0, -2)
    expected = F.cross_entropy(scores, targets.flatten())
    expected.backward()
    for _ in range(2):  # the second step must not add to the first one's gradients
        loss = reference_step(model, inputs, targets)
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for got, want in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-5, atol=1e-7)
    assert same(model.state_dict(), plain.state_dict())  # no optimizer, no step


def test_reference_step_without_valid_targets_is_refused():
    inputs, targets = batch("digits", 3)
    with pytest.raises(ValueError, match="at least one valid"):
        reference_step(build("digits"), inputs, targets.fill_(-100))


@pytest.mark.parametrize("name, steps", [("text", 20), ("digits", 300)])
def test_uneven_microbatches_add_up_to_the_single_process(name, steps):
    expected = toy.reference_run(name, steps, SIZE[name])
    model = build(name)
    sgd = torch.optim.SGD(model.parameters(), toy.LR[name], toy.MOMENTUM)
    for step in range(steps):
        inputs, targets = batch(name, SIZE[name], step)
        sgd.zero_grad()
        total = 0.0
        for x, t in zip(inputs.split(5), targets.split(5)):  # 16 = 5 + 5 + 5 + 1
            loss = loss_sum(model(x), t) / n_valid(targets)
            loss.backward()
            total += loss.item()
        sgd.step()
        assert total == pytest.approx(expected[step], rel=0, abs=1e-5)
    if name == "digits":
        images, labels = batch(name, 1000, step=steps)
        assert (model(images).argmax(1) == labels).float().mean() > 0.95


def test_text_model_learns():
    losses = toy.reference_run("text", 300, SIZE["text"])
    assert log(256) - 0.5 < losses[0] < log(256) + 0.5
    assert sum(losses[-20:]) / 20 < 2.6


@pytest.mark.parametrize("size", [1, 4])
def test_layer_costs_by_hand(size):
    conv, conv2 = 2 * 9 * 1 * 32 * 6 * 6, 2 * 9 * 32 * 64 * 4 * 4
    fc, fc2 = 2 * 256 * 128, 2 * 128 * 10
    costs = [conv, 0, conv2, 0, 0, 0, fc, 0, fc2]
    assert toy.layer_costs("digits", size) == [size * cost for cost in costs]

    linears = 2 * 32 * (64 * 192 + 64 * 64 + 64 * 256 + 256 * 64)
    attention = 2 * 2 * 32 * 32 * 64
    costs = [0, *[linears + attention] * 6, 2 * 32 * 64 * 256]
    assert toy.layer_costs("text", size) == [size * cost for cost in costs]


@pytest.mark.parametrize("lr", [0.5, 0.9, 1.2])
def test_descent_on_old_gradients(lr):
    """Without a delay w shrinks by 1 - lr; with one, w' = w - lr * (the w before)."""
    plain = toy.delayed_descent(lr, 60, delay=0)
    assert plain == pytest.approx([(1 - lr) ** step for step in range(61)])
    late = toy.delayed_descent(lr, 60)
    assert len(late) == 61 and late[:3] == pytest.approx([1, 1 - lr, 1 - 2 * lr])
    for before, now, after in zip(late, late[1:], late[2:]):
        assert after == pytest.approx(now - lr * before)
    assert (max(map(abs, late[-9:])) < 0.1) == (lr < 1)


def test_p04_descent_converges_or_not():
    ends = [toy.delayed_descent(lr, 60)[-1] for lr in (0.9, 1.2)]
    assert ends == pytest.approx([0.0066, -262.1229], abs=1e-4)
