"""The composed cost of a step is what the labs' formulas and the simulator say."""

from math import inf

import pytest

from labs import gpipe, model_parallel, parameter_server, ring_allreduce, single_gpu
from labs.choosing import (
    RESNET50,
    Cluster,
    Model,
    Scheme,
    Step,
    cost,
    row,
    schemes,
    transformer,
)
from labs.kit import simulate
from labs.kit.timeline import Link

GPT = transformer(24, 2048, 16)
FAST, SLOW = Link(1e-5, 2e11), Link(1e-3, 1e8)


def cluster(link=FAST, n=8, between=None, per_node=8):
    return Cluster(n, 80e9, 312e12, 0.5, link, between or link, per_node)


# ---- what is composed ----------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_a_single_device_computes_and_sends_nothing(recompute):
    found = cost(GPT, cluster(SLOW), 8, Scheme(microbatches=4, recompute=recompute))
    factor = 4 / 3 if recompute else 1
    assert found.seconds == pytest.approx(factor * GPT.flops * 8 / 156e12)
    assert (found.idle, found.exposed, found.sent) == (0, 0, 0)
    assert found.memory[:3] == single_gpu.memory(GPT.parameters, GPT.rule)


@pytest.mark.parametrize("link", [FAST, SLOW, Link(0, inf)], ids=str)
def test_data_parallelism_adds_an_all_reduce(link):
    found = cost(GPT, cluster(link), 8, Scheme(8))
    ring = "ring", 8, 2 * GPT.parameters
    assert found.compute == pytest.approx(GPT.flops / 156e12)
    assert found.exposed == pytest.approx(ring_allreduce.seconds(*ring, link))
    assert found.sent == ring_allreduce.traffic(*ring)[0]
    assert found.memory == cost(GPT, cluster(), 1, Scheme()).memory


@pytest.mark.parametrize("bandwidth", [1e8, 1e10, 4e10, 1e11, 1e12])
def test_beside_the_backward_only_the_last_bucket_or_the_excess_shows(bandwidth):
    link = Link(0, bandwidth)
    found = cost(GPT, cluster(link), 8, Scheme(8, beside=True))
    ring = ring_allreduce.seconds("ring", 8, 2 * GPT.parameters, link)
    last, backward = ring / 106, 2 / 3 * found.compute  # 106 buckets of 25 MB
    assert found.exposed == pytest.approx(max(last, ring - backward * 105 / 106))


@pytest.mark.parametrize("n_servers", [1, 2, 8])
def test_parameter_servers_carry_weights_and_gradients(n_servers):
    found = cost(GPT, cluster(SLOW), 8, Scheme(8, servers=n_servers))
    nbytes = 2 * GPT.parameters
    run = 8, n_servers, nbytes, found.compute, SLOW
    assert found.seconds == pytest.approx(parameter_server.step_seconds(*run))
    assert found.sent == 8 / n_servers * nbytes
    assert found.memory[2] == 0  # the servers keep the optimizer's states


@pytest.mark.parametrize("d, m", [(1, 1), (2, 1), (4, 8), (8, 3)])
@pytest.mark.parametrize("link", [FAST, SLOW, Link(0, 3e8), Link(1e-3, 1e7)], ids=str)
def test_a_pipeline_takes_what_the_simulator_says(d, m, link):
    scheme = Scheme(stages=d, microbatches=m, order="gpipe")
    step, batch = Step(GPT, cluster(link), 2 * m, scheme), 2 * m
    costs = {"F": step.forward, "B": step.backward}
    run = simulate.simulate(gpipe.gpipe(d, m), costs, link, 2 * GPT.boundary)
    found = cost(GPT, cluster(link), batch, scheme)
    assert found.seconds == pytest.approx(run.makespan)
    assert found.idle / (found.idle + found.compute) == pytest.approx(
        gpipe.bubble_fraction(d, m)
    )


