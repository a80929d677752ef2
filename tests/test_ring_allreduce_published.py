"""The cost formulas beside those that libraries and papers state."""

from pathlib import Path

import pytest

from labs import ring_allreduce as lab
from labs.kit import page
from labs.kit.timeline import Link

ROWS = page.read(
    Path(__file__).parent.parent / "book" / "published" / "ring_allreduce.csv"
)


def rows(source, what=""):
    return [row for row in ROWS if row["source"] == source and what in row["what"]]


@pytest.mark.parametrize("row", rows("nccl-tests", "all-reduce"), ids=str)
def test_bus_bandwidth_has_the_factor_of_nccl_tests(row):
    assert lab.busbw(1.0, 1.0, row["n_ranks"]) == row["tensors"]
    assert lab.cost("ring", row["n_ranks"])[1] == row["tensors"]


def test_each_half_of_the_ring_has_half_of_the_factor():
    halves = rows("nccl-tests", "reduce-scatter") + rows("nccl-tests", "all-gather")
    assert len(halves) == 2
    for row in halves:
        assert lab.cost("ring", row["n_ranks"])[1] == 2 * row["tensors"]


@pytest.mark.parametrize("row", rows("MPICH"), ids=str)
def test_costs_are_those_that_mpich_states(row):
    assert lab.cost(row["what"], row["n_ranks"]) == (row["latencies"], row["tensors"])


def speed_up(nbytes, n_ranks, link=Link(20e-6, 1e9)):  # noqa: B008 (immutable)
    ring, halving = (
        lab.seconds(name, n_ranks, nbytes, link)
        for name in ("ring", "halving_doubling")
    )
    return ring / halving


def test_what_halving_doubling_gained_is_between_the_limits():
    """Goyal et al. 2017, section 4.1: a factor of 3 on 32 servers."""
    [row] = rows("Goyal 2017")
    many, few = speed_up(1e12, row["n_ranks"]), speed_up(1, row["n_ranks"])
    assert many == pytest.approx(1, abs=1e-3) and few == pytest.approx(6.2, abs=1e-3)
    assert many < row["value"] < few
