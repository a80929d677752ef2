import random
from itertools import combinations

import pytest
import torch
from torch import nn

from labs.kit import split, toy
from labs.kit.split import by_cost, check, chunk_sizes, even, ranges, remarks

pytestmark = pytest.mark.timeout(120)


# ---- sizes ---------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 20))
def test_even_sizes_differ_by_at_most_one(n):
    for parts in range(1, n + 1):
        sizes = even(n, parts)
        assert len(sizes) == parts and sum(sizes) == n
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert sizes == [len(part) for part in torch.arange(n).tensor_split(parts)]


def test_even_in_numbers():
    assert even(8, 3) == [3, 3, 2]
    assert even(6, 4) == [2, 2, 1, 1]
    assert chunk_sizes(2, 4) == [1, 1, 0, 0]


@pytest.mark.parametrize("n, parts", [(8, 9), (8, 0), (8, -1), (1, 2)])
def test_parts_without_anything_are_refused(n, parts):
    with pytest.raises(ValueError, match=f"{n} eggs cannot make {parts} boxes"):
        even(n, parts, "eggs", "boxes")
    with pytest.raises(ValueError, match=f"choose 1 to {n}"):
        by_cost([1] * n, parts)


def brute_force(costs, n_stages):
    """The smallest largest cost over all contiguous splits."""
    cuts = combinations(range(1, len(costs)), n_stages - 1)
    ends = ([0, *cut, len(costs)] for cut in cuts)
    return min(max(sum(costs[a:b]) for a, b in zip(e, e[1:])) for e in ends)


@pytest.mark.parametrize("seed", range(40))
def test_by_cost_is_exact(seed):
    draw = random.Random(seed)
    costs = [draw.choice([0, 1, 2, 5, 30]) for _ in range(draw.randint(1, 10))]
    for n_stages in range(1, len(costs) + 1):
        sizes = by_cost(costs, n_stages)
        assert len(sizes) == n_stages and sum(sizes) == len(costs) and min(sizes) >= 1
        found = max(sum(costs[i] for i in span) for span in ranges(sizes))
        assert found == brute_force(costs, n_stages)


def test_by_cost_in_numbers():
    assert by_cost([1, 1, 6], 2) == [2, 1]
    assert by_cost([0.5, 0.25, 0.25, 0.5], 2) == [2, 2]
    assert ranges([2, 1]) == [range(0, 2), range(2, 3)]


# ---- tied weights and connections that skip a boundary -------------------------------


class Scale(nn.Module):
    """y = w x"""

    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(float(w)))

    def forward(self, x):
        return self.w * x


class Keeps(Scale):
    """Keeps its output, for whom it may concern."""

    def forward(self, x):
        self.output = super().forward(x)
        return self.output


class Adds(Scale):
    """y = w x + what `take` returns"""

    def __init__(self, w, take):
        super().__init__(w)
        self.take = take

    def forward(self, x):
        return super().forward(x) + self.take()


class Puts(Scale):
    """Puts its output into a dict."""

    def __init__(self, w, shared):
        super().__init__(w)
        self.shared = shared

    def forward(self, x):
        self.shared["y"] = y = super().forward(x)
        return y


class Gets(Scale):
    def __init__(self, w, shared):
        super().__init__(w)
        self.shared = shared

    def forward(self, x):
        return super().forward(x) + self.shared["y"]


board = {}  # what layers could share through a global


class PutsOnBoard(Scale):
    def forward(self, x):
        board["y"] = super().forward(x)
        return board["y"]


class GetsFromBoard(Scale):
    detach = False

    def forward(self, x):
        return super().forward(x) + (board["y"].detach() if self.detach else board["y"])


class PopsFromBoard(Scale):
    def forward(self, x):
        return super().forward(x) + board.pop("y")


class Default(Scale):
    """Uses what another layer may have set, or nothing."""

    extra = None

    def forward(self, x):
        y = super().forward(x)
        return y if self.extra is None else y + self.extra


class Sets(Scale):
    """Sets an attribute of a later layer that it does not own."""

    def __init__(self, w, later):
        super().__init__(w)
        self.later = [later]

    def forward(self, x):
        self.later[0].extra = y = super().forward(x)
        return y


def through_a_module():
    first = Keeps(1)
    return first, Gets(5, _Attribute(first))