@pytest.mark.parametrize("d", [4, 5])  # 5 stages are unequal: that costs no time
def test_one_after_the_other_is_model_parallelism(d):
    scheme = Scheme(stages=d, microbatches=8, order="in turn")
    found = cost(GPT, cluster(SLOW), 16, scheme)
    whole = cost(GPT, cluster(), 16, Scheme()).seconds
    boundary = [2 * GPT.boundary] * d
    eight = 8 * model_parallel.step_time(whole / 8, boundary, SLOW)
    assert found.seconds == pytest.approx(eight)
    assert found.sent == 8 * max(model_parallel.traffic(boundary))
    idle = found.idle / (found.idle + found.compute)
    assert idle == pytest.approx(model_parallel.idle_fraction(d))


@pytest.mark.parametrize("t", [2, 4, 8])
def test_tensor_parallelism_sends_what_megatron_says(t):
    """8bsh (t-1)/t numbers per layer, device and microbatch: Narayanan 2021, 3.2."""
    step = Step(GPT, cluster(), 12, Scheme(tensor=t, microbatches=4))
    numbers = 8 * 3 * 2048 * 2048 * (t - 1) / t
    assert step.share_layers()[1] == pytest.approx(24 * 2 * numbers)
    again = Step(GPT, cluster(), 12, Scheme(tensor=t, microbatches=4, recompute=True))
    assert again.share_layers()[1] == pytest.approx(1.5 * step.share_layers()[1])


def test_all_three_at_once():
    """Each part is what it is by itself; a pipeline also stretches the all-reduces
    within its stages."""
    scheme = Scheme(2, 4, 2, microbatches=8)
    found = cost(GPT, cluster(n=16), 32, scheme)
    step = Step(GPT, cluster(n=16), 32, scheme)
    within, hand_over, exchange = step.share_layers(), step.hand_over(), step.exchange()
    assert found.compute == pytest.approx(GPT.flops * 32 / 16 / 156e12)
    assert found.exposed == pytest.approx(8 * within[0] + hand_over[0] + exchange[0])
    work = found.compute + 8 * within[0]
    assert found.idle / (found.idle + work) == pytest.approx(3 / 11)
    assert found.memory[1] == 2 * GPT.parameters / 8


def test_a_cut_into_unequal_stages_takes_the_time_of_the_largest():
    even = cost(GPT, cluster(), 8, Scheme(stages=4, microbatches=8))
    uneven = cost(GPT, cluster(), 8, Scheme(stages=5, microbatches=8))
    slots = 8 / (1 - gpipe.bubble_fraction(5, 8))
    assert uneven.seconds - uneven.exposed == pytest.approx(
        slots * GPT.flops / 156e12 * 5 / 24
    )
    assert uneven.memory[0] == pytest.approx(2 * GPT.parameters * 5 / 24)
    assert even.memory[0] == pytest.approx(2 * GPT.parameters / 4)


# ---- memory --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme, kept",  # in layers with all that they keep, and inputs of layers
    [
        (Scheme(microbatches=4), (24, 0)),
        (Scheme(microbatches=4, recompute=True), (1, 24)),
        (Scheme(stages=4, microbatches=8, order="gpipe"), (48, 0)),
        (Scheme(stages=4, microbatches=8), (24, 0)),
        (Scheme(stages=4, microbatches=2), (12, 0)),
        (Scheme(stages=4, microbatches=8, order="in turn"), (6, 0)),
        (Scheme(stages=4, microbatches=8, order="gpipe", recompute=True), (1, 48)),
        (Scheme(stages=4, microbatches=8, recompute=True), (1, 24)),
    ],
)
def test_which_activations_wait(scheme, kept):
    found = cost(GPT, cluster(), scheme.microbatches, scheme)
    layers, inputs = kept
    expected = layers * GPT.activations / 24 + inputs * GPT.boundary
    assert found.memory[3] == pytest.approx(expected)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_activations_of_a_layer_are_those_of_korthikanti(t):
    """Table 2: sbh (10 + 24/t + 5as/(ht)) bytes; with t = 1 sbh (34 + 5as/h)."""
    s, h, a = 2048, 2048, 16
    found = cost(GPT, cluster(), 1, Scheme(tensor=t)).memory[3]
    assert found == pytest.approx(24 * s * h * (10 + 24 / t + 5 * a * s / (h * t)))


