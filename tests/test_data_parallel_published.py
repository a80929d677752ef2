"""The formulas of the chapter beside the numbers of Goyal et al. 2017."""

from pathlib import Path

import pytest

from labs.kit import page
from labs.kit.clock import ring_seconds
from labs.kit.timeline import Link

FILE = Path(__file__).parent.parent / "book" / "published" / "data_parallel.csv"
ROWS = {row["samples"]: row for row in page.read(FILE)}


@pytest.mark.parametrize("samples", ROWS)
def test_the_learning_rate_is_a_tenth_per_256_samples(samples):
    assert ROWS[samples]["rate"] == pytest.approx(0.1 * samples / 256)


def test_the_error_stays_within_three_tenths_up_to_8192_samples_and_not_beyond():
    small = min(row["error"] for row in ROWS.values())
    off = {samples: row["error"] - small for samples, row in ROWS.items()}
    assert max(off[n] for n in off if n <= 8192) < 0.3
    assert min(off[n] for n in off if n > 8192) > 1


def gbit(seconds):
    """The bandwidth that all-reduces 25 million gradients so quickly, in Gbit/s."""
    taken = ring_seconds(Link(0.0, 1.0), "all_reduce", 10**6, 4 * 25e6)
    return 8e-9 * taken / seconds


def test_the_bandwidth_of_the_paper_is_that_of_125_ms_not_of_its_120_ms():
    assert gbit(0.125) == pytest.approx(12.8, abs=0.01)
    assert gbit(0.120) == pytest.approx(13.3, abs=0.05)


@pytest.mark.parametrize("n_messages, worth", [(1, 0.85), (5, 0.96)])
def test_32_servers_are_worth_what_the_chapter_says(n_messages, worth):
    ethernet, step = Link(20e-6, 50e9 / 8), 0.180
    taken = ring_seconds(ethernet, "all_reduce", 32, 4 * 25.6e6 / n_messages)
    assert taken < 0.120 / n_messages  # then only the last message is not hidden
    assert step / (step + taken) == pytest.approx(worth, abs=0.005)