class _Attribute:
    """shared["y"] reads the attribute `output` of a module."""

    def __init__(self, module):
        self.module = module

    def __getitem__(self, key):
        return self.module.output


def through_a_closure():
    first = Keeps(1)
    return first, Adds(5, lambda: first.output)


def through_a_dict():
    shared = {}
    return Puts(1, shared), Gets(5, shared)


def through_a_global():
    return PutsOnBoard(1), GetsFromBoard(5)


def through_a_global_without_gradient():
    last = GetsFromBoard(5)
    last.detach = True
    return PutsOnBoard(1), last


def through_a_global_that_is_emptied():
    return PutsOnBoard(1), PopsFromBoard(5)


def through_a_later_layer():
    last = Default(5)
    return Sets(1, last), last


def through_a_hook():
    store = []
    first, last = Scale(1), Scale(5)
    first.register_forward_hook(lambda m, args, y: store.append(y))
    last.register_forward_hook(lambda m, args, y: y + store[-1])
    return first, last


SKIPS = [
    through_a_module,
    through_a_closure,
    through_a_dict,
    through_a_global,
    through_a_global_without_gradient,
    through_a_global_that_is_emptied,
    through_a_later_layer,
    through_a_hook,
]
X = torch.tensor([[2.0], [2.0]])


@pytest.mark.parametrize("skip", SKIPS)
@pytest.mark.parametrize("used", [False, True], ids=["new", "used before"])
def test_a_skip_over_a_boundary_is_refused(skip, used):
    """y = w1 x, z = w2 y, out = w3 z + y, a stage each."""
    first, last = skip()
    model = nn.Sequential(first, Scale(3), last)
    board.clear()
    if used:
        model(X)
    for sizes in ([1, 1, 1], [2, 1], [1, 2]):
        with pytest.raises(ValueError, match="^stage [012] by itself .* cut elsewhere"):
            check(model, sizes, X)
    check(nn.Sequential(nn.Identity(), first, Scale(3), last), [1, 3], X)


def test_a_skip_inside_a_stage_gives_the_right_gradients():
    first, last = through_a_module()
    model = nn.Sequential(first, Scale(3), last)
    check(model, [3], X)
    out = model(X)
    out.mean().backward()
    assert out.tolist() == [[32.0], [32.0]]
    assert [layer.w.grad.item() for layer in model] == [32, 10, 6]


def tied_module():
    layer = nn.Linear(4, 4)
    return layer, layer


def tied_parameter():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = first.weight
    return first, last


def tied_memory():
    first, last = nn.Linear(4, 4), nn.Linear(4, 4)
    last.weight = nn.Parameter(first.weight.data.T)
    return first, last