# ---- models and links ----------------------------------------------------------------


def test_resnet_50_counted_layer_by_layer():
    """Convolutions as (window, channels in, channels out, side of the output)."""
    layers, channels, side = [(7, 3, 64, 112)], 64, 56
    boundaries = []
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            wide = side * (2 if block == 0 and width > 64 else 1)
            layers += [(1, channels, width, wide), (3, width, width, side)]
            layers += [(1, width, 4 * width, side)]
            if block == 0:
                layers += [(1, channels, 4 * width, side)]  # the shortcut
            channels = 4 * width
            boundaries.append(channels * side**2)
        side //= 2
    parameters = sum(k * k * i * o + 2 * o for k, i, o, _ in layers) + 2049 * 1000
    products = sum(k * k * i * o * size**2 for k, i, o, size in layers) + 2048 * 1000
    outputs = sum(o * size**2 for _, _, o, size in layers)
    assert RESNET50.parameters == pytest.approx(parameters, rel=2e-3)
    assert RESNET50.flops == pytest.approx(3 * 2 * products, rel=5e-3)
    assert RESNET50.activations == pytest.approx(2 * 4 * outputs, rel=5e-3)
    assert RESNET50.boundary == pytest.approx(4 * max(boundaries), rel=5e-3)
    assert RESNET50.n_layers == len(boundaries)


@pytest.mark.parametrize(
    "n, apart, link",
    [
        (8, 1, FAST),
        (2, 4, FAST),
        (16, 1, Link(2e-5, 1e11)),
        (4, 4, Link(2e-5, 2.5e10)),
        (2, 64, Link(2e-5, 1.25e10)),
    ],
)
def test_groups_that_lie_side_by_side_share_the_link_between_nodes(n, apart, link):
    machines = cluster(n=1024, between=Link(2e-5, 1e11))
    assert machines.link(n, apart) == link


def test_a_ring_between_nodes_is_no_faster_than_inside():
    assert cluster(n=16, between=Link(0, 1e12)).link(16) == Link(0, 2e11)


# ---- tables --------------------------------------------------------------------------


def test_each_scheme_of_the_book_makes_a_row():
    rows = [row(name, GPT, cluster(), 64, s) for name, s in schemes(8, 64, 4).items()]
    limits = {one["scheme"]: one["limit"] for one in rows}
    assert limits["model parallel"] == "idle"
    assert limits["data parallel"] == "compute"
    assert "GPipe, recompute" in limits  # all of the batch waits
    assert all(one["step in s"] > 0 and one["memory, GB"] > 0 for one in rows)


def test_a_row_says_memory_where_recompute_does_not_help():
    found = row("one", transformer(96, 12288, 96), cluster(), 1, Scheme())
    assert (found["scheme"], found["limit"]) == ("one, recompute", "memory")


@pytest.mark.parametrize(
    "scheme, words",
    [
        (Scheme(16), "needs 16 devices, not 8"),
        (Scheme(4, microbatches=4), "8 samples cannot make 16 microbatches"),
        (Scheme(stages=8), "4 layers cannot make 8 stages"),
        (Scheme(tensor=4), "2 heads cannot make 4 shares"),
    ],
)
def test_what_is_no_scheme_is_refused_in_words(scheme, words):
    small = Model(1e6, 4, 1e9, 1e6, 1e3, heads=2)
    with pytest.raises(ValueError, match=words):
        cost(small, cluster(), 8, scheme)