class Uses(nn.Module):
    """A linear layer with the weight of another one."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.linear(x, self.weight())


class Reuses(nn.Module):
    def __init__(self, layer, hide):
        super().__init__()
        self.layer = [layer] if hide else layer

    def forward(self, x):
        return (self.layer[0] if isinstance(self.layer, list) else self.layer)(x)


def tied_by_reference():
    first = nn.Linear(4, 4)
    return first, Reuses(first, hide=False)


def tied_out_of_sight():
    first = nn.Linear(4, 4)
    return first, Reuses(first, hide=True)


def tied_by_a_closure():
    first = nn.Linear(4, 4)
    return first, Uses(lambda: first.weight)


TIES = [
    tied_module,
    tied_parameter,
    tied_memory,
    tied_by_reference,
    tied_out_of_sight,
    tied_by_a_closure,
]


@pytest.mark.parametrize("tie", TIES)
def test_a_tied_weight_is_refused(tie):
    first, last = tie()
    model = nn.Sequential(nn.Tanh(), first, nn.Tanh(), last)
    x = torch.randn(2, 4)
    words = "one tied weight|another gradient of 1.weight than in the whole model"
    for sizes in ([2, 2], [1, 1, 1, 1], [3, 1]):
        with pytest.raises(ValueError, match=words):
            check(model, sizes, x)
    check(model, [4], x)
    check(model, [1, 3], x)


def test_the_tied_embedding_of_language_models():
    model = toy.build("text")
    model[-1][-1].weight = model[0].token.weight
    with pytest.raises(ValueError) as caught:
        check(model, even(8, 4), toy.batch("text", 2)[0])
    assert str(caught.value) == (
        "0.token.weight of stage 0 and 7.1.weight of stage 3 are one tied weight: put "
        "both layers into one stage, or untie them."
    )


def test_frozen_weights_may_be_shared():
    layer = nn.Linear(4, 4).requires_grad_(False)
    check(nn.Sequential(layer, nn.Linear(4, 4), layer), [1, 1, 1], torch.randn(2, 4))


# ---- other cuts that cannot train ----------------------------------------------------


class Detaches(nn.Module):
    def forward(self, x):
        return x.detach()


class Pair(nn.Module):
    def forward(self, x):
        return x, x


class First(nn.Module):
    def forward(self, pair):
        return pair[0]


def test_a_boundary_without_gradient_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), Detaches(), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="stage 1 by itself has no gradient for stage"):
        check(model, [1, 2], torch.randn(2, 4))
    check(model, [2, 1], torch.randn(2, 4))  # then stage 0 has nothing to train


def test_a_boundary_is_one_tensor():
    model = nn.Sequential(nn.Linear(4, 4), Pair(), First())
    with pytest.raises(ValueError, match="stage 0 ends in a tuple: cut"):
        check(model, [2, 1], torch.randn(2, 4))
    check(model, [1, 2], torch.randn(2, 4))


def test_an_operation_in_place_on_the_boundary_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="stage 1 by itself cannot run .*in-place"):
        check(model, [1, 2], torch.randn(2, 4))
    check(model, [2, 1], torch.randn(2, 4))


def test_what_is_no_sequence_of_these_sizes_is_refused():
    with pytest.raises(TypeError, match="cut an nn.Sequential, not a Linear"):
        check(nn.Linear(2, 2), [1], torch.randn(2, 2))
    with pytest.raises(ValueError, match=r"\[1, 2\] layers do not make 2 layers"):
        check(nn.Sequential(nn.Tanh(), nn.Tanh()), [1, 2], torch.randn(2, 2))


# ---- what is fine stays as it was ----------------------------------------------------


@pytest.mark.parametrize("name", toy.MODELS)
def test_the_toy_models_may_be_cut_anywhere(name):
    model, sample = toy.build(name), toy.batch(name, 2)[0]
    for n_stages in range(1, len(model) + 1):
        check(model, even(len(model), n_stages), sample)


@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4), nn.Dropout(0.5)],
        [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)],
        [nn.Linear(4, 4, dtype=torch.float64), nn.Tanh()],
        [nn.Linear(4, 4, dtype=torch.bfloat16), nn.Tanh()],
        [nn.Linear(4, 4)],
    ],
    ids=["dropout", "batch norm", "float64", "bfloat16", "one layer"],
)
def test_a_check_changes_nothing(layers):
    model = nn.Sequential(*layers)
    sample = torch.randn(2, 4, dtype=layers[0].weight.dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    random_state = torch.get_rng_state()
    check(model, [1] * len(layers), sample)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not sample.requires_grad


# ---- remarks -------------------------------------------------------------------------


def test_remarks_name_what_microbatches_change():
    assert remarks(toy.build("text")) == remarks(toy.build("digits")) == []
    assert remarks(nn.Sequential(nn.LayerNorm(4), nn.Dropout(0.0))) == []
    model = nn.Sequential(nn.Sequential(nn.BatchNorm2d(3)), nn.Dropout2d(0.1))
    norm, dropout = remarks(model)
    assert norm.startswith("BatchNorm normalises each microbatch by itself")
    assert dropout.startswith("Dropout draws a mask per microbatch")


# ---- weigh ---------------------------------------------------------------------------


def test_weigh_gives_bytes_per_stage_and_microbatch():
    from labs.gpipe import Config

    config = Config("text", n_stages=2, batch=3, n_microbatches=2)
    inside, boundary = split.weigh(config)
    assert boundary == [[2 * 32 * 8, 32 * 8], [2 * 32 * 64 * 4, 32 * 64 * 4]]
    assert all(len(row) == 2 and row[0] > row[1] > 0 for row in inside)
    again, _ = split.weigh(Config("text", n_stages=2, batch=3, n_microbatches=2,
                                  recompute=True))  # fmt: skip
    output = 32 * 64 * 4
    assert [a - b for a, b in zip(inside[0], again[0])] == [2 * output, output]
